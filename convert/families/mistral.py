"""MistralForCausalLM: llama without biases, with a sliding window in older models.
Without a window it is exported as llama, which computes the same.

Some directories also have files in Mistral's own format (consolidated.safetensors,
params.json, tokenizer.model.v3), which are ignored.
"""

from dataclasses import replace

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import llama, read
from stree_jax.convert.families.family import Family
from stree_jax.convert.families.table import Field
from stree_jax.convert.families.windows import effective, window_of
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import ModelConfig

MODELS = "MistralForCausalLM"
NAMES = llama.NAMES
KV_HEADS = Field("num_key_value_heads", "num_kv_heads", read.kv_heads(hf.HEADS), 8)
ATTENTION = (hf.HEADS, KV_HEADS, hf.HEAD_DIM)
MLP = (Field("intermediate_size", "d_hidden", read.size, 14336),)


def parse(fields: ConfigFields) -> ModelConfig:
    config = llama.parse_dense(fields, ATTENTION, MLP)
    window = effective(fields, window_of(fields, 4096), 131072)
    return config.with_mixers(
        attention=replace(config.mixers["attention"], window=window)
    )


FAMILY = Family(
    "mistral", MODELS, NAMES, parse, exported="as llama, without a sliding window"
)
