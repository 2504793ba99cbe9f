"""An MLP and experts side by side: config, parameters, arrays of its state, memory."""

from dataclasses import dataclass, replace
from typing import Any

from stree_jax.models.configs.mixer import Mixer
from stree_jax.models.configs.mlp import MLP_MIXER, MLPConfig
from stree_jax.models.configs.moe import MOE, MoEConfig, moe_params
from stree_jax.models.configs.params import ONES, Param, Table, norm_params

# The norms before and after the MLP, and before and after the experts.
NORMS = ("mlp_norm", "mlp_norm_after", "moe_norm", "moe_norm_after")


@dataclass(frozen=True)
class MLPMoEConfig:
    """The sum of norm(mlp(norm(x))) and norm(experts(norm(x))).

    The router reads x divided by its root mean square and multiplied by a parameter,
    and every expert's weight is multiplied by a parameter.

    Attributes:
      mlp: config of the MLP.
      moe: config of the experts, which are chosen by a softmax, without a shared MLP.
      norm_eps: epsilon of the norms.
    """

    mlp: MLPConfig
    moe: MoEConfig
    norm_eps: float

    def __post_init__(self) -> None:
        plain = MoEConfig(self.moe.num_experts, self.moe.top_k, self.moe.d_hidden)
        if replace(self.moe, activation=plain.activation) != plain:
            raise ValueError("moe: only experts without further options are supported")


class MLPMoEMixer(Mixer[MLPMoEConfig]):
    """The implementation of `mixer.Mixer` for an MLP and experts side by side."""

    kind = "mlp_moe"
    Config = MLPMoEConfig

    def params(self, c: MLPMoEConfig, d_model: int) -> Table:
        return {
            **moe_params(c.moe, d_model),
            "router_scale": Param((d_model,), ONES),
            "expert_scale": Param((c.moe.num_experts,), ONES, float32=True),
            "mlp": MLP_MIXER.params(c.mlp, d_model),
            **{name: norm_params("rms", d_model) for name in NORMS},
        }

    def experts(self, c: MLPMoEConfig) -> tuple[int, int]:
        return MOE.experts(c.moe)

    def part(self, c: MLPMoEConfig, n: int) -> MLPMoEConfig:
        return replace(c, mlp=MLP_MIXER.part(c.mlp, n), moe=MOE.part(c.moe, n))

    def work_bytes(self, c: MLPMoEConfig, batch: int, nodes: int, dtype: Any) -> int:
        args = batch, nodes, dtype
        return MLP_MIXER.work_bytes(c.mlp, *args) + MOE.work_bytes(c.moe, *args)


MLP_MOE = MLPMoEMixer()
