"""How often nodes of each kind are right, learnt while decoding.

A drafter's own probability, or the length of a match, says how good a node is compared
with others; how often such nodes are accepted, here, is counted. Counts fade, so that
they are of the text at hand.

Letters: B rows, T nodes, M depth of the tree, Z kinds of nodes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax.models.sharding.shards import over_rows
from stree_jax.speculation.accept import Accepted
from stree_jax.speculation.adaptive.pool import KINDS, LOOKUP_KINDS, MODEL_KINDS
from stree_jax.speculation.draft import Draft

FADES = 0.99  # a step
PRIOR_WEIGHT = 3.0  # nodes
LOGIT_STEP = 8.0 / MODEL_KINDS  # between kinds, of a probability's logit, from -4 on
LONGEST = LOOKUP_KINDS // 2  # matched tokens that make a difference

# Before anything was seen: the drafter is believed, and matches are by their length,
# for the first continuation of a place and for the others.
_BELIEVED = 1 / (1 + np.exp(4 - LOGIT_STEP * (np.arange(MODEL_KINDS) + 0.5)))
_MATCHED = [0.03, 0.08, 0.2, 0.4, 0.6, 0.75, 0.85, 0.9]
_OTHERS = [0.01, 0.02, 0.03, 0.04, 0.05, 0.05, 0.05, 0.05]
PRIOR = np.asarray([*_BELIEVED, *_MATCHED, *_OTHERS], np.float32)
# A text that is drawn repeats itself less than one that is always the likeliest.
_DRAWN = [0.5 * p for p in (*_MATCHED, *_OTHERS)]
PRIOR_SAMPLED = np.asarray([*_BELIEVED, *_DRAWN], np.float32)


@struct.dataclass
class Counts:
    """Attributes:
    right, tried: [Z] float32, nodes of each kind, faded.
    """

    right: jax.Array
    tried: jax.Array

    def probability(self, sampled: bool) -> jax.Array:
        """Returns [Z] float32, that a node is right once its parent is."""
        prior = jnp.asarray(PRIOR_SAMPLED if sampled else PRIOR)
        return (self.right + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT)


def no_counts() -> Counts:
    return Counts(jnp.zeros((KINDS,), jnp.float32), jnp.zeros((KINDS,), jnp.float32))


def model_kind(probability: jax.Array) -> jax.Array:
    """Returns kinds [...] int32 of nodes that a drafter gives such a probability."""
    odds = jnp.log(probability) - jnp.log1p(-probability)
    place = jnp.floor((odds + 4.0) / LOGIT_STEP)
    return jnp.clip(place, 0, MODEL_KINDS - 1).astype(jnp.int32)


def lookup_kind(matched: jax.Array, first: jax.Array) -> jax.Array:
    """Returns kinds [...] int32 of nodes below so many matched tokens.

    Args:
      matched: [...] int32, at least 1.
      first: [...] bool, whether no longer or later match goes on otherwise there.
    """
    length = jnp.minimum(matched, LONGEST) - 1
    return MODEL_KINDS + jnp.where(first, 0, LONGEST) + length


def count(
    counts: Counts, draft: Draft, accepted: Accepted, rows: str | None = None
) -> Counts:
    """Counts after a step: all children of accepted nodes were put to the test.

    Args:
      rows: as of `Spec`.
    """
    assert draft.kind is not None  # who values nodes says of which kind they are
    above = jnp.maximum(draft.layout.depth - 1, 0)

    def of_parent(table: jax.Array) -> jax.Array:
        return jnp.take_along_axis(table, above, axis=1)

    tried = of_parent(accepted.path) == draft.layout.parents
    tried &= above < accepted.length[:, None]
    right = tried & (of_parent(accepted.tokens) == draft.tokens)
    kinds = jnp.arange(KINDS, dtype=jnp.int32)[None, None]
    one_hot = draft.kind[..., None] == kinds

    def total(nodes: jax.Array) -> jax.Array:
        here = (one_hot & nodes[..., None]).sum(axis=(0, 1), dtype=jnp.float32)
        return over_rows(here, rows)

    return Counts(
        right=FADES * counts.right + total(right),
        tried=FADES * counts.tried + total(tried),
    )
