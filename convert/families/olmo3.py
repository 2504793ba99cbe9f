"""Olmo3ForCausalLM (Olmo 3): norms after attention and MLPs, and a sliding window on
most layers. Olmo2ForCausalLM (OLMo 2) is the same without windows.

Norms of q and k are of all heads together. Scaling of the rotary embedding, such as
YaRN, applies to layers without a window only, unless the config has
`rope_parameters` for each type of layer.
"""

from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import llama, read
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.windows import (
    NEAR,
    SLIDES,
    WINDOW,
    layer_attention,
    needed_window,
    typed_rope,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig, Rope
from stree_jax.models.stack.config import blocks, named

FORMAT, OLDER = "olmo3", "olmo2"
MODELS = "Olmo 3: attention with and without a window, norms after"
FULL = "full_attention"
KINDS: dict[str, str] = {FULL: "attention", SLIDES: NEAR}
TYPES = {ours: theirs for theirs, ours in KINDS.items()}
THETA = 500000.0  # default base of the frequencies
LENGTH = 4096  # default of `sliding_window`
NAMES = replace(
    llama.NAMES,
    mixer_norm="",
    mlp_norm="",
    norm_after_mixer="post_attention_layernorm",
    norm_after_mlp="post_feedforward_layernorm",
)

MODEL = hf.model_table("rms_norm_eps", 1e-5)
HEADS = Field("num_attention_heads", "num_heads", read.size, 32)
KV_HEADS = Field("num_key_value_heads", "num_kv_heads", read.kv_heads(HEADS))
ATTENTION = (HEADS, KV_HEADS, hf.head_dim(HEADS, 4096), *hf.BIASES)
MLP = (Field("intermediate_size", "d_hidden", read.size, 11008),)


def parse(fields: ConfigFields) -> ModelConfig:
    kinds = _mixers(fields)
    model = hf.read_model(MODEL, fields, NAMES)
    c = _attention(fields, model["norm_eps"])
    far = near = None
    if "attention" in kinds:
        far = replace(c, rope=_rope(fields, FULL, c))
    if NEAR in kinds:
        turned = replace(c, rope=_rope(fields, SLIDES, c))
        near = replace(turned, window=needed_window(fields, LENGTH))
    return _after(fields, model, kinds, **{"attention": far, NEAR: near})


def parse_older(fields: ConfigFields) -> ModelConfig:
    """Parses OLMo 2."""
    model = hf.read_model(MODEL, fields, NAMES)
    c = _attention(fields, model["norm_eps"])
    c = replace(c, rope=hf.rope(fields, c.head_dim, theta=THETA))
    kinds = ("attention",) * fields.size("num_hidden_layers", 32)
    return _after(fields, model, kinds, attention=c)


def _attention(fields: ConfigFields, eps: float) -> AttentionConfig:
    """Reads what the attention of all layers has in common."""
    options = read_fields(ATTENTION, fields)
    return AttentionConfig(**options, qk_norm_eps=eps, qk_norm_whole=True)


def _after(
    fields: ConfigFields, model: dict[str, Any], kinds: hf.Layers, **attention: Any
) -> ModelConfig:
    """Returns a model with norms after its mixers.

    Args:
      fields: the fields of the config file.
      model: attributes of the `ModelConfig`.
      kinds: the mixer of each layer.
      **attention: the mixers by name.
    """
    hf.check_silu(fields)
    return ModelConfig(
        **model,
        layers=blocks(f"after:{kind}" for kind in hf.with_mlps(kinds)),
        mixers=named(**attention, mlp=MLPConfig(**read_fields(MLP, fields))),
    )


def _mixers(fields: ConfigFields) -> hf.Layers:
    """Reads which layers have a window."""
    count = fields.size("num_hidden_layers", 32)
    if fields.get("layer_types", None) is not None:
        return hf.counted_layers(fields, "layer_types", KINDS, count)
    return tuple(NEAR if (i + 1) % 4 else "attention" for i in range(count))


def _rope(fields: ConfigFields, kind: str, c: AttentionConfig) -> Rope:
    """Reads the rotary embedding of one type of layers. In configs of transformers 4,
    all have the same base, and `rope_scaling` is that of layers without a window."""
    theta = fields.positive("rope_theta", THETA)
    older = fields.object("rope_scaling").values if kind == FULL else {}
    return typed_rope(fields, kind, c.head_dim, theta, older=older)


def export(config: ModelConfig) -> dict[str, Any]:
    each, c, window = layer_attention(FORMAT, config)
    kinds = [block.mixers[0] for block in config.layers[::2]]
    far, near = (config.mixers.get(name) for name in ("attention", NEAR))
    require(
        FORMAT,
        {
            "windows": getattr(far, "window", 0) == 0 < getattr(near, "window", 1),
            "attention norms of q and k": c.qk_norm_eps == config.norm_eps
            and c.qk_norm_whole,
            "rotary of part of a head": all(_turns(own) for own in each),
        },
    )
    elsewhere = ("qk_norm_eps", "qk_norm_whole")
    return {
        "architectures": ["Olmo3ForCausalLM"],
        **hf.write_model(FORMAT, MODEL, config),
        "num_hidden_layers": len(kinds),
        "layer_types": [TYPES[kind] for kind in kinds],
        "hidden_act": "silu",
        **write_fields(FORMAT, ATTENTION, c, elsewhere),
        **write_fields(FORMAT, MLP, config.mixers["mlp"]),
        "rope_parameters": {
            TYPES[kind]: _rope_fields(config.mixers[kind].rope)
            for kind in dict.fromkeys(kinds)
        },
        WINDOW: window or LENGTH,  # the class makes a mask of it in any case
    }


def _turns(c: AttentionConfig) -> bool:
    return c.rope is not None and c.rope.dim == c.head_dim


def _rope_fields(rope: Rope) -> dict[str, Any]:
    """Returns the parameters of an embedding; the inverse of `_rope`."""
    scaling = hf.scaling_fields(FORMAT, rope) or {"rope_type": "default"}
    return {**scaling, "rope_theta": rope.theta}


def expresses(config: ModelConfig) -> bool:
    return alternates(config, {f"after:{kind}" for kind in TYPES}, {"after:mlp"})


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
OLDER_FAMILY = FAMILY.also(OLDER, "OLMo 2", parse=parse_older, expresses=None)
