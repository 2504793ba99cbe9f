"""The MLP: config, parameters, arrays of its state, memory."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from stree_jax.models.base.shards import Run
from stree_jax.models.configs.mixer import FLOAT, Mixer
from stree_jax.models.configs.params import ZEROS, Param, Table
from stree_jax.models.weights.padding import padded_rows

CLAMP, GAIN = 7.0, 1.702  # of the activation "clamped"
Activation = Literal["silu", "relu2", "gelu", "gelu_tanh", "sigmoid", "clamped"]


@dataclass(frozen=True)
class MLPConfig:
    """An MLP: down(act(gate(x)) * up(x)) if gated, down(act(up(x))) otherwise.

    Attributes:
      d_hidden: width of the hidden layer.
      bias: True if the projections have biases.
      gated: True if there is a gate projection.
      activation: act, the activation function; "gelu_tanh" is the approximation of
        GELU by a hyperbolic tangent. "clamped" is x sigmoid(GAIN x) for x = min(gate,
        CLAMP), where up is limited to +-CLAMP and incremented by 1 (gpt-oss).
      gate_multiplier: scale of gate(x).
      down_multiplier: scale of the output.
    """

    d_hidden: int
    bias: bool = False
    gated: bool = True
    activation: Activation = "silu"
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0


def hidden_runs(d_hidden: int, gated: bool) -> tuple[Run, ...]:
    """Returns the rows of an MLP's first projection as runs of channels: gate, then
    up."""
    return (Run(d_hidden, d_hidden),) * (2 if gated else 1)


def mlp_params(c: MLPConfig, d_model: int) -> Table:
    """Returns the parameters by name.

    A gated MLP has `gate_up`, the rows of gate followed by those of up; an MLP without
    a gate has `up`.
    """
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


class MLPMixer(Mixer[MLPConfig]):
    """The implementation of `mixer.Mixer` for MLPs."""

    kind = "mlp"
    Config = MLPConfig

    def params(self, c: MLPConfig, d_model: int) -> Table:
        return mlp_params(c, d_model)

    def part(self, c: MLPConfig, n: int) -> MLPConfig:
        return replace(c, d_hidden=c.d_hidden // n)

    def work_bytes(self, c: MLPConfig, batch: int, nodes: int, dtype: Any) -> int:
        return FLOAT * padded_rows(batch * nodes) * 3 * c.d_hidden


MLP_MIXER = MLPMixer()
