"""Chooses the candidates of a block drafter with a Markov head.

The best tokens of U alone are poor candidates: a Markov head carries so much that the
right token is often not among them. Instead, the probabilities of tokens are propagated
from level to level along the pairs, below the likeliest tokens of the level before:

    reach_k(b) = sum over a of reach_{k-1}(a) softmax(U_k + pair_k(a, .))(b)

Tokens a that do not have b among their K best next tokens are left out of the sum.

Letters: B rows, M levels, K candidates, V tokens, d width, r rank.
"""

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.models.dflash import DFlash
from stree_jax.models.dflash_pairs import no_memory, pair_bias
from stree_jax.sampling.best import best_scores

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
    batch, parents = len(root), min(PARENTS, count)

    def level(
        carry: tuple[jax.Array, jax.Array, jax.Array], inputs: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        previous, weight, memory = carry
        state, own = inputs
        pairs, memory = _bias(drafter, state, previous, memory, own.shape[1])
        after = own[:, None] + pairs / temperature[:, None, None]
        best, ids, total = best_scores(after, count=count)  # [B, parents, K]
        share = jnp.exp(weight[..., None] + best - total).reshape(batch, -1)
        ids = ids.reshape(batch, -1)
        same = ids[:, :, None] == ids[:, None]
        reach = jnp.where(same, share[:, None], 0.0).sum(axis=2)
        again = jnp.tril(same, -1).any(axis=2)  # a token of an earlier parent
        order = jnp.where(again, -1.0, reach).at[:, 0].set(jnp.inf)
        place = lax.top_k(order, count)[1]
        tokens = jnp.take_along_axis(ids, place, axis=1)
        chosen = tokens[:, :parents, None, None] == ids.reshape(batch, 1, parents, -1)
        by_parent = jnp.where(chosen, share.reshape(batch, 1, parents, -1), 0.0).sum(3)
        above = by_parent.argmax(axis=2)
        memory = jnp.take_along_axis(memory, above[..., None], axis=1)
        found = jnp.take_along_axis(reach, place[:, :parents], axis=1)
        weight = jnp.log(found / found.sum(axis=1, keepdims=True))
        return (tokens[:, :parents], weight, memory), tokens

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
