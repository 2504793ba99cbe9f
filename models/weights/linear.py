"""Matrix products with weights of any format."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from stree_jax.models.base.collectives import total
from stree_jax.models.base.shards import Group
from stree_jax.models.weights.parameters import as_weight, stack_of


def linear(
    x: jax.Array,
    weight: Any,
    bias: jax.Array | None = None,
    *,
    valid_count: jax.Array | None = None,
    implementation: Literal["xla", "native"] | None = None,
) -> jax.Array:
    """Computes x @ weight.T + bias in float32. The weight's format decides how x is
    rounded first.

    Args:
      x: [..., k].
      weight: [m, k] as in PyTorch, an array or a `Weight`.
      bias: [m] or None.
      valid_count: [B] int32, for x [B, T, k]: the first valid_count[b] tokens of row b
        are valid. The rest is padding, whose results are unspecified. If None, there is
        no padding.
      implementation: "native" for the compiled CPU kernel (`cpu_kernels`), "xla" for
        plain JAX. If None, the CPU kernel is used on a CPU if it supports the
        arguments.

    Returns:
      [..., m] float32.

    Raises:
      ValueError: the implementation is unknown or does not support the arguments.
    """
    rows, value = x.reshape(-1, x.shape[-1]), as_weight(weight)
    reason = value.unsupported(rows, valid_count)
    if implementation not in (None, "xla", "native"):
        raise ValueError(f"linear: unknown implementation {implementation!r}")
    if implementation == "native" and reason is not None:
        raise ValueError(f"linear: native: {reason}")
    native = reason is None and implementation != "xla"
    y = value.product(rows, valid_count, native)
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None]
    return y.reshape(*x.shape[:-1], value.shape[0])


def expert_product(
    x: jax.Array,
    chosen: jax.Array,
    experts: Any,
    implementation: Literal["xla", "native"] | None = None,
) -> jax.Array:
    """Computes products with the matrices of chosen experts in float32.

    Args:
      x: [n, k].
      chosen: [n * r] int32; result i is of row i // r of x and expert chosen[i]. The
        compiled kernel does not write a result whose expert is negative (padding).
      experts: [E, m, k], an array or `Experts`.
      implementation: as in `linear`.

    Returns:
      [n * r, m].

    Raises:
      ValueError: the implementation is unknown or does not support the arguments.
    """
    x, chosen = jnp.asarray(x), jnp.asarray(chosen)
    stack = stack_of(experts)
    reason = stack.chosen_unsupported(x, chosen)
    if implementation not in (None, "xla", "native"):
        raise ValueError(f"expert_product: unknown implementation {implementation!r}")
    if implementation == "native" and reason is not None:
        raise ValueError(f"expert_product: native: {reason}")
    return stack.chosen_product(x, chosen, reason is None and implementation != "xla")


def linear_summed(
    x: jax.Array,
    weight: Any,
    bias: jax.Array | None,
    parts: Group,
    valid_count: jax.Array | None = None,
) -> jax.Array:
    """Computes `linear` with x and the weight's columns divided over devices.

    Args:
      x: [..., k / parts.size], this device's part.
      weight: [m, k / parts.size], this device's part.
      bias: [m] or None; every device has it whole.
      parts: the devices.
      valid_count: as in `linear`.

    Returns:
      [..., m] float32, the same on every device.
    """
    y = total(linear(x, weight, valid_count=valid_count), parts)
    return y if bias is None else y + as_row(bias, y.ndim)


def as_row(v: jax.Array, ndim: int) -> jax.Array:
    """Reshapes a vector to `ndim` axes, with its elements along the last; float32."""
    return v.astype(jnp.float32).reshape((1,) * (ndim - 1) + (-1,))


def scaled(x: jax.Array, multiplier: float) -> jax.Array:
    """Returns x * multiplier, without an operation if the multiplier is 1."""
    return x if multiplier == 1.0 else x * multiplier
