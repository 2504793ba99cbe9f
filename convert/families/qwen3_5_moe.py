"""Qwen3_5MoeForCausalLM (Qwen3.5, 3.6 and 3.8 with experts), also within a multimodal
model."""

from typing import Any

from stree_jax.convert.families import qwen3_5, qwen3_next
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.qwen3_next import Tables
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import ModelConfig

FORMAT = "qwen3_5_moe_text"
MODELS = "Qwen3.5, 3.6 and 3.8: Gated DeltaNet and attention, with experts"
NAMES = qwen3_5.NAMES

MODEL = qwen3_next.MODEL
ATTENTION = qwen3_next.ATTENTION
DELTA = qwen3_next.DELTA
MOE = qwen3_next.moe_table(256, 8)
SHARED = qwen3_next.SHARED
TABLES = Tables(MODEL, ATTENTION, DELTA, (), MOE, SHARED, 40)


def parse(fields: ConfigFields) -> ModelConfig:
    return qwen3_5.parse_text(fields, FORMAT, TABLES, "moe")


def parse_with_mtp(fields: ConfigFields) -> ModelConfig:
    return qwen3_5.parse_text(fields, FORMAT, TABLES, "moe", with_mtp=True)


def export(config: ModelConfig) -> dict[str, Any]:
    return qwen3_next.export_layers(FORMAT, "Qwen3_5MoeForCausalLM", TABLES, config)


def expresses(config: ModelConfig) -> bool:
    fits = alternates(config, qwen3_next.TYPES, {"moe"}) and "delta" in config.kinds
    return fits and config.mixers["moe"].shared_gate


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses, parse_with_mtp)
NESTED_FAMILY = FAMILY.also("qwen3_5_moe", f"{MODELS}, within a multimodal model")
