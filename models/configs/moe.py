"""Mixtures of experts: config, parameters, arrays of its state, memory."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from stree_jax.models.configs.mixer import FLOAT, Mixer
from stree_jax.models.configs.mlp import (
    MLP_MIXER,
    Activation,
    MLPConfig,
    hidden_runs,
    mlp_params,
)
from stree_jax.models.configs.params import ZEROS, Param, Table


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts, optionally with a shared MLP that every token uses.

    Attributes:
      num_experts, top_k: E experts, of which each token uses k.
      d_hidden: hidden width of an expert.
      shared: config of the shared MLP. If None, there is no shared MLP.
      shared_gate: True if the shared MLP's output is multiplied by the sigmoid of a
        number that each token computes (Qwen3-Next).
      router: "softmax" over the k largest logits (Granite) or all logits (Jamba, see
        `normalize`), or "sigmoid" of each logit (Nemotron-H).
      groups, top_groups: experts are chosen from the best `top_groups` of `groups`.
      normalize: True if the weights of the chosen experts are divided by their sum. If
        False, a softmax router's weights are those of the softmax over all experts
        (Jamba).
      normalize_eps: number that is added to this sum.
      scale: factor of a sigmoid router's weights.
      d_latent: width of the experts' input and output, between two extra projections.
        If 0, it is d_model and there are no such projections.
      gated, activation: options of the experts, as in `MLPConfig`.
      bias: True if the experts' projections have biases, and a softmax router has one
        (gpt-oss).
      correction: True if a sigmoid router has a bias that affects only which experts
        are chosen.
    """

    num_experts: int
    top_k: int
    d_hidden: int
    shared: MLPConfig | None = None
    shared_gate: bool = False
    router: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    normalize: bool = True
    normalize_eps: float = 1e-20
    scale: float = 1.0
    d_latent: int = 0
    gated: bool = True
    activation: Activation = "silu"
    bias: bool = False
    correction: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.num_experts // self.groups * self.top_groups:
            raise ValueError(
                f"moe: cannot choose {self.top_k} experts per token from "
                f"{self.top_groups} of {self.groups} groups of {self.num_experts} "
                "experts"
            )
        if self.num_experts % self.groups or self.top_groups > self.groups:
            raise ValueError(
                f"moe: cannot choose {self.top_groups} of {self.groups} groups of "
                f"{self.num_experts} experts"
            )


def moe_params(c: MoEConfig, d_model: int) -> Table:
    """Returns the parameters by name.

    `into` holds each expert's rows of gate followed by those of up, or of up only if
    experts are not gated. Under tensor parallelism every device has some channels of
    every expert, so the work is balanced whatever experts are chosen.
    """
    E, width = c.num_experts, c.d_latent or d_model
    into = hidden_runs(c.d_hidden, c.gated)
    rows = c.d_hidden * (2 if c.gated else 1)
    table: Table = {
        "router": Param((E, d_model)),
        "into": Param((E, rows, width), runs=into, axis=1, quantizable=True),
        "down": Param((E, width, c.d_hidden), runs=into[:1], axis=2, quantizable=True),
    }
    if c.router == "sigmoid" and c.correction:
        table["router_bias"] = Param((E,), ZEROS, float32=True)
    if c.router == "softmax" and c.bias:
        table["router_bias"] = Param((E,), ZEROS)
    if c.bias:
        table["into_bias"] = Param((E, rows), ZEROS, into, axis=1)
        table["down_bias"] = Param((E, width), ZEROS)
    if c.d_latent:
        table["latent_in"] = Param((c.d_latent, d_model), quantizable=True)
        table["latent_out"] = Param((d_model, c.d_latent), quantizable=True)
    if c.shared is not None:
        table["shared"] = mlp_params(c.shared, d_model)
        if c.shared_gate:
            table["shared_gate"] = Param((1, d_model))
    return table


class MoEMixer(Mixer[MoEConfig]):
    """The implementation of `mixer.Mixer` for mixtures of experts."""

    kind = "moe"
    Config = MoEConfig

    def params(self, c: MoEConfig, d_model: int) -> Table:
        return moe_params(c, d_model)

    def experts(self, c: MoEConfig) -> tuple[int, int]:
        return c.num_experts, c.top_k

    def part(self, c: MoEConfig, n: int) -> MoEConfig:
        shared = None if c.shared is None else MLP_MIXER.part(c.shared, n)
        return replace(c, d_hidden=c.d_hidden // n, shared=shared)

    def work_bytes(self, c: MoEConfig, batch: int, nodes: int, dtype: Any) -> int:
        tokens = batch * nodes
        few = tokens * c.top_k < c.num_experts
        experts = c.top_k if few else c.num_experts
        return FLOAT * tokens * experts * c.d_hidden * (3 if c.gated else 1)


MOE = MoEMixer()
