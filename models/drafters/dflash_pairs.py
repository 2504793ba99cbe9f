"""Scores of token pairs of block drafters, and their confidence; see `dflash`.

Letters: B rows, Q tokens before a draft, K candidates for it, r rank, d width.
"""

import jax
import jax.numpy as jnp

from stree_jax.models.drafters.dflash import DFlash
from stree_jax.models.weights.linear import linear
from stree_jax.models.weights.parameters import as_weight


def no_memory(drafter: DFlash, shape: tuple[int, ...]) -> jax.Array:
    """Returns the memory of roots for `pair_scores`, which is 0: [*shape, r]. If the
    Markov head is not recurrent, its memory is empty, [*shape, 0]."""
    rank = drafter.config.rank if drafter.config.pairs == "rnn" else 0
    return jnp.zeros((*shape, rank), jnp.float32)


def pair_scores(
    drafter: DFlash,
    hidden: jax.Array,
    previous: jax.Array,
    following: jax.Array,
    memory: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Scores candidates of one draft after several previous tokens.

    Args:
      drafter: the drafter.
      hidden: [B, d] float32, the hidden state that predicts the draft.
      previous: [B, Q] int32, Q alternative tokens before the draft.
      following: [B, K] int32, the candidates.
      memory: [B, Q, r], the memory of each previous token, which `pair_scores` returned
        for it; see `no_memory`.

    Returns:
      The scores [B, Q, K] float32 of each candidate after each previous token, to be
      added to the logits U, and the memory [B, Q, r] after the draft.
    """
    c = drafter.config
    if not c.pairs:
        return jnp.zeros((*previous.shape, following.shape[1]), jnp.float32), memory
    e, memory = _pair_vectors(drafter, hidden, previous, memory)
    rows = following
    if drafter.ids is not None:
        rows = jnp.searchsorted(drafter.ids, following).astype(jnp.int32)
        rows = jnp.minimum(rows, c.head_rows - 1)
    after = as_weight(drafter.params["pairs"]["following"]).rows(rows)  # [B, K, r]
    return jnp.einsum("bqr,bkr->bqk", e, after, precision="highest"), memory


def pair_bias(
    drafter: DFlash, hidden: jax.Array, previous: jax.Array, memory: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the pair scores [B, Q, D] of all tokens of the head, for training.
    Arguments and memory are as in `pair_scores`."""
    e, memory = _pair_vectors(drafter, hidden, previous, memory)
    return linear(e, drafter.params["pairs"]["following"]), memory


def _pair_vectors(
    drafter: DFlash, hidden: jax.Array, previous: jax.Array, memory: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the vectors [B, Q, r] whose products with a token's row of "following"
    are pair scores, and the memory after the draft."""
    c, p = drafter.config, drafter.params["pairs"]
    e = as_weight(p["previous"]).rows(previous)  # [B, Q, r]
    h = jnp.broadcast_to(hidden[:, None], (*e.shape[:2], hidden.shape[-1]))
    if c.pairs == "gated":
        both = jnp.concatenate([h, e], axis=-1)
        e = jax.nn.sigmoid(linear(both, p["gate"], p["gate_bias"])) * e
    elif c.pairs == "selector":
        e = e * linear(h, p["projection"])
    elif c.pairs == "rnn":
        joint = jnp.concatenate([memory, e, h], axis=-1)
        joint = linear(joint, p["joint"], p["joint_bias"])
        keep, new, out = jnp.split(joint, 3, axis=-1)
        keep = jax.nn.sigmoid(keep)
        memory, e = keep * memory + (1 - keep) * jnp.tanh(new), jnp.tanh(out)
    return e, memory


def confidence(
    drafter: DFlash, hidden: jax.Array, previous: jax.Array
) -> jax.Array | None:
    """Estimates the probability that the target accepts the drafter's likeliest token,
    after each of Q alternative previous tokens.

    Args:
      drafter, hidden, previous: as in `pair_scores`.

    Returns:
      [B, Q] float32, or None if the drafter has no confidence head.
    """
    c = drafter.config
    if not c.confidence:
        return None
    p = drafter.params["confidence"]
    x = jnp.broadcast_to(hidden[:, None], (*previous.shape, hidden.shape[-1]))
    if c.confidence_pairs:
        e = as_weight(drafter.params["pairs"]["previous"]).rows(previous)
        x = jnp.concatenate([x, e], axis=-1)
    return jax.nn.sigmoid(linear(x, p["weight"], p["bias"])[..., 0])
