"""LlamaForCausalLM."""

from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families.table import read_fields, require, write_fields
from stree_jax.convert.fields import ConfigFields
from stree_jax.convert.rows import Names
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig
from stree_jax.models.config import given

NAMES = Names(
    embedding="model.embed_tokens",
    norm="model.norm",
    layer="model.layers.{i}.",
    mixer_norm="input_layernorm",
    attention="self_attn",
    mlp_norm="post_attention_layernorm",
    mlp="mlp",
)

MODEL = hf.model_table("rms_norm_eps", 1e-6)
ATTENTION = (*hf.ATTENTION, hf.HEAD_DIM)
MLP = hf.gated_mlp_table(11008, "mlp")


def parse(fields: ConfigFields) -> ModelConfig:
    attention = AttentionConfig(**read_fields(ATTENTION, fields))
    hf.check_silu(fields)
    return ModelConfig(
        **hf.read_model(MODEL, fields, NAMES),
        layers=("attention", "mlp") * fields.size("num_hidden_layers", 32),
        attention=replace(attention, rope=hf.rope(fields, attention.head_dim)),
        mlp=MLPConfig(**read_fields(MLP, fields)),
    )


def export(config: ModelConfig) -> dict[str, Any]:
    c = given(config.attention)
    require("llama", {"lack of rotary": c.rope is not None})
    return {
        "architectures": ["LlamaForCausalLM"],
        **hf.write_model("llama", MODEL, config),
        "num_hidden_layers": len(config.layers) // 2,
        **write_fields("llama", ATTENTION, c, ("rope",)),
        **hf.rope_fields("llama", c),
        **write_fields("llama", MLP, config.mlp),
        "hidden_act": "silu",
    }
