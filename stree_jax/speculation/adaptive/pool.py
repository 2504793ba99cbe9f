"""Pools of candidate draft tokens with values, and the choice of the best nodes for a
tree.

A node's value is the estimated probability that the target accepts it: the product,
along its path, of the conditional acceptance probabilities. The n nodes of largest
value are then the tree of n nodes with the largest expected gain (EAGLE-2, OPT-Tree),
which is 1 + the sum of their values, in tokens.

Letters: B rows, C candidates, T nodes of a tree, K sizes.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from stree_jax.cpu_kernels import cpu_kernel, floats, ints, like
from stree_jax.models.layers.nodes import NO_NODE
from stree_jax.speculation.draft import (
    DRAFTER,
    EARLIER,
    FORCED,
    LOOKUP,
    NGRAM,
    TARGET,
    Draft,
)
from stree_jax.speculation.layout import Layout, tree_layout
from stree_jax.speculation.tree import Budget

# Multiplier of the hash of a path: sum of (token + 1) PRIME^depth, modulo 2^32. If two
# paths have the same hash by chance, one of their nodes is not drafted. The output does
# not change.
PRIME = 2654435761

# Kinds of nodes, whose acceptance rates are counted separately: 16 bins of the draft
# model's probability, 16 kinds for prompt lookup (8 match lengths, each for the best
# match and for other matches), as many for lookup in earlier texts, and one for text
# that a constraint forces.
MODEL_KINDS, LOOKUP_KINDS = 16, 16
FIRST_EARLIER_KIND = MODEL_KINDS + LOOKUP_KINDS
FORCED_KIND = FIRST_EARLIER_KIND + LOOKUP_KINDS
KINDS = FORCED_KIND + 1
NO_KIND = KINDS  # the root, and nodes that fill up a row's tree


@struct.dataclass
class Pool:
    """Candidates for the nodes of a tree, parents before children.

    Attributes:
      tokens: [B, C] int32.
      parents: [B, C] int32. 0 for the root, c + 1 for candidate c.
      value: [B, C] float32. Estimated probability that the target accepts the path to
        the candidate, at most the parent's value; 0 for padding.
      kind: [B, C] int32. The candidate's kind, for which an acceptance rate is counted,
        from 0 to `KINDS` - 1; see `calibration`.
      path: [B, C] uint32. Hash of the tokens on the path.
      guessed: [B, C] bool. True if n-grams guessed the draft model's node in advance.
    """

    tokens: jax.Array
    parents: jax.Array
    value: jax.Array
    kind: jax.Array
    path: jax.Array
    guessed: jax.Array


def path_powers(depth: int) -> jax.Array:
    """Returns PRIME^d modulo 2^32 for d < depth: [depth] uint32."""
    return jnp.asarray([pow(PRIME, d, 1 << 32) for d in range(depth)], jnp.uint32)


@cpu_kernel(
    "stree_merged", outputs=lambda first, _: like(first), aliases={"first": None}
)
def merged(first: Pool, second: Pool) -> Pool:
    """Merges two pools. If a path is in both, the node of the first pool is kept, with
    the larger of the two values.

    Args:
      first: a pool that ends with at least as many entries of padding as the second
        pool has entries.
      second: the other pool.
    """
    C = first.tokens.shape[1] - second.tokens.shape[1]
    first = jax.tree.map(lambda z: z[:, :C], first)
    same = second.path[:, :, None] == first.path[:, None]  # [B, C2, C]
    same &= (second.value > 0)[:, :, None] & (first.value > 0)[:, None]
    known, twin = same.any(axis=2), jnp.argmax(same, axis=2).astype(jnp.int32)
    better = jnp.where(same, second.value[..., None], 0.0)
    lifted, by = better.max(axis=1), jnp.argmax(better, axis=1)
    kind = jnp.take_along_axis(second.kind, by, axis=1)
    guessed = jnp.take_along_axis(second.guessed, by, axis=1)
    first = replace(
        first,
        value=jnp.maximum(first.value, lifted),
        kind=jnp.where(lifted > first.value, kind, first.kind),
        guessed=jnp.where(lifted > first.value, guessed, first.guessed),
    )
    place = jnp.arange(second.tokens.shape[1], dtype=jnp.int32)[None] + C
    own = jnp.where(known, twin, place) + 1  # index of the second's nodes, as parents
    above = jnp.take_along_axis(own, jnp.maximum(second.parents - 1, 0), axis=1)
    second = replace(
        second,
        parents=jnp.where(second.parents > 0, above, 0),
        value=jnp.where(known, 0.0, second.value),
    )
    return joined(first, second)


def best_tree(pool: Pool, root: jax.Array, tree: Budget) -> tuple[Draft, jax.Array]:
    """Returns the tree of the best candidates, best first.

    Its first n nodes are the best tree of n nodes, because the value of a child is at
    most its parent's, and children come after their parents. A row with fewer
    candidates is filled up with nodes of value 0 and the root's token.

    Args:
      pool: the candidates.
      root: [B] int32. Tokens of the roots.
      tree: the size of the tree.

    Returns:
      The tree, and the values of its nodes [B, T] float32; the root's value is 1.
    """
    nodes = _best_nodes(pool, root, size=tree.size)
    tokens, parents, value, kind, guessed = nodes
    origin = jnp.where(guessed, NGRAM, DRAFTER)
    origin = jnp.where(kind < MODEL_KINDS, origin, LOOKUP)
    is_earlier = (kind >= FIRST_EARLIER_KIND) & (kind < FORCED_KIND)
    origin = jnp.where(is_earlier, EARLIER, origin)
    origin = jnp.where(kind == FORCED_KIND, FORCED, origin)
    node = jnp.arange(tree.size, dtype=jnp.int32)[None]
    draft = Draft(
        layout=tree_layout(tree, parents),
        tokens=tokens,
        origin=jnp.where(node == 0, TARGET, origin).astype(jnp.uint8),
        kind=kind,
    )
    return draft, value


def _nodes_shapes(
    pool: Pool, root: jax.Array, *, size: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = root.shape[0], size
    guessed = jax.ShapeDtypeStruct(shape, jnp.bool_)
    return ints(*shape), ints(*shape), floats(*shape), ints(*shape), guessed


@cpu_kernel(
    "stree_best_nodes",
    outputs=_nodes_shapes,
    attributes=lambda size: {"no_kind": NO_KIND},
    prepare=lambda z, root, *, size: (
        *(z.tokens, z.parents, z.value, z.kind, z.guessed),
        root,
    ),
)
def _best_nodes(pool: Pool, root: jax.Array, *, size: int) -> tuple[jax.Array, ...]:
    """Returns tokens, parents, values, kinds and `guessed` of the best nodes [B, T]."""
    best, place = lax.top_k(pool.value, min(size - 1, pool.value.shape[1]))
    padding = ((0, 0), (0, size - 1 - best.shape[1]))
    best, place = jnp.pad(best, padding), jnp.pad(place.astype(jnp.int32), padding)
    exists = best > 0

    def of(table: jax.Array, fill: Any) -> jax.Array:
        return jnp.where(exists, jnp.take_along_axis(table, place, axis=1), fill)

    def with_root(nodes: jax.Array, first: jax.Array) -> jax.Array:
        return jnp.concatenate([first[:, None], nodes], axis=1)

    above = of(pool.parents, 0)
    at = (above[:, :, None] == (place + 1)[:, None]) & exists[:, None]
    nearest = jnp.where(above > 0, 1 + jnp.argmax(at, axis=2).astype(jnp.int32), 0)
    none = jnp.full_like(root, -1)
    return (
        with_root(of(pool.tokens, root[:, None]), root),
        with_root(nearest, none),
        with_root(best, jnp.ones(root.shape, jnp.float32)),
        with_root(of(pool.kind, NO_KIND), none + 1 + NO_KIND),
        with_root(of(pool.guessed, False), none >= 0),
    )


def without_rest(draft: Draft, count: jax.Array) -> Draft:
    """Returns the trees with only their first `count` [B] nodes. The arrays keep their
    sizes; the other nodes become padding."""
    layout, T = draft.layout, draft.tokens.shape[1]
    node, count = jnp.arange(T, dtype=jnp.int32)[None], count[:, None]
    less = replace(
        layout,
        parents=jnp.where(node < count, layout.parents, NO_NODE),
        children=jnp.where(layout.children < count[..., None], layout.children, T),
    )
    return replace(draft, layout=less)


def first_nodes(draft: Draft, tree: Budget) -> Draft:
    """Returns the first `tree.size` nodes of a draft."""
    T, layout = tree.size, draft.layout
    assert draft.origin is not None and draft.kind is not None  # set by `best_tree`
    children = layout.children[:, :T, : max(tree.children, 1)]
    return Draft(
        layout=Layout(
            parents=layout.parents[:, :T],
            depth=layout.depth[:, :T],
            paths=layout.paths[:, :T, : tree.depth + 1],
            children=jnp.minimum(children, T),
        ),
        tokens=draft.tokens[:, :T],
        origin=draft.origin[:, :T],
        kind=draft.kind[:, :T],
        has_padding=tree.has_padding,
    )


def no_tree(batch: int, tree: Budget) -> Draft:
    """Returns a draft without candidates, with the arrays of a tree."""
    zeros = jnp.zeros((batch,), jnp.int32)
    return best_tree(no_candidates(batch, 1), zeros, tree)[0]


def no_candidates(batch: int, count: int) -> Pool:
    """Returns a pool of `count` entries, all padding."""
    zeros = jnp.zeros((batch, count), jnp.int32)
    value, path = zeros.astype(jnp.float32), zeros.astype(jnp.uint32)
    return Pool(zeros, zeros, value, zeros, path, zeros > 0)


def joined(first: Pool, second: Pool) -> Pool:
    """Concatenates two pools."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)


def gains(value: jax.Array, last: np.ndarray) -> jax.Array:
    """Returns the expected gains [B, K] of trees of the best candidates, in tokens.

    Args:
      value: [B, C] float32. Values of the candidates.
      last: [K] ints. Numbers of nodes below the root.
    """
    return _gains(value, jnp.asarray(last, jnp.int32))


@cpu_kernel(
    "stree_gains",
    outputs=lambda value, last: floats(value.shape[0], last.shape[0]),
    unsupported=lambda value, _: value.shape[1] == 0,
    shared=("last",),
)
def _gains(value: jax.Array, last: jax.Array) -> jax.Array:
    """Returns 1 + the sum of the n largest values of each row, for each of K numbers n.

    Args:
      value: [B, C] float32.
      last: [K] int32. The numbers n.

    Returns:
      [B, K] float32.
    """
    best, _ = lax.top_k(value, value.shape[1])
    sums = jnp.cumsum(jnp.pad(best, ((0, 0), (1, 0)), constant_values=1.0), axis=1)
    return jnp.take(sums, jnp.minimum(last, value.shape[1]), axis=1)
