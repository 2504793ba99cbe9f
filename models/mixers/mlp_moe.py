"""An MLP and a mixture of experts side by side, each between norms of its own
(Gemma 4)."""

from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import linen as nn

from stree_jax.models.base.shards import total
from stree_jax.models.layers.mixer import Mixer, MixerModule, Sent
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.norm import Norm, ScaledNorm, scaled_rms_norm
from stree_jax.models.layers.params import ONES, Param, Table, declare, norm_params
from stree_jax.models.mixers.mlp import MLP, MLP_MIXER, MLPConfig
from stree_jax.models.mixers.moe import (
    MOE,
    MoEConfig,
    moe_params,
    route,
    sent_experts,
    weighted_experts,
    without_padding,
)
from stree_jax.models.weights.linear import linear

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


class MLPMoE(MixerModule):
    """The mixer, or one device's share of it."""

    config: MLPMoEConfig

    @nn.compact
    def __call__(
        self, u: jax.Array, pass_: Pass[Any], state: None = None, record: None = None
    ) -> tuple[jax.Array, Sent, None]:
        """Runs the mixer on u [B, T, d]; see `Pass` for the contract."""
        c, count = self.config, pass_.valid_count
        norms = {n: Norm("rms", c.norm_eps, self.dtype, name=n) for n in NORMS}
        mlp = MLP(c.mlp, self.dtype, self.parts, name="mlp")
        dense = mlp(norms["mlp_norm"](u, count), pass_)[0]
        experts, sent = self.experts(u, norms["moe_norm"](u, count), pass_)
        dense = norms["mlp_norm_after"](dense, count)
        return dense + norms["moe_norm_after"](experts, count), sent, None

    def experts(
        self, u: jax.Array, x: jax.Array, pass_: Pass[Any]
    ) -> tuple[jax.Array, Sent]:
        """Computes the weighted sum of the experts that u [B, T, d] chooses, on x
        [B, T, d]. Returns it and these experts."""
        c, count = self.config.moe, pass_.valid_count
        p = declare(self, MLP_MOE.params(self.config, u.shape[-1]), self.dtype)
        with jax.named_scope("moe"):
            norm = ScaledNorm(self.config.norm_eps)
            routed = scaled_rms_norm(u, p["router_scale"], norm, count)
            routed = routed * u.shape[-1] ** -0.5
            logits = linear(routed, p["router"], valid_count=count)
            logits = logits.reshape(-1, c.num_experts)
            chosen, weight = route(logits, None, c, pass_.experts)
            weight = weight * p["expert_scale"][chosen]
            chosen = without_padding(chosen, u.shape[1], count)
            args = x.reshape(-1, u.shape[-1]), chosen, weight, p["into"], p["down"]
            y = weighted_experts(*args, gated=c.gated, activation=c.activation)
            y = total(y, self.parts).reshape(u.shape)
            return y, sent_experts(u, chosen)


class MLPMoEMixer(Mixer[MLPMoEConfig]):
    """The implementation of `mixer.Mixer` for an MLP and experts side by side."""

    kind = "mlp_moe"
    Config = MLPMoEConfig
    Module = MLPMoE

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
