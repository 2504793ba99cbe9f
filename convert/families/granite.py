"""GraniteMoeHybridForCausalLM (Granite 4), with or without experts."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import llama, read
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import (
    Part,
    Path,
    Row,
    mamba_rows,
    module_rows,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig, MoEConfig
from stree_jax.models.stack.config import blocks, named

FORMAT = "granitemoehybrid"
MODELS = "Granite 4: hybrid, attention only, rotary or none, with experts or without"


def mlp_rows(ours: Path, theirs: str, c: MLPConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of an MLP whose gate and up are one tensor,
    gate first."""
    modules = {"gate_up": "input_linear", "down": "output_linear"}
    return module_rows(ours, theirs, modules)


def moe_rows(ours: Path, prefix: str, c: MoEConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a layer with experts. Each projection is one
    tensor for all experts."""
    theirs = f"{prefix}block_sparse_moe"
    if c.shared is not None:
        yield from mlp_rows((*ours, "shared"), f"{prefix}shared_mlp", c.shared)
    yield Row((*ours, "router"), (f"{theirs}.router.layer.weight",))
    yield Row((*ours, "into"), (f"{theirs}.input_linear.weight",))
    yield Row((*ours, "down"), (f"{theirs}.output_linear.weight",))


NAMES = llama.NAMES.with_parts(
    mamba=Part("mamba", mamba_rows),
    mlp=Part("shared_mlp", mlp_rows),
    moe=Part("", moe_rows),
)

MULTIPLIERS = (
    Field("embedding_multiplier", "embedding_multiplier", read.positive, 1.0),
    Field("residual_multiplier", "residual_multiplier", read.positive, 1.0),
    Field("logits_scaling", "logits_divisor", read.positive, 1.0),
)
MODEL = (*hf.model_table("rms_norm_eps", 1e-6), *MULTIPLIERS)


def _scale(fields: ConfigFields, name: str, default: float) -> float | None:
    """Reads the softmax scale; null means the default, head_dim ** -0.5."""
    if name in fields.values and fields.get(name, None) is None:
        return None
    return fields.positive(name, default)


SCALE = Field("attention_multiplier", "scale", _scale, 1.0)
ATTENTION = (*hf.ATTENTION, SCALE)
MAMBA = hf.mamba_table(hf.expanded)
MLP = (Field("shared_intermediate_size", "d_hidden", read.size, 1024),)
MOE = (
    Field("num_local_experts", "num_experts", read.size, 8),
    Field("num_experts_per_tok", "top_k", read.size, 2),
    Field("intermediate_size", "d_hidden", read.size, 11008),
)


def parse(fields: ConfigFields) -> ModelConfig:
    model = hf.read_model(MODEL, fields, NAMES)
    count = fields.size("num_hidden_layers", 32)
    mixers = hf.mixers(fields, count, ["mamba"] * count)
    hf.check_silu(fields)
    attention = mamba = None  # the config may have fields of a mixer that is not used
    if "attention" in mixers:
        table = (*ATTENTION, hf.HEAD_DIM)
        attention = AttentionConfig(**read_fields(table, fields))
        if fields.get("position_embedding_type", "nope") == "rope":
            attention = replace(attention, rope=hf.rope(fields, attention.head_dim))
    if "mamba" in mixers:
        mamba = hf.read_mamba(MAMBA, fields, model["norm_eps"])
    second: str = "mlp"
    mlp: MLPConfig | None = MLPConfig(**read_fields(MLP, fields))
    moe = None
    if fields.size("num_local_experts", 8, low=0):
        moe, mlp = MoEConfig(**read_fields(MOE, fields), shared=mlp), None
        second = "moe"
    return ModelConfig(
        **model,
        layers=blocks(hf.with_mlps(mixers, second)),
        mixers=named(mamba=mamba, attention=attention, mlp=mlp, moe=moe),
    )


def export(config: ModelConfig) -> dict[str, Any]:
    mixers, moe, c = (
        config.kinds[::2],
        config.mixers.get("moe"),
        config.mixers.get("attention"),
    )
    mlp = config.mixers.get("mlp") if moe is None else moe.shared
    require(FORMAT, {"lack of a shared MLP": mlp is not None})
    values: dict[str, Any] = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **hf.write_model(FORMAT, MODEL, config),
        "num_hidden_layers": len(mixers),
        "layer_types": list(mixers),
        "hidden_act": "silu",
        **write_fields(FORMAT, MLP, mlp),
        "position_embedding_type": "nope",
        "num_attention_heads": 1,  # any valid values for mixers that are not used
        "mamba_n_heads": 1,
        "mamba_d_head": "auto",
    }
    if moe is not None:
        values |= write_fields(FORMAT, MOE, moe, ("shared",))
    else:
        values |= {"num_local_experts": 0, "num_experts_per_tok": 0}
        values["intermediate_size"] = values["shared_intermediate_size"]
    if c is not None:
        hf.check_width(FORMAT, config, c)
        scaled = replace(c, scale=c.head_dim**-0.5 if c.scale is None else c.scale)
        values |= write_fields(FORMAT, ATTENTION, scaled, ("rope",))
        values |= hf.rope_fields(FORMAT, c)
        values["position_embedding_type"] = "nope" if c.rope is None else "rope"
    if (mamba := config.mixers.get("mamba")) is not None:
        values |= hf.write_mamba(FORMAT, MAMBA, mamba, config.norm_eps)
        values["mamba_expand"] = hf.expand(FORMAT, config)
    return values


def expresses(config: ModelConfig) -> bool:
    mixers, has_mamba = {"mamba", "attention"}, "mamba" in config.kinds
    if "attention" in config.mixers and config.mixers["attention"].sinks:
        return False
    if alternates(config, mixers, {"moe"}):
        moe = config.mixers["moe"]
        return moe.gated and (has_mamba or (moe.shared is not None and not moe.bias))
    if not alternates(config, mixers, {"mlp"}):
        return False
    mlp = config.mixers["mlp"]
    # Unless `plain`, a model without multipliers is a Llama or a Bamba.
    plain = has_mamba and not mlp.bias and not llama.rotates_partly(config)
    return mlp.gated and (plain or llama.multiplies(config))


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
