"""Decays by column of the state (Kimi Delta Attention) in the Triton kernel of the
delta rule.

Such decays are inside the products over the N columns c of the state:

    k_t . (k_s decayed from s to t) = sum_c k_t[c] k_s[c] exp(A_t[c] - A_s[c])

The exponential is computed for every pair of tokens and every column, and only on
paths, where it is at most 1. Separate factors exp(A_t) and exp(-A_s), with which this
would be one matrix product, overflow where a path forgets.

The sums A over paths are computed before the kernel.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.pallas_kernels.delta import DeltaInputs
from stree_jax.pallas_kernels.scan import FORGOTTEN
from stree_jax.pallas_kernels.triton_blocks import numbers, tile


class Sums(NamedTuple):
    """Sums A of the log decays over each token's path, in two parts that sum to them.

    Attributes:
      hi, lo: [B, H, T, N] float32, see `scan.exact_split`. In a program [T, N].
    """

    hi: Any
    lo: Any


def columns_per_step(T: int, N: int, num_warps: int) -> int:
    """Returns the number of columns whose decays a program holds at a time. They fit in
    registers."""
    return max(1, min(N & -N, 1024 * num_warps // tile(T) ** 2))


def replayer(past: Any, product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function that replays the path on a part of the state.

    Args:
      past: `Replayed` of refs; a is [T, N].
      product: matrix product, see `triton_blocks.product`.
    """
    M = past.path.shape[0]
    j = lax.iota(jnp.int32, tile(M))
    valid = j < jnp.minimum(past.length[...], M)
    row = jnp.where(valid, past.path[numbers(M)], 0)
    dt = jnp.where(valid, past.dt[row], 0.0)[:, None]
    valid = valid[:, None]
    u = jnp.where(valid, past.x[row, :].astype(jnp.float32), 0.0)
    later = (j[None] > j[:, None]).astype(jnp.bfloat16)

    def replay(state: jax.Array, part: Any) -> jax.Array:
        # The product splits a into parts, which must be finite.
        a = jnp.where(valid, jnp.maximum(past.a[row, part], FORGOTTEN), 0.0)
        after = jnp.exp(product(later, a, (1, 0)))
        k = jnp.where(valid, past.B[row, part].astype(jnp.float32), 0.0)
        kept = jnp.exp(a.sum(axis=0))[None]
        return kept * state + product(u, dt * after * k, (0, 0))

    return replay


def decayed(z: jax.Array, sums: Sums, row: jax.Array, part: Any) -> jax.Array:
    """Returns z exp(A): keys or queries that meet the committed state.

    Args:
      z: [Tq, columns], some columns of the tokens `row`.
      sums: the refs.
      row: [Tq] int32.
      part: the columns.
    """
    grown = jnp.exp(sums.hi[row, part] + sums.lo[row, part])
    return grown * z.astype(jnp.float32)


def scores(
    inputs: DeltaInputs,
    key: jax.Array,
    query: jax.Array,
    row: jax.Array,
    allowed: jax.Array,
    columns: int,
) -> tuple[jax.Array, jax.Array]:
    """Computes k . k and q . k [Tq, T] float32 with the decays between the tokens.

    Args:
      inputs: the refs; a is `Sums`.
      key: [T] int32, the tokens.
      query: [Tq] int32, rows of q.
      row: [Tq] int32, the queried tokens.
      allowed: [Tq, T] bool. True if the token is the query itself or its ancestor.
      columns: columns per step.
    """

    def step(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # The columns are the first axis: a thread has all of them, and sums them alone.
        column = (i * columns + lax.iota(jnp.int32, columns))[:, None]

        def taken(z: Any, tokens: jax.Array) -> jax.Array:  # [columns, tokens]
            return z[tokens[None], column].astype(jnp.float32)

        hi, lo = (taken(z, key)[:, None] for z in inputs.a)
        hi_q, lo_q = (taken(z, row)[:, :, None] for z in inputs.a)
        # Mask the exponent before exp: off the path it can be large and positive.
        difference = jnp.where(allowed[None], (hi_q - hi) + (lo_q - lo), -jnp.inf)
        k = jnp.exp(difference) * taken(inputs.k, key)[:, None]
        k_q, q = (taken(inputs.k, row)[:, :, None], taken(inputs.q, query)[:, :, None])
        kk, qk = sums
        return kk + (k_q * k).sum(axis=0), qk + (q * k).sum(axis=0)

    zero = jnp.zeros(allowed.shape, jnp.float32)
    return lax.fori_loop(0, inputs.k.shape[1] // columns, step, (zero, zero))
