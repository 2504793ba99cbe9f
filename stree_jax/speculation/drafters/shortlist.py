"""Chooses the candidates of a block drafter with a Markov head.

The best tokens of U alone are poor candidates: a Markov head carries so much that the
right token is often not among them. Instead, the probabilities of tokens are propagated
from level to level along the pairs, below the likeliest tokens of the level before:

    reach_k(b) = sum over a of reach_{k-1}(a) softmax(U_k + pair_k(a, .))(b)

Letters: B rows, M levels, K candidates, V tokens, d width, r rank.
"""

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.models.dflash import DFlash
from stree_jax.models.dflash_pairs import no_memory, pair_bias

PARENTS = 4  # tokens of a level from which probabilities are propagated


def chained(drafter: DFlash) -> bool:
    """True if the drafter has a Markov head."""
    return drafter.config.pairs not in ("", "selector")


def reached(
    drafter: DFlash,
    hidden: jax.Array,
    scores: jax.Array,
    root: jax.Array,
    temperature: jax.Array,
    count: int,
) -> jax.Array:
    """Returns the candidates of each level, the most probable ones there.

    The first candidates are the greedy chain: what the makers of such drafters draft.

    Args:
      drafter: the drafter.
      hidden: [B, M, d], the hidden states that predict the drafts.
      scores: [B, M, V] float32, U as the distribution processes it.
      root: [B] int32.
      temperature: [B] float32, by which pair scores are divided, not 0.
      count: K.

    Returns:
      [B, M, K] int32.
    """
    batch, places = len(root), jnp.arange(len(root), dtype=jnp.int32)
    parents = min(PARENTS, count)

    def level(
        carry: tuple[jax.Array, jax.Array, jax.Array], inputs: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        previous, weight, memory = carry
        state, own = inputs
        pairs, memory = _bias(drafter, state, previous, memory, own.shape[1])
        after = own[:, None] + pairs / temperature[:, None, None]
        after = weight[..., None] + jax.nn.log_softmax(after)
        reach = jax.nn.logsumexp(after, axis=1)
        greedy = after[:, 0].argmax(axis=-1).astype(jnp.int32)
        first = reach.at[places, greedy].set(jnp.inf)
        tokens = lax.top_k(first, count)[1]
        best = tokens[:, :parents]
        chosen = jnp.broadcast_to(best[:, None], (batch, parents, parents))
        above = jnp.take_along_axis(after, chosen, axis=2).argmax(axis=1)
        memory = jnp.take_along_axis(memory, above[..., None], axis=1)
        weight = jax.nn.log_softmax(jnp.take_along_axis(reach, best, axis=1))
        return (best, weight, memory), tokens

    only = jnp.where(jnp.arange(parents) == 0, 0.0, -jnp.inf)  # one root
    start = (
        jnp.broadcast_to(root[:, None], (batch, parents)),
        jnp.broadcast_to(only[None], (batch, parents)),
        no_memory(drafter, (batch, parents)),
    )
    inputs = jnp.moveaxis(hidden, 1, 0), jnp.moveaxis(scores, 1, 0)
    return jnp.moveaxis(lax.scan(level, start, inputs)[1], 0, 1)


def _bias(
    drafter: DFlash,
    hidden: jax.Array,
    previous: jax.Array,
    memory: jax.Array,
    num_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the pair scores [B, Q, num_tokens] of all tokens, and the memory. Tokens
    that the head does not have get 0; their U is -inf."""
    rows, memory = pair_bias(drafter, hidden, previous, memory)
    if drafter.ids is not None:
        full = jnp.zeros((*rows.shape[:2], drafter.config.vocab_size), jnp.float32)
        rows = full.at[:, :, drafter.ids].set(rows, unique_indices=True)
    return rows[..., :num_tokens], memory
