"""Per-layer inputs: config, parameters, arrays of its state, memory."""

from dataclasses import dataclass
from typing import Any

from stree_jax.models.configs.mixer import FLOAT, INPUTS, Mixer
from stree_jax.models.configs.mlp import Activation
from stree_jax.models.configs.params import Param, Table
from stree_jax.models.weights.padding import padded_rows


@dataclass(frozen=True)
class PerLayerConfig:
    """The mixer out(act(gate(x)) * input), where input is the per-layer input.

    Attributes:
      d_input: P, width of the input.
      activation: act, as in `MLPConfig`.
    """

    d_input: int
    activation: Activation = "gelu_tanh"


class PerLayerMixer(Mixer[PerLayerConfig]):
    """The implementation of `mixer.Mixer` for per-layer inputs."""

    kind = "per_layer"
    Config = PerLayerConfig

    def params(self, c: PerLayerConfig, d_model: int) -> Table:
        return {
            "gate": Param((c.d_input, d_model), quantizable=True),
            "out": Param((d_model, c.d_input), quantizable=True),
        }

    def source(self, c: PerLayerConfig) -> str:
        return INPUTS

    def divides(self, c: PerLayerConfig, d_model: int, n: int) -> bool:
        return False

    def part(self, c: PerLayerConfig, n: int) -> PerLayerConfig:
        return c

    def work_bytes(self, c: PerLayerConfig, batch: int, nodes: int, dtype: Any) -> int:
        return FLOAT * padded_rows(batch * nodes) * 3 * c.d_input


PER_LAYER_MIXER = PerLayerMixer()
