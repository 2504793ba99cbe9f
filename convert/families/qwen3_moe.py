"""Qwen3MoeForCausalLM (Qwen3-30B-A3B and others): attention of Qwen3, with experts on
some or all layers.

A file has three tensors for each expert, as published, or two for all experts of a
layer, as transformers 5 has them in memory.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import llama, qwen3_next, read
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import Names
from stree_jax.convert.families.windows import WINDOW, effective, window_of
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig, MoEConfig
from stree_jax.models.stack.config import blocks, named

FORMAT = "qwen3_moe"
MODELS = "Qwen3 with experts (Qwen3-30B-A3B, Qwen3-Coder)"
COUNT = "num_experts"
LONGEST = 32768  # default of `max_position_embeddings`


def spelled(names: Names, tensors: Collection[str]) -> Names:
    """Returns the names that a file uses; see `Names.spelling`."""
    fused = any(name.endswith(qwen3_next.FUSED) for name in tensors)
    return names.with_parts(moe=qwen3_next.FUSED_EXPERTS) if fused else names


NAMES = replace(llama.NAMES.with_parts(moe=qwen3_next.EXPERTS), spelling=spelled)

MODEL = hf.model_table("rms_norm_eps", 1e-6, 2048)
HEADS = Field("num_attention_heads", "num_heads", read.size, 32)
KV_HEADS = Field("num_key_value_heads", "num_kv_heads", read.kv_heads(HEADS), 4)
ATTENTION = (HEADS, KV_HEADS, hf.head_dim(HEADS, 2048), *hf.BIASES)
MLP = (Field("intermediate_size", "d_hidden", read.size, 6144),)
MOE = (
    Field(COUNT, "num_experts", read.size, 128),
    Field("num_experts_per_tok", "top_k", read.size, 8),
    Field("moe_intermediate_size", "d_hidden", read.size, 768),
    Field("norm_topk_prob", "normalize", read.flag, False),
)


def renamed(fields: ConfigFields) -> ConfigFields:
    """Returns the fields with the number of experts as `num_experts`, which
    transformers also calls `num_local_experts`."""
    values = dict(fields.values)
    if (count := values.pop("num_local_experts", None)) is not None:
        values[COUNT] = count
    return replace(fields, values=values)


def parse(fields: ConfigFields) -> ModelConfig:
    hf.check_silu(fields)
    fields = renamed(fields)
    model = hf.read_model(MODEL, fields, NAMES)
    seconds = qwen3_next.second_mixers(fields, 24, 128)
    used = fields.flag("use_sliding_window", False)
    window = window_of(fields, 4096) if used else None
    c = AttentionConfig(**read_fields(ATTENTION, fields), qk_norm_eps=model["norm_eps"])
    size = effective(fields, window, LONGEST)
    attention = replace(c, rope=hf.rope(fields, c.head_dim), window=size)
    mlp = moe = None
    if "mlp" in seconds:
        mlp = MLPConfig(**read_fields(MLP, fields))
    if "moe" in seconds:
        moe = MoEConfig(**read_fields(MOE, fields))
    return ModelConfig(
        **model,
        layers=blocks(kind for second in seconds for kind in ("attention", second)),
        mixers=named(attention=attention, mlp=mlp, moe=moe),
    )


def export(config: ModelConfig) -> dict[str, Any]:
    seconds, c = config.kinds[1::2], config.mixers["attention"]
    mlp, moe = (config.mixers.get(name) for name in ("mlp", "moe"))
    require(
        FORMAT,
        {
            "attention norms of q and k": c.qk_norm_eps == config.norm_eps,
            "lack of rotary": c.rope is not None,
        },
    )
    values: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        **hf.write_model(FORMAT, MODEL, config),
        "num_hidden_layers": len(seconds),
        "hidden_act": "silu",
        **write_fields(FORMAT, ATTENTION, c, ("rope", "qk_norm_eps", "window")),
        **hf.rope_fields(FORMAT, c),
        "use_sliding_window": c.window > 0,
        WINDOW: c.window or None,
        "mlp_only_layers": [i for i, kind in enumerate(seconds) if kind == "mlp"],
        "decoder_sparse_step": 1,
        **write_fields(FORMAT, MOE, moe),
    }
    return values if mlp is None else values | write_fields(FORMAT, MLP, mlp)


def expresses(config: ModelConfig) -> bool:
    fits = alternates(config, {"attention"}, {"mlp", "moe"}) and "moe" in config.kinds
    return fits and config.mixers["attention"].qk_norm_eps is not None


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
