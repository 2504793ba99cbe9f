"""Counts how often nodes of each kind are accepted while decoding.

Nodes are divided into kinds. For nodes of a draft model, a kind is a range (bin) of the
probability that the model gives to the node's token. For nodes of prompt lookup, it is
the length of the match; matches in earlier texts have kinds of their own. The
acceptance rate of each kind is counted during decoding and
is the estimate for new nodes of this kind. Old counts decay, so that the rates describe
the recent text.

Letters: B rows, T nodes, M depth of the tree, Z kinds of nodes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax.speculation.accept import Accepted
from stree_jax.speculation.adaptive.pool import (
    FIRST_EARLIER_KIND,
    KINDS,
    LOOKUP_KINDS,
    MODEL_KINDS,
)
from stree_jax.speculation.draft import Draft

FADES = 0.99  # decay of the counts per step
PRIOR_WEIGHT = 3.0  # weight of the prior, as a number of observed nodes
# Width of a bin of the draft model's probability, in units of log(p / (1 - p)). The
# first bin begins at -4.
LOGIT_STEP = 8.0 / MODEL_KINDS
LONGEST = LOOKUP_KINDS // 2  # maximum match length that is distinguished

# Prior acceptance rates of the kinds. For bins of the draft model's probability, it is
# the probability in the middle of the bin. For match lengths 1, 2, .. it is in
# `_MATCHED` for the best match at a position, and in `_OTHERS` for other matches.
_BELIEVED = 1 / (1 + np.exp(4 - LOGIT_STEP * (np.arange(MODEL_KINDS) + 0.5)))
_MATCHED = [0.03, 0.08, 0.2, 0.4, 0.6, 0.75, 0.85, 0.9]
_OTHERS = [0.01, 0.02, 0.03, 0.04, 0.05, 0.05, 0.05, 0.05]
_FORCED = [0.95]  # other tokens may spell the same text
_LOOKED_UP = [*_MATCHED, *_OTHERS]
PRIOR = np.asarray([*_BELIEVED, *2 * _LOOKED_UP, *_FORCED], np.float32)
# Sampled text repeats itself less often than greedy text.
_DRAWN = [0.5 * p for p in _LOOKED_UP]
PRIOR_SAMPLED = np.asarray([*_BELIEVED, *2 * _DRAWN, *_FORCED], np.float32)


@struct.dataclass
class Counts:
    """Statistics of the nodes of each kind (see `pool`). Old counts decay, so they are
    not whole numbers.

    Attributes:
      right: [Z] float32. Number of nodes that were accepted.
      tried: [Z] float32. Number of nodes whose parents were accepted.
    """

    right: jax.Array
    tried: jax.Array

    def probability(self, sampled: bool) -> jax.Array:
        """Returns, for each kind [Z] float32, the estimated probability that a node is
        accepted if its parent is."""
        prior = jnp.asarray(PRIOR_SAMPLED if sampled else PRIOR)
        return (self.right + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT)


def no_counts() -> Counts:
    """Returns counts of 0."""
    return Counts(jnp.zeros((KINDS,), jnp.float32), jnp.zeros((KINDS,), jnp.float32))


def model_kind(probability: jax.Array) -> jax.Array:
    """Returns the kinds [...] int32 of a draft model's nodes: the bins of their
    probabilities [...]."""
    odds = jnp.log(probability) - jnp.log1p(-probability)
    place = jnp.floor((odds + 4.0) / LOGIT_STEP)
    return jnp.clip(place, 0, MODEL_KINDS - 1).astype(jnp.int32)


def lookup_kind(
    matched: jax.Array, first: jax.Array, earlier: jax.Array | bool = False
) -> jax.Array:
    """Returns the kinds [...] int32 of nodes from prompt lookup.

    Args:
      matched: [...] int32. Number of matched tokens before the node, at least 1.
      first: [...] bool. Whether the node belongs to the best match of its parent's
        position (the longest, then the most recent).
      earlier: [...] bool. Whether the match is in an earlier text.
    """
    length = jnp.minimum(matched, LONGEST) - 1
    start = jnp.where(earlier, FIRST_EARLIER_KIND, MODEL_KINDS)
    return start + jnp.where(first, 0, LONGEST) + length


def count(counts: Counts, draft: Draft, accepted: Accepted) -> Counts:
    """Returns the counts after a step, in which all children of accepted nodes were
    tested.

    Args:
      counts: the counts before the step.
      draft: the tree of the step.
      accepted: the accepted path.
    """
    assert draft.kind is not None  # set by `best_tree`
    above = jnp.maximum(draft.layout.depth - 1, 0)

    def of_parent(table: jax.Array) -> jax.Array:
        return jnp.take_along_axis(table, above, axis=1)

    tried = of_parent(accepted.path) == draft.layout.parents
    tried &= above < accepted.length[:, None]
    right = tried & (of_parent(accepted.tokens) == draft.tokens)
    kinds = jnp.arange(KINDS, dtype=jnp.int32)[None, None]
    one_hot = draft.kind[..., None] == kinds

    def total(nodes: jax.Array) -> jax.Array:
        return (one_hot & nodes[..., None]).sum(axis=(0, 1), dtype=jnp.float32)

    return Counts(
        right=FADES * counts.right + total(right),
        tried=FADES * counts.tried + total(tried),
    )
