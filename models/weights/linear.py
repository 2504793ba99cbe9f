"""Products with weights, written as each platform streams them fastest."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from stree_jax.cpu_kernels import MOST_ROWS as SKINNY
from stree_jax.cpu_kernels import (
    CpuKernel,
    by_platform,
    cpu_kernel,
    floats,
    int8_unsupported,
    product_unsupported,
)
from stree_jax.models.sharding.shards import total
from stree_jax.models.weights.int8 import (
    GPU_LEAST,
    Quantized,
    int8_product,
    int8_product_cuda,
)

Function = Callable[..., jax.Array]


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
    kernel: CpuKernel[..., jax.Array] = _skinny_cpu
    arrays: tuple[Any, ...] = rows, weight, live
    cuda: Function = _skinny_gpu
    default: Function = _whole
    if isinstance(weight, Quantized):
        kernel, arrays = _int8_product, (rows, weight.q, weight.scale, live)
        cuda, default = _int8_product_cuda, _int8_product.definition
    reason = kernel.unsupported(*arrays)
    if implementation not in (None, "xla", "native"):
        raise ValueError(f"linear: no implementation {implementation!r}")
    if implementation == "native" and reason is not None:
        raise ValueError(f"linear: native: {reason}")
    native = reason is None and implementation != "xla"
    if rows.shape[0] > SKINNY and not native and default is _whole:
        y = default(*arrays)
    else:
        cpu = kernel if native else kernel.definition
        y = by_platform(*arrays, cpu=cpu, cuda=cuda, default=default)
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


def _in_float32(rows: jax.Array, *rest: Any) -> tuple[Any, ...]:
    return rows.astype(jnp.float32), *rest


def _product_shape(rows: jax.Array, weight: jax.Array, *_: Any) -> jax.ShapeDtypeStruct:
    return floats(rows.shape[0], weight.shape[0])


@cpu_kernel(
    "stree_product_int8",
    outputs=_product_shape,
    unsupported=int8_unsupported,
    shared=("weight", "scale"),
    prepare=_in_float32,
)
def _int8_product(
    rows: jax.Array, weight: jax.Array, scale: jax.Array, live: jax.Array | None
) -> jax.Array:
    return int8_product(rows.astype(jnp.float32), weight, scale)


def _int8_product_cuda(
    rows: jax.Array, weight: jax.Array, scale: jax.Array, live: jax.Array | None
) -> jax.Array:
    return int8_product_cuda(rows.astype(jnp.float32), weight, scale)


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


@cpu_kernel(
    "stree_product",
    outputs=_product_shape,
    unsupported=product_unsupported,
    shared=("weight",),
    prepare=_in_float32,
)
def _skinny_cpu(
    rows: jax.Array, weight: jax.Array, live: jax.Array | None
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
