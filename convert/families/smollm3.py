"""SmolLM3ForCausalLM (SmolLM3): llama without a rotary embedding on some layers.

Layers without it may have a sliding window.
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
    attention_mixers,
    effective,
    has_usual_names,
    layer_attention,
    sliding_layers,
    window_of,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig
from stree_jax.models.stack.config import blocks, named

FORMAT = "smollm3"
MODELS = "SmolLM3: attention with and without a rotary embedding"
NAMES = llama.NAMES
NOPE = ("attention_nope", f"{NEAR}_nope")  # mixers without a rotary embedding
THETA = 2e6  # default base of the frequencies
LONGEST = 32768  # default of `max_position_embeddings`
ROTATES = "no_rope_layers"  # 1 for each layer with a rotary embedding, else 0

MODEL = hf.model_table("rms_norm_eps", 1e-6, 2048, True)
HEADS = Field("num_attention_heads", "num_heads", read.size, 16)
KV_HEADS = Field("num_key_value_heads", "num_kv_heads", read.kv_heads(HEADS), 4)
ATTENTION = (HEADS, KV_HEADS, hf.head_dim(HEADS, 2048), *hf.BIASES)
MLP = hf.gated_mlp_table(11008, "mlp")


def parse(fields: ConfigFields) -> ModelConfig:
    hf.check_silu(fields)
    c = AttentionConfig(**read_fields(ATTENTION, fields))
    rope = hf.rope(fields, c.head_dim, theta=THETA)
    rotates = rotating_layers(fields, fields.size("num_hidden_layers", 36))
    used = fields.flag("use_sliding_window", False)
    window = window_of(fields, None) if used else None
    slides = [window is not None and not turns for turns in rotates]
    if fields.get("layer_types", None) is not None:
        slides = sliding_layers(fields, window, len(rotates))
    size = effective(fields, window, LONGEST)
    kinds, mixers = attention_mixers(
        [
            replace(c, rope=rope if turns else None, window=size if near else 0)
            for turns, near in zip(rotates, slides, strict=True)
        ]
    )
    return ModelConfig(
        **hf.read_model(MODEL, fields, NAMES),
        layers=blocks(hf.with_mlps(kinds)),
        mixers=named(**mixers, mlp=MLPConfig(**read_fields(MLP, fields))),
    )


def rotating_layers(fields: ConfigFields, count: int) -> list[bool]:
    """Reads which of `count` layers have a rotary embedding. If the list is absent,
    every `no_rope_layer_interval`-th layer has none."""
    listed = fields.get(ROTATES, None)
    if listed is None:
        every = fields.size("no_rope_layer_interval", 4)
        return [(i + 1) % every != 0 for i in range(count)]
    fits = isinstance(listed, list) and len(listed) >= count
    if not fits or any(flag not in (0, 1) for flag in listed):
        raise fields.wants(ROTATES, f"a list of {count} numbers 0 or 1", listed)
    return [flag == 1 for flag in listed[:count]]


def export(config: ModelConfig) -> dict[str, Any]:
    each, c, window = layer_attention(FORMAT, config)
    ropes = {own.rope for own in each} - {None}
    require(FORMAT, {"several rotary embeddings": len(ropes) < 2})
    turned = replace(c, rope=ropes.pop() if ropes else None)
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        **hf.write_model(FORMAT, MODEL, config),
        "num_hidden_layers": len(each),
        ROTATES: [int(own.rope is not None) for own in each],
        "layer_types": [SLIDES if own.window else "full_attention" for own in each],
        "use_sliding_window": window > 0,
        WINDOW: window or None,
        **write_fields(FORMAT, ATTENTION, c),
        **hf.rope_fields(FORMAT, turned),
        **write_fields(FORMAT, MLP, config.mixers["mlp"]),
        "hidden_act": "silu",
    }


def expresses(config: ModelConfig) -> bool:
    fits = alternates(config, ("attention", NEAR, *NOPE), {"mlp"})
    if not fits or not set(NOPE) & set(config.kinds) or not has_usual_names(config):
        return False
    return not any(config.mixers[kind].sinks for kind in config.kinds[::2])


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
