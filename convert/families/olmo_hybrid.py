"""OlmoHybridForCausalLM (Olmo-Hybrid-7B): Gated DeltaNet and attention with MLPs.

Layers with Gated DeltaNet have norms before the mixer and the MLP, layers with
attention have them after. Norms of q and k are of all heads together. The strength of
a write is up to 2 (`linear_allow_neg_eigval`).

The norms of a layer have two spellings. The released model has the older one in layers
with Gated DeltaNet only. transformers 5.24 saves it in all layers, and reads both in
any layer. It also saves the convolution of q, k and v in three parts of almost equal
size, which are not q, k and v.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import read
from stree_jax.convert.families.family import Family
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import (
    Names,
    Part,
    Path,
    Row,
    attention_rows,
    mlp_rows,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, DeltaConfig, MLPConfig, ModelConfig
from stree_jax.models.stack.config import Block, named

FORMAT = "olmo_hybrid"
MODELS = "Olmo-Hybrid: Gated DeltaNet and attention"
KINDS: dict[str, str] = {"linear_attention": "delta", "full_attention": "attention"}
TYPES = {ours: theirs for theirs, ours in KINDS.items()}
NORM_EPS = 1e-5  # of the norm of each head's output; not in the config
CONV = re.compile(r"layers\.(\d+)\.linear_attn\.([qkv])_conv1d\.weight")
BEFORE, AFTER = "input_layernorm", "post_attention_layernorm"
OLDER = {"attention_layer_norm": BEFORE, "feedforward_layer_norm": AFTER}


def delta_rows(
    ours: Path, theirs: str, c: DeltaConfig, convs: tuple[int, ...] = ()
) -> Iterator[Row]:
    """Yields a `Row` for each parameter of Gated DeltaNet, for files with separate
    tensors for all projections.

    Args:
      ours: path of the parameters.
      theirs: prefix of the tensors' names.
      c: the config.
      convs: number of channels of each of the convolution's three tensors. If empty,
        the tensors are those of q, k and v.
    """
    key, inner, heads = c.d_key, c.d_inner, c.value_heads

    def tensors(letters: str, module: str) -> tuple[str, ...]:
        return tuple(f"{theirs}.{letter}_{module}.weight" for letter in letters)

    into = tensors("qkvg", "proj")
    yield Row((*ours, "in_proj"), into, "concat", (key, key, inner, inner), (0,) * 4)
    gates = tensors("ba", "proj")
    yield Row((*ours, "gates"), gates, "concat", (heads, heads), (0, 0))
    sizes = convs or (key, key, inner)
    yield Row((*ours, "conv_weight"), tensors("qkv", "conv1d"), "conv", sizes)
    for name in ("A_log", "dt_bias"):
        yield Row((*ours, name), (f"{theirs}.{name}",))
    yield Row((*ours, "norm"), (f"{theirs}.o_norm.weight",))
    yield Row((*ours, "out_proj"), (f"{theirs}.o_proj.weight",))


def spelled(names: Names, tensors: Collection[str]) -> Names:
    """Returns the names that a file uses; see `Names.spelling`."""
    ours = {
        name.replace(f".{o}.", f".{n}."): name
        for o, n in OLDER.items()
        for name in tensors
        if f".{o}." in name
    }
    names = replace(names, renamed=ours)
    if isinstance(tensors, Mapping) and (convs := _conv_sizes(tensors)):
        names = names.with_parts(
            delta=Part("linear_attn", partial(delta_rows, convs=convs))
        )
    return names


def _conv_sizes(tensors: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the channels of the three convolution tensors of the first layer that
    has them, or () if no layer does."""
    found = {m[2]: tensors[m.string] for m in map(CONV.search, tensors) if m}
    sizes = [found[letter].shape[0] for letter in "qkv" if letter in found]
    return tuple(sizes) if len(sizes) == 3 else ()


NAMES = Names(
    mixer_norm=BEFORE,
    mlp_norm=AFTER,
    norm_after_mixer=AFTER,
    norm_after_mlp="post_feedforward_layernorm",
    parts={
        "delta": Part("linear_attn", delta_rows),
        "attention": Part("self_attn", attention_rows),
        "mlp": Part("mlp", mlp_rows),
    },
    spelling=spelled,
)

MODEL = hf.model_table("rms_norm_eps", 1e-6, 3840)
HEADS = Field("num_attention_heads", "num_heads", read.size, 30)
KV_HEADS = Field("num_key_value_heads", "num_kv_heads", read.kv_heads(HEADS))
ATTENTION = (HEADS, KV_HEADS, *hf.BIASES)
MLP = (Field("intermediate_size", "d_hidden", read.size, 11008),)


def _heads(fields: ConfigFields, name: str, default: Any) -> int:
    return HEADS.value(fields) if fields.get(name, None) is None else fields.size(name)


def _key_dim(fields: ConfigFields, name: str, default: Any) -> int:
    if fields.get(name, None) is not None:
        return fields.size(name)
    heads = KEY_HEADS.value(fields)
    return int(0.75 * fields.size("hidden_size", 3840) / heads)


def _value_dim(fields: ConfigFields, name: str, default: Any) -> int:
    if fields.get(name, None) is not None:
        return fields.size(name)
    return 2 * KEY_DIM.value(fields)


def _beta_max(fields: ConfigFields, name: str, default: Any) -> float:
    return 2.0 if fields.flag(name, default) else 1.0


KEY_HEADS = Field("linear_num_key_heads", "key_heads", _heads)
KEY_DIM = Field("linear_key_head_dim", "key_dim", _key_dim)
DELTA = (
    KEY_HEADS,
    Field("linear_num_value_heads", "value_heads", _heads),
    KEY_DIM,
    Field("linear_value_head_dim", "value_dim", _value_dim),
    Field("linear_conv_kernel_dim", "d_conv", read.size, 4),
    Field(
        "linear_allow_neg_eigval", "beta_max", _beta_max, True, lambda most: most == 2.0
    ),
)


def rotates(fields: ConfigFields) -> bool:
    """True if attention has a rotary embedding.

    If its parameters are absent or null, there is no such embedding, as in the
    published model.
    transformers 5.24 uses a base of 10,000 in that case.
    """
    older, current = fields.object("rope_scaling"), fields.object("rope_parameters")
    values = older.values or current.values
    if values:
        return values.get("rope_theta", fields.get("rope_theta", None)) is not None
    return fields.get("rope_theta", None) is not None


def parse(fields: ConfigFields) -> ModelConfig:
    model = hf.read_model(MODEL, fields, NAMES)
    hf.check_silu(fields)
    count = fields.size("num_hidden_layers", 32)
    usual = [
        "full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)
    ]
    if "full_attention" not in usual:
        usual[-1] = "full_attention"
    name = "layer_types"
    if fields.get(name, None) is None:
        kinds = hf.named_layers(fields, name, KINDS, usual)
    else:
        kinds = hf.counted_layers(fields, name, KINDS, count)
    layers = tuple(
        Block((mixer,), norms="after" if kind == "attention" else "before")
        for kind in kinds
        for mixer in (kind, "mlp")
    )
    attention = delta = None
    if "attention" in kinds:
        attention = AttentionConfig(**read_fields((*ATTENTION, hf.HEAD_DIM), fields))
        rope = hf.rope(fields, attention.head_dim) if rotates(fields) else None
        attention = replace(
            attention, rope=rope, qk_norm_eps=model["norm_eps"], qk_norm_whole=True
        )
    if "delta" in kinds:
        delta = DeltaConfig(**read_fields(DELTA, fields), norm_eps=NORM_EPS)
    mlp = MLPConfig(**read_fields(MLP, fields))
    return ModelConfig(
        **model,
        layers=layers,
        mixers=named(attention=attention, delta=delta, mlp=mlp),
    )


def export(config: ModelConfig) -> dict[str, Any]:
    kinds = [block.mixers[0] for block in config.layers[::2]]
    delta, c = config.mixers["delta"], config.mixers.get("attention")
    values: dict[str, Any] = {
        "architectures": ["OlmoHybridForCausalLM"],
        **hf.write_model(FORMAT, MODEL, config),
        "num_hidden_layers": len(kinds),
        "layer_types": [TYPES[kind] for kind in kinds],
        "hidden_act": "silu",
        **write_fields(FORMAT, MLP, config.mixers["mlp"]),
        **write_fields(FORMAT, DELTA, delta, ("norm_eps",)),
    }
    require(FORMAT, {"norm epsilon of Gated DeltaNet": delta.norm_eps == NORM_EPS})
    if c is not None:
        hf.check_width(FORMAT, config, c)
        eps = c.qk_norm_eps
        require(FORMAT, {"attention norms of q and k": eps == config.norm_eps})
        elsewhere = ("rope", "qk_norm_eps", "qk_norm_whole")
        values |= write_fields(FORMAT, ATTENTION, c, elsewhere)
        rope = hf.rope_fields(FORMAT, c)
        values |= rope or {"rope_parameters": {"rope_theta": None}}
    return values


def expresses(config: ModelConfig) -> bool:
    pairs = set(zip(config.kinds[::2], config.kinds[1::2], strict=False))
    fits = pairs == {("delta", "mlp"), ("after:attention", "after:mlp")}
    return fits and len(config.layers) % 2 == 0


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
