"""The MLP of every token."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from stree_jax.cpu_kernels import cpu_kernel, floats
from stree_jax.models.config import Activation, MLPConfig
from stree_jax.models.params import declare, mlp_params
from stree_jax.models.weights.linear import linear, linear_summed, scaled


def activate(x: jax.Array, name: Activation) -> jax.Array:
    match name:
        case "silu":
            return jax.nn.silu(x)
        case "relu2":
            return jnp.square(jax.nn.relu(x))
        case "gelu":
            return jax.nn.gelu(x, approximate=False)


def activate_gated(
    h: jax.Array,
    name: Activation,
    multiplier: float = 1.0,
    live: jax.Array | None = None,
) -> jax.Array:
    """Returns act(multiplier * gate) * up of h [..., gate and up].

    Args:
      live: as of `linear`.
    """
    return _gated(h, live, name=name, multiplier=float(multiplier))


def _no_silu(
    h: jax.Array, live: jax.Array | None, *, name: Activation, **options: float
) -> bool:
    return name != "silu" or h.dtype != jnp.float32 or h.ndim < 2 or h.shape[-1] % 2 > 0


@cpu_kernel(
    "stree_gate",
    outputs=lambda h, *_, **__: floats(*h.shape[:-1], h.shape[-1] // 2),
    unsupported=_no_silu,
    attributes=lambda name, multiplier: {"multiplier": multiplier},
)
def _gated(
    h: jax.Array, live: jax.Array | None, *, name: Activation, multiplier: float
) -> jax.Array:
    gate, up = jnp.split(h, 2, axis=-1)
    return activate(scaled(gate, multiplier), name) * up


class MLP(nn.Module):
    """An MLP as `MLPConfig` says, cut in so many parts."""

    config: MLPConfig
    dtype: Any
    parts: int = 1

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        adapter: jax.Array | None = None,
        live: jax.Array | None = None,
    ) -> jax.Array:
        """[B, T, d] float32 of u [B, T, d].

        Args:
          adapter: [B, T, rows], added to the rows of the first product.
          live: as of `linear`.
        """
        c = self.config
        p = declare(self, mlp_params(c, u.shape[-1]), self.dtype)
        first = "gate_up" if c.gated else "up"
        with jax.named_scope("mlp"):
            h = linear(u, p[first], p.get(f"{first}_bias"), live=live)
            if adapter is not None:
                h = h + adapter
            if c.gated:
                h = activate_gated(h, c.activation, c.gate_multiplier, live)
            else:
                h = activate(h, c.activation)
            last = p["down"], p.get("down_bias")
            down = linear_summed(h, *last, self.parts, live)
            return scaled(down, c.down_multiplier)
