"""Lfm2ForCausalLM (LFM2 and LFM2.5 of Liquid AI): gated short convolutions and
attention, each followed by an MLP.

`lfm2_moe` has the same layers with experts, so it shares this code.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import read
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import (
    Names,
    Part,
    Path,
    Row,
    attention_rows,
    mlp_rows,
    module_rows,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import (
    AttentionConfig,
    MLPConfig,
    ModelConfig,
    ShortConvConfig,
)
from stree_jax.models.stack.config import blocks, named

FORMAT = "lfm2"
MODELS = "LFM2 and LFM2.5: short convolutions and attention"
KINDS: dict[str, str] = {"conv": "short_conv", "full_attention": "attention"}
TYPES = {ours: theirs for theirs, ours in KINDS.items()}
WORDS = {"gate": "w1", "up": "w3", "down": "w2"}


def conv_rows(ours: Path, theirs: str, c: ShortConvConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a gated short convolution."""
    modules = {name: name for name in ("in_proj", "out_proj")}
    yield from module_rows(ours, theirs, modules)
    yield Row((*ours, "conv_weight"), (f"{theirs}.conv.weight",), "conv")
    yield Row((*ours, "conv_bias"), (f"{theirs}.conv.bias",))


def qk_rows(ours: Path, theirs: str, c: AttentionConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of attention. This family calls the output
    projection "out_proj" and the norms of q and k "q_layernorm" and "k_layernorm"."""
    for row in attention_rows(ours, theirs, c):
        names = (
            name.replace(".o_proj.", ".out_proj.").replace("_norm.", "_layernorm.")
            for name in row.sources
        )
        yield replace(row, sources=tuple(names))


def w_rows(ours: Path, theirs: str, c: MLPConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of an MLP. This family calls gate, up and down
    "w1", "w3" and "w2"."""
    for row in mlp_rows(ours, theirs, c):
        yield replace(row, sources=tuple(map(_by_number, row.sources)))


def _by_number(name: str) -> str:
    for word, number in WORDS.items():
        name = name.replace(f".{word}_proj.", f".{number}.")
    return name


NAMES = Names(
    norm="model.embedding_norm",
    mixer_norm="operator_norm",
    mlp_norm="ffn_norm",
    parts={
        "short_conv": Part("conv", conv_rows),
        "attention": Part("self_attn", qk_rows),
        "mlp": Part("feed_forward", w_rows),
    },
)

MODEL = hf.model_table("norm_eps", 1e-5, 2560, True)
ATTENTION = (
    Field("num_attention_heads", "num_heads", read.size, 32),
    Field(
        "num_key_value_heads",
        "num_kv_heads",
        read.kv_heads(Field("num_attention_heads", "num_heads", read.size, 32)),
        8,
    ),
    hf.HEAD_DIM,
)
CONV = (
    Field("conv_L_cache", "d_conv", read.size, 3),
    Field("conv_bias", "bias", read.flag, False),
)
THETA = 1e6  # default base of the rotary embedding


def mixer_kinds(fields: ConfigFields) -> hf.Layers:
    """Reads which layers are convolutions and which are attention."""
    count = fields.size("num_hidden_layers", 32)
    if fields.get("layer_types", None) is not None:
        return hf.counted_layers(fields, "layer_types", KINDS, count)
    if fields.get("full_attn_idxs", None) is None:
        return ("attention",) * count
    chosen = fields.chosen_layers("full_attn_idxs", count)
    return tuple("attention" if i in chosen else "short_conv" for i in range(count))


def renamed(fields: ConfigFields) -> ConfigFields:
    """Returns the fields with older names replaced by current ones. If a config has
    both, the value under the older name is used, as in transformers."""
    values = dict(fields.values)
    older = {
        "tie_embedding": "tie_word_embeddings",
        "block_ff_dim": "intermediate_size",
    }
    for old, new in older.items():
        if old in values:
            values[new] = values.pop(old)
    if not any(name in values for name in ("rope_parameters", "rope_theta")):
        values["rope_theta"] = THETA
    return replace(fields, values=values)


def parse_layers(fields: ConfigFields, second: hf.Layers, **mixers: Any) -> ModelConfig:
    """Parses the config of a model. `lfm2` and `lfm2_moe` share this code.

    Args:
      fields: the fields of the config file, the result of `renamed`.
      second: for each layer, what follows its mixer: "mlp" or "moe".
      **mixers: the configs of the MLP and of the experts, under these names.
    """
    model = hf.read_model(MODEL, fields, NAMES)
    kinds = mixer_kinds(fields)
    if "short_conv" in kinds:
        channels = model["d_model"]
        conv = ShortConvConfig(channels=channels, **read_fields(CONV, fields))
        mixers["short_conv"] = conv
    if "attention" in kinds:
        attention = AttentionConfig(**read_fields(ATTENTION, fields))
        rope = hf.rope(fields, attention.head_dim)
        eps = model["norm_eps"]
        mixers["attention"] = replace(attention, rope=rope, qk_norm_eps=eps)
    each = tuple(name for pair in zip(kinds, second, strict=True) for name in pair)
    return ModelConfig(**model, layers=blocks(each), mixers=named(**mixers))


def mlp_width(fields: ConfigFields) -> int:
    """Reads the hidden width of the MLPs, which may be adjusted as in Llama."""
    width = fields.size("intermediate_size", 12288)
    if not fields.truth("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    multiplier, of = fields.get("block_ffn_dim_multiplier", 1.0), 1
    if multiplier is not None:
        width = int(fields.positive("block_ffn_dim_multiplier", 1.0) * width)
        of = fields.size("block_multiple_of", 256)
    return -(-width // of) * of


def parse(fields: ConfigFields) -> ModelConfig:
    fields = renamed(fields)
    count = fields.size("num_hidden_layers", 32)
    return parse_layers(fields, ("mlp",) * count, mlp=MLPConfig(mlp_width(fields)))


def export_layers(format: str, config: ModelConfig) -> dict[str, Any]:
    """Writes the fields that `parse_layers` reads."""
    kinds = config.kinds[::2]
    conv, attention = (config.mixers.get(n) for n in ("short_conv", "attention"))
    values: dict[str, Any] = {
        **hf.write_model(format, MODEL, config),
        "num_hidden_layers": len(kinds),
        "layer_types": [TYPES[kind] for kind in kinds],
        "num_attention_heads": 1,  # any valid value if there is no attention
    }
    if conv is not None:
        require(format, {"convolution's width": conv.channels == config.d_model})
        values |= write_fields(format, CONV, conv, ("channels",))
    if attention is not None:
        eps = attention.qk_norm_eps
        require(
            format,
            {
                "attention norms of q and k": eps == config.norm_eps,
                "lack of rotary": attention.rope is not None,
            },
        )
        hf.check_width(format, config, attention)
        written = write_fields(format, ATTENTION, attention, ("rope", "qk_norm_eps"))
        values |= written | hf.rope_fields(format, attention)
        del values["head_dim"]
    return values


def export(config: ModelConfig) -> dict[str, Any]:
    mlp = config.mixers["mlp"]
    return {
        "architectures": ["Lfm2ForCausalLM"],
        **export_layers(FORMAT, config),
        **write_fields(FORMAT, (WIDTH,), mlp),
        "block_auto_adjust_ff_dim": False,
    }


WIDTH = Field("intermediate_size", "d_hidden", read.size, 12288)


def expresses(config: ModelConfig) -> bool:
    fits = alternates(config, TYPES, {"mlp"})
    return fits and "short_conv" in config.kinds


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
