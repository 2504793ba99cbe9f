"""A mixture of experts whose router is an MLP, as in ZAYA (Zyphra 2025).

The router's hidden vector is added to that of the router of the layer before, channel
by channel with a scale (exponential depth averaging, EDA). A token uses one expert, or
none if the router chooses the last class.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from stree_jax.models.base.collectives import total
from stree_jax.models.base.rounding import uncontracted
from stree_jax.models.configs.eda_moe import EDAMoEConfig, eda_moe_params
from stree_jax.models.layers.mixer import MixerModule, Sent
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.layers.norm import ScaledNorm, scaled_rms_norm
from stree_jax.models.layers.params import declare
from stree_jax.models.mixers.mlp import activate
from stree_jax.models.mixers.moe import (
    PADDING,
    sent_experts,
    weighted_experts,
    with_given,
    without_padding,
)
from stree_jax.models.weights.linear import as_row, linear


class EDAMoE(MixerModule):
    """The mixer, or one device's share of it."""

    config: EDAMoEConfig

    @nn.compact
    def __call__(
        self, u: jax.Array, pass_: Pass[Any], state: None = None, record: None = None
    ) -> tuple[jax.Array, Sent, None]:
        """Runs the mixer on u [B, T, d]; see `Pass` for the contract. It sends the
        router's vector [B, T, R] float32, and the chosen class as the expert."""
        c, count, d_model = self.config, pass_.valid_count, u.shape[-1]
        p = declare(self, eda_moe_params(c, d_model), self.dtype)
        with jax.named_scope("router"):
            bias = p["router_in_bias"]
            vector = linear(u, p["router_in"], bias, valid_count=count)
            if c.averages:
                _, earlier = pass_.source
                average = earlier * as_row(p["router_average"], 3)
                vector = vector + uncontracted(average)
            logits = self.logits(p, vector, count)
            chosen, weight = chosen_expert(logits, p, pass_.experts)
            sent, skips = sent_experts(u, chosen, vector), chosen == c.num_experts
        with jax.named_scope("moe"):
            chosen = jnp.where(skips, PADDING, chosen)
            chosen = without_padding(chosen, u.shape[1], count)
            args = u.reshape(-1, d_model), chosen, weight, p["into"], p["down"]
            y = weighted_experts(*args, gated=True, activation="silu")
            y = jnp.where(skips, 0.0, total(y, self.parts))
        return y.reshape(u.shape), sent, None

    def logits(
        self, p: dict[str, Any], vector: jax.Array, count: jax.Array | None
    ) -> jax.Array:
        """Computes the logits [B * T, E + 1] float32 of the classes from the router's
        vector [B, T, R]."""
        norm = ScaledNorm(self.config.norm_eps)
        x = scaled_rms_norm(vector, p["router_norm"], norm, count)
        for name in ("router_1", "router_2"):
            x = linear(x, p[name], p[f"{name}_bias"], valid_count=count)
            x = activate(x, "gelu")
        x = linear(x, p["router_out"], valid_count=count)
        return x.reshape(-1, x.shape[-1])


def chosen_expert(
    logits: jax.Array, p: dict[str, Any], given: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the class [n, 1] int32 of each token, and its probability [n, 1] float32.

    Args:
      logits: [n, E + 1] float32, by which tokens choose.
      p: the mixer's parameters.
      given: the classes that tokens have to use, see `with_given`.
    """
    share = jax.nn.softmax(logits, axis=-1)
    chosen = lax.top_k(share + p["router_bias"][None], 1)[1]
    chosen = with_given(chosen, given)
    return chosen, jnp.take_along_axis(share, chosen, axis=1)
