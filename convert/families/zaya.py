"""ZayaForCausalLM (ZAYA1 of Zyphra): compressed convolutional attention, with and
without a window, and experts whose router adds the vector of the router before it.

Both terms of every residual layer, and the embedding, have a bias and a scale of every
channel.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import read
from stree_jax.convert.families.family import Family, alternates, read_back
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import Names, Part, Path, Row, module_rows
from stree_jax.convert.families.windows import (
    WINDOW,
    effective,
    typed_rope,
    typed_rope_fields,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import CCAConfig, EDAMoEConfig, ModelConfig
from stree_jax.models.configs.params import ADDED, EMBEDDED, STREAM
from stree_jax.models.stack.config import blocks

FORMAT = "zaya"
MODELS = "ZAYA1: compressed convolutional attention (CCA) and experts"
FAR, SLIDES = "hybrid", "hybrid_sliding"
NEAR, FIRST = "cca_near", "moe_first"
KINDS: dict[str, str] = {FAR: "cca", SLIDES: NEAR}
TYPES = {ours: theirs for theirs, ours in KINDS.items()}
LAYERS, ROPES = "num_hidden_layers", "rope_parameters"
LONGEST = 131072  # default of `max_position_embeddings`
THETAS = {FAR: 5e6, SLIDES: 1e4}  # without `rope_parameters`
PARTIAL = "partial_rotary_factor"
TERMS = {ADDED: "hidden_states", STREAM: "residual"}


def affine_rows(ours: Path, theirs: str, terms: dict[str, str]) -> Iterator[Row]:
    """Yields a `Row` for the bias and the scale of each term."""
    for term, name in terms.items():
        for kind in ("scale", "bias"):
            yield Row((*ours, term, kind), (f"{theirs}{name}_{kind}",))


def cca_rows(ours: Path, layer: str, c: CCAConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of attention and of the sum after it."""
    yield from affine_rows(ours[:1], f"{layer}post_attention_residual_scale.", TERMS)
    theirs = f"{layer}self_attn"
    half = c.num_kv_heads * c.head_dim // 2
    sizes = (c.num_heads * c.head_dim, 2 * half, half, half)
    names = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")
    sources = (f"{theirs}.qkv_proj.{name}.weight" for name in names)
    yield Row((*ours, "qkv"), tuple(sources), "concat", sizes)
    yield Row((*ours, "out"), (f"{theirs}.o_proj.weight",))
    yield Row((*ours, "k_scale"), (f"{theirs}.qk_norm.temp",))
    conv = f"{theirs}.qkv_proj.conv_qk"
    yield Row((*ours, "conv_weight"), (f"{conv}_depthwise.weight",), "conv")
    yield Row((*ours, "conv_bias"), (f"{conv}_depthwise.bias",))
    yield Row((*ours, "head_conv_weight"), (f"{conv}_grouped.weight",), "transposed")
    yield Row((*ours, "head_conv_bias"), (f"{conv}_grouped.bias",))


def moe_rows(ours: Path, layer: str, c: EDAMoEConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of the experts and of the sum after them."""
    yield from affine_rows(ours[:1], f"{layer}post_mlp_residual_scale.", TERMS)
    gate, experts = f"{layer}mlp.gate", f"{layer}mlp.experts"
    yield from module_rows(ours, gate, {"router_in": "down_proj"})
    inner = {"router_1": "fc1", "router_2": "fc2", "router_out": "out_proj"}
    yield from module_rows(ours, f"{gate}.router_mlp", inner)
    for name, source in {
        "router_norm": f"{gate}.router_mlp.norm.weight",
        "router_average": f"{gate}.router_states_scale",
        "router_bias": f"{gate}.balancing_biases",
        "into": f"{experts}.gate_up_proj",
        "down": f"{experts}.down_proj",
    }.items():
        yield Row((*ours, name), (source,))


def embedding_rows(names: Names, config: ModelConfig) -> Iterator[Row]:
    """Yields a `Row` for the bias and the scale of the embedding."""
    prefix = names.norm.removesuffix("norm")
    yield from affine_rows((), prefix, {EMBEDDED: "input_hidden_states"})


NAMES = Names(
    embedding="model.embed_tokens",
    norm="model.norm",
    layer="model.layers.{i}.",
    mixer_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    parts={"cca": Part("", cca_rows), "moe": Part("", moe_rows)},
    shared_rows=embedding_rows,
)

MODEL = hf.model_table("rms_norm_eps", 1e-5, 2048, True)
HEADS = Field("num_attention_heads", "num_heads", read.size, 8)
CCA = (
    HEADS,
    Field("num_key_value_heads", "num_kv_heads", read.kv_heads(HEADS), 2),
    Field("head_dim", "head_dim", read.size, 128),
    Field("cca_time0", "d_conv", read.size, 2),
    Field("cca_time1", "d_head_conv", read.size, 2),
)
MOE = (
    Field("num_experts", "num_experts", read.size, 16),
    Field("moe_intermediate_size", "d_hidden", read.size, 2048),
    Field("router_hidden_size", "d_router", read.size, 256),
)


def parse(fields: ConfigFields) -> ModelConfig:
    hf.check_silu(fields)
    fields.choice("num_experts_per_tok", 1, (1,))
    for bias in ("attention_bias", "lm_head_bias"):
        fields.choice(bias, False, (False,))
    model, count = hf.read_model(MODEL, fields, NAMES), fields.size(LAYERS, 40)
    kinds = ("cca",) * count
    if fields.get("layer_types", None) is not None:
        kinds = hf.counted_layers(fields, "layer_types", KINDS, count)
    moe = EDAMoEConfig(**read_fields(MOE, fields), norm_eps=model["norm_eps"])
    mixers: dict[str, Any] = {k: _attention(fields, k) for k in dict.fromkeys(kinds)}
    mixers[FIRST] = replace(moe, averages=False)
    if count > 1:
        mixers["moe"] = moe
    seconds = (FIRST, *["moe"] * (count - 1))
    pairs = zip(kinds, seconds, strict=True)
    layers = blocks(f"{name}+affine" for pair in pairs for name in pair)
    return ModelConfig(**model, layers=layers, mixers=mixers)


def _attention(fields: ConfigFields, kind: str) -> CCAConfig:
    """Reads the attention of a type of layers."""
    theirs, c = TYPES[kind], CCAConfig(**read_fields(CCA, fields))
    if c.num_kv_heads * c.head_dim % 2:
        raise fields.error("head_dim", "want an even number of channels of v")
    ropes = fields.object(ROPES).values
    # Published configs also have a `rope_type` outside the types of layers.
    nested = {k: v for k, v in ropes.items() if k != "rope_type"}
    values = {**fields.values, ROPES: nested}
    default = {"rope_type": "default", PARTIAL: 0.5}
    args = (replace(fields, values=values), theirs, c.head_dim, THETAS[theirs])
    rope = typed_rope(*args, default, partial=1.0)
    if kind != NEAR:
        return replace(c, rope=rope)
    window = effective(fields, fields.size(WINDOW), LONGEST)
    return replace(c, rope=rope, window=window)


def export(config: ModelConfig) -> dict[str, Any]:
    kinds, moe = config.kinds[::2], config.mixers[FIRST]
    each = {k: config.mixers[k] for k in TYPES if k in config.mixers}
    require(FORMAT, {"lack of rotary": all(c.rope is not None for c in each.values())})
    first, near = next(iter(each.values())), each.get(NEAR)
    values: dict[str, Any] = {
        "architectures": ["ZayaForCausalLM"],
        **hf.write_model(FORMAT, MODEL, config),
        LAYERS: len(kinds),
        "layer_types": [TYPES[kind.partition("+")[0]] for kind in kinds],
        "hidden_act": "silu",
        WINDOW: None if near is None else near.window or LONGEST,
        **write_fields(FORMAT, CCA, first, ("rope", "window")),
        **write_fields(FORMAT, MOE, moe, ("norm_eps", "averages")),
        ROPES: {
            TYPES[kind]: {
                PARTIAL: c.rope.dim / c.head_dim,
                **typed_rope_fields(FORMAT, c.rope),
            }
            for kind, c in each.items()
        },
    }
    return read_back(FORMAT, NAMES, parse, config, values)


def expresses(config: ModelConfig) -> bool:
    return alternates(
        config,
        [f"{kind}+affine" for kind in TYPES],
        [f"{kind}+affine" for kind in (FIRST, "moe")],
    )


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
