"""The MLP mixer, gated or not."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from stree_jax.cpu_kernels import cpu_kernel, floats
from stree_jax.models.configs.mlp import CLAMP, GAIN, Activation, MLPConfig, mlp_params
from stree_jax.models.layers.mixer import MixerModule
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.params import declare
from stree_jax.models.weights.linear import linear, linear_summed, scaled


def activate(x: jax.Array, name: Activation) -> jax.Array:
    """Applies an activation function, element by element."""
    match name:
        case "silu":
            return jax.nn.silu(x)
        case "relu2":
            return jnp.square(jax.nn.relu(x))
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "sigmoid":
            return jax.nn.sigmoid(x)
        case "clamped":
            x = jnp.minimum(x, CLAMP)
            return x * jax.nn.sigmoid(GAIN * x)


def activate_gated(
    h: jax.Array,
    name: Activation,
    multiplier: float = 1.0,
    valid_count: jax.Array | None = None,
) -> jax.Array:
    """Computes act(multiplier * gate) * up.

    Args:
      h: [..., 2 * d_hidden], gate followed by up.
      name: act, the activation function.
      multiplier: scale of gate.
      valid_count: as in `linear`.

    Returns:
      [..., d_hidden].
    """
    return _gated(h, valid_count, name=name, multiplier=float(multiplier))


def _gate_unsupported(
    h: jax.Array, valid_count: jax.Array | None, *, name: Activation, **options: float
) -> bool:
    return name != "silu" or h.dtype != jnp.float32 or h.ndim < 2 or h.shape[-1] % 2 > 0


@cpu_kernel(
    "stree_gate",
    outputs=lambda h, *_, **__: floats(*h.shape[:-1], h.shape[-1] // 2),
    unsupported=_gate_unsupported,
    attributes=lambda name, multiplier: {"multiplier": multiplier},
)
def _gated(
    h: jax.Array, valid_count: jax.Array | None, *, name: Activation, multiplier: float
) -> jax.Array:
    gate, up = jnp.split(h, 2, axis=-1)
    if name == "clamped":
        up = jnp.clip(up, -CLAMP, CLAMP) + 1
    return activate(scaled(gate, multiplier), name) * up


class MLP(MixerModule):
    """An MLP, or one device's share of it."""

    config: MLPConfig

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[Any] | None = None,
        state: None = None,
        record: None = None,
        adapter: jax.Array | None = None,
    ) -> tuple[jax.Array, None, None]:
        """Runs the MLP on u [B, T, d]; see `Pass` for the contract.

        Args:
          pass_: the forward pass. If None, there is no padding.
          adapter: [B, T, rows], added to the output of the first projection. If None,
            nothing is added.
        """
        c, valid_count = self.config, None if pass_ is None else pass_.valid_count
        p = declare(self, mlp_params(c, u.shape[-1]), self.dtype)
        first = "gate_up" if c.gated else "up"
        with jax.named_scope("mlp"):
            h = linear(u, p[first], p.get(f"{first}_bias"), valid_count=valid_count)
            if adapter is not None:
                h = h + adapter
            if c.gated:
                h = activate_gated(h, c.activation, c.gate_multiplier, valid_count)
            else:
                h = activate(h, c.activation)
            last = p["down"], p.get("down_bias")
            down = linear_summed(h, *last, self.parts, valid_count)
            return scaled(down, c.down_multiplier), None, None
