"""Ministral3ForCausalLM (Ministral 3), also within a multimodal model: llama with YaRN,
whose queries grow with their position (`llama_4_scaling_beta`).

Multimodal models of the class Mistral3ForConditionalGeneration have the language model
of Ministral 3 or, as Mistral Small 3.1, that of `mistral`. Their vision encoder is left
out.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import llama, mistral, read
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.gemma3 import NAMES as GEMMA
from stree_jax.convert.families.gemma3 import NESTED, TEXT, nested
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import Names
from stree_jax.convert.families.windows import WINDOW, effective, window_of
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig
from stree_jax.models.configs.rope import Temperature
from stree_jax.models.stack.config import blocks, named

FORMAT = "ministral3"
MODELS = "Ministral 3"
LONGEST = 262144  # default of `max_position_embeddings`
GROWTH = "llama_4_scaling_beta"
TIED = "tie_word_embeddings"
ROPE: dict[str, Any] = {  # default
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    hf.ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    GROWTH: 0.1,
}


def spelled(names: Names, tensors: Collection[str]) -> Names:
    """Returns the names that a file uses; see `Names.spelling`."""
    for prefix in NESTED:
        if any(name.startswith(prefix) for name in tensors):
            head = f"language_model.{names.head}"
            names = nested(names, prefix)
            return replace(names, head=head) if f"{head}.weight" in tensors else names
    return names


NAMES = replace(llama.NAMES, spelling=spelled, left_out=GEMMA.left_out)

MODEL = hf.model_table("rms_norm_eps", 1e-5)
HEADS = Field("num_attention_heads", "num_heads", read.size, 32)

OF_WIDTH = hf.head_dim(HEADS, 4096)


def _head_dim(fields: ConfigFields, name: str, default: int) -> int:
    """Reads the head size. null is not the default: the heads together are then as wide
    as the model."""
    return OF_WIDTH.value(fields) if name in fields.values else default


ATTENTION = (
    HEADS,
    Field("num_key_value_heads", "num_kv_heads", read.kv_heads(HEADS), 8),
    Field("head_dim", "head_dim", _head_dim, 128),
)
MLP = (Field("intermediate_size", "d_hidden", read.size, 14336),)


def parse(fields: ConfigFields) -> ModelConfig:
    hf.check_silu(fields)
    fields = _with_rope(fields)
    c = AttentionConfig(**read_fields(ATTENTION, fields))
    window = effective(fields, window_of(fields, None), LONGEST)
    attention = replace(
        c,
        rope=hf.rope(fields, c.head_dim),
        temperature=_temperature(fields),
        window=window,
    )
    return ModelConfig(
        **hf.read_model(MODEL, fields, NAMES),
        layers=blocks(("attention", "mlp") * fields.size("num_hidden_layers", 34)),
        mixers=named(attention=attention, mlp=MLPConfig(**read_fields(MLP, fields))),
    )


def _with_rope(fields: ConfigFields) -> ConfigFields:
    """Returns the fields with the class's default of the rotary embedding."""
    names = ("rope_parameters", "rope_scaling")
    if any(fields.get(name, None) is not None for name in names):
        return fields
    return replace(fields, values={**fields.values, names[0]: ROPE})


def _temperature(fields: ConfigFields) -> Temperature | None:
    scaling = hf.scaling_of(fields)
    growth = scaling.finite(GROWTH, 0.0)
    return Temperature(growth, hf.original_length(fields, scaling)) if growth else None


def parse_nested(fields: ConfigFields) -> ModelConfig:
    """Parses the language model of a multimodal model."""
    text = text_fields(fields)
    kind = text.choice("model_type", "mistral", ("mistral", FORMAT))
    return parse(text) if kind == FORMAT else mistral.parse(text)


def text_fields(fields: ConfigFields) -> ConfigFields:
    """Returns the fields of a multimodal model's language model, with its stop tokens
    and `tie_word_embeddings`, which may be outside `text_config`. Names of tensors are
    those of the model alone."""
    fields.get(TEXT)  # raises if it is missing
    text = fields.object(TEXT)
    stops = text.get("eos_token_id", fields.get("eos_token_id", None))
    tied = fields.flag(TIED, True)
    tensors = dict(fields.tensors)
    for name, info in fields.tensors.items():
        for prefix in NESTED:
            if name.startswith(prefix):
                tensors[f"model.{name.removeprefix(prefix)}"] = info
    values = {**text.values, "eos_token_id": stops, TIED: tied}
    return replace(text, values=values, tensors=tensors)


def export(config: ModelConfig) -> dict[str, Any]:
    c = config.mixers["attention"]
    rope, t = c.rope, c.temperature
    whole = rope is not None and rope.dim == c.head_dim
    require(FORMAT, {"rotary of part of a head": whole})
    scaling = hf.scaling_fields(FORMAT, rope) or {"rope_type": "default"}
    growth, length = (0.0, float(LONGEST)) if t is None else (t.growth, t.length)
    trained = scaling.setdefault(hf.ORIGINAL, length)
    require(FORMAT, {"attention temperature": t is None or trained == length})
    scaling[GROWTH] = growth
    return {
        "architectures": ["Ministral3ForCausalLM"],
        **hf.write_model(FORMAT, MODEL, config),
        "num_hidden_layers": len(config.layers) // 2,
        "hidden_act": "silu",
        **write_fields(FORMAT, ATTENTION, c, ("rope", "window", "temperature")),
        **write_fields(FORMAT, MLP, config.mixers["mlp"]),
        "rope_parameters": {**scaling, "rope_theta": rope.theta},
        WINDOW: c.window or None,
    }


def expresses(config: ModelConfig) -> bool:
    fits = alternates(config, {"attention"}, {"mlp"})
    return fits and config.mixers["attention"].temperature is not None


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
NESTED_FAMILY = FAMILY.also(
    "mistral3",
    "Ministral 3 and Mistral Small 3 within a multimodal model",
    parse=parse_nested,
    expresses=None,
    exported="as ministral3 or llama",
)
