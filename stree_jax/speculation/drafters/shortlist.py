"""Chooses the candidates of a block drafter with a Markov head.

The logits U alone give poor candidates: with a Markov head, pair scores change the
ranking so much that the right token is often not among the best tokens of U. Instead,
the probability that a token is reached is propagated from level to level, from the
likeliest tokens of the level before:

    reach_k(b) = sum over a of reach_{k-1}(a) softmax(U_k + pair_k(a, .))(b)

Tokens a that do not have b among their K best next tokens are left out of the sum. Only
the N best tokens of U are considered: scores of pairs with all tokens would read the
whole table of following tokens once per level.

Letters: B rows, M levels, K candidates, N considered tokens, V tokens, d width, r rank.
"""

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.models.drafters.dflash import DFlash
from stree_jax.models.drafters.dflash_pairs import no_memory, pair_scores
from stree_jax.sampling.best import best_scores

CONSIDERED = 256  # N
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
    """Returns the candidates of each level, the most probable tokens first.

    The first candidates of all levels form the greedy chain: the best token after the
    first candidate of the level before. The makers of such drafters draft this chain.

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
    batch, parents = root.shape[0], min(PARENTS, count)
    near, near_ids, total = best_scores(scores, count=min(CONSIDERED, scores.shape[2]))
    rest = log_rest(near, total)

    def level(
        carry: tuple[jax.Array, jax.Array, jax.Array], inputs: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        previous, weight, memory = carry
        state, own, own_ids, others = inputs
        pairs, memory = pair_scores(drafter, state, previous, own_ids, memory)
        after = own[:, None] + pairs / temperature[:, None, None]
        best, ids, among = best_scores(after, count=count)  # [B, parents, K]
        total = jnp.logaddexp(among, others[:, None, None])
        share = jnp.exp(weight[..., None] + best - total).reshape(batch, -1)
        ids = jnp.take_along_axis(own_ids, ids.reshape(batch, -1), axis=1)
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
    inputs = tuple(jnp.moveaxis(x, 1, 0) for x in (hidden, near, near_ids, rest))
    return jnp.moveaxis(lax.scan(level, start, inputs)[1], 0, 1)


def log_rest(best: jax.Array, total: jax.Array) -> jax.Array:
    """Returns the log-sum-exp [..] of all scores except the best ones.

    Args:
      best: [.., K]. The best scores.
      total: [.., 1]. The log-sum-exp of all scores.
    """
    share = jnp.minimum(jax.nn.logsumexp(best, axis=-1) - total[..., 0], -1e-6)
    return total[..., 0] + jnp.log(-jnp.expm1(share))
