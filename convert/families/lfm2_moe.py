"""Lfm2MoeForCausalLM (LFM2-8B-A1B): the layers of `lfm2`, with experts from the third
layer on."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from stree_jax.convert.families import lfm2, read
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import Names, Part, Path, Row, expert_rows
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import MLPConfig, ModelConfig, MoEConfig

FORMAT = "lfm2_moe"
MODELS = "LFM2 with experts (LFM2-8B-A1B)"
FUSED = "experts.gate_up_proj"  # ending of a tensor of all experts of a layer
NORMALIZE_EPS = 1e-6  # added to the sum by which the router's weights are divided


def moe_rows(
    ours: Path, theirs: str, c: MoEConfig, fused: bool = False
) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a layer with experts; see `expert_rows`."""
    yield Row((*ours, "router"), (f"{theirs}.gate.weight",))
    yield Row((*ours, "router_bias"), (f"{theirs}.expert_bias",))
    names = ("w1", "w3", "w2")
    yield from expert_rows(ours, f"{theirs}.experts", c.num_experts, names, fused)


def spelled(names: Names, tensors: Collection[str]) -> Names:
    """Returns the names that a file uses; see `Names.spelling`."""
    if any(name.endswith(FUSED) for name in tensors):
        fused = partial(moe_rows, fused=True)
        return names.with_parts(moe=Part("feed_forward", fused))
    return names


NAMES = replace(
    lfm2.NAMES.with_parts(moe=Part("feed_forward", moe_rows)), spelling=spelled
)
MOE = (
    Field("num_experts", "num_experts", read.size, 32),
    Field("num_experts_per_tok", "top_k", read.size, 4),
    Field("moe_intermediate_size", "d_hidden", read.size, 1792),
    Field("norm_topk_prob", "normalize", read.flag, True),
    Field("routed_scaling_factor", "scale", read.positive, 1.0),
    Field("use_expert_bias", "correction", read.flag, True),
)
DENSE = "num_dense_layers"


def parse(fields: ConfigFields) -> ModelConfig:
    fields = lfm2.renamed(fields)
    count = fields.size("num_hidden_layers", 32)
    dense = min(fields.size(DENSE, 2, low=0), count)
    mixers: dict[str, Any] = {}
    if dense:
        mixers["mlp"] = MLPConfig(fields.size("intermediate_size", 7168))
    if dense < count:
        mixers["moe"] = MoEConfig(
            **read_fields(MOE, fields), router="sigmoid", normalize_eps=NORMALIZE_EPS
        )
    second = ("mlp",) * dense + ("moe",) * (count - dense)
    return lfm2.parse_layers(fields, second, **mixers)


def export(config: ModelConfig) -> dict[str, Any]:
    second = config.kinds[1::2]
    mlp, moe = config.mixers.get("mlp"), config.mixers["moe"]
    fits = (moe.router, moe.normalize_eps) == ("sigmoid", NORMALIZE_EPS)
    require(FORMAT, {"router": fits})
    values = {
        "architectures": ["Lfm2MoeForCausalLM"],
        **lfm2.export_layers(FORMAT, config),
        DENSE: second.index("moe"),
        **write_fields(FORMAT, MOE, moe, ("router", "normalize_eps")),
    }
    if mlp is not None:
        values |= write_fields(FORMAT, (lfm2.WIDTH,), mlp)
    return values


def expresses(config: ModelConfig) -> bool:
    fits = alternates(config, lfm2.TYPES, {"mlp", "moe"})
    return fits and {"short_conv", "moe"} <= set(config.kinds)


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
