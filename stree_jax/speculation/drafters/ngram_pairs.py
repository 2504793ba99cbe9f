"""Scores of token pairs from n-grams, for block drafters that have none.

A plain DFlash drafter gives one distribution q_k for each level k, which does not
depend on the token before. N-grams say which tokens follow each other: R_k(a, b) =
P(b | a), for a candidate a of level k - 1 and a candidate b of level k. The
probabilities of pairs

    J_k(a, b) = q_{k-1}(a) R_k(a, b) q_k(b) / sum over a' of q_{k-1}(a') R_k(a', b)

have the drafter's marginal at level k, because their sum over a is q_k(b). The tokens
after a have the log-probabilities

    s_k(a, b) = log(J_k(a, b) / sum over b' of J_k(a, b'))

How likely the n-grams find a token in general does not matter, only how much likelier
they find it after a than after the other candidates.

This is one step of iterative proportional fitting (Deming and Stephan 1940). More steps
would also make the sums over b equal q_{k-1}(a). That accepts as much if q_k is exact,
and less where q_k mostly follows the likeliest token above.

Letters: B rows, M levels, K candidates per level, n order of the n-grams.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.common.checks import shown
from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.drafters.dflash import DFlash
from stree_jax.speculation.drafters.ngrams import EMPTY, NGrams, log_prob

LOWEST = -60.0  # in place of the log of smaller probabilities


@register_for_export
@struct.dataclass
class WithNGrams:
    """A block drafter without scores of pairs, and n-grams that give it some.

    Attributes:
      drafter: the block drafter.
      ngrams: the n-grams, best counted from text of the target.
    """

    drafter: DFlash
    ngrams: NGrams

    def check(self) -> None:
        """Raises ValueError unless the drafter is a block drafter without scores of
        pairs, and the n-grams are n-grams."""
        without_pairs("drafter", self.drafter)
        if not isinstance(self.ngrams, NGrams):
            raise ValueError(f"ngrams: want NGrams, got {shown(type(self.ngrams))}")

    def __repr__(self) -> str:
        return f"{self.drafter} with {self.ngrams}"


def without_pairs(name: str, drafter: Any) -> DFlash:
    """Returns the drafter unchanged, after checking that n-grams can score pairs of
    tokens for it.

    Args:
      name: name of the option or argument, for the message.
      drafter: the published drafter.

    Raises:
      ValueError: it is not a block drafter, or has scores of pairs.
    """
    if not isinstance(drafter, DFlash):
        raise ValueError(
            f"{name}: n-grams score pairs of tokens for a DFlash drafter only, got "
            f"{shown(drafter)}"
        )
    if drafter.config.pairs:
        raise ValueError(
            f"{name}: this {drafter.config.kind} drafter scores pairs of tokens "
            "itself; leave the n-grams out"
        )
    return drafter


def fitted_pairs(above: jax.Array, below: jax.Array, pairs: jax.Array) -> jax.Array:
    """Fits probabilities of pairs to a marginal, see the module's docstring.

    Args:
      above: [..., K] float32. log q_{k-1}, up to a constant.
      below: [..., L] float32. log q_k, up to a constant.
      pairs: [..., K, L] float32. log R_k.

    Returns:
      s_k [..., K, L] float32: each row is a distribution, in logs.
    """
    above, below = log_marginals(above), log_marginals(below)
    pairs = jnp.maximum(pairs, LOWEST)
    joint = jax.nn.log_softmax(above[..., None] + pairs, axis=-2) + below[..., None, :]
    return jax.nn.log_softmax(joint, axis=-1)


def log_marginals(scores: jax.Array) -> jax.Array:
    """Returns log-probabilities of scores [..., K], at least `LOWEST`."""
    return jnp.maximum(jax.nn.log_softmax(scores, axis=-1), LOWEST)


def ngram_pairs(
    ngrams: NGrams,
    root: jax.Array,
    tokens: jax.Array,
    scores: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """Scores candidates of each level after those of the level above.

    Args:
      ngrams: the n-grams.
      root: [B] int32. Tokens of the roots.
      tokens: [B, M, K] int32. Candidates for each level, best first.
      scores: [B, M, K] float32. log q of the candidates, up to a constant per level.
      scale: [B or 1, 1, 1] float32. Factors of log P, see `NGrams.scale`.

    Returns:
      s - log q [B, M, K, K] float32, to be added to the scores. The log-sum-exp of a
      level's scores does not change, so the probability of all other tokens does not
      either. It is 0 for the first level, whose q_1 is already conditional on the root.
    """
    above, below = tokens[:, :-1], tokens[:, 1:]
    contexts = _contexts(root, above, ngrams.order - 1)[:, :, :, None]
    every = jnp.broadcast_to(below[:, :, None], (*above.shape, below.shape[-1]))
    pairs = log_prob(ngrams, contexts, every) * scale[..., None]
    marginals = log_marginals(scores)
    fitted = fitted_pairs(scores[:, :-1], scores[:, 1:], pairs)
    return jnp.pad(fitted - marginals[:, 1:, None], ((0, 0), (1, 0), (0, 0), (0, 0)))


def _contexts(root: jax.Array, above: jax.Array, length: int) -> jax.Array:
    """Returns the n-gram contexts [B, M - 1, K, length] that end with each of the
    candidates `above` [B, M - 1, K]. The tokens before the candidate are the best
    candidates of the levels above it, and before those the root [B]."""
    batch, levels, K = above.shape
    spine = jnp.concatenate([root[:, None], above[:, :-1, 0]], axis=1)
    spine = jnp.pad(spine, ((0, 0), (length, 0)), constant_values=EMPTY)
    parts = [spine[:, i + 2 : i + 2 + levels] for i in range(length - 1)]
    parts = [jnp.broadcast_to(x[:, :, None], above.shape) for x in parts]
    return jnp.stack([*parts, above], axis=-1)


def after(table: jax.Array, above: jax.Array, previous: jax.Array) -> jax.Array:
    """Selects from one level of the result of `ngram_pairs` the scores [B, Q, K] of the
    candidates after Q previous tokens.

    Args:
      table: [B, K, K] float32. The level.
      above: [B, K] int32. The candidates to which its rows belong.
      previous: [B, Q] int32. Tokens, which are among these candidates; the row of other
        tokens is unspecified.
    """
    row = (previous[:, :, None] == above[:, None]).argmax(axis=-1)
    return jnp.take_along_axis(table, row[..., None], axis=1)
