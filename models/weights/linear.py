"""Products with weights, written as each platform streams them fastest."""

from typing import Literal

import jax
import jax.numpy as jnp

from stree_jax.cpu_kernels import MOST_ROWS as SKINNY
from stree_jax.cpu_kernels import (
    by_platform,
    counts,
    skinny_product,
    skinny_product_int8,
    unsupported,
)
from stree_jax.models.sharding.shards import total
from stree_jax.models.weights.int8 import (
    GPU_LEAST,
    Quantized,
    int8_product,
    int8_product_cuda,
)


def linear(
    x: jax.Array,
    weight: jax.Array | Quantized,
    bias: jax.Array | None = None,
    *,
    live: jax.Array | None = None,
    implementation: Literal["xla", "native"] | None = None,
) -> jax.Array:
    """x @ weight.T + bias in float32; x is rounded to the weight's dtype first.

    Args:
      x: [..., k].
      weight: [m, k], PyTorch's own layout; or int8 with scales.
      bias: [m] or None.
      live: [B] int32, of x [B, T, k]: how many of each row's tokens there are, for what
        is left behind them may be anything; None: all.
      implementation: "native" is the compiled kernel (`cpu_kernels`), None takes it on
        a CPU where it can, "xla" never.

    Returns:
      [..., m] float32.

    Raises:
      ValueError: the implementation is unknown or cannot take these.
    """
    rows = x.reshape(-1, x.shape[-1])
    reason = unsupported(rows, _matrix(weight), live)
    if implementation not in (None, "xla", "native"):
        raise ValueError(f"linear: no implementation {implementation!r}")
    if implementation == "native" and reason is not None:
        raise ValueError(f"linear: native: {reason}")
    native = reason is None and implementation != "xla"
    if isinstance(weight, Quantized):
        y = _by_int8(rows, weight, live, native)
    elif rows.shape[0] > SKINNY and not native:
        y = _whole(rows, weight)
    else:
        y = by_platform(
            rows,
            weight,
            counts(live),
            cpu=_skinny_native if native else _skinny_cpu,
            cuda=_skinny_gpu,
            default=_whole,
        )
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None]
    return y.reshape(*x.shape[:-1], weight.shape[0])


def linear_summed(
    x: jax.Array,
    weight: jax.Array | Quantized,
    bias: jax.Array | None,
    parts: int,
    live: jax.Array | None = None,
) -> jax.Array:
    """`linear` of which x and the weight's columns are cut in so many parts."""
    y = total(linear(x, weight, live=live), parts)
    return y if bias is None else y + as_row(bias, y.ndim)


def _matrix(weight: jax.Array | Quantized) -> jax.Array:
    return weight.q if isinstance(weight, Quantized) else weight


def _by_int8(
    rows: jax.Array, weight: Quantized, live: jax.Array | None, native: bool
) -> jax.Array:
    args = rows.astype(jnp.float32), weight.q, weight.scale, counts(live)
    return by_platform(
        *args,
        cpu=_int8_native if native else _int8_product,
        cuda=_int8_product_cuda,
        default=_int8_product,
    )


def _int8_native(*arrays: jax.Array) -> jax.Array:
    return skinny_product_int8(*arrays, definition=_int8_product)


def _int8_product(*arrays: jax.Array) -> jax.Array:
    return int8_product(*arrays[:3])


def _int8_product_cuda(*arrays: jax.Array) -> jax.Array:
    return int8_product_cuda(*arrays[:3])


def _product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    exact = left.dtype == jnp.float32  # or a GPU would round float32 to tf32
    return jnp.einsum(
        spec,
        left,
        right,
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _whole(rows: jax.Array, weight: jax.Array, _: jax.Array | None = None) -> jax.Array:
    return _product("tk,mk->tm", rows.astype(weight.dtype), weight)


def _skinny_native(rows: jax.Array, weight: jax.Array, live: jax.Array) -> jax.Array:
    return skinny_product(rows, weight, live, definition=_skinny_cpu)


def _skinny_gpu(
    rows: jax.Array, weight: jax.Array, _: jax.Array | None = None
) -> jax.Array:
    """rows [t, k] @ weight.T for few rows, in the form XLA:GPU streams fastest.

    Of one row XLA makes a product of a matrix and a vector, which it tiles badly: 22.7
    us where 16 rows take 16.8 (10576 x 2560, bfloat16, an H200), 1.3 times the pass.
    """
    count = rows.shape[0]
    if count >= 4 or weight.dtype.itemsize != 2:
        return _whole(rows, weight)
    return _whole(jnp.pad(rows, ((0, GPU_LEAST - count), (0, 0))), weight)[:count]


def _skinny_cpu(
    rows: jax.Array, weight: jax.Array, _: jax.Array | None = None
) -> jax.Array:
    """rows [t, k] @ weight.T for few rows, in the form XLA:CPU streams fastest.

    The weight stands on the left, cut into blocks of rows that the cores share. Row
    counts between 4, 8 and the multiples of 16 are slower than the next of these, and
    for one 16-bit row the whole weight would be converted on every call (two are not).
    """
    (count, k), m = rows.shape, weight.shape[0]
    if count > SKINNY:
        return _whole(rows, weight)
    if count <= 4:
        padded = 2 if weight.dtype.itemsize == 2 and count == 1 else count
    else:
        padded = 8 if count <= 8 else -(-count // 16) * 16
    rows = jnp.pad(rows.astype(weight.dtype), ((0, padded - count), (0, 0)))
    blocks = next(n for n in (4, 2, 1) if m % n == 0)
    y = _product("bmk,kt->bmt", weight.reshape(blocks, m // blocks, k), rows.T)
    y = jax.lax.optimization_barrier(y)  # or XLA puts the weight back on the right
    return y.reshape(m, -1)[:, :count].T


def as_row(v: jax.Array, ndim: int) -> jax.Array:
    """A vector as the last axis of an ndim-dimensional array, in float32."""
    return v.astype(jnp.float32).reshape((1,) * (ndim - 1) + (-1,))


def scaled(x: jax.Array, multiplier: float) -> jax.Array:
    """x times a constant of the config, which mostly is 1."""
    return x if multiplier == 1.0 else x * multiplier
