"""Mamba-1 files of llama.cpp (`mamba`, which Falcon Mamba shares, and `jamba`): names
and metadata keys.

Sources: llama.cpp's `conversion/mamba.py` and `jamba.py`, its `models/mamba-base.cpp`
and `jamba.cpp`, and the `gguf` package's constants.
"""

from collections.abc import Iterator
from typing import Any

from stree_jax.convert.families import read
from stree_jax.convert.families.table import Field, read_fields
from stree_jax.convert.families.tensor_map import Part, Path, Row
from stree_jax.convert.gguf.keys import (
    FEED_FORWARD,
    HEADS,
    INNER,
    KV_HEADS,
    MLP,
    MOE,
    attention_config,
    attention_values,
    layer_count,
    mixers_of,
    mlp_config,
    model_options,
    model_values,
    per_layer,
    values_of,
    where,
)
from stree_jax.convert.gguf.names import HALVES, linear_rows
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import Mamba1Config, ModelConfig, MoEConfig
from stree_jax.models.stack.config import blocks, named

NORMED = "ssm.dt_b_c_rms"  # true for Falcon Mamba
NAMED = {
    "in_proj": "ssm_in",
    "out_proj": "ssm_out",
    "x_proj": "ssm_x",
    "conv": "ssm_conv1d",
}


def mamba1_rows(ours: Path, block: str, c: Mamba1Config) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a Mamba-1 mixer."""
    for row in linear_rows(ours, block, NAMED):
        name = row.path[-1]
        yield row if name != "conv" else Row((*ours, "conv_weight"), row.sources)
    yield Row((*ours, "dt_proj"), (f"{block}ssm_dt.weight",))
    yield Row((*ours, "dt_bias"), (f"{block}ssm_dt.bias",))
    yield Row((*ours, "A_log"), (f"{block}ssm_a",), "log")
    yield Row((*ours, "D"), (f"{block}ssm_d",))
    for name in ("dt", "B", "C"):
        yield Row((*ours, f"{name}_norm"), (f"{block}ssm_{name.lower()}_norm.weight",))


NAMES = HALVES.with_parts(mamba1=Part("", mamba1_rows))
MIXER = (
    Field(INNER, "d_inner", read.size),
    Field("ssm.time_step_rank", "dt_rank", read.size),
    Field("ssm.state_size", "d_state", read.size),
    Field("ssm.conv_kernel", "d_conv", read.size),
    Field("", "proj_in_bias", read.tensor("ssm_in.bias")),
    Field("", "proj_out_bias", read.tensor("ssm_out.bias")),
    Field("", "conv_bias", read.tensor("ssm_conv1d.bias")),
)


def parse(fields: ConfigFields) -> ModelConfig:
    """Parses the metadata of Mamba and Falcon Mamba. As in llama.cpp, the norms of dt,
    B and C have the same epsilon as all other norms, the only one that files have."""
    model = model_options(fields)
    options = read_fields(MIXER, fields)
    if fields.flag(NORMED, False):
        options |= {"norm": "plain", "norm_eps": model["norm_eps"]}
    layers: tuple[str, ...] = ("mamba1",) * layer_count(fields)
    return ModelConfig(
        **model,
        layers=blocks(layers),
        mixers=named(mamba1=Mamba1Config(**options)),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata of Mamba and Falcon Mamba: the inverse of `parse`."""
    mixer = config.mixers["mamba1"]
    values = model_values(config) | values_of(MIXER, mixer)
    normed = mixer.norm is not None
    return values | {FEED_FORWARD: 0, HEADS.name: 0, NORMED: normed}


def parse_jamba(fields: ConfigFields) -> ModelConfig:
    """Parses the metadata of Jamba. Layers without KV heads have Mamba-1 mixers. Layers
    with a router tensor have experts."""
    model, count = model_options(fields), layer_count(fields)
    heads = per_layer(fields, KV_HEADS, HEADS.value(fields))
    kinds = ["attention" if n else "mamba1" for n in heads]
    router = "ffn_gate_inp.weight"
    expert = [fields.has_tensor(router, f"blk.{i}.") for i in range(count)]
    attention = mixer = mlp = moe = None
    if "attention" in kinds:
        attention = attention_config(fields)
    if "mamba1" in kinds:
        options = read_fields(MIXER, fields)
        mixer = Mamba1Config(**options, norm="scaled", norm_eps=model["norm_eps"])
    if any(expert):
        moe = MoEConfig(**read_fields(MOE, fields), normalize=False)
    if not all(expert):
        mlp = mlp_config(fields)
    second = ["moe" if there else "mlp" for there in expert]
    each = tuple(name for pair in zip(kinds, second, strict=True) for name in pair)
    return ModelConfig(
        **model,
        layers=blocks(each),
        mixers=named(mamba1=mixer, attention=attention, mlp=mlp, moe=moe),
    )


def write_jamba(config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata of Jamba: the inverse of `parse_jamba`. llama.cpp reads one
    width for MLPs and experts."""
    c, mlp, moe = (config.mixers.get(name) for name in ("attention", "mlp", "moe"))
    assert c is not None  # of `architectures.Architecture.layers`
    values = model_values(config) | attention_values(c)
    values |= values_of(MIXER, config.mixers["mamba1"])
    values[KV_HEADS] = where(mixers_of(config), "attention", c.num_kv_heads)
    if moe is not None:
        values |= values_of(MOE[:2], moe) | {FEED_FORWARD: moe.d_hidden}
    return values if mlp is None else values | values_of(MLP, mlp)
