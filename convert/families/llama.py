"""Converts checkpoints of LlamaForCausalLM."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import Names, Part, attention_rows, mlp_rows
from stree_jax.convert.families.windows import check_llama_windows
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig
from stree_jax.models.stack.config import blocks, named

MODELS = "LlamaForCausalLM, llama3 rotary scaling"
NAMES = Names(
    parts={
        "attention": Part("self_attn", attention_rows),
        "mlp": Part("mlp", mlp_rows),
    },
)

MODEL = hf.model_table("rms_norm_eps", 1e-6)
ATTENTION = (*hf.ATTENTION, hf.HEAD_DIM)
MLP = hf.gated_mlp_table(11008, "mlp")


def parse(fields: ConfigFields) -> ModelConfig:
    check_llama_windows(fields)
    return parse_dense(fields, ATTENTION, MLP)


def parse_dense(
    fields: ConfigFields, attention: Sequence[Field], mlp: Sequence[Field]
) -> ModelConfig:
    """Reads a model of alternating attention and gated MLPs, with llama's field names.

    Args:
      fields: the fields of the config file.
      attention, mlp: the family's tables for `AttentionConfig` and `MLPConfig`.
    """
    c = AttentionConfig(**read_fields(attention, fields))
    hf.check_silu(fields)
    return ModelConfig(
        **hf.read_model(MODEL, fields, NAMES),
        layers=blocks(("attention", "mlp") * fields.size("num_hidden_layers", 32)),
        mixers=named(
            attention=replace(c, rope=hf.rope(fields, c.head_dim)),
            mlp=MLPConfig(**read_fields(mlp, fields)),
        ),
    )


def export(config: ModelConfig) -> dict[str, Any]:
    values = export_dense("llama", config, ATTENTION, MLP)
    return {"architectures": ["LlamaForCausalLM"], **values}


def export_dense(
    format: str,
    config: ModelConfig,
    attention: Sequence[Field],
    mlp: Sequence[Field],
    elsewhere: Collection[str] = (),
) -> dict[str, Any]:
    """Writes the fields that `parse_dense` reads.

    Args:
      format: the family, for messages.
      config: the architecture.
      attention, mlp: the family's tables for `AttentionConfig` and `MLPConfig`.
      elsewhere: attributes of `AttentionConfig` that the family checks itself.
    """
    c = config.mixers["attention"]
    require(format, {"lack of rotary": c.rope is not None})
    return {
        **hf.write_model(format, MODEL, config),
        "num_hidden_layers": len(config.layers) // 2,
        **write_fields(format, attention, c, ("rope", *elsewhere)),
        **hf.rope_fields(format, c),
        **write_fields(format, mlp, config.mixers.get("mlp")),
        "hidden_act": "silu",
    }


def multiplies(config: ModelConfig) -> bool:
    """True if the model has multipliers, as Granite does."""
    c = config.mixers.get("attention")
    scales = (
        config.embedding_multiplier,
        config.residual_multiplier,
        config.logits_divisor,
    )
    return scales != (1,) * 3 or (c is not None and c.scale is not None)


def rotates_partly(config: ModelConfig) -> bool:
    """True if only a part of each head of attention rotates."""
    c = config.mixers.get("attention")
    return c is not None and c.rope is not None and c.rope.dim != c.head_dim


def is_dense(config: ModelConfig) -> bool:
    """True if the layers alternate between attention and gated MLPs, and the model has
    no multipliers and no partial rotary embedding."""
    if not alternates(config, {"attention"}, {"mlp"}) or multiplies(config):
        return False
    return config.mixers["mlp"].gated and not rotates_partly(config)


def expresses(config: ModelConfig) -> bool:
    if not is_dense(config):
        return False
    c = config.mixers["attention"]
    plain = c.qk_norm_eps is None and c.temperature is None and not c.sinks
    return plain and (c.out_bias or not c.qkv_bias)


FAMILY = Family("llama", MODELS, NAMES, parse, export, expresses)
