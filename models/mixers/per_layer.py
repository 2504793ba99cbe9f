"""The mixer of per-layer inputs (Gemma 4): a small vector of the token, one for each
layer, gated by the residual stream. On a mesh every device has the whole mixer."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn

from stree_jax.models.layers.mixer import FLOAT, INPUTS, Mixer, MixerModule, padded_rows
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.params import Param, Table, declare
from stree_jax.models.mixers.mlp import Activation, activate
from stree_jax.models.weights.linear import linear


@dataclass(frozen=True)
class PerLayerConfig:
    """The mixer out(act(gate(x)) * input), where input is the per-layer input.

    Attributes:
      d_input: P, width of the input.
      activation: act, as in `MLPConfig`.
    """

    d_input: int
    activation: Activation = "gelu_tanh"


class PerLayer(MixerModule):
    """The mixer."""

    config: PerLayerConfig

    @nn.compact
    def __call__(
        self, u: jax.Array, pass_: Pass[Any], state: None = None, record: None = None
    ) -> tuple[jax.Array, None, None]:
        """Runs the mixer on u [B, Tq, d]; see `Pass` for the contract."""
        c, valid_count = self.config, pass_.valid_count
        p = declare(self, PER_LAYER_MIXER.params(c, u.shape[-1]), self.dtype)
        with jax.named_scope("per_layer"):
            gate = activate(linear(u, p["gate"], valid_count=valid_count), c.activation)
            x = gate * pass_.source
            return linear(x, p["out"], valid_count=valid_count), None, None


class PerLayerMixer(Mixer[PerLayerConfig]):
    """The implementation of `mixer.Mixer` for per-layer inputs."""

    kind = "per_layer"
    Config = PerLayerConfig
    Module = PerLayer

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
