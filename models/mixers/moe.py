"""A mixture of experts: every token takes a few of many MLPs."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from stree_jax.models.mixer import FLOAT, Mixer
from stree_jax.models.mixers.mlp import (
    MLP,
    MLP_MIXER,
    Activation,
    MLPConfig,
    activate,
    activate_gated,
    hidden_runs,
    mlp_params,
)
from stree_jax.models.nodes import Pass
from stree_jax.models.params import ZEROS, Param, Table, declare
from stree_jax.models.sharding.shards import total
from stree_jax.models.weights.linear import linear


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts beside an MLP that every token passes.

    Attributes:
      num_experts, top_k: E experts, of which a token takes k.
      d_hidden: width of an expert.
      shared: the MLP of every token, or None.
      router: "softmax" over the k largest logits (Granite), or "sigmoid" of each, with
        a correction bias that takes part in the choice alone (Nemotron-H).
      groups, top_groups: experts are chosen from the best `top_groups` of `groups`.
      normalize, scale: of a sigmoid router's weights.
      d_latent: width that experts work in, between two projections; 0: d_model.
      gated, activation: of the experts, as in `MLPConfig`.
    """

    num_experts: int
    top_k: int
    d_hidden: int
    shared: MLPConfig | None = None
    router: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    normalize: bool = True
    scale: float = 1.0
    d_latent: int = 0
    gated: bool = True
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.num_experts // self.groups * self.top_groups:
            raise ValueError(
                f"moe: {self.top_k} experts a token from {self.top_groups} of "
                f"{self.groups} groups of {self.num_experts} experts"
            )
        if self.num_experts % self.groups or self.top_groups > self.groups:
            raise ValueError(
                f"moe: {self.num_experts} experts in {self.groups} groups, of which "
                f"{self.top_groups} are taken"
            )


def moe_params(c: MoEConfig, d_model: int) -> Table:
    """Returns the parameters; `into` holds the rows [gate; up] of each of the E experts
    if they are gated.

    Every device has some channels of every expert, so that all have equal work whatever
    experts are chosen.
    """
    E, width = c.num_experts, c.d_latent or d_model
    into = hidden_runs(c.d_hidden, c.gated)
    rows = c.d_hidden * (2 if c.gated else 1)
    table: Table = {
        "router": Param((E, d_model)),
        "into": Param((E, rows, width), runs=into, axis=1),
        "down": Param((E, width, c.d_hidden), runs=into[:1], axis=2),
    }
    if c.router == "sigmoid":
        table["router_bias"] = Param((E,), ZEROS, float32=True)
    if c.d_latent:
        table["latent_in"] = Param((c.d_latent, d_model), quantizable=True)
        table["latent_out"] = Param((d_model, c.d_latent), quantizable=True)
    if c.shared is not None:
        table["shared"] = mlp_params(c.shared, d_model)
    return table


def route(
    logits: jax.Array, bias: jax.Array | None, c: MoEConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns the experts [n, k] int32 of each token and their weights [n, k], from the
    router's logits [n, E]."""
    if c.router == "softmax":
        best, chosen = lax.top_k(logits, c.top_k)
        return chosen, jax.nn.softmax(best, axis=-1)
    score = jax.nn.sigmoid(logits)
    choice = score if bias is None else score + bias[None]
    if c.groups > 1:
        grouped = choice.reshape(choice.shape[0], c.groups, -1)
        two = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
        kept = lax.top_k(two, c.top_groups)[1]  # [n, top_groups]
        places = jnp.arange(c.groups, dtype=kept.dtype)[None, :, None]
        inside = (kept[:, None] == places).any(axis=-1)
        grouped = jnp.where(inside[..., None], grouped, -jnp.inf)
        choice = grouped.reshape(choice.shape)
    chosen = lax.top_k(choice, c.top_k)[1]
    weight = jnp.take_along_axis(score, chosen, axis=1)
    if c.normalize:
        weight = weight / (weight.sum(axis=-1, keepdims=True) + 1e-20)
    return chosen, weight * c.scale


class MoE(nn.Module):
    """sum of weight * expert(x) over the chosen experts, and the shared MLP of x.

    Attributes:
      parts: devices that share the experts.
    """

    config: MoEConfig
    dtype: Any
    parts: int = 1

    @nn.compact
    def __call__(
        self,
        u: jax.Array,
        pass_: Pass[Any] | None = None,
        state: None = None,
        record: None = None,
    ) -> tuple[jax.Array, None, None]:
        """Runs the experts on u [B, T, d]; see `Pass` for the contract."""
        c, d_model = self.config, u.shape[-1]
        p = declare(self, moe_params(c, d_model), self.dtype)
        with jax.named_scope("moe"):
            x = u.reshape(-1, d_model)
            logits = linear(x, p["router"])
            chosen, weight = route(logits, p.get("router_bias"), c)
            if c.d_latent:
                # Or XLA:CPU takes the transpose that ends it into the experts' product,
                # and then has no code for it in bfloat16.
                x = lax.optimization_barrier(linear(x, p["latent_in"]))
            y = self._experts(x, chosen, weight, p["into"], p["down"])
            y = total(y, self.parts)
            if c.d_latent:
                y = linear(y, p["latent_out"])
            y = y.reshape(u.shape)
        if c.shared is not None:
            y = y + MLP(c.shared, self.dtype, self.parts, name="shared")(u)[0]
        return y, None, None

    def _experts(
        self,
        x: jax.Array,
        chosen: jax.Array,
        weight: jax.Array,
        into: jax.Array,
        down: jax.Array,
    ) -> jax.Array:
        """Returns the weighted sum of each token's experts, [n, d'] float32.

        Few tokens read the weights of their own experts only; for many, all experts run
        on all tokens, which reads every weight once.
        """
        c = self.config
        (n, k), E = chosen.shape, c.num_experts

        def product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
            return jnp.einsum(
                spec,
                left.astype(right.dtype),
                right,
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )

        def hidden(h: jax.Array) -> jax.Array:
            act = activate_gated if c.gated else activate
            return act(h, c.activation)

        if n * k < E:
            h = hidden(product("nd,nkfd->nkf", x, into[chosen]))
            y = product("nkf,nkdf->nkd", h, down[chosen])
            return (weight[..., None] * y).sum(axis=1)
        token = jnp.arange(n, dtype=jnp.int32)[:, None]
        table = jnp.zeros((n, E), jnp.float32).at[token, chosen].add(weight)
        h = hidden(product("nd,efd->nef", x, into)) * table[..., None]
        return product("nef,edf->nd", h, down)


class MoEMixer(Mixer[MoEConfig]):
    """See `mixer.Mixer`."""

    kind = "moe"
    Config = MoEConfig
    Module = MoE
    skips_padding = False

    def params(self, c: MoEConfig, d_model: int) -> Table:
        return moe_params(c, d_model)

    def part(self, c: MoEConfig, n: int) -> MoEConfig:
        shared = None if c.shared is None else MLP_MIXER.part(c.shared, n)
        return replace(c, d_hidden=c.d_hidden // n, shared=shared)

    def work_bytes(self, c: MoEConfig, batch: int, nodes: int, dtype: Any) -> int:
        tokens = batch * nodes
        few = tokens * c.top_k < c.num_experts
        experts = c.top_k if few else c.num_experts
        return FLOAT * tokens * experts * c.d_hidden * (3 if c.gated else 1)


MOE = MoEMixer()
