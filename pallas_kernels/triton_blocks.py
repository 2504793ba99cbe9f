"""Parts that the Triton kernels of the scan and of the delta rule have in common.

Inputs are not padded: blocks of 16, 32 or 64 tokens are gathered by row number, and
rows past the last token repeat it. As keys these rows are masked; as queries they are
cut off the result.

Products run on tensor cores with float32 sums. Products of two bfloat16 values are
exact. If one factor is float32, it is split into three bfloat16 parts that sum to it,
so these products are exact, too. For two float32 factors see `Blocks.precision`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from stree_jax.pallas_kernels.scan import FORGOTTEN
from stree_jax.pallas_kernels.triton_limits import MIN_TILE

try:
    from jax.experimental.pallas import triton as pltriton
except ImportError:  # this jax has no Triton backend: see `available`
    pltriton = None  # type: ignore[assignment]  # a module, where it exists


@dataclass(frozen=True)
class Blocks:
    """Block sizes and precision of the kernel.

    Attributes:
      head: channels of a head per program, a power of two >= 16 that divides P.
      state: columns of N per chunk, a power of two >= 16 that divides N.
      num_warps, num_stages: as in Triton.
      columns: columns of N per step of the scores, a power of two that divides N. Only
        for decays by column.
      precision: precision of products of two float32 factors, as relative error:
        "tf32x3" (2^-21, three tensor core passes), "bf16x3" (2^-16, three passes with
        fewer registers) or "highest" (2^-24, without tensor cores, also for bfloat16).
    """

    head: int = 32
    state: int = 32
    num_warps: int = 4
    num_stages: int = 3
    columns: int = 1
    precision: str = "tf32x3"


_PRECISIONS: dict[str, Any] = {
    "tf32x3": lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    "bf16x3": lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    "highest": lax.Precision.HIGHEST,
    "interpret": lax.Precision.HIGHEST,
}
_GPU_ONLY = ("tf32x3", "bf16x3")  # precisions that the interpreter does not have


class Tree(NamedTuple):
    """Inputs of a kernel, as arrays, as refs, or as block specs.

    Attributes:
      inputs: `ScanInputs` or `DeltaInputs`.
      mask: [B, T, T] int8.
      rows: [Tq] int32. If None, all tokens are queried.
      u: [B, T, H, P] float32, the u of earlier tokens. If None, there are none.
    """

    inputs: Any
    mask: Any
    rows: Any
    u: Any = None


def tile(count: int) -> int:
    """Returns the size of the smallest block that holds `count` tokens."""
    return max(MIN_TILE, 1 << (count - 1).bit_length())


def numbers(count: int) -> jax.Array:
    """Returns 0, 1, ..., count - 1, then count - 1 repeated up to the block's size."""
    places = lax.iota(jnp.int32, tile(count))
    if places.size == count:  # the compiler loads a plain range in wide words
        return places
    return jnp.minimum(places, count - 1)


def _parts(z: jax.Array) -> list[jax.Array]:
    """Splits the float32 z into three bfloat16 arrays that sum to it, smallest first.

    Bits are truncated, not rounded: a compiler may remove a conversion and its inverse.
    """
    parts = []
    for _ in range(2):
        bits = lax.bitcast_convert_type(z, jnp.int32) & jnp.int32(-(1 << 16))
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        z = z - part
    return [z.astype(jnp.bfloat16), *reversed(parts)]


def product(
    left: jax.Array, right: jax.Array, axes: tuple[int, int], precision: str
) -> jax.Array:
    """Contracts `axes` of two matrices in float32; see the module's docstring."""

    def dot(left: jax.Array, right: jax.Array) -> jax.Array:
        exact = left.dtype != jnp.float32
        return lax.dot_general(
            left,
            right,
            (((axes[0],), (axes[1],)), ((), ())),
            precision=_PRECISIONS["highest" if exact else precision],
            preferred_element_type=jnp.float32,
        )

    if precision == "highest":
        return dot(left.astype(jnp.float32), right.astype(jnp.float32))
    if left.dtype == right.dtype:
        return dot(left, right)
    if left.dtype == jnp.float32:
        small, middle, large = (dot(part, right) for part in _parts(left))
    else:
        small, middle, large = (dot(left, part) for part in _parts(right))
    return small + middle + large


def _path_sums(allowed: jax.Array, a: jax.Array, T: int) -> tuple[jax.Array, jax.Array]:
    """Sums hi and lo of `scan.exact_split` of a [T] along the paths; returns both
    [Tq]."""
    a = jnp.maximum(a, FORGOTTEN)
    quantum = -FORGOTTEN * 2.0 ** (math.ceil(math.log2(T)) - 24)
    hi = jnp.floor(a * (1 / quantum) + 0.5) * quantum
    sums = (jnp.where(allowed, z[None], 0.0).sum(axis=1) for z in (hi, a - hi))
    return next(sums), next(sums)


def replayer(past: Any, product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function that replays the path on a part of the state.

    Args:
      past: `Replayed` of refs.
      product: matrix product, see `_product`.
    """
    M = past.path.shape[0]
    j = lax.iota(jnp.int32, tile(M))
    valid = j < jnp.minimum(past.length[...], M)
    row = jnp.where(valid, past.path[numbers(M)], 0)
    dt = jnp.where(valid, past.dt[row], 0.0)
    a = jnp.where(valid, past.a[row], 0.0)
    after = jnp.where(j[None] > j[:, None], a[None], 0.0).sum(axis=1)
    # Entries past the path read row 0, which may be NaN.
    x = jnp.where(valid[:, None], past.x[row, :].astype(jnp.float32), 0.0)
    weighted = (jnp.exp(after) * dt)[:, None] * x
    kept = jnp.exp(a.sum())

    def replay(state: jax.Array, part: Any) -> jax.Array:
        B = cleared(~valid, past.B[row, part])
        return kept * state + product(weighted, B, (0, 0))

    return replay


def weights(
    mask: jax.Array, mask_q: jax.Array, a: jax.Array, dt: jax.Array, T: int
) -> tuple[jax.Array, jax.Array]:
    """Computes exp(Acum_t) [Tq] and decay_ts dt_s [Tq, T] for a block of T tokens."""
    real = lax.iota(jnp.int32, a.size)[None] < T
    allowed, allowed_q = ((m != 0) & real for m in (mask, mask_q))
    hi, lo = _path_sums(allowed, a, T)
    hi_q, lo_q = (hi, lo) if mask_q is mask else _path_sums(allowed_q, a, T)
    # Mask the exponent before exp: off the path it can be large and positive.
    difference = (hi_q[:, None] - hi[None]) + (lo_q[:, None] - lo[None])
    decay = jnp.exp(jnp.where(allowed_q, difference, -jnp.inf))
    return jnp.exp(hi_q + lo_q), decay * dt[None]


def faults_of(z: jax.Array) -> jax.Array:
    """Returns which rows of a block [T, S] have NaN or infinity, as [T] bool."""
    fault = jnp.where(jnp.abs(z.astype(jnp.float32)) < jnp.inf, 0, 1)
    return fault.max(axis=1) != 0


def cleared(fault: jax.Array, z: jax.Array) -> jax.Array:
    """Returns z [T, S] with the rows in `fault` [T] bool set to 0."""
    return jnp.where(fault[:, None], jnp.zeros((), z.dtype), z)


def marked(hit: jax.Array, z: jax.Array) -> jax.Array:
    """Returns the float32 z [Tq, S] with the rows in `hit` [Tq] bool set to NaN."""
    return jnp.where(hit[:, None], jnp.nan, z)


def reached(allowed: jax.Array, fault: jax.Array) -> jax.Array:
    """Returns which queries see a token in `fault` [T] bool, as [Tq] bool, by the mask
    `allowed` [Tq, T] bool."""
    return jnp.where(allowed & fault[None], 1, 0).max(axis=1) != 0


@dataclass(frozen=True)
class Specs:
    """Block specs of arrays: the part of each that a program reads or writes.

    The grid is (sequences, heads, blocks of `head` channels).

    Attributes:
      head: channels of a head per program.
      heads_per_group: heads that share a group, or a key head.
    """

    head: int
    heads_per_group: int

    def state(self, z: Any) -> Any:
        """Returns the spec of a state [B, H, P, N]."""
        block = (None, None, self.head, z.shape[3])
        return pl.BlockSpec(block, lambda b, h, p: (b, h, p, 0))

    def sequence(self, z: Any) -> Any:
        """Returns the spec of z [B, ...] for which programs read a whole sequence."""
        rest = (0,) * (len(z.shape) - 1)
        return pl.BlockSpec((None, *z.shape[1:]), lambda b, h, p: (b, *rest))

    def shared(self, z: Any) -> Any:
        """Returns the spec of an array [...] that every program reads whole."""
        rest = (0,) * len(z.shape)
        return pl.BlockSpec(z.shape, lambda b, h, p: rest)

    def steps(self, z: Any) -> Any:
        """Returns the spec of z [B, T, H]."""
        return pl.BlockSpec((None, z.shape[1], None), lambda b, h, p: (b, 0, h))

    def path_sums(self, z: Any) -> Any:
        """Returns the spec of z [B, H, T, N]."""
        return pl.BlockSpec((None, None, *z.shape[2:]), lambda b, h, p: (b, h, 0, 0))

    def columns(self, z: Any) -> Any:
        """Returns the spec of z [B, T, H, N]."""
        block = (None, z.shape[1], None, z.shape[3])
        return pl.BlockSpec(block, lambda b, h, p: (b, 0, h, 0))

    def channels(self, z: Any) -> Any:
        """Returns the spec of z [B, T, H, P]."""
        block = (None, z.shape[1], None, self.head)
        return pl.BlockSpec(block, lambda b, h, p: (b, 0, h, p))

    def group_steps(self, z: Any) -> Any:
        """Returns the spec of z [B, T, G]."""
        block = (None, z.shape[1], None)
        return pl.BlockSpec(block, lambda b, h, p: (b, 0, h // self.heads_per_group))

    def group(self, z: Any) -> Any:
        """Returns the spec of z [B, T, G, N]."""
        block = (None, z.shape[1], None, z.shape[3])
        return pl.BlockSpec(block, lambda b, h, p: (b, 0, h // self.heads_per_group, 0))


def available() -> bool:
    """True if this jax and this jaxlib have the Triton backend."""
    return pltriton is not None


@dataclass(frozen=True)
class Launch:
    """A kernel that replays a path into the state, or not, and computes a tree.

    Attributes:
      kernel: function of the refs h0, past, tree, h, outputs, and of `blocks`.
      name: name of the kernel in profiles.
      blocks: block sizes and precision.
      specs: block specs of `past` and `tree`.
      interpret: True to run in Pallas's interpreter, on any device.
    """

    kernel: Callable[..., None]
    name: str
    blocks: Blocks
    specs: tuple[Any, Tree]
    interpret: bool

    def __call__(
        self, h0: jax.Array, past: Any, tree: Tree, Tq: int, outputs: int
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Runs the kernel.

        Args:
          h0: [B, H, P, N] float32, overwritten if there is a path.
          past: recorded inputs of the last tree and the path, or None.
          tree: this tree.
          Tq: number of queried tokens.
          outputs: number of outputs [B, Tq, H, P] float32.

        Returns:
          The state after the path, and the outputs.
        """
        batch, H, P, _ = h0.shape
        blocks, params = self.blocks, None
        if not self.interpret:
            params = pltriton.CompilerParams(
                num_warps=blocks.num_warps, num_stages=blocks.num_stages
            )
        elif blocks.precision in _GPU_ONLY:
            blocks = replace(blocks, precision="interpret")
        of = Specs(blocks.head, 1)
        state, state_type = of.state(h0), jax.ShapeDtypeStruct(h0.shape, jnp.float32)
        y_type = jax.ShapeDtypeStruct((batch, tile(Tq), H, P), jnp.float32)
        replays = past is not None
        h, *found = pl.pallas_call(
            partial(self.kernel, blocks=blocks),
            out_shape=(state_type if replays else None, *[y_type] * outputs),
            grid=(batch, H, P // blocks.head),
            in_specs=(state, *self.specs),
            out_specs=(state if replays else None, *[of.channels(y_type)] * outputs),
            input_output_aliases={0: 0} if replays else {},
            compiler_params=params,
            interpret=self.interpret,
            name=self.name,
        )(h0, past, tree)
        return h if replays else h0, [z[:, :Tq] for z in found]
