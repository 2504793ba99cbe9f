"""Candidate nodes of a tree, what each is worth, and the picking of the best.

A node's value is the probability that the target accepts it: the product along its path
of how likely each token is once those above it are text. The n nodes of most value are
then the tree of n nodes that gains most (EAGLE-2, OPT-Tree), and 1 + the sum of their
values is how many tokens it gains.

Letters: B rows, C candidates, T nodes, K sizes.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.speculation.draft import DRAFTER, LOOKUP, TARGET, Draft
from stree_jax.speculation.layout import tree_layout
from stree_jax.speculation.tree import Budget

# Tokens on a path as one number: sum of (token + 1) PRIME^depth, modulo 2^32. Two paths
# that share a number by chance share a node, which costs a draft and never the text.
PRIME = 2654435761

# Kinds of nodes that are equally often right: 16 by the drafter's own probability, 16
# by how well the text matches.
MODEL_KINDS, LOOKUP_KINDS = 16, 16
KINDS = MODEL_KINDS + LOOKUP_KINDS
NO_KIND = KINDS  # of the root, and of nodes that only fill a row's tree


@struct.dataclass
class Pool:
    """Candidates, parents before children.

    Attributes:
      tokens: [B, C] int32.
      parents: [B, C] int32, 0 for the root, c + 1 for candidate c.
      value: [B, C] float32, 0 for what is no candidate; at most the parent's.
      kind: [B, C] int32, below `KINDS`.
      path: [B, C] uint32, the path's number.
    """

    tokens: jax.Array
    parents: jax.Array
    value: jax.Array
    kind: jax.Array
    path: jax.Array


def path_powers(depth: int) -> jax.Array:
    """PRIME^d for d < depth, uint32 [depth]."""
    return jnp.asarray([pow(PRIME, d, 1 << 32) for d in range(depth)], jnp.uint32)


def merged(first: Pool, second: Pool) -> Pool:
    """Both pools as one; a path that both have is the first's, and worth the more."""
    C = first.tokens.shape[1]
    same = second.path[:, :, None] == first.path[:, None]  # [B, C2, C]
    same &= (second.value > 0)[:, :, None] & (first.value > 0)[:, None]
    known, twin = same.any(axis=2), jnp.argmax(same, axis=2).astype(jnp.int32)
    better = jnp.where(same, second.value[..., None], 0.0)
    lifted, by = better.max(axis=1), jnp.argmax(better, axis=1)
    kind = jnp.take_along_axis(second.kind, by, axis=1)
    first = replace(
        first,
        value=jnp.maximum(first.value, lifted),
        kind=jnp.where(lifted > first.value, kind, first.kind),
    )
    place = jnp.arange(second.tokens.shape[1], dtype=jnp.int32)[None] + C
    own = jnp.where(known, twin, place) + 1  # where each of the second is to be found
    above = jnp.take_along_axis(own, jnp.maximum(second.parents - 1, 0), axis=1)
    second = replace(
        second,
        parents=jnp.where(second.parents > 0, above, 0),
        value=jnp.where(known, 0.0, second.value),
    )
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)


def ranking(pool: Pool, count: int) -> tuple[jax.Array, jax.Array]:
    """Values and places [B, count] of the best candidates, best first.

    Of equal values the earlier one is better: no child stands before its parent.
    """
    room = count - pool.value.shape[1]
    value, place = lax.top_k(pool.value, min(count, pool.value.shape[1]))
    padding = ((0, 0), (0, max(room, 0)))
    return jnp.pad(value, padding), jnp.pad(place.astype(jnp.int32), padding)


def gains(value: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """Tokens [B, K] that trees of so many nodes are expected to gain.

    Args:
      value: [B, n] float32, of the best candidates, best first.
    """
    total = jnp.pad(jnp.cumsum(value, axis=1), ((0, 0), (1, 0)))
    return 1.0 + total[:, jnp.asarray([n - 1 for n in sizes], jnp.int32)]


def picked(pool: Pool, root: jax.Array, tree: Budget) -> Draft:
    """The tree of the best candidates below the roots [B].

    A row with fewer candidates is filled with nodes that nothing is expected of.
    """
    value, place = ranking(pool, tree.size - 1)
    place = jnp.sort(jnp.where(value > 0, place, pool.value.shape[1]), axis=1)
    exists = place < pool.value.shape[1]

    def of(table: jax.Array, fill: int) -> jax.Array:
        own = jnp.take_along_axis(table, place, axis=1, mode="clip")
        return jnp.where(exists, own, fill)

    above = of(pool.parents, 0)
    at = above[:, :, None] == (place + 1)[:, None]
    parents = jnp.where(above > 0, 1 + jnp.argmax(at, axis=2).astype(jnp.int32), 0)
    kind = of(pool.kind, NO_KIND)
    origin = jnp.where(kind < MODEL_KINDS, DRAFTER, LOOKUP)

    def with_root(nodes: jax.Array, first: jax.Array) -> jax.Array:
        return jnp.concatenate([first[:, None], nodes], axis=1)

    zero = jnp.zeros_like(root)
    parents = with_root(parents, zero - 1)
    return Draft(
        layout=tree_layout(tree, parents),
        tokens=with_root(of(pool.tokens, 0), root),
        origin=with_root(origin, zero + TARGET).astype(jnp.uint8),
        kind=with_root(kind, zero + NO_KIND),
    )
