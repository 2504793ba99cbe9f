"""Bookkeeping of trees, one call each instead of dozens of small operations:
`src/trees_ffi.cc`.

Each of XLA's operations is compiled by itself, and run by itself; to choose and lay out
a tree takes it over a hundred. What these compute is defined by those who call:
`models.nodes`, and `layout`, `lookup`, `pool`, `best_first` and `accept` of
`stree_jax.speculation`.

Letters: B rows, T nodes, K taps, M depth, S room for text, C candidates, W nodes of a
level, Z kinds of nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.cpu_kernels.native_call import called

MOST_PLACES = 8
MOST_WIDTH = 64

Definition = Callable[..., Any]  # of the same arrays; hashed, as programs are


def _like(z: jax.Array, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape or z.shape, z.dtype)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@dataclass(frozen=True)
class _TreeNodes:
    taps: int

    def __call__(self, parents: jax.Array, level: int) -> Sequence[jax.Array]:
        B, T = parents.shape
        mask = jax.ShapeDtypeStruct((B, T, T), jnp.bool_)
        outs = mask, _ints(B, T), _ints(B, T, self.taps)
        return jax.ffi.ffi_call("stree_tree_nodes", outs)(parents)


def tree_nodes(
    parents: jax.Array, taps: int, definition: Definition
) -> list[jax.Array]:
    """Mask [B, T, T] bool, depth [B, T] and window [B, T, K] of parents [B, T]."""
    many = parents.shape[1] > 1  # of the root alone XLA makes constants
    return called(parents, kernel=_TreeNodes(taps), definition=definition, fits=many)


@dataclass(frozen=True)
class _TreeLayout:
    depth: int
    children: int

    def __call__(self, parents: jax.Array, level: int) -> Sequence[jax.Array]:
        B, T = parents.shape
        outs = _ints(B, T), _ints(B, T, self.depth + 1), _ints(B, T, self.children)
        return jax.ffi.ffi_call("stree_tree_layout", outs)(parents)


def tree_layout(
    parents: jax.Array, depth: int, children: int, definition: Definition
) -> list[jax.Array]:
    """Depth [B, T], paths [B, T, M + 1] and children [B, T, most] of parents [B, T]."""
    kernel, many = _TreeLayout(depth, children), parents.shape[1] > 1
    return called(parents, kernel=kernel, definition=definition, fits=many)


@dataclass(frozen=True)
class _LookUp:
    places: int
    depth: int
    room: int
    longest: int
    prime: int
    first_kind: int

    def __call__(
        self, tokens: jax.Array, length: jax.Array, probability: jax.Array, level: int
    ) -> Sequence[jax.Array]:
        shape = tokens.shape[0], self.places * self.depth + self.room
        ints = _ints(*shape)
        outs = ints, ints, _like(probability, *shape), ints
        call = jax.ffi.ffi_call(
            "stree_look_up", (*outs, jax.ShapeDtypeStruct(shape, jnp.uint32))
        )
        return call(
            tokens,
            length,
            probability,
            places=np.int64(self.places),
            depth=np.int64(self.depth),
            longest=np.int64(self.longest),
            prime=np.int64(self.prime),
            first_kind=np.int64(self.first_kind),
        )


def look_up(
    tokens: jax.Array,
    length: jax.Array,
    probability: jax.Array,
    *,
    places: int,
    depth: int,
    room: int,
    longest: int,
    prime: int,
    first_kind: int,
    definition: Definition,
) -> list[jax.Array]:
    """Tokens, parents, value, kind and path [B, W * M + room] of what may come.

    Args:
      tokens, length: [B, S] and [B] int32, texts.
      probability: [Z] float32.
      places, depth, longest, prime, first_kind: W, M and the constants of `lookup`.
    """
    return called(
        *(tokens, length, probability),
        kernel=_LookUp(places, depth, room, longest, prime, first_kind),
        definition=definition,
        shared=(2,),
        fits=places <= MOST_PLACES,
    )


def _merged(*pools: jax.Array, level: int) -> Sequence[jax.Array]:
    outs, places = [_like(z) for z in pools[:6]], {i: i for i in range(6)}
    call = jax.ffi.ffi_call("stree_merged", outs, input_output_aliases=places)
    return call(*pools)


def merged(*pools: jax.Array, definition: Definition) -> list[jax.Array]:
    """Two pools as one, in place: of each its six arrays [B, C], as `pool.Pool` lists
    them; the first has room behind its candidates for the second's."""
    return called(*pools, kernel=_merged, definition=definition)


@dataclass(frozen=True)
class _BestNodes:
    size: int
    no_kind: int

    def __call__(self, *arrays: jax.Array, level: int) -> Sequence[jax.Array]:
        value, root = arrays[2], arrays[5]
        shape = root.shape[0], self.size
        ints, guessed = _ints(*shape), jax.ShapeDtypeStruct(shape, jnp.bool_)
        outs = ints, ints, _like(value, *shape), ints, guessed
        call = jax.ffi.ffi_call("stree_best_nodes", outs)
        return call(*arrays, no_kind=np.int64(self.no_kind))


def best_nodes(
    *arrays: jax.Array, size: int, no_kind: int, definition: Definition
) -> list[jax.Array]:
    """Tokens, parents, values, kinds and whether guessed [B, T] of a pool's best.

    Args:
      arrays: the pool's tokens, parents, value, kind and guessed [B, C]; the roots [B].
      size: T, the root included.
    """
    kernel = _BestNodes(size, no_kind)
    return called(*arrays, kernel=kernel, definition=definition)


def _gains(value: jax.Array, last: jax.Array, level: int) -> jax.Array:
    out = _like(value, value.shape[0], last.shape[0])
    return jax.ffi.ffi_call("stree_gains", out)(value, last)


def gains(value: jax.Array, last: jax.Array, definition: Definition) -> list[jax.Array]:
    """1 and the sums of the best values [B, C], so many [K] of them: [B, K]."""
    fits = value.shape[1] > 0
    return called(
        value, last, kernel=_gains, definition=definition, shared=(1,), fits=fits
    )


@dataclass(frozen=True)
class Levels:
    """Of trees that grow level by level.

    Attributes:
      depth: most levels; C is W times that.
      taps, ahead: K, and by how much C' is more than C.
      prime, step, model_kinds: constants of `best_first`.
    """

    depth: int
    taps: int
    ahead: int
    prime: int
    step: float
    model_kinds: int

    def shapes(self, batch: int, width: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of what grows, see `next_level`."""
        B, W, C, K = batch, width, width * self.depth, self.taps
        N = C + self.ahead

        def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((B, *shape), dtype)

        masks = of(jnp.bool_, W, C), of(jnp.bool_, N, N)
        i, f, u = jnp.int32, jnp.float32, jnp.uint32
        frontier = masks[0], of(i, W, K), of(f, W), of(u, W)
        candidates = of(i, C), of(i, C), of(f, C), of(i, C), of(u, C)
        return *frontier, *candidates, masks[1], of(i, N), of(i, N, K)

    def __call__(self, *arrays: jax.Array, level: int) -> Sequence[jax.Array]:
        (batch, _, W), first = arrays[0].shape, 5  # what becomes new in place
        name = "stree_next_level" if len(arrays) > first else "stree_first_level"
        outs = self.shapes(batch, W)
        places = {first + i: i for i in range(len(arrays) - first)}
        call = jax.ffi.ffi_call(name, outs, input_output_aliases=places)
        return call(
            *arrays,
            prime=np.int64(self.prime),
            step=np.float32(self.step),
            model_kinds=np.int64(self.model_kinds),
        )


def next_level(
    *arrays: jax.Array, levels: Levels, definition: Definition
) -> list[jax.Array]:
    """A frontier, candidates and nodes after another level, in place.

    Args:
      arrays: the best W scores after each of the frontier's nodes
        [B, W or 1, W], their tokens, and what to take off them [B, W or 1, 1];
        probability [Z]; and for all levels but the first, below the root: the level [1]
        int32; the frontier's mask [B, W, C], window [B, W, K], value and path [B, W];
        the candidates' tokens, parents, value, kind and path [B, C]; mask [B, C', C'],
        depth [B, C'] and window [B, C', K] of nodes.
    """
    return called(
        *arrays,
        kernel=levels,
        definition=definition,
        shared=(3, 4)[: len(arrays) - 3],  # the first level is no array
        fits=arrays[0].shape[2] <= MOST_WIDTH,
    )


@dataclass(frozen=True)
class _AcceptGreedy:
    vocabulary: int

    def __call__(self, *arrays: jax.Array, level: int) -> Sequence[jax.Array]:
        B, _, room = arrays[4].shape
        margin = jax.ShapeDtypeStruct((B, room), jnp.float32)
        outs = _ints(B, room), _ints(B), _ints(B, room), margin
        call = jax.ffi.ffi_call("stree_accept_greedy", outs)
        return call(*arrays, vocabulary=np.int64(self.vocabulary))


def accept_greedy(
    *arrays: jax.Array, vocabulary: int, definition: Definition
) -> list[jax.Array]:
    """Path [B, M + 1], length [B], tokens and margins [B, M + 1]: `accept.Accepted`.

    Args:
      arrays: scores [B, T, >= V] float32; the tree's tokens, parents and depth [B, T]
        and paths [B, T, M + 1].
      vocabulary: V.
    """
    kernel = _AcceptGreedy(vocabulary)
    return called(*arrays, kernel=kernel, definition=definition)


def _argmax(numbers: jax.Array, level: int) -> jax.Array:
    return jax.ffi.ffi_call("stree_argmax", _ints(*numbers.shape[:-1]))(numbers)


def argmax(numbers: jax.Array, definition: Definition) -> jax.Array:
    """The place [...] int32 of the largest number of [..., n] float32."""
    fits = numbers.dtype == jnp.float32 and numbers.ndim > 1 and numbers.size > 0
    (place,) = called(numbers, kernel=_argmax, definition=definition, fits=fits)
    return place
