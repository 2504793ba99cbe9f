"""The routing of texts: the experts that each token uses, as one array of all layers.

Letters: B rows, T tokens, L mixtures of experts in the model, k experts of a token. If
mixtures differ in k, k is the largest, and other entries are -1.
"""

import jax
import jax.numpy as jnp

from stree_jax.models.mixers import mixer_of
from stree_jax.models.stack.config import ModelConfig
from stree_jax.models.stack.network import Experts, ExpertsOf, Tapped

UNKNOWN = -1  # the expert of tokens that no pass has read; routers choose it


def expert_taps(config: ModelConfig) -> tuple[ExpertsOf, ...]:
    """Returns the model's L mixtures of experts, in the order of the layers."""
    return tuple(
        ExpertsOf(i, name)
        for i, block in enumerate(config.layers)
        for name in block.mixers
        if routed_experts(config, name)[1]
    )


def routed_experts(config: ModelConfig, name: str) -> tuple[int, int]:
    """Returns the number of experts of a mixer, and how many a token uses."""
    mixer = config.mixers[name]
    return mixer_of(mixer).experts(mixer)


def empty_routing(config: ModelConfig, batch: int, places: int) -> jax.Array:
    """Returns the routing [B, T, L, k] int32 of texts that no pass has read."""
    taps = expert_taps(config)
    k = max((routed_experts(config, tap.mixer)[1] for tap in taps), default=0)
    return jnp.full((batch, places, len(taps), k), UNKNOWN, jnp.int32)


def with_experts(
    routing: jax.Array, experts: Tapped, first: jax.Array, length: jax.Array
) -> jax.Array:
    """Writes the experts of some tokens into the routing of their texts.

    Args:
      routing: [B, T, L, k] int32.
      experts: [B, M, k'] int32 for each of the L mixtures, of M tokens.
      first: [B] int32. Position in the text of the first of these tokens.
      length: [B] int32. Number of valid tokens; others are not written.

    Returns:
      The new routing [B, T, L, k].
    """
    T, k = routing.shape[1], routing.shape[3]

    def whole(one: jax.Array) -> jax.Array:
        missing = ((0, 0), (0, 0), (0, k - one.shape[2]))
        return jnp.pad(one, missing, constant_values=UNKNOWN)

    new = jnp.stack([whole(one) for one in experts], axis=2)
    place = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    place = jnp.where(place < length[:, None], first[:, None] + place, T)
    write = jax.vmap(lambda old, place, new: old.at[place].set(new, mode="drop"))
    return write(routing, place, new)


def experts_of(config: ModelConfig, routing: jax.Array) -> Experts:
    """Returns the experts [B, T, k] of each mixture, for `forward_tapped`. Numbers that
    no expert has become the nearest one."""
    return {
        tap: jnp.minimum(routing[:, :, i], routed_experts(config, tap.mixer)[0] - 1)
        for i, tap in enumerate(expert_taps(config))
    }
