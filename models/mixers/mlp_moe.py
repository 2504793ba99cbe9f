"""An MLP and a mixture of experts side by side, each between norms of its own
(Gemma 4)."""

from typing import Any

import jax
from flax import linen as nn

from stree_jax.models.base.collectives import total
from stree_jax.models.configs.mlp_moe import MLP_MOE, NORMS, MLPMoEConfig
from stree_jax.models.layers.mixer import MixerModule, Sent
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.norm import Norm, ScaledNorm, scaled_rms_norm
from stree_jax.models.layers.params import declare
from stree_jax.models.mixers.mlp import MLP
from stree_jax.models.mixers.moe import (
    route,
    sent_experts,
    weighted_experts,
    without_padding,
)
from stree_jax.models.weights.linear import linear


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
