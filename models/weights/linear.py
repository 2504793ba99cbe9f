"""Products with weights of any format."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from stree_jax.models.sharding.shards import total
from stree_jax.models.weights.formats import as_weight


def linear(
    x: jax.Array,
    weight: Any,
    bias: jax.Array | None = None,
    *,
    live: jax.Array | None = None,
    implementation: Literal["xla", "native"] | None = None,
) -> jax.Array:
    """Computes x @ weight.T + bias in float32; the weight's format says how x is
    rounded first.

    Args:
      x: [..., k].
      weight: [m, k], PyTorch's own layout: an array or a `Weight`.
      bias: [m] or None.
      live: [B] int32, for x [B, T, k]: how many tokens of each row are valid. The rest
        is padding, whose results are unspecified. If None, there is no padding.
      implementation: "native" is the compiled kernel (`cpu_kernels`), None takes it on
        a CPU where it can, "xla" never.

    Returns:
      [..., m] float32.

    Raises:
      ValueError: the implementation is unknown or cannot take these.
    """
    rows, value = x.reshape(-1, x.shape[-1]), as_weight(weight)
    reason = value.unsupported(rows, live)
    if implementation not in (None, "xla", "native"):
        raise ValueError(f"linear: no implementation {implementation!r}")
    if implementation == "native" and reason is not None:
        raise ValueError(f"linear: native: {reason}")
    native = reason is None and implementation != "xla"
    y = value.product(rows, live, native)
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None]
    return y.reshape(*x.shape[:-1], value.shape[0])


def linear_summed(
    x: jax.Array,
    weight: Any,
    bias: jax.Array | None,
    parts: int,
    live: jax.Array | None = None,
) -> jax.Array:
    """Computes `linear` where x and the weight's columns are cut into so many parts."""
    y = total(linear(x, weight, live=live), parts)
    return y if bias is None else y + as_row(bias, y.ndim)


def as_row(v: jax.Array, ndim: int) -> jax.Array:
    """Returns a vector as the last axis of an ndim-dimensional array, in float32."""
    return v.astype(jnp.float32).reshape((1,) * (ndim - 1) + (-1,))


def scaled(x: jax.Array, multiplier: float) -> jax.Array:
    """Returns x times a constant of the config, which mostly is 1."""
    return x if multiplier == 1.0 else x * multiplier
