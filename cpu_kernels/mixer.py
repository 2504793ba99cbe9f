"""Arguments of the Mamba2 mixer kernel (`src/mixer_body.h`), and what it has in common
with the kernel of the gated delta rule (`delta`).

One kernel computes everything between a mixer's two projections, as defined by
`models.mixers.mamba2.equations`: step sizes, the convolution along tree paths, the
replay of the last path, the scan of this tree, gate and norm. The new state and records
replace the old ones in place.

Axes are those of `pallas_kernels.scan`; K is the taps and C the channels of the
convolution, W the outputs of in_proj. The results of a node do not depend on other rows
of the batch, nor on nodes that are not its ancestors, bit for bit.
"""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from stree_jax.cpu_kernels.kernel import floats
from stree_jax.cpu_kernels.limits import MAX_NODES

MAX_TAPS = 16
Memory = TypeVar("Memory", bound=tuple[Any, ...])


class MixerWeights(NamedTuple):
    """Weights of a mixer, without its projections.

    Attributes:
      conv_weight: [C, K].
      conv_bias: [C] or None.
      norm: [H * P], scale of the gated norm, or None.
      dt_bias, A_log: [H] float32.
      D: [H] or [H * P] float32.
    """

    conv_weight: jax.Array
    conv_bias: jax.Array | None
    norm: jax.Array | None
    dt_bias: jax.Array
    A_log: jax.Array
    D: jax.Array


class MixerMemory(NamedTuple):
    """A mixer's state and the records of a tree's T nodes.

    Attributes:
      ssm: [B, H, P, N] float32.
      conv: [B, K-1, C], the last inputs of the convolution.
      x: [B, T, H, P].
      dt, a: [B, T, H] float32.
      B: [B, T, G, N], input projection.
      xBC: [B, T, C], inputs of the convolution.
    """

    ssm: jax.Array
    conv: jax.Array
    x: jax.Array
    dt: jax.Array
    a: jax.Array
    B: jax.Array
    xBC: jax.Array


class MixerTree(NamedTuple):
    """The accepted path in the last tree, and this tree.

    Attributes:
      path: [B, M] int32, rows of the accepted tokens in the last tree.
      length: [B] int32, number of valid entries of `path`.
      rows: [Tq] int32, rows of the queried nodes in this tree. If None, all T are
        queried.
      mask: [B, T, T] bool, see `models.layers.nodes`.
      window: [B, T, K] int32, see `models.layers.nodes`.
    """

    path: jax.Array
    length: jax.Array
    rows: jax.Array | None
    mask: jax.Array
    window: jax.Array


def mixer_unsupported(
    _: jax.Array,
    weights: MixerWeights,
    memory: MixerMemory,
    tree: MixerTree,
    *,
    config: Any,
    **options: Any,
) -> str | None:
    """Returns why the kernel does not support these arguments. None if it does.

    Args:
      weights, memory, tree: the arrays.
      config: a `models.MambaConfig`.
    """
    heads, groups = memory.x.shape[2], config.norm_groups
    if heads % groups:
        return f"wants norm groups of whole heads, got {groups} for {heads} heads"
    records = memory.conv, memory.x, memory.B, memory.xBC
    return unsupported(memory.ssm, tree, memory.B.shape[2], records, weights[:3])


def unsupported(
    ssm: jax.Array,
    tree: MixerTree,
    groups: int,
    records: tuple[jax.Array, ...],
    weights: tuple[jax.Array | None, ...],
) -> str | None:
    """Returns why no mixer kernel supports these arguments. None if they do.

    Args:
      ssm: [B, H, P, N].
      tree: the tree.
      groups: G, number of groups of heads.
      records: the arrays that have the dtype of the convolution's window.
      weights: the weights that may be bfloat16.
    """
    T, taps = tree.window.shape[1:]
    if not 1 <= T <= MAX_NODES:
        return f"wants 1 to {MAX_NODES} nodes, got {T}"
    if taps > MAX_TAPS:
        return f"wants at most {MAX_TAPS} taps, got {taps}"
    if 0 in ssm.shape:
        return f"wants a state that is not empty, got {ssm.shape}"
    if ssm.shape[1] % groups:
        return f"wants equal groups of heads, got {groups} for {ssm.shape[1]} heads"
    if records[0].dtype not in (jnp.float32, jnp.bfloat16):
        return f"wants records in float32 or bfloat16, got {records[0].dtype}"
    if len({z.dtype for z in records}) > 1:
        return "wants records of one dtype"
    kinds = {z.dtype.name for z in weights if z is not None}
    if kinds not in ({"float32"}, {"bfloat16"}):
        return f"wants all weights in float32 or all in bfloat16, got {kinds}"
    return None


def mixer_outputs(
    zxbcdt: jax.Array,
    _: MixerWeights,
    memory: MixerMemory,
    tree: MixerTree,
    *,
    replays: bool,
    **options: Any,
) -> tuple[jax.ShapeDtypeStruct, MixerMemory]:
    """Returns the shapes and dtypes of y [B, Tq, H * P] and of the new memory."""
    return outputs_of(zxbcdt, memory, tree, replays)


def outputs_of(
    projected: jax.Array, memory: Memory, tree: MixerTree, replays: bool
) -> tuple[Any, Memory]:
    """Returns the shapes and dtypes of y [B, Tq, H * P] and of the new memory.

    The records have as many rows as the larger of the last tree and this one. If no
    path is replayed, the state does not change and is not returned: its arrays are
    [B, 0].

    Args:
      projected: [B, Tq, W], output of in_proj.
      memory: the state, its window, and the records.
      tree: the tree.
      replays: True if there is a pending path.
    """
    T, (ssm, conv, *records) = tree.mask.shape[1], memory
    _, heads, head_dim, _ = ssm.shape

    def shaped(shape: tuple[int, ...], z: jax.Array) -> Any:
        return jax.ShapeDtypeStruct(shape, z.dtype)

    state = (shaped(z.shape if replays else (z.shape[0], 0), z) for z in (ssm, conv))
    new = (shaped((z.shape[0], max(T, z.shape[1]), *z.shape[2:]), z) for z in records)
    y = floats(*projected.shape[:2], heads * head_dim)
    return y, type(memory)(*state, *new)
