"""Gemma4ForCausalLM and Gemma4UnifiedForCausalLM (Gemma 4), also within a multimodal
model: attention with and without a window, of two head sizes, and MLPs.

Layers end with a factor of the residual stream. The last layers may read the keys and
values of earlier ones (`num_kv_shared_layers`), each layer may add a small vector of
the token (`hidden_size_per_layer_input`), and experts may run next to the MLP
(`enable_moe_block`). Encoders of images and sound are left out.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from stree_jax.convert.families import gemma3, read
from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families.family import Family, read_back
from stree_jax.convert.families.gemma3 import FULL, KINDS, NESTED, TYPES
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import (
    Names,
    Part,
    Path,
    Row,
    attention_rows,
    mlp_rows,
    module_rows,
    nested,
    norm_rows,
)
from stree_jax.convert.families.windows import (
    NEAR,
    SLIDES,
    WINDOW,
    effective,
    typed_rope,
    typed_rope_fields,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import (
    AttentionConfig,
    KVReaderConfig,
    MLPConfig,
    MLPMoEConfig,
    ModelConfig,
    MoEConfig,
    PerLayerConfig,
)
from stree_jax.models.stack.config import Block, blocks
from stree_jax.models.stack.config_json import MAX_SIZE
from stree_jax.models.stack.param_table import PER_LAYER, per_layer_sizes

FORMAT, UNIFIED = "gemma4_text", "gemma4_unified_text"
MODELS = "Gemma 4 (E2B, E4B, 26B-A4B, 31B): attention with and without a window"
READERS = {kind: f"{kind}_reader" for kind in KINDS.values()}
SHARED, WIDE = "num_kv_shared_layers", "use_double_wide_mlp"
INPUT, INPUT_ROWS = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
EXPERTS, BY_LAYER = "enable_moe_block", "per_layer_config"
K_IS_V, FAR_DIM, FAR_KV = (
    "attention_k_eq_v",
    "global_head_dim",
    "num_global_key_value_heads",
)
# Defaults that differ between the two classes.
USUAL = {
    FORMAT: {WINDOW: 512, hf.POSITIONS: 131072, INPUT: 256},
    UNIFIED: {WINDOW: 1024, hf.POSITIONS: 262144, INPUT: 0},
}
ROPES: dict[str, dict[str, Any]] = {  # defaults by type of layers
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    SLIDES: {"rope_type": "default"},
}
THETAS = {FULL: 1e6, SLIDES: 1e4}


def qkv_rows(ours: Path, theirs: str, c: AttentionConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of attention, which may lack v."""
    for row in attention_rows(ours, theirs, c):
        if c.k_is_v and row.path[-1] == "qkv":
            row = replace(row, sources=row.sources[:2], sizes=row.sizes[:2])
        yield row


def reader_rows(ours: Path, theirs: str, c: KVReaderConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of attention with another layer's keys."""
    yield from module_rows(ours, theirs, {"q": "q_proj", "out": "o_proj"})
    yield Row((*ours, "q_norm"), (f"{theirs}.q_norm.weight",))


def per_layer_rows(ours: Path, layer: str, c: PerLayerConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a layer's mixer of per-layer inputs."""
    yield Row((*ours, "gate"), (f"{layer}per_layer_input_gate.weight",))
    yield Row((*ours, "out"), (f"{layer}per_layer_projection.weight",))


def mlp_moe_rows(ours: Path, layer: str, c: MLPMoEConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of an MLP and experts side by side."""
    yield from mlp_rows((*ours, "mlp"), f"{layer}mlp", c.mlp)
    for param, tensor in {
        "router": "router.proj.weight",
        "router_scale": "router.scale",
        "expert_scale": "router.per_expert_scale",
        "into": "experts.gate_up_proj",
        "down": "experts.down_proj",
    }.items():
        yield Row((*ours, param), (layer + tensor,))
    for norm, tensor in {
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_norm_after": "post_feedforward_layernorm_1",
        "moe_norm": "pre_feedforward_layernorm_2",
        "moe_norm_after": "post_feedforward_layernorm_2",
    }.items():
        yield from norm_rows((*ours, norm), layer + tensor)


def input_rows(names: Names, config: ModelConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of the per-layer inputs."""
    prefix = names.norm.removesuffix("norm")
    embedding, projection = "embed_tokens_per_layer", "per_layer_model_projection"
    yield Row((PER_LAYER, "embedding"), (f"{prefix}{embedding}.weight",))
    yield Row((PER_LAYER, "projection"), (f"{prefix}{projection}.weight",))
    yield from norm_rows((PER_LAYER, "norm"), f"{prefix}per_layer_projection_norm")


KEYS = tuple(f"self_attn.{name}" for name in ("k_proj", "v_proj", "k_norm", "v_norm"))


def unread_keys(
    names: Names, config: ModelConfig, parts: tuple[str, ...] = KEYS
) -> Iterator[str]:
    """Yields prefixes of the names of keys and values that published files have for
    layers that read those of other layers.

    Args:
      names: the names of the tensors.
      config: the architecture.
      parts: names of the keys, the values and their norms within a layer.
    """
    for i, kind in enumerate(_token_mixers(config)):
        if kind in READERS.values():
            yield from (f"{names.layer.format(i=i)}{part}." for part in parts)


NAMES = replace(
    gemma3.NAMES,
    norm_how="copy",
    norms={PER_LAYER: "post_per_layer_input_norm"},
    scalar="layer_scalar",
    shared_rows=input_rows,
    unread=unread_keys,
    parts={
        **dict.fromkeys(READERS, Part("self_attn", qkv_rows)),
        **dict.fromkeys(READERS.values(), Part("self_attn", reader_rows)),
        **dict.fromkeys(("mlp", "mlp_wide"), Part("mlp", mlp_rows)),
        "mlp_moe": Part("", mlp_moe_rows),
        PER_LAYER: Part("", per_layer_rows),
    },
    left_out=tuple(
        f"model.{part}."
        for part in (
            *("vision_tower", "vision_embedder", "embed_vision"),
            *("audio_tower", "embed_audio"),
        )
    ),
)


def _cap(fields: ConfigFields, name: str, default: Any) -> float:
    return 0.0 if fields.get(name, None) is None else fields.positive(name)


MODEL = (
    *hf.model_table("rms_norm_eps", 1e-6, 2304, True),
    Field("final_logit_softcapping", "logits_cap", _cap, 0.0, lambda cap: cap or None),
)
HEADS = Field("num_attention_heads", "num_heads", read.size, 8)
ATTENTION = (
    HEADS,
    Field("num_key_value_heads", "num_kv_heads", read.kv_heads(HEADS), 4),
    Field("head_dim", "head_dim", read.size, 256),
)
FAR_ATTENTION = (
    HEADS,
    Field(FAR_KV, "num_kv_heads", read.kv_heads(HEADS)),
    Field(FAR_DIM, "head_dim", read.size, 512),
    Field(K_IS_V, "k_is_v", read.flag, False),
)
MLP = (Field("intermediate_size", "d_hidden", read.size, 9216),)
MOE = (
    Field("num_experts", "num_experts", read.size),
    Field("top_k_experts", "top_k", read.size),
    Field("moe_intermediate_size", "d_hidden", read.size),
)


def parse(fields: ConfigFields) -> ModelConfig:
    if str(fields.get("model_type")) not in USUAL:
        fields = gemma3.text_fields(fields, tuple(USUAL), NAMES.left_out)
    fields = _with_defaults(fields)
    _check_supported(fields)
    model = hf.read_model(MODEL, fields, NAMES, *(nested(NAMES, p) for p in NESTED))
    count = fields.size("num_hidden_layers", 30)
    kinds = _kinds(fields, count)
    shared = fields.size(SHARED, 0, low=0, top=count - 1)
    if {*kinds[: count - shared]} != {*kinds}:
        raise fields.error(SHARED, "a type of layers has no keys and values to read")
    mixers = _attention(fields, model["norm_eps"], kinds)
    for kind in dict.fromkeys(kinds[count - shared :]):
        mixers[READERS[kind]] = _reader(kind, mixers[kind])
    mixers |= _channel_mixers(fields, model["norm_eps"], shared)
    if width := fields.size(INPUT, low=0, top=MAX_SIZE):
        mixers[PER_LAYER] = PerLayerConfig(width)
        rows = fields.size(INPUT_ROWS, model["vocab_size"], top=MAX_SIZE)
        if rows != model["vocab_size"]:
            raise fields.error(INPUT_ROWS, f"{rows} is not {model['vocab_size']}")
    return ModelConfig(
        **model,
        embedding_multiplier=math.sqrt(model["d_model"]),
        layers=blocks(_layers(kinds, count - shared, mixers)),
        mixers=mixers,
    )


def _layers(kinds: hf.Layers, own: int, mixers: dict[str, Any]) -> Iterator[str]:
    """Yields the layers; those from number `own` on read the keys of others."""
    for i, kind in enumerate(kinds):
        mlp = "mlp_wide" if "mlp_wide" in mixers and i >= own else "mlp"
        last = "after:mlp_moe" if "mlp_moe" in mixers else f"both:{mlp}"
        yield f"both:{kind if i < own else READERS[kind]}"
        if PER_LAYER in mixers:
            yield last
            last = f"after:{PER_LAYER}"
        yield f"{last}+scaled"


def _with_defaults(fields: ConfigFields) -> ConfigFields:
    """Returns the fields with the defaults of their class, and with the head sizes of
    layers without a window from `per_layer_config`, where newer files have them."""
    given = {name: v for name, v in fields.values.items() if v is not None}
    usual = USUAL[fields.get("model_type")]
    values, kv = {**usual, **given}, given.get("num_key_value_heads", 4)
    fields = replace(fields, values=values)
    if values.pop(BY_LAYER, None) is not None:
        count = fields.size("num_hidden_layers", 30)
        far = _far_sizes(replace(fields, values=given), _kinds(fields, count))
        values[FAR_DIM] = far.get("head_dim", given.get("head_dim", 256))
        values[FAR_KV] = far.get("num_key_value_heads", kv)
    elif not fields.flag(K_IS_V, False):
        values[FAR_KV] = kv
    return replace(fields, values={FAR_KV: kv, **values})


def _far_sizes(fields: ConfigFields, kinds: Sequence[str]) -> dict[str, Any]:
    """Reads what `per_layer_config` says of the layers without a window, which must be
    the same for all of them."""
    sizes = fields.object(BY_LAYER)
    known = {"head_dim", "num_key_value_heads"}
    by_number = {int(i): v for i, v in sizes.values.items() if str(i).isdecimal()}
    wanted = {i for i, kind in enumerate(kinds) if kind != NEAR}
    each = [by_number.get(i) for i in sorted(wanted)]
    same = all(v == each[0] for v in each)
    fits = isinstance(each[0], dict) and each[0].keys() <= known if by_number else True
    if by_number.keys() - wanted or len(by_number) != len(sizes.values) or not fits:
        raise fields.error(BY_LAYER, "is supported for sizes of layers without windows")
    if not same:
        raise fields.error(BY_LAYER, "layers of one type with different sizes")
    return each[0] or {}


def _check_supported(fields: ConfigFields) -> None:
    activation = "gelu_pytorch_tanh"
    fields.choice("hidden_activation", activation, (activation,))
    # "vision" changes only what image tokens see.
    fields.choice("use_bidirectional_attention", "vision", ("vision",))
    fields.choice("attention_bias", False, (False,))
    if fields.get("model_type") == UNIFIED:
        fields.choice(INPUT, 0, (0,))
        fields.choice(EXPERTS, False, (False,))


def _kinds(fields: ConfigFields, count: int) -> hf.Layers:
    """Reads which layers have a window. The last one has none, as in transformers."""
    if fields.get("layer_types", None) is not None:
        kinds = hf.counted_layers(fields, "layer_types", KINDS, count)
    else:
        kinds = tuple(NEAR if (i + 1) % 6 else "attention" for i in range(count))
    return (*kinds[:-1], "attention")


def _attention(fields: ConfigFields, eps: float, kinds: hf.Layers) -> dict[str, Any]:
    """Reads the attention of each type of layers that the model has."""
    options: Any = {"scale": 1.0, "qk_norm_eps": eps, "v_norm": True}
    mixers = {}
    for kind in (NEAR, "attention"):
        if kind in kinds:
            theirs = TYPES[kind]
            table = FAR_ATTENTION if kind == "attention" else ATTENTION
            c = AttentionConfig(**read_fields(table, fields), **options)
            args = (fields, theirs, c.head_dim, THETAS[theirs], ROPES[theirs])
            mixers[kind] = replace(c, rope=typed_rope(*args))
    if NEAR in kinds:
        longest = fields.size(hf.POSITIONS)
        window = effective(fields, fields.size(WINDOW), longest)
        mixers[NEAR] = replace(mixers[NEAR], window=window)
    return mixers


def _reader(kind: str, c: AttentionConfig) -> KVReaderConfig:
    """Returns attention that reads the keys and values of layers with the mixer
    `kind`."""
    assert c.qk_norm_eps is not None
    sizes = (c.num_heads, c.num_kv_heads, c.head_dim, c.qk_norm_eps)
    return KVReaderConfig(kind, *sizes, c.rope, c.scale, c.window)


def all_readers(config: ModelConfig) -> tuple[tuple[Block, ...], dict[str, Any]]:
    """Returns the layers and mixers of the same model if all its attention layers read
    the keys and values of another model's layers of the same type."""
    kinds = [kind for kind in READERS if kind in config.mixers]
    read = {READERS[kind]: _reader(kind, config.mixers[kind]) for kind in kinds}
    mixers = {name: c for name, c in config.mixers.items() if name not in kinds}
    layers = (
        replace(block, mixers=tuple(READERS.get(name, name) for name in block.mixers))
        for block in config.layers
    )
    return tuple(layers), mixers | read


def _channel_mixers(fields: ConfigFields, eps: float, shared: int) -> dict[str, Any]:
    """Reads the MLPs, or the MLP with experts."""
    mlp = MLPConfig(**read_fields(MLP, fields), activation="gelu_tanh")
    wide = fields.flag(WIDE, False) and shared > 0
    if fields.flag(EXPERTS, False):
        if wide:
            raise fields.error(WIDE, "next to experts is not supported")
        moe = MoEConfig(**read_fields(MOE, fields), activation="gelu_tanh")
        return {"mlp_moe": MLPMoEConfig(mlp, moe, eps)}
    twice = replace(mlp, d_hidden=2 * mlp.d_hidden)
    return {"mlp": mlp, "mlp_wide": twice} if wide else {"mlp": mlp}


def _token_mixers(config: ModelConfig) -> list[str]:
    """Returns the attention mixer of each layer of the file."""
    known = {*READERS, *READERS.values()}
    return [b.mixers[0] for b in config.layers if b.mixers[0] in known]


def export(config: ModelConfig) -> dict[str, Any]:
    kinds = _token_mixers(config)
    sources = {reader: kind for kind, reader in READERS.items()}
    require(FORMAT, {"attention": "attention" in config.mixers})
    far, experts = config.mixers["attention"], config.mixers.get("mlp_moe")
    near = config.mixers.get(NEAR, far)
    mlp = config.mixers["mlp"] if experts is None else experts.mlp
    of_mixers = ("rope", "window", "scale", "qk_norm_eps", "v_norm")
    ropes = {FULL: far.rope, SLIDES: near.rope}
    values: dict[str, Any] = {
        "architectures": ["Gemma4ForCausalLM"],
        **hf.write_model(FORMAT, MODEL, replace(config, embedding_multiplier=1.0)),
        "num_hidden_layers": len(kinds),
        "layer_types": [TYPES[sources.get(kind, kind)] for kind in kinds],
        SHARED: sum(kind in sources for kind in kinds),
        WIDE: "mlp_wide" in config.mixers,
        "hidden_activation": "gelu_pytorch_tanh",
        **write_fields(FORMAT, MLP, mlp, ("activation",)),
        **write_fields(FORMAT, FAR_ATTENTION, far, of_mixers),
        **write_fields(FORMAT, ATTENTION, near, (*of_mixers, "k_is_v")),
        WINDOW: near.window or USUAL[FORMAT][hf.POSITIONS],
        "rope_parameters": {
            kind: typed_rope_fields(FORMAT, rope)
            for kind, rope in ropes.items()
            if rope is not None
        },
        INPUT: per_layer_sizes(config)[1],
        INPUT_ROWS: config.vocab_size,
        EXPERTS: experts is not None,
    }
    if experts is not None:
        values |= write_fields(FORMAT, MOE, experts.moe, ("activation",))
    return read_back(FORMAT, NAMES, parse, config, values)


def expresses(config: ModelConfig) -> bool:
    return any(block.scaled for block in config.layers)


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
NESTED_FAMILY = FAMILY.also("gemma4", "Gemma 4 within a multimodal model")
UNIFIED_FAMILY = FAMILY.also(UNIFIED, "Gemma 4 12B")
NESTED_UNIFIED = FAMILY.also("gemma4_unified", "Gemma 4 12B within a multimodal model")
