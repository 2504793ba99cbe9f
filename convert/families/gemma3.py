"""Gemma3ForCausalLM (Gemma 3), also within a multimodal model: attention with a sliding
window on most layers and without one on the others, and MLPs.

Every mixer and MLP has a norm before and one after it. All norms store scale - 1. The
embedding is multiplied by the root of its width. Layers with a window have another
rotary embedding than those without. The vision encoder of a multimodal model is left
out.
"""

import math
from collections.abc import Collection, Iterator
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
    nested,
)
from stree_jax.convert.families.windows import (
    NEAR,
    SLIDES,
    WINDOW,
    effective,
    typed_rope,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig
from stree_jax.models.stack.config import blocks, named

FORMAT = "gemma3_text"
MODELS = "Gemma 3: attention with and without a window"
FULL = "full_attention"
KINDS: dict[str, str] = {FULL: "attention", SLIDES: NEAR}
TYPES = {ours: theirs for theirs, ours in KINDS.items()}
TEXT = "text_config"  # fields of the language model of a multimodal model
# Prefixes of a language model within a multimodal one, instead of "model.".
NESTED = ("language_model.model.", "model.language_model.")
LONGEST = 131072  # default of `max_position_embeddings`
PATTERN = "sliding_window_pattern"  # every n-th layer has no window
THETA, NEAR_THETA = "rope_theta", "rope_local_base_freq"


def offset_rows(ours: Path, theirs: str, c: AttentionConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of attention. The norms of q and k store
    scale - 1."""
    for row in attention_rows(ours, theirs, c):
        offset = row.path[-1] in ("q_norm", "k_norm")
        yield replace(row, how="offset") if offset else row


def spelled(names: Names, tensors: Collection[str]) -> Names:
    """Returns the names that a file uses; see `Names.spelling`."""
    for prefix in NESTED:
        if any(name.startswith(prefix) for name in tensors):
            return nested(names, prefix)
    return names


NAMES = Names(
    norm_after_mixer="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    norm_after_mlp="post_feedforward_layernorm",
    norm_how="offset",
    parts={
        "attention": Part("self_attn", offset_rows),
        NEAR: Part("self_attn", offset_rows),
        "mlp": Part("mlp", mlp_rows),
    },
    spelling=spelled,
    left_out=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)


def _scale(fields: ConfigFields, name: str, default: Any) -> float:
    return fields.positive(name, default) ** -0.5


def _scalar(scale: float | None) -> int | None:
    """Returns the field `query_pre_attn_scalar` for a softmax scale: scale ** -2, or
    None if the scale is unset."""
    return None if scale is None else round(scale**-2)


MODEL = hf.model_table("rms_norm_eps", 1e-6, 2304, True)
HEADS = Field("num_attention_heads", "num_heads", read.size, 8)
SCALAR = "query_pre_attn_scalar"
ATTENTION = (
    HEADS,
    Field("num_key_value_heads", "num_kv_heads", read.kv_heads(HEADS), 4),
    Field("head_dim", "head_dim", read.size, 256),
    *hf.BIASES,
    Field(SCALAR, "scale", _scale, 256, _scalar),
)
MLP = (Field("intermediate_size", "d_hidden", read.size, 9216),)


def parse(fields: ConfigFields) -> ModelConfig:
    if fields.get("model_type") != FORMAT:
        fields = text_fields(fields, (FORMAT,), NAMES.left_out)
    _check_supported(fields)
    names = (NAMES, *(nested(NAMES, prefix) for prefix in NESTED))
    model = hf.read_model(MODEL, fields, *names)
    attention = AttentionConfig(
        **read_fields(ATTENTION, fields),
        qk_norm_eps=model["norm_eps"],
        qk_norm_float32=True,
    )
    kinds = _mixers(fields)
    far = near = None
    if "attention" in kinds:
        far = replace(attention, rope=_rope(fields, FULL, attention))
    if NEAR in kinds:
        window = effective(fields, fields.size(WINDOW, 4096), LONGEST)
        turned = _rope(fields, SLIDES, attention)
        near = replace(attention, rope=turned, window=window)
    mlp = MLPConfig(**read_fields(MLP, fields), activation="gelu_tanh")
    return ModelConfig(
        **model,
        norm="rms_float32",
        embedding_multiplier=math.sqrt(model["d_model"]),
        layers=blocks(f"both:{kind}" for kind in hf.with_mlps(kinds)),
        mixers=named(**{"attention": far, NEAR: near, "mlp": mlp}),
    )


def text_fields(
    fields: ConfigFields, formats: tuple[str, ...], left_out: tuple[str, ...]
) -> ConfigFields:
    """Returns the fields of a multimodal model's language model: those of
    `text_config`, and the stop tokens and `tie_word_embeddings` if the file has them
    outside it.

    Args:
      fields: the fields of the config file.
      formats: the language model's possible values of `model_type`.
      left_out: see `Names.left_out`.
    """
    fields.get(TEXT)  # raises if it is missing
    text = fields.object(TEXT)
    text.choice("model_type", formats[0], formats)
    outside = {
        name: fields.values[name]
        for name in ("eos_token_id", "tie_word_embeddings")
        if fields.get(name, None) is not None
    }
    tensors = {
        name: info
        for name, info in text.tensors.items()
        if not name.startswith(left_out)
    }
    return replace(text, values={**text.values, **outside}, tensors=tensors)


def _check_supported(fields: ConfigFields) -> None:
    activation = "gelu_pytorch_tanh"
    fields.choice("hidden_activation", activation, (activation,))
    fields.choice("use_bidirectional_attention", False, (False,))
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.get(name, None) is not None:
            raise fields.error(name, "soft caps of logits are not supported")


def _mixers(fields: ConfigFields) -> hf.Layers:
    """Reads which layers have a window."""
    count = fields.size("num_hidden_layers", 26)
    if fields.get("layer_types", None) is not None:
        return hf.counted_layers(fields, "layer_types", KINDS, count)
    every = fields.size(PATTERN, 6)
    return tuple(NEAR if (i + 1) % every else "attention" for i in range(count))


def _rope(fields: ConfigFields, kind: str, c: AttentionConfig) -> Any:
    """Reads the rotary embedding of one type of layers. In configs of transformers 4,
    `rope_scaling` is that of layers without a window."""
    if kind == FULL:
        theta, older = fields.positive(THETA, 1e6), fields.object("rope_scaling").values
    else:
        theta, older = fields.positive(NEAR_THETA, 1e4), {}
    return typed_rope(fields, kind, c.head_dim, theta, older=older)


def export(config: ModelConfig) -> dict[str, Any]:
    """Writes the config with the field names of transformers 4."""
    kinds = [block.mixers[0] for block in config.layers[::2]]
    far, near = (config.mixers.get(name) for name in ("attention", NEAR))
    both = [c for c in (far, near) if c is not None]
    multiplier = config.embedding_multiplier
    windows = not getattr(far, "window", 0) and getattr(near, "window", 1) > 0
    require(
        FORMAT,
        {
            "norms": config.norm == "rms_float32",
            "embedding multiplier": multiplier == math.sqrt(config.d_model),
            "windows": windows,
        },
    )
    plain = replace(config, norm="rms", embedding_multiplier=1.0)
    values: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"],
        **hf.write_model(FORMAT, MODEL, plain),
        "num_hidden_layers": len(kinds),
        "layer_types": [TYPES[kind] for kind in kinds],
        "hidden_activation": "gelu_pytorch_tanh",
    }
    mlp = config.mixers["mlp"]
    require(FORMAT, {"activation": mlp.activation == "gelu_tanh"})
    values |= write_fields(FORMAT, MLP, mlp, ("activation",))
    written = [_attention_fields(config, c) for c in both]
    require(FORMAT, {"attention of two sizes": all(w == written[0] for w in written)})
    values |= written[0]
    if far is not None:
        values |= hf.rope_fields(FORMAT, far)
    if near is not None:
        require(FORMAT, {"scaled rotary": not hf.scaling_fields(FORMAT, near.rope)})
        values |= {NEAR_THETA: near.rope.theta, WINDOW: near.window}
    return values


def _attention_fields(config: ModelConfig, c: AttentionConfig) -> dict[str, Any]:
    """Returns the fields that layers with and without a window share."""
    scalar = _scalar(c.scale)
    require(
        FORMAT,
        {
            "attention norms of q and k": c.qk_norm_eps == config.norm_eps
            and c.qk_norm_float32,
            "attention scale": scalar is not None and c.scale == scalar**-0.5,
            "lack of rotary": c.rope is not None and c.rope.dim == c.head_dim,
        },
    )
    elsewhere = ("rope", "window", "qk_norm_eps", "qk_norm_float32")
    return write_fields(FORMAT, ATTENTION, c, elsewhere)


def expresses(config: ModelConfig) -> bool:
    mixers = {f"both:{kind}" for kind in TYPES}
    scaled = config.norm == "rms_float32" or config.embedding_multiplier != 1
    return alternates(config, mixers, {"both:mlp"}) and scaled


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
NESTED_FAMILY = FAMILY.also("gemma3", "Gemma 3 within a multimodal model")
