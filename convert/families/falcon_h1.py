"""FalconH1ForCausalLM: Mamba2 and attention in parallel, and multipliers."""

from dataclasses import replace
from typing import Any

from stree_jax.convert.families import bamba, read
from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig
from stree_jax.models.stack.config import blocks, named

MODELS = "Falcon-H1: mixer and attention side by side"
NAMES = bamba.NAMES
ALL_PARTS = (1.0,) * 5  # z, x, B, C and dt


def _inverse(scale: float) -> float:
    return 1 / scale


def _reciprocal(fields: ConfigFields, name: str, default: float) -> float:
    return _inverse(fields.positive(name, default))


def _multipliers(fields: ConfigFields, name: str, default: Any) -> tuple[float, ...]:
    return tuple(fields.multipliers(name, len(default)))


def _width(fields: ConfigFields) -> int:
    return fields.size("mamba_d_ssm", hf.expanded(fields))


MODEL = (
    *hf.model_table("rms_norm_eps", 1e-5),
    Field("embedding_multiplier", "embedding_multiplier", read.finite, 1.0),
    Field("lm_head_multiplier", "logits_divisor", _reciprocal, 1.0, _inverse),
)
ATTENTION = (
    *bamba.ATTENTION,
    hf.HEAD_DIM,
    Field("attention_in_multiplier", "in_multiplier", read.finite, 1.0),
    Field("key_multiplier", "key_multiplier", read.finite, 1.0),
    Field("attention_out_multiplier", "out_multiplier", read.finite, 1.0),
)
MAMBA = (
    *hf.mamba_table(_width, out_bias="projectors_bias"),
    Field("ssm_in_multiplier", "in_multiplier", read.finite, 1.0),
    Field("ssm_out_multiplier", "out_multiplier", read.finite, 1.0),
    Field("ssm_multipliers", "part_multipliers", _multipliers, ALL_PARTS, list),
)
MLP = hf.gated_mlp_table(14336, "feed_forward")


def parse(fields: ConfigFields) -> ModelConfig:
    model = hf.read_model(MODEL, fields, NAMES)
    mamba = hf.read_mamba(MAMBA, fields, model["norm_eps"])
    if mamba.d_inner != (width := _width(fields)):
        raise fields.error("mamba_d_ssm", f"{width} is not mamba_n_heads * head size")
    first = fields.truth("mamba_norm_before_gate", True)
    normed = fields.truth("mamba_rms_norm", False)
    if not normed or first:
        mamba = replace(mamba, norm="norm_first" if normed else None)
    attention = AttentionConfig(**read_fields(ATTENTION, fields))
    hf.check_silu(fields)
    gate, down = fields.multipliers("mlp_multipliers", 2)
    mlp = MLPConfig(**read_fields(MLP, fields))
    block: tuple[str, ...] = ("mamba+attention", "mlp")
    return ModelConfig(
        **model,
        layers=blocks(block * fields.size("num_hidden_layers", 32)),
        mixers=named(
            mamba=mamba,
            attention=replace(attention, rope=hf.rope(fields, attention.head_dim)),
            mlp=replace(mlp, gate_multiplier=gate, down_multiplier=down),
        ),
    )


def export(config: ModelConfig) -> dict[str, Any]:
    format = "falcon_h1"
    m, c = config.mixers["mamba"], config.mixers["attention"]
    mlp = config.mixers["mlp"]
    require(format, {"lack of rotary": c.rope is not None})
    return {
        "architectures": ["FalconH1ForCausalLM"],
        **hf.write_model(format, MODEL, config),
        "num_hidden_layers": len(config.layers) // 2,
        **write_fields(format, ATTENTION, c, ("rope",)),
        **hf.rope_fields(format, c),
        **hf.write_mamba(format, MAMBA, m, config.norm_eps, ("norm",)),
        "mamba_d_ssm": m.d_inner,
        "mamba_expand": max(m.d_inner // config.d_model, 1),
        "mamba_rms_norm": m.norm is not None,
        "mamba_norm_before_gate": m.norm == "norm_first",
        **write_fields(format, MLP, mlp, ("gate_multiplier", "down_multiplier")),
        "mlp_multipliers": [mlp.gate_multiplier, mlp.down_multiplier],
    }


def expresses(config: ModelConfig) -> bool:
    return alternates(config, {"mamba+attention"}, {"mlp"})


FAMILY = Family("falcon_h1", MODELS, NAMES, parse, export, expresses)
