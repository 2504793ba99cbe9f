"""Qwen2ForCausalLM (Qwen2, Qwen2.5): llama with biases only of q, k and v."""

from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import llama, read
from stree_jax.convert.families.family import Family
from stree_jax.convert.families.table import Field
from stree_jax.convert.families.windows import with_qwen_windows
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import ModelConfig

FORMAT = "qwen2"
NAMES = llama.NAMES
ATTENTION = (
    hf.HEADS,
    hf.KV_HEADS,
    hf.HEAD_DIM,
    Field("", "qkv_bias", read.tensor("self_attn.q_proj.bias")),
)
MLP = (Field("intermediate_size", "d_hidden", read.size, 22016),)


def parse(fields: ConfigFields) -> ModelConfig:
    return with_qwen_windows(fields, llama.parse_dense(fields, ATTENTION, MLP))


def export(config: ModelConfig) -> dict[str, Any]:
    values = llama.export_dense(FORMAT, config, ATTENTION, MLP, ("qkv_bias",))
    return {
        "architectures": ["Qwen2ForCausalLM"],
        **values,
        "use_sliding_window": False,
    }


def expresses(config: ModelConfig) -> bool:
    if not llama.is_dense(config):
        return False
    c = config.mixers["attention"]
    return c.qk_norm_eps is None and c.qkv_bias and not c.out_bias


FAMILY = Family(FORMAT, "Qwen2, Qwen2.5 (dense)", NAMES, parse, export, expresses)
