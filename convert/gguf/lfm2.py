"""LFM2 files of llama.cpp (`lfm2`, `lfm2moe`): names and metadata keys.

Sources: llama.cpp's `conversion/lfm2.py` and its `models/lfm2.cpp`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stree_jax.convert.families import read
from stree_jax.convert.families.lfm2_moe import NORMALIZE_EPS
from stree_jax.convert.families.table import Field, read_fields
from stree_jax.convert.families.tensor_map import Part, Path, Row
from stree_jax.convert.gguf.keys import (
    GATING,
    HEADS,
    KV_HEADS,
    MLP,
    MOE,
    SIGMOID,
    attention_config,
    attention_values,
    layer_count,
    mixers_of,
    mlp_config,
    model_options,
    model_values,
    per_layer,
    second_of,
    values_of,
    where,
)
from stree_jax.convert.gguf.names import HALVES, linear_rows
from stree_jax.convert.gguf.rotary import rope, rope_values
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import ModelConfig, MoEConfig, ShortConvConfig
from stree_jax.models.stack.config import blocks, named

DENSE = "leading_dense_block_count"
CONV = (
    Field("shortconv.l_cache", "d_conv", read.size),
    Field("", "bias", read.tensor("shortconv.conv.bias")),
)


def conv_rows(ours: Path, block: str, c: ShortConvConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a gated short convolution."""
    names = {name: f"shortconv.{name}" for name in ("in_proj", "out_proj")}
    yield from linear_rows(ours, block, names)
    for param, ending in (("conv_weight", "weight"), ("conv_bias", "bias")):
        yield Row((*ours, param), (f"{block}shortconv.conv.{ending}",))


NAMES = replace(
    HALVES.with_parts(short_conv=Part("", conv_rows)), norm="token_embd_norm"
)


def parse(fields: ConfigFields) -> ModelConfig:
    """Parses the metadata. Layers without KV heads are convolutions; layers from
    `leading_dense_block_count` on have experts if there are any."""
    model = model_options(fields)
    heads = per_layer(fields, KV_HEADS, HEADS.value(fields))
    kinds = ["attention" if n else "short_conv" for n in heads]
    attention = conv = mlp = moe = None
    if "attention" in kinds:
        attention = attention_config(fields)
        attention = replace(
            attention,
            rope=rope(fields, attention.head_dim),
            qk_norm_eps=model["norm_eps"],
        )
    if "short_conv" in kinds:
        conv = ShortConvConfig(model["d_model"], **read_fields(CONV, fields))
    count = dense = layer_count(fields)
    if fields.size("expert_count", 0, low=0):
        dense = min(fields.size(DENSE, 0, low=0), count)
        fields.choice(GATING, SIGMOID, (SIGMOID,))
        moe = MoEConfig(
            **read_fields(MOE, fields), router="sigmoid", normalize_eps=NORMALIZE_EPS
        )
    if dense:
        mlp = mlp_config(fields)
    second = ("mlp",) * dense + ("moe",) * (count - dense)
    each = tuple(name for pair in zip(kinds, second, strict=True) for name in pair)
    return ModelConfig(
        **model,
        layers=blocks(each),
        mixers=named(short_conv=conv, attention=attention, mlp=mlp, moe=moe),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata: the inverse of `parse`."""
    c, mlp, moe = (config.mixers.get(name) for name in ("attention", "mlp", "moe"))
    assert c is not None  # of `architectures.Architecture.layers`
    values = model_values(config) | attention_values(c) | rope_values(c.rope)
    values |= values_of(CONV, config.mixers["short_conv"])
    values[KV_HEADS] = where(mixers_of(config), "attention", c.num_kv_heads)
    if mlp is not None:
        values |= values_of(MLP, mlp)
    if moe is not None:
        dense = second_of(config).count("mlp")
        values |= values_of(MOE, moe) | {GATING: SIGMOID, DENSE: dense}
    return values
