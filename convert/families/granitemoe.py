"""GraniteMoeForCausalLM and GraniteMoeSharedForCausalLM (Granite 3 with experts)."""

from dataclasses import replace
from typing import Any

from stree_jax.convert.families import granite, granite3, read
from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import MLPConfig, ModelConfig, MoEConfig
from stree_jax.models.stack.config import blocks, named

FORMAT = "granitemoe"
NAMES = granite.NAMES
SHARED = Field("shared_intermediate_size", "d_hidden", read.count, 0)


def parse(fields: ConfigFields) -> ModelConfig:
    attention = granite3.read_attention(fields)
    hf.check_silu(fields)
    width = SHARED.value(fields)
    shared = MLPConfig(width) if width else None
    return ModelConfig(
        **hf.read_model(granite.MODEL, fields, NAMES),
        layers=blocks(("attention", "moe") * fields.size("num_hidden_layers", 32)),
        mixers=named(
            attention=attention,
            moe=MoEConfig(**read_fields(granite.MOE, fields), shared=shared),
        ),
    )


def export(config: ModelConfig) -> dict[str, Any]:
    """Writes the config of a model whose experts have no shared MLP."""
    c, moe = config.mixers["attention"], config.mixers["moe"]
    require(FORMAT, {"lack of rotary": c.rope is not None})
    hf.check_width(FORMAT, config, c)
    c = replace(c, scale=c.head_dim**-0.5 if c.scale is None else c.scale)
    return {
        "architectures": ["GraniteMoeForCausalLM"],
        **hf.write_model(FORMAT, granite.MODEL, config),
        "num_hidden_layers": len(config.layers) // 2,
        **write_fields(FORMAT, granite.ATTENTION, c, ("rope",)),
        **hf.rope_fields(FORMAT, c),
        **write_fields(FORMAT, granite.MOE, moe),
        "hidden_act": "silu",
    }


def expresses(config: ModelConfig) -> bool:
    if not alternates(config, {"attention"}, {"moe"}):
        return False
    moe, c = config.mixers["moe"], config.mixers["attention"]
    plain = c.qk_norm_eps is None and not c.sinks
    return plain and moe.gated and moe.shared is None and not moe.bias


FAMILY = Family(FORMAT, "Granite 3 with experts", NAMES, parse, export, expresses)
SHARED_FAMILY = FAMILY.also(
    "granitemoeshared",
    "Granite 3 with experts beside an MLP",
    exported="as granitemoehybrid",
)
