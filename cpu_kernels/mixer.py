"""A Mamba2 mixer between its projections, in one go: `src/mixer_body.h`.

What it computes is the equations of `models.mamba2`: step sizes, the convolution along
tree paths, the last path's replay and this tree's scan, gate and norm. State and
records become the new ones in place. Axes as in `pallas_kernels.scan`; K taps, C
channels of the convolution, W outputs of in_proj. A row of the batch, and a node and
its ancestors in it, have the same bits whatever stands beside them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.cpu_kernels.library import level
from stree_jax.cpu_kernels.native_call import MoreRows, native_call

MOST_NODES = 64
MOST_TAPS = 16
SHARED = (*range(1, 7), 16)  # weights and rows, among all arrays: without an axis B


class MixerWeights(NamedTuple):
    """conv_weight [C, K], conv_bias [C] or [0], norm [H * P] or [0], dt_bias and A_log
    [H], D [H] or [H * P]; the last three in float32."""

    conv_weight: jax.Array
    conv_bias: jax.Array
    norm: jax.Array
    dt_bias: jax.Array
    A_log: jax.Array
    D: jax.Array


class MixerMemory(NamedTuple):
    """State, ssm [B, H, P, N] float32 and conv [B, K-1, C], and a tree's records: x
    [B, T, H, P], dt and a [B, T, H] float32, inputs B [B, T, G, N], xBC [B, T, C]."""

    ssm: jax.Array
    conv: jax.Array
    x: jax.Array
    dt: jax.Array
    a: jax.Array
    B: jax.Array
    xBC: jax.Array


class MixerTree(NamedTuple):
    """The last tree's path [B, M] and its length [B]; of this one the queried rows
    [Tq], or [0] for all T, mask [B, T, T] and window [B, T, K]: `models.nodes`."""

    path: jax.Array
    length: jax.Array
    rows: jax.Array
    mask: jax.Array
    window: jax.Array


@dataclass(frozen=True)
class MixerOptions:
    """What a program knows of a mixer; `to_z` is where z, xBC and dt begin among the W
    outputs of in_proj, others as in `models.MambaConfig`."""

    to_z: int
    norm_groups: int
    norm_first: bool
    norm_eps: float
    dt_limit: tuple[float, float]


def mixer_unsupported(
    weights: MixerWeights,
    memory: MixerMemory,
    tree: MixerTree,
    options: MixerOptions,
) -> str | None:
    """Why `mixer_pass` cannot take these, or None."""
    (_, T, taps), heads = tree.window.shape, memory.x.shape[2]
    if level() is None:
        return "there are no compiled kernels, or they are switched off"
    if not 1 <= T <= MOST_NODES:
        return f"wants 1 to {MOST_NODES} nodes, got {T}"
    if taps > MOST_TAPS:
        return f"wants at most {MOST_TAPS} taps, got {taps}"
    if 0 in memory.ssm.shape:
        return f"wants a state that is not empty, got {memory.ssm.shape}"
    if heads % memory.B.shape[2]:
        return f"wants groups of as many heads, not {memory.B.shape[2]} of {heads}"
    if heads % options.norm_groups:
        return f"norms groups of whole heads, not {options.norm_groups} of {heads}"
    if memory.conv.dtype not in (jnp.float32, jnp.bfloat16):
        return f"wants records in float32 or bfloat16, got {memory.conv.dtype}"
    records = memory.conv, memory.x, memory.B, memory.xBC
    if len({z.dtype for z in records}) > 1:
        return "wants records of one dtype"
    kinds = {z.dtype.name for z in weights[:3] if z.size}
    if kinds not in ({"float32"}, {"bfloat16"}):
        return f"wants weights in float32 or bfloat16, all in one, got {kinds}"
    return None


def mixer_pass(
    zxbcdt: jax.Array,
    weights: MixerWeights,
    memory: MixerMemory,
    tree: MixerTree,
    *,
    options: MixerOptions,
    definition: Callable[..., Any],
    replays: bool = True,
) -> tuple[jax.Array, MixerMemory]:
    """The mixer's output before out_proj [B, Tq, H * P] float32, and its new memory:
    records of this tree's T nodes, behind which those of a larger T' stay as they were.

    Args:
      zxbcdt: [B, Tq, W] float32, of the queried nodes.
      memory: the state before the path, and records of the last tree's T' nodes; of
        this tree's nodes so far if `tree.rows` says which are new.
      definition: of the same arrays, one after another; as the kernel.
      replays: whether there may be a path; without one the state is only read, and what
        stays as it is need not be copied for who wants it, too.
    """
    allowed = level()
    if allowed is None:
        raise ValueError("mixer_pass: there are no compiled kernels")
    kernel = Kernel(options, replays)
    y, *kept = native_call(
        *(zxbcdt, *weights, *memory, *tree),
        kernel=kernel,
        definition=definition,
        batched=MoreRows(kernel, SHARED),
        level=allowed,
    )
    state = kept[:2] if replays else memory[:2]
    return y, MixerMemory(*state, *kept[2:])


@dataclass(frozen=True)
class Kernel:
    """The compiled kernel, as a function of all arrays; of a state that is only read
    nothing comes out, [B, 0]."""

    options: MixerOptions
    replays: bool

    def __call__(self, *arrays: jax.Array, level: int) -> Sequence[jax.Array]:
        zxbcdt, weights, memory, tree = parted(arrays)
        o, T, P = self.options, tree.mask.shape[1], memory.ssm.shape[2]

        def record(z: jax.Array) -> jax.ShapeDtypeStruct:
            room = max(T, z.shape[1])
            return jax.ShapeDtypeStruct((z.shape[0], room, *z.shape[2:]), z.dtype)

        def state(z: jax.Array) -> jax.ShapeDtypeStruct:
            shape = z.shape if self.replays else (z.shape[0], 0)
            return jax.ShapeDtypeStruct(shape, z.dtype)

        y = jax.ShapeDtypeStruct(
            (*zxbcdt.shape[:2], memory.x.shape[2] * P), jnp.float32
        )
        outs = [y, *map(state, memory[:2]), *map(record, memory[2:])]
        first = 1 + len(weights)
        same = [
            i for i, z in enumerate(memory) if z.shape == outs[1 + i].shape
        ]  # arrays of a smaller tree cannot become this one's
        call = jax.ffi.ffi_call(
            "stree_mixer",
            outs,
            input_output_aliases={first + i: 1 + i for i in same},
        )
        low, high = o.dt_limit
        return call(
            zxbcdt,
            *weights,
            *memory,
            *tree,
            to_z=np.int64(o.to_z),
            norm_groups=np.int64(o.norm_groups),
            norm_first=np.bool_(o.norm_first),
            eps=np.float32(o.norm_eps),
            least_dt=np.float32(low),
            most_dt=np.float32(high),
            level=np.int64(level),
        )


def parted(
    arrays: Sequence[Any],
) -> tuple[Any, MixerWeights, MixerMemory, MixerTree]:
    """All arrays as `mixer_pass` takes them."""
    first, second = 7, 14
    parts = arrays[1:first], arrays[first:second], arrays[second:]
    return (
        arrays[0],
        MixerWeights(*parts[0]),
        MixerMemory(*parts[1]),
        MixerTree(*parts[2]),
    )
