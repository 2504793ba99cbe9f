"""Qwen3ForCausalLM: llama with an RMSNorm of each head of q and k."""

from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import llama, read
from stree_jax.convert.families.family import Family
from stree_jax.convert.families.table import Field, require
from stree_jax.convert.families.windows import with_qwen_windows
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import ModelConfig

FORMAT = "qwen3"
NAMES = llama.NAMES
ATTENTION = (*hf.ATTENTION, Field("head_dim", "head_dim", read.size, 128))
MLP = (Field("intermediate_size", "d_hidden", read.size, 22016),)


def parse(fields: ConfigFields) -> ModelConfig:
    config = llama.parse_dense(fields, ATTENTION, MLP)
    attention = replace(config.mixers["attention"], qk_norm_eps=config.norm_eps)
    return with_qwen_windows(fields, config.with_mixers(attention=attention))


def export(config: ModelConfig) -> dict[str, Any]:
    eps = config.mixers["attention"].qk_norm_eps
    require(FORMAT, {"attention norms of q and k": eps == config.norm_eps})
    values = llama.export_dense(FORMAT, config, ATTENTION, MLP, ("qk_norm_eps",))
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **values,
        "use_sliding_window": False,
    }


def expresses(config: ModelConfig) -> bool:
    dense = llama.is_dense(config)
    return dense and config.mixers["attention"].qk_norm_eps is not None


FAMILY = Family(FORMAT, "Qwen3 (dense)", NAMES, parse, export, expresses)
