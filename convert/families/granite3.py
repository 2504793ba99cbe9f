"""GraniteForCausalLM (Granite 3): llama with Granite's multipliers.

These models are exported as granitemoehybrid without Mamba2 layers, which computes the
same.
"""

from dataclasses import replace

from stree_jax.convert.families import granite, llama
from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families.family import Family
from stree_jax.convert.families.table import read_fields
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig
from stree_jax.models.stack.config import blocks, named

MODELS = "Granite 3, dense"
NAMES = llama.NAMES
ATTENTION = (*granite.ATTENTION, hf.HEAD_DIM)


def parse(fields: ConfigFields) -> ModelConfig:
    attention = read_attention(fields)
    hf.check_silu(fields)
    return ModelConfig(
        **hf.read_model(granite.MODEL, fields, NAMES),
        layers=blocks(("attention", "mlp") * fields.size("num_hidden_layers", 32)),
        mixers=named(
            attention=attention, mlp=MLPConfig(**read_fields(llama.MLP, fields))
        ),
    )


def read_attention(fields: ConfigFields) -> AttentionConfig:
    """Reads attention with rotary embeddings, which all Granite 3 models have."""
    c = AttentionConfig(**read_fields(ATTENTION, fields))
    return replace(c, rope=hf.rope(fields, c.head_dim))


FAMILY = Family("granite", MODELS, NAMES, parse, exported="as granitemoehybrid")
