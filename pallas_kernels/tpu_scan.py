"""`scan.replay_tree_scan` as one Pallas TPU kernel (Mosaic).

There is one program per sequence and block of heads. It reads its heads' part of the
state once, replays the accepted path into it, writes it in place, and computes the
outputs of all nodes:

    h = exp(sum_j a_j) h0 + sum_s w_s x_s (outer) B_s
    y = exp(Acum_t) (C_t . h) + sum_s (decay_ts dt_s C_t . B_s) x_s

Tokens are rows, and the channels of all heads of a block are lanes. Numbers by head
[T, H] are brought to the block's heads, or from heads to their channels, by products
with matrices of ones and zeros, because Mosaic has no gather along lanes. Such products
are exact, see `_product`. D x is left to XLA, which joins it with what follows.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from stree_jax.pallas_kernels.dispatch import int32_inside
from stree_jax.pallas_kernels.scan import FORGOTTEN, Replayed, ScanInputs, exact_split
from stree_jax.pallas_kernels.tpu_limits import LANES, heads_of_block

_PLAIN, _LAST, _FIRST = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))  # contracted axes


def _parts(z: jax.Array) -> list[jax.Array]:
    """Splits z into bfloat16 arrays whose sum is z: one, or three of float32."""
    if z.dtype == jnp.bfloat16:
        return [z]
    parts = []
    for _ in range(3):
        parts.append(z.astype(jnp.bfloat16))
        z = z - parts[-1].astype(jnp.float32)
    return parts


def _product(left: jax.Array, right: jax.Array, axes: Any = _PLAIN) -> jax.Array:
    """Computes a product in float32.

    Products with a bfloat16 factor are exact before they are summed: the parts of the
    other factor take one pass each. Two float32 factors take the six passes of HIGHEST.
    """
    dot = partial(
        lax.dot_general,
        dimension_numbers=(axes, ((), ())),
        preferred_element_type=jnp.float32,
    )
    if left.dtype == right.dtype == jnp.float32:
        return dot(left, right, precision=lax.Precision.HIGHEST)
    products = [dot(one, other) for one in _parts(left) for other in _parts(right)]
    return sum(products[1:], products[0])


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def _ones(condition: jax.Array) -> jax.Array:
    return condition.astype(jnp.float32).astype(jnp.bfloat16)


def _replay(path: Any, length: Any, h0: Any, past: Any, h: Any, of: Any) -> None:
    """Writes the state after the accepted path to h.

    Args:
      path, length: refs to all paths [B, M] and their lengths [B].
      h0, h: refs [Hb, P, N], the state before and after.
      past: (x [T0, Hb * P], dt [T0, H], a [T0, H], B [T0, N]), refs.
      of: `_Heads` of the program.
    """
    x, dt, a, B = (ref[...] for ref in past)
    nodes, b = x.shape[0], pl.program_id(0)
    place = jnp.full((nodes, 1), -1, jnp.int32)  # of each node in the path
    place_row = jnp.full((1, nodes), -1, jnp.int32)
    for m in range(path.shape[1]):
        node = jnp.where(m < length[b], path[b, m], -1)
        place = jnp.where(_iota(place.shape, 0) == node, m, place)
        place_row = jnp.where(_iota(place_row.shape, 1) == node, m, place_row)
    on_path = place >= 0  # other nodes may have NaN
    a = jnp.where(on_path, jnp.maximum(a, FORGOTTEN), 0.0)
    after = _product(_ones((place_row > place) & on_path), a)
    weight = jnp.where(on_path, jnp.exp(after) * dt, 0.0)
    weighted = of.lanes(of.block(weight)) * jnp.where(on_path, x, 0).astype(jnp.float32)
    added = _product(weighted, jnp.where(on_path, B, jnp.zeros((), B.dtype)), _FIRST)
    kept = jnp.exp(of.rows(_product(jnp.ones((8, nodes), jnp.bfloat16), a)))  # [Hb, 8]
    P = h0.shape[1]
    for j in range(h0.shape[0]):
        h[j] = kept[j : j + 1, :1] * h0[j] + added[j * P : (j + 1) * P]


class _Heads:
    """Brings numbers by head to the heads of this program, and to their channels."""

    def __init__(self, heads: int, block: int, P: int):
        first = pl.program_id(1) * block
        shape = block, heads
        self.chosen = _ones(_iota(shape, 1) == _iota(shape, 0) + first)
        start = _iota((block, block * P), 0) * P
        lane = _iota((block, block * P), 1)
        self.spread = _ones((lane >= start) & (lane < start + P))

    def block(self, z: jax.Array) -> jax.Array:
        """Returns z [T, H] of this program's heads [T, Hb]."""
        return _product(z, self.chosen, _LAST)

    def rows(self, z: jax.Array) -> jax.Array:
        """Returns z [T, H] of this program's heads, transposed [Hb, T]."""
        return _product(self.chosen, z, _LAST)

    def lanes(self, z: jax.Array) -> jax.Array:
        """Repeats z [T, Hb] for the channels of each head [T, Hb * P]."""
        return _product(z, self.spread)


def _scan(h: Any, inputs: Any, mask: Any, y: Any, of: _Heads) -> None:
    """Writes the outputs of the tree's nodes to y [T, Hb * P].

    Args:
      h: ref [Hb, P, N], the state before the tree's root.
      inputs: (x [T, Hb * P], dt [T, H], a [T, H], B [T, N], C [T, N]), refs.
      mask: ref [T, T] int8.
      y: ref.
      of: see `_Heads`.
    """
    x, dt, a, B, C = (ref[...] for ref in inputs)
    heads, P, N = h.shape
    allowed = mask[...].astype(jnp.int32) != 0
    ancestors = _ones(allowed)
    valid = a < jnp.inf
    dt = jnp.where(valid, dt, jnp.nan)  # reaches the descendants through `weight`
    hi, lo = (_product(ancestors, z) for z in _split(jnp.where(valid, a, 0.0)))
    hi_t, lo_t, hi_s, lo_s = of.block(hi), of.block(lo), of.rows(hi), of.rows(lo)
    scores, dt = _product(C, B, _LAST), of.rows(dt)
    carried = _product(C, h[...].reshape(heads * P, N), _LAST)
    carried = carried * of.lanes(jnp.exp(hi_t + lo_t))
    finite = jnp.abs(x.astype(jnp.float32)) < jnp.inf
    hit = _product(ancestors, _ones(~finite)) > 0
    x = jnp.where(finite, x, jnp.zeros((), x.dtype))

    width = max(P, min(LANES, heads * P))
    for start in range(0, heads * P, width):
        part = slice(start, start + width)
        mixed = jnp.zeros((x.shape[0], width), jnp.float32)
        lane = _iota(mixed.shape, 1) + start
        for j in range(start // P, (start + width) // P):
            one = slice(j, j + 1)
            difference = (hi_t[:, one] - hi_s[one]) + (lo_t[:, one] - lo_s[one])
            decay = jnp.exp(jnp.where(allowed, difference, 0.0))
            weight = jnp.where(allowed, decay * dt[one] * scores, 0.0)
            ours = (lane >= j * P) & (lane < (j + 1) * P)
            mixed = jnp.where(ours, _product(weight, x[:, part]), mixed)
        y[:, part] = jnp.where(hit[:, part], jnp.nan, carried[:, part] + mixed)


def _split(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    hi, lo = exact_split(a[None])
    return hi[0], lo[0]


def _kernel(path: Any, length: Any, h0: Any, *refs: Any) -> None:
    """Runs one program, on refs without the axis of sequences."""
    past, inputs, mask, h, y = refs[:4], refs[4:9], refs[9], refs[10], refs[11]
    of = _Heads(inputs[1].shape[1], *h0.shape[:2])
    _replay(path, length, h0, past, h, of)
    _scan(h, inputs, mask, y, of)


class _Specs:
    """Block specs: the part of each array that a program reads or writes.

    Attributes:
      block: heads of a program.
      per_group: programs that share a group of B and C.
    """

    def __init__(self, block: int, per_group: int):
        self.block, self.per_group = block, per_group

    def state(self, z: Any) -> pl.BlockSpec:
        """Returns the spec of a state [B, H, P, N]: the program's heads."""
        shape = None, self.block, *z.shape[2:]
        return pl.BlockSpec(shape, lambda b, i, *_: (b, i, 0, 0))

    def heads(self, z: Any, width: int) -> pl.BlockSpec:
        """Returns the spec of z [B, T, H * width]: the program's heads."""
        shape = None, z.shape[1], self.block * width
        return pl.BlockSpec(shape, lambda b, i, *_: (b, 0, i))

    def group(self, z: Any, width: int) -> pl.BlockSpec:
        """Returns the spec of z [B, T, G * width]: the group of the program's heads."""
        shape = None, z.shape[1], width
        return pl.BlockSpec(shape, lambda b, i, *_: (b, 0, lax.div(i, self.per_group)))

    def whole(self, z: Any) -> pl.BlockSpec:
        """Returns the spec of z [B, ., .]: everything of the program's sequence."""
        return pl.BlockSpec((None, *z.shape[1:]), lambda b, i, *_: (b, 0, 0))


def _flat(z: jax.Array) -> jax.Array:
    return z.reshape(*z.shape[:2], -1)


def _tokens(z: Any, specs: _Specs) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
    """Returns x, dt, a and B of all tokens as the kernel takes them, and their
    specs."""
    dt, a = (z.astype(jnp.float32) for z in (z.dt, z.a))
    arrays = x, _, _, B = [_flat(z.x), dt, a, _flat(z.B)]
    channels = specs.heads(x, z.x.shape[-1])
    by_head, group = specs.whole(dt), specs.group(B, z.B.shape[-1])
    return arrays, [channels, by_head, by_head, group]


@int32_inside
def replay_tree_scan(
    h0: jax.Array,
    past: Replayed,
    inputs: ScanInputs,
    mask: jax.Array,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes `scan.replay_tree_scan` in one kernel launch, which overwrites h0.

    Args:
      h0, past, inputs, mask: as in `scan.replay_tree_scan`;
        `tpu_limits.tpu_scan_unsupported` must return None for them.
      interpret: True, or an `InterpretParams`, to run in an interpreter on any device.

    Returns:
      y [B, T, H, P] and the replayed state [B, H, P, N], both float32.
    """
    (batch, H, P, N), T = h0.shape, mask.shape[1]
    heads = H // inputs.B.shape[2]  # of a group
    block = heads_of_block(heads, P, N)
    assert block is not None
    specs = _Specs(block, heads // block)
    (old, old_specs), (new, new_specs) = _tokens(past, specs), _tokens(inputs, specs)
    C, mask = _flat(inputs.C), mask.astype(jnp.int8)
    out = jax.ShapeDtypeStruct((batch, T, H * P), jnp.float32)
    rest_specs = specs.group(C, N), specs.whole(mask)
    arrays: list[Any] = [h0, h0, *old, *new, C, out]
    cost = pl.CostEstimate(
        flops=2 * h0.size * (T + old[0].shape[1]),
        transcendentals=batch * H * T * T,
        bytes_accessed=sum(z.size * z.dtype.itemsize for z in arrays),
    )
    call = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, H // block),
            in_specs=[specs.state(h0), *old_specs, *new_specs, *rest_specs],
            out_specs=[specs.state(h0), specs.heads(out, P)],
        ),
        out_shape=[jax.ShapeDtypeStruct(h0.shape, jnp.float32), out],
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel")
        ),
        cost_estimate=cost,
        interpret=interpret,
        name="replay_tree_scan",
    )
    h, mixed = call(past.path, past.length, h0, *old, *new, C, mask)
    D = jnp.broadcast_to(inputs.D.astype(jnp.float32).reshape(H, -1), (H, P))
    y = mixed + D.reshape(1, 1, -1) * new[0].astype(jnp.float32)
    return y.reshape(inputs.x.shape), h
