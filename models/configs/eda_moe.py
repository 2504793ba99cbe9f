"""Experts with an averaging router: config, parameters, arrays of its state, memory."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stree_jax.models.configs.mixer import FLOAT, ROUTER, Mixer
from stree_jax.models.configs.moe import MOE, MoEConfig, moe_params
from stree_jax.models.configs.params import ONES, ZEROS, Param, Table
from stree_jax.models.weights.padding import padded_rows


@dataclass(frozen=True)
class EDAMoEConfig:
    """A mixture of gated experts in which a token uses at most one.

    Attributes:
      num_experts: E.
      d_hidden: hidden width of an expert.
      d_router: R, width of the router.
      norm_eps: epsilon of the router's RMSNorm.
      averages: True if the router adds the vector of the router before. False in the
        first layer with experts.
    """

    num_experts: int
    d_hidden: int
    d_router: int
    norm_eps: float
    averages: bool = True

    @property
    def experts(self) -> MoEConfig:
        """The experts without the router."""
        return MoEConfig(self.num_experts, 1, self.d_hidden)


def eda_moe_params(c: EDAMoEConfig, d_model: int) -> Table:
    """Returns the parameters by name.

    `router_in` has the rows of the router's vector, `router_out` those of the experts
    and of the class without an expert. `router_bias` affects only the choice.
    """
    R, classes = c.d_router, c.num_experts + 1
    table = {
        **moe_params(c.experts, d_model),
        "router_in": Param((R, d_model)),
        "router_in_bias": Param((R,), ZEROS),
        "router_norm": Param((R,), ONES),
        **{f"router_{i}": Param((R, R)) for i in (1, 2)},
        **{f"router_{i}_bias": Param((R,), ZEROS) for i in (1, 2)},
        "router_out": Param((classes, R)),
        "router_bias": Param((classes,), ZEROS, float32=True),
    }
    del table["router"]
    if c.averages:
        table["router_average"] = Param((R,), ONES, float32=True)
    return table


class EDAMoEMixer(Mixer[EDAMoEConfig]):
    """The implementation of `mixer.Mixer` for experts with an averaging router."""

    kind = "eda_moe"
    Config = EDAMoEConfig
    sends = ROUTER

    def check(self, c: EDAMoEConfig, name: str) -> None:
        if not 0 < c.norm_eps < np.inf:
            raise ValueError(f"{name}.norm_eps: {c.norm_eps} does not fit")

    def params(self, c: EDAMoEConfig, d_model: int) -> Table:
        return eda_moe_params(c, d_model)

    def source(self, c: EDAMoEConfig) -> str:
        return ROUTER if c.averages else ""

    def experts(self, c: EDAMoEConfig) -> tuple[int, int]:
        return c.num_experts + 1, 1

    def part(self, c: EDAMoEConfig, n: int) -> EDAMoEConfig:
        return replace(c, d_hidden=c.d_hidden // n)

    def work_bytes(self, c: EDAMoEConfig, batch: int, nodes: int, dtype: Any) -> int:
        router = FLOAT * padded_rows(batch * nodes) * 3 * c.d_router
        return router + MOE.work_bytes(c.experts, batch, nodes, dtype)


EDA_MOE = EDAMoEMixer()
