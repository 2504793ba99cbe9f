"""Converts checkpoints of BambaForCausalLM. Rotary embeddings apply to a part of each
attention head."""

from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import llama
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import Part, mamba_rows, mlp_rows
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig
from stree_jax.models.configs.rope import Rope
from stree_jax.models.stack.config import blocks, named, required

NAMES = replace(
    llama.NAMES.with_parts(
        mlp=Part("feed_forward", mlp_rows), mamba=Part("mamba", mamba_rows)
    ),
    norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
)
ROTATING = 0.5  # default share of a head that rotates

MODEL = hf.model_table("rms_norm_eps", 1e-5)
KV_HEADS = hf.KV_HEADS._replace(default=8)
ATTENTION = (hf.HEADS, KV_HEADS, *hf.BIASES)
MAMBA = hf.mamba_table(hf.expanded)
MLP = hf.gated_mlp_table(14336, "feed_forward")


def parse(fields: ConfigFields) -> ModelConfig:
    model = hf.read_model(MODEL, fields, NAMES)
    count = fields.size("num_hidden_layers", 32)
    kinds = hf.chosen_mixers(fields, "attn_layer_indices", count)
    mixers = hf.mixers(fields, count, list(kinds))
    hf.check_silu(fields)
    attention = mamba = None
    if "attention" in mixers:
        table = (*ATTENTION, hf.HEAD_DIM)
        attention = AttentionConfig(**read_fields(table, fields))
        rope = hf.rope(fields, attention.head_dim, ROTATING)
        attention = replace(attention, rope=rope)
    if "mamba" in mixers:
        mamba = hf.read_mamba(MAMBA, fields, model["norm_eps"])
    return ModelConfig(
        **model,
        layers=blocks(hf.with_mlps(mixers)),
        mixers=named(
            mamba=mamba, attention=attention, mlp=MLPConfig(**read_fields(MLP, fields))
        ),
    )


def export(config: ModelConfig) -> dict[str, Any]:
    mixers, c = config.kinds[::2], config.mixers.get("attention")
    values: dict[str, Any] = {
        "architectures": ["BambaForCausalLM"],
        **hf.write_model("bamba", MODEL, config),
        "num_hidden_layers": len(mixers),
        "attn_layer_indices": [i for i, k in enumerate(mixers) if k == "attention"],
        **write_fields("bamba", MLP, config.mixers.get("mlp")),
        "num_attention_heads": 1,  # any valid value if there is no attention
    }
    if c is not None:
        hf.check_width("bamba", config, c)
        values |= write_fields("bamba", ATTENTION, c, ("rope",))
        values["rope_parameters"] = _rope_parameters(c.rope, c.head_dim)
    if (mamba := config.mixers.get("mamba")) is not None:
        values |= hf.write_mamba("bamba", MAMBA, mamba, config.norm_eps)
        values["mamba_expand"] = hf.expand("bamba", config)
    return values


def _rope_parameters(rope: Rope | None, head_dim: int) -> dict[str, Any]:
    require("bamba", {"lack of rotary": rope is not None})
    rope = required(rope)
    return {
        "rope_type": "default",
        **hf.scaling_fields("bamba", rope),
        "rope_theta": rope.theta,
        "partial_rotary_factor": rope.dim / head_dim,
    }


def expresses(config: ModelConfig) -> bool:
    if not alternates(config, {"mamba", "attention"}, {"mlp"}):
        return False
    mlp, has_mamba = config.mixers["mlp"], "mamba" in config.kinds
    odd = llama.rotates_partly(config) or (has_mamba and mlp.bias)
    return mlp.gated and odd and not llama.multiplies(config)


FAMILY = Family("bamba", "Bamba", NAMES, parse, export, expresses)
