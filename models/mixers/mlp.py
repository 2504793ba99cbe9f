"""The MLP of every token."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from stree_jax.cpu_kernels import cpu_kernel, floats
from stree_jax.models.mixer import FLOAT, Mixer, padded_rows
from stree_jax.models.nodes import Pass
from stree_jax.models.params import ZEROS, Param, Table, declare
from stree_jax.models.sharding.shards import Run
from stree_jax.models.weights.linear import linear, linear_summed, scaled

Activation = Literal["silu", "relu2", "gelu"]


@dataclass(frozen=True)
class MLPConfig:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) if it is not gated.

    Attributes:
      gate_multiplier: scale of gate(x); down_multiplier: of the output.
    """

    d_hidden: int
    bias: bool = False
    gated: bool = True
    activation: Activation = "silu"
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0


def hidden_runs(d_hidden: int, gated: bool) -> tuple[Run, ...]:
    """Returns what the rows of an MLP's first product consist of."""
    return (Run(d_hidden, d_hidden),) * (2 if gated else 1)


def mlp_params(c: MLPConfig, d_model: int) -> Table:
    """Returns the parameters; `gate_up` holds the rows [gate; up], and an MLP without a
    gate has `up` instead."""
    first, rows = ("gate_up", 2 * c.d_hidden) if c.gated else ("up", c.d_hidden)
    into = hidden_runs(c.d_hidden, c.gated)
    table = {
        first: Param((rows, d_model), runs=into, quantizable=True),
        "down": Param((d_model, c.d_hidden), runs=into[:1], axis=1, quantizable=True),
    }
    if c.bias:
        table[f"{first}_bias"] = Param((rows,), ZEROS, into)
        table["down_bias"] = Param((d_model,), ZEROS)
    return table


def activate(x: jax.Array, name: Activation) -> jax.Array:
    """Applies an activation function, element by element."""
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
    """Returns act(multiplier * gate) * up, of h [..., gate and up].

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
    """An MLP, of which this device has one of `parts` shares."""

    config: MLPConfig
    dtype: Any
    parts: int = 1

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
          pass_: if None, there is no padding.
          adapter: [B, T, rows], added to the rows of the first product.
        """
        c, live = self.config, None if pass_ is None else pass_.live
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
            return scaled(down, c.down_multiplier), None, None


class MLPMixer(Mixer[MLPConfig]):
    """See `mixer.Mixer`."""

    kind = "mlp"
    Config = MLPConfig
    Module = MLP

    def params(self, c: MLPConfig, d_model: int) -> Table:
        return mlp_params(c, d_model)

    def part(self, c: MLPConfig, n: int) -> MLPConfig:
        return replace(c, d_hidden=c.d_hidden // n)

    def work_bytes(self, c: MLPConfig, batch: int, nodes: int, dtype: Any) -> int:
        return FLOAT * padded_rows(batch * nodes) * 3 * c.d_hidden


MLP_MIXER = MLPMixer()
