"""Norms over the last axis, computed in float32."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from stree_jax.cpu_kernels import cpu_kernel, floats
from stree_jax.models.base.collectives import mean_of_neighbours
from stree_jax.models.base.rounding import uncontracted
from stree_jax.models.base.shards import ALONE, Group
from stree_jax.models.configs.params import affine_params, norm_params
from stree_jax.models.layers.params import declare
from stree_jax.models.weights.linear import as_row


def rms_norm(
    x: jax.Array, eps: float, groups: int = 1, parts: Group = ALONE
) -> jax.Array:
    """Divides each group of channels by its root mean square, in float32.

    Args:
      x: [..., d] of any float dtype.
      eps: epsilon, added to the mean square.
      groups: number of groups of consecutive channels that are normed separately.
      parts: the devices that one group spans.

    Returns:
      [..., d] float32.
    """
    grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
    mean = jnp.mean(jnp.square(grouped), axis=-1, keepdims=True)
    mean = mean_of_neighbours(mean, parts)
    return (grouped * jax.lax.rsqrt(mean + eps)).reshape(x.shape)


@dataclass(frozen=True)
class ScaledNorm:
    """An RMSNorm with a scale: maps x [..., d] and scale [d] to x / rms(x) * scale.

    Attributes:
      eps, groups, parts: as in `rms_norm`.
    """

    eps: float
    groups: int = 1
    parts: Group = ALONE

    def __call__(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        normed = rms_norm(x, self.eps, self.groups, self.parts)
        return normed * as_row(scale, x.ndim)


def scaled_rms_norm(
    x: jax.Array,
    scale: jax.Array,
    norm: ScaledNorm,
    valid_count: jax.Array | None = None,
) -> jax.Array:
    """Computes norm(x, scale); on a CPU with the compiled kernel, if the norm has one
    group on one device.

    Args:
      x: [..., d].
      scale: [d].
      norm: the norm.
      valid_count: as in `linear`.
    """
    if norm.groups == norm.parts.size == 1:
        return whole_norm(x, scale, valid_count, eps=norm.eps)
    return norm(x, scale)


def _unsupported(
    x: jax.Array, scale: jax.Array, valid_count: jax.Array | None, *, eps: float
) -> bool:
    known = scale.dtype in (jnp.float32, jnp.bfloat16)
    return x.ndim < 2 or x.size == 0 or not known


# XLA:CPU compiles this to four separate operations. The kernel's result for a row does
# not depend on the other rows, the number of threads or the program around it.
@cpu_kernel(
    "stree_norm",
    outputs=lambda x, *_, **__: floats(*x.shape),
    unsupported=_unsupported,
    shared=("scale",),
    attributes=lambda eps: {"eps": float(eps)},
    prepare=lambda x, *rest, **_: (x.astype(jnp.float32), *rest),
)
def whole_norm(
    x: jax.Array, scale: jax.Array, valid_count: jax.Array | None, *, eps: float
) -> jax.Array:
    """Computes x / rms(x) * scale in float32, with one group on one device.

    Args:
      x: [..., d].
      scale: [d].
      valid_count: as in `linear`.
      eps: epsilon of the norm.
    """
    return ScaledNorm(eps)(x, scale)


def gated_norm(
    y: jax.Array,
    z: jax.Array,
    scale: jax.Array | None,
    norm: ScaledNorm,
    gate_first: bool,
) -> jax.Array:
    """Gates a mixer's output y by silu(z), before or after the norm.

    Args:
      y, z: [B, T, d] float32.
      scale: [d], scale of the norm. If None, there is no norm.
      norm: the norm.
      gate_first: True for norm(y * silu(z)), False for norm(y) * silu(z).
    """
    gate = jax.nn.silu(z)
    if scale is None:
        return y * gate
    y = scaled_rms_norm(y * gate if gate_first else y, scale, norm)
    return y if gate_first else y * gate


class Norm(nn.Module):
    """The norm of x [..., d] of a layer or of the model, of a kind of
    `ModelConfig.norm`."""

    kind: str
    eps: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, valid_count: jax.Array | None = None) -> jax.Array:
        p = declare(self, norm_params(self.kind, x.shape[-1]), self.dtype)
        norm = ScaledNorm(self.eps)
        if self.kind != "layer":
            return scaled_rms_norm(x, p["scale"], norm, valid_count)
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = scaled_rms_norm(centred, p["scale"], norm)
        return scaled + as_row(p["bias"], x.ndim)


class Affine(nn.Module):
    """Computes (x + bias) * scale of x [..., d] float32; see `Block.affine`."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        p = declare(self, affine_params(x.shape[-1]), self.dtype)
        scale, bias = (as_row(p[name], x.ndim) for name in ("scale", "bias"))
        return uncontracted((x + bias) * scale)
