"""A checkpoint family for tests: the MLP of each layer comes before its attention.

A test registers it with `families()[TOY.name] = TOY`.
"""

from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import llama
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import read_fields
from stree_jax.convert.families.tensor_map import Names
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig
from stree_jax.models.stack.config import blocks, named

NAMES = Names(
    embedding="toy.tokens",
    norm="toy.last_norm",
    layer="toy.half_layers.{i}.",
    mixer_norm="norm",
    mlp_norm="norm",
    parts=llama.NAMES.parts,
    numbers_every_layer=True,
)


def parse(fields: ConfigFields) -> ModelConfig:
    c = AttentionConfig(**read_fields(llama.ATTENTION, fields))
    return ModelConfig(
        **hf.read_model(llama.MODEL, fields, NAMES),
        layers=blocks(("mlp", "attention") * fields.size("num_hidden_layers")),
        mixers=named(
            attention=replace(c, rope=hf.rope(fields, c.head_dim)),
            mlp=MLPConfig(**read_fields(llama.MLP, fields)),
        ),
    )


def export(config: ModelConfig) -> dict[str, Any]:
    return llama.export_dense("toy", config, llama.ATTENTION, llama.MLP)


def expresses(config: ModelConfig) -> bool:
    return alternates(config, {"mlp"}, {"attention"})


TOY = Family("toy", "Toys", NAMES, parse, export, expresses)
