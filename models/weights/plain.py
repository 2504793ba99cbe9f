"""float32 and bfloat16 weights, with products in the form that each platform reads
fastest."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.cpu_kernels import (
    at_most,
    by_platform,
    cpu_kernel,
    experts_unsupported,
    floats,
    product_unsupported,
)
from stree_jax.models.weights.experts import chosen_rows, chosen_shape
from stree_jax.models.weights.format import Format
from stree_jax.models.weights.padding import SKINNY
from stree_jax.models.weights.plain_format import plain_format
from stree_jax.models.weights.weight import Weight

MIN_GPU_ROWS = 16  # on a GPU, small 8- and 16-bit products are padded to so many rows


@struct.dataclass
class PlainWeight(Weight):
    """A `Weight` around a plain array [m, k]. A model's parameters contain only the
    array."""

    array: Any

    @property
    def format(self) -> Format:
        return plain_format(self.array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def unsupported(self, rows: jax.Array, valid_count: jax.Array | None) -> str | None:
        return _skinny_cpu.unsupported(rows, self.array, valid_count)

    def product(
        self, rows: jax.Array, valid_count: jax.Array | None, native: bool
    ) -> jax.Array:
        """Computes rows @ matrix.T with the rows rounded to the weight's dtype and sums
        in float32."""
        if not at_most(rows.shape[0], SKINNY) and not native:
            return _whole(rows, self.array)
        cpu = _skinny_cpu if native else _skinny_cpu.definition
        args = rows, self.array, valid_count
        return by_platform(
            *args, cpu=cpu, cuda=_skinny_gpu, tpu=_skinny_tpu, default=_whole
        )

    def chosen_unsupported(self, rows: jax.Array, chosen: jax.Array) -> str | None:
        return _chosen.unsupported(rows, chosen, self.array)

    def chosen_product(
        self, rows: jax.Array, chosen: jax.Array, native: bool
    ) -> jax.Array:
        compute = _chosen if native else _chosen.definition
        return compute(rows, chosen, self.array)

    def rows(self, ids: jax.Array) -> jax.Array:
        return table_rows(self.array, ids)


def _rows_unsupported(table: jax.Array, ids: jax.Array) -> bool:
    known = table.dtype in (jnp.float32, jnp.bfloat16) and ids.dtype == jnp.int32
    return not known or 0 in (table.size, ids.size)


# XLA:CPU gathers 16-bit floats with scalar code: 8 rows of 192 numbers take 40 us.
@cpu_kernel(
    "stree_rows",
    outputs=lambda table, ids: floats(*ids.shape, table.shape[1]),
    unsupported=_rows_unsupported,
    shared=("table",),
)
def table_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Looks up rows of a table.

    Args:
      table: [V, d].
      ids: [...] int32.

    Returns:
      [..., d] float32.
    """
    return table[ids].astype(jnp.float32)


def _copied_unsupported(rows: jax.Array) -> bool:
    return rows.dtype != jnp.float32 or rows.ndim < 2 or rows.size == 0


def _all_rows(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    table = rows.reshape(-1, rows.shape[-1])
    return table, jnp.arange(table.shape[0], dtype=jnp.int32)


@cpu_kernel(
    "stree_rows",
    outputs=lambda rows: floats(*rows.shape),
    unsupported=_copied_unsupported,
    prepare=_all_rows,
)
def in_pool_thread(rows: jax.Array) -> jax.Array:
    """Returns rows [..., d] unchanged, and moves a CPU program to XLA's thread pool.

    XLA may start a program in another thread, so that there is one thread more than
    cores. The kernel of `table_rows` moves it to the pool. A weight whose rows are
    looked up in another way calls this function. On two cores it saves a third of the
    waits for other threads: 59 to 40 in a pass of 61 layers over one node, 92 to 59
    over 16.
    """
    return rows


def in_float32(rows: jax.Array, *rest: Any) -> tuple[Any, ...]:
    """Returns a product's arguments with the rows converted to float32."""
    return rows.astype(jnp.float32), *rest


def product_shape(rows: jax.Array, weight: jax.Array, *_: Any) -> Any:
    """Returns the shape [t, m] and dtype (float32) of a product's result."""
    return floats(rows.shape[0], weight.shape[0])


@cpu_kernel(
    "stree_experts",
    outputs=chosen_shape,
    unsupported=experts_unsupported,
    shared=("weight",),
    prepare=in_float32,
)
def _chosen(rows: jax.Array, chosen: jax.Array, weight: jax.Array) -> jax.Array:
    """Computes products with the chosen of the matrices weight [E, m, k]."""
    return chosen_rows(rows, chosen, weight, _whole)


def _product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    exact = left.dtype == jnp.float32  # by default a GPU rounds float32 to tf32
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
    """Computes rows [t, k] @ weight.T in the form that XLA:GPU reads fastest.

    For one row XLA emits a matrix-vector product, which it tiles badly: 22.7 us, while
    16 rows take 16.8 us (10576 x 2560, bfloat16, H200). That makes the whole forward
    pass 1.3 times as long.
    """
    count = rows.shape[0]
    if count >= 4 or weight.dtype.itemsize != 2:
        return _whole(rows, weight)
    return _whole(jnp.pad(rows, ((0, MIN_GPU_ROWS - count), (0, 0))), weight)[:count]


def _skinny_tpu(
    rows: jax.Array, weight: jax.Array, _: jax.Array | None = None
) -> jax.Array:
    """Computes rows [t, k] @ weight.T in the form that XLA:TPU computes fastest.

    For one row XLA emits multiplications and sums instead of a matrix product. By its
    own estimate they take 20 times as many cycles in bfloat16 (10576 x 2560, v5e), four
    times as many as reading the weight.
    """
    if rows.shape[0] != 1:
        return _whole(rows, weight)
    return _whole(jnp.pad(rows, ((0, 1), (0, 0))), weight)[:1]


@cpu_kernel(
    "stree_product",
    outputs=product_shape,
    unsupported=product_unsupported,
    shared=("weight",),
    prepare=in_float32,
)
def _skinny_cpu(
    rows: jax.Array, weight: jax.Array, valid_count: jax.Array | None
) -> jax.Array:
    """Computes rows [t, k] @ weight.T in the form that XLA:CPU reads fastest.

    The weight is the left factor, divided into blocks of rows for the cores. Row counts
    are padded to 8 or a multiple of 16, since counts in between are slower. A single
    16-bit row is padded to two, because for one row XLA converts the whole weight to
    float32 on every call.
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
    y = jax.lax.optimization_barrier(y)  # keeps XLA from swapping the factors back
    return y.reshape(m, -1)[:, :count].T
