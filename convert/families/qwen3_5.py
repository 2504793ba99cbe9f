"""Qwen3_5ForCausalLM (Qwen3.5, 3.6 and 3.8, dense), also within a multimodal model.

The layers are those of `qwen3_next`; the projections of Gated DeltaNet are separate
tensors. The vision encoder of a multimodal model is left out.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import qwen3_next, read
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.qwen3_next import Tables
from stree_jax.convert.families.table import Field
from stree_jax.convert.families.tensor_map import Part, Path, Row
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import ModelConfig
from stree_jax.models.configs.delta import DeltaConfig

FORMAT = "qwen3_5_text"
MODELS = "Qwen3.5, 3.6 and 3.8: Gated DeltaNet and attention, dense"
TEXT = "text_config"  # fields of the language model of a multimodal model
# Fields that files have outside `text_config` as well as in it.
SHARED_FIELDS = ("eos_token_id", *qwen3_next.MTP_COUNTS)
TIED = "tie_word_embeddings"


def delta_rows(ours: Path, theirs: str, c: DeltaConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of Gated DeltaNet. The file has one tensor for
    q, k and v, and one tensor each for z, b and a."""
    for param, modules, sizes in (
        ("in_proj", ("in_proj_qkv", "in_proj_z"), (c.d_qkv, c.d_inner)),
        ("gates", ("in_proj_b", "in_proj_a"), (c.value_heads, c.value_heads)),
    ):
        sources = tuple(f"{theirs}.{module}.weight" for module in modules)
        yield Row((*ours, param), sources, "concat", sizes)
    yield from qwen3_next.inner_delta_rows(ours, theirs)


NAMES = replace(
    qwen3_next.NAMES.with_parts(delta=Part("linear_attn", delta_rows)),
    left_out=("model.visual.",),
)

MODEL = hf.model_table("rms_norm_eps", 1e-6, 4096)
ATTENTION = qwen3_next.attention_table(4)
DELTA = qwen3_next.DELTA
MLP = (Field("intermediate_size", "d_hidden", read.size, 12288),)
TABLES = Tables(MODEL, ATTENTION, DELTA, MLP, (), (), 32)


def parse(fields: ConfigFields) -> ModelConfig:
    return parse_text(fields, FORMAT, TABLES, "mlp")


def parse_with_mtp(fields: ConfigFields) -> ModelConfig:
    return parse_text(fields, FORMAT, TABLES, "mlp", with_mtp=True)


def parse_text(
    fields: ConfigFields,
    format: str,
    tables: Tables,
    second: str,
    with_mtp: bool = False,
) -> ModelConfig:
    """Reads a language model, alone or within a multimodal model.

    Args:
      fields: the fields of the config file.
      format: `model_type` of the language model.
      tables: the family's tables.
      second: what follows the mixer of every layer, "mlp" or "moe".
      with_mtp: True to read the MTP layers.
    """
    if fields.get("model_type") != format:
        fields = text_fields(fields, format)
    mtp = qwen3_next.mtp_layers(fields) if with_mtp else ()
    count = fields.size("num_hidden_layers", tables.layers)
    return qwen3_next.parse_layers(fields, tables, NAMES, [second] * count, mtp)


def text_fields(fields: ConfigFields, format: str) -> ConfigFields:
    """Returns the fields of a multimodal model's language model, including those that
    the file has outside `text_config`.

    The embeddings are tied if either place says so. Where a file has a head of its own
    that differs, `tensors.settle_names` unties them.
    """
    fields.get(TEXT)  # raises if it is missing
    text = fields.object(TEXT)
    text.choice("model_type", format, (format,))
    names = (name for name in SHARED_FIELDS if text.get(name, None) is None)
    outside = {name: fields.get(name, None) for name in names}
    tied = fields.flag(TIED, False) or text.flag(TIED, False)
    return replace(text, values={**text.values, **outside, TIED: tied})


def export(config: ModelConfig) -> dict[str, Any]:
    return qwen3_next.export_layers(FORMAT, "Qwen3_5ForCausalLM", TABLES, config)


def expresses(config: ModelConfig) -> bool:
    fits = alternates(config, qwen3_next.TYPES, {"mlp"})
    return fits and "delta" in config.kinds


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses, parse_with_mtp)
NESTED_FAMILY = FAMILY.also("qwen3_5", f"{MODELS}, within a multimodal model")
