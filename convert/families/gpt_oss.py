"""GptOssForCausalLM (gpt-oss): attention with sinks, with a sliding window on every
second layer, and experts with biases.

Rows of gate and up alternate in the experts' first projection. Published files, in
MXFP4, store an expert's matrix as [outputs, inputs]. Float files that transformers
writes store it as [inputs, outputs].
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import read
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import (
    Groups,
    Names,
    Part,
    Path,
    Row,
    attention_rows,
    module_rows,
)
from stree_jax.convert.families.windows import NEAR, SLIDES, WINDOW, effective
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, ModelConfig, MoEConfig
from stree_jax.models.configs.mlp import CLAMP, GAIN
from stree_jax.models.stack.config import blocks, named

FORMAT = "gpt_oss"
MODELS = "gpt-oss: attention with sinks, with and without a window, and experts"
KINDS: dict[str, str] = {"full_attention": "attention", SLIDES: NEAR}
TYPES = {ours: theirs for theirs, ours in KINDS.items()}
LONGEST = 131072  # default of `max_position_embeddings`
ROPE: dict[str, Any] = {  # default
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
UP = "experts.gate_up_proj"


def sink_rows(ours: Path, theirs: str, c: AttentionConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of attention with sinks."""
    yield from attention_rows(ours, theirs, c)
    yield Row((*ours, "sinks"), (f"{theirs}.sinks",))


def moe_rows(
    ours: Path, theirs: str, c: MoEConfig, packed: bool = False
) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a layer with experts.

    Args:
      ours: path of the parameters.
      theirs: prefix of the tensors' names.
      c: the config.
      packed: True if the file stores matrices as [outputs, inputs], as files in MXFP4
        do.
    """
    how: Any = "copy" if packed else "transposed"
    turns: Any = {"groups": (Groups(c.d_hidden, (1, 1)),), "group_axis": 1}
    up, down = f"{theirs}.{UP}", f"{theirs}.experts.down_proj"
    yield from module_rows(ours, theirs, {"router": "router"})
    yield Row((*ours, "into"), (up,), how, **turns)
    yield Row((*ours, "into_bias"), (f"{up}_bias",), **turns)
    yield Row((*ours, "down"), (down,), how)
    yield Row((*ours, "down_bias"), (f"{down}_bias",))


def spelled(names: Names, tensors: Collection[str]) -> Names:
    """Returns the names that a file uses; see `Names.spelling`.

    The shapes show whether matrices are stored as [outputs, inputs]: the axis of the
    outputs is as long as the bias.
    """
    if isinstance(tensors, Mapping):
        for name, info in tensors.items():
            bias = tensors.get(f"{name}_bias")
            if name.endswith(UP) and bias and info.shape[1] == bias.shape[-1]:
                return names.with_parts(moe=PACKED)
    return names


PACKED = Part("mlp", partial(moe_rows, packed=True))
NAMES = Names(
    parts={
        "attention": Part("self_attn", sink_rows),
        NEAR: Part("self_attn", sink_rows),
        "moe": Part("mlp", moe_rows),
    },
    spelling=spelled,
)

MODEL = hf.model_table("rms_norm_eps", 1e-5, 2880)
HEADS = Field("num_attention_heads", "num_heads", read.size, 64)
ATTENTION = (
    HEADS,
    Field("num_key_value_heads", "num_kv_heads", read.kv_heads(HEADS), 8),
    Field("head_dim", "head_dim", read.size, 64),
    Field("attention_bias", "qkv_bias", read.bias("self_attn.q_proj.bias"), True),
    Field("attention_bias", "out_bias", read.bias("self_attn.o_proj.bias"), True),
)
MOE = (
    Field("num_local_experts", "num_experts", read.size, 128),
    Field("num_experts_per_tok", "top_k", read.size, 4),
    Field("intermediate_size", "d_hidden", read.size, 2880),
)


def parse(fields: ConfigFields) -> ModelConfig:
    hf.check_silu(fields)
    for name, value in (("swiglu_limit", CLAMP), ("swiglu_alpha", GAIN)):
        fields.choice(name, value, (value,))
    model, kinds = hf.read_model(MODEL, fields, NAMES), _mixers(fields)
    c = AttentionConfig(**read_fields(ATTENTION, fields), sinks=True)
    c = replace(c, rope=hf.rope(_with_rope(fields), c.head_dim))
    window = effective(fields, fields.size(WINDOW, 128), LONGEST)
    mixers = {"attention": c, NEAR: replace(c, window=window)}
    if 2 * MOE[-1].value(fields) == model["d_model"]:
        problem = "half of hidden_size, so the axes of the experts look alike"
        raise fields.error(MOE[-1].name, f"is not supported ({problem})")
    moe = MoEConfig(**read_fields(MOE, fields), activation="clamped", bias=True)
    return ModelConfig(
        **model,
        layers=blocks(hf.with_mlps(kinds, "moe")),
        mixers=named(moe=moe, **{kind: mixers[kind] for kind in dict.fromkeys(kinds)}),
    )


def _mixers(fields: ConfigFields) -> hf.Layers:
    count = fields.size("num_hidden_layers", 36)
    if fields.get("layer_types", None) is not None:
        return hf.counted_layers(fields, "layer_types", KINDS, count)
    return tuple("attention" if i % 2 else NEAR for i in range(count))


def _with_rope(fields: ConfigFields) -> ConfigFields:
    """Returns the fields with the class's defaults of the rotary embedding."""
    values = {"rope_theta": ROPE["rope_theta"], **fields.values}
    names = ("rope_parameters", "rope_scaling")
    if all(fields.get(name, None) is None for name in names):
        values["rope_parameters"] = {**ROPE, "rope_theta": values["rope_theta"]}
    return replace(fields, values=values)


def export(config: ModelConfig) -> dict[str, Any]:
    kinds, moe = config.kinds[::2], config.mixers["moe"]
    far, near = (config.mixers.get(name) for name in ("attention", NEAR))
    both = [c for c in (far, near) if c is not None]
    alike = all(replace(c, window=0) == replace(both[0], window=0) for c in both)
    windows = not getattr(far, "window", 0) and getattr(near, "window", 1) > 0
    c = both[0]
    require(
        FORMAT,
        {
            "windows": windows,
            "attention of two sizes": alike,
            "attention without sinks": c.sinks,
            "lack of rotary": c.rope is not None,
            "activation": moe.activation == "clamped",
        },
    )
    values: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        **hf.write_model(FORMAT, MODEL, config),
        "num_hidden_layers": len(kinds),
        "layer_types": [TYPES[kind] for kind in kinds],
        "hidden_act": "silu",
        "swiglu_limit": CLAMP,
        **write_fields(FORMAT, MOE, moe, ("activation", "bias")),
        **write_fields(FORMAT, ATTENTION, c, ("rope", "window", "sinks")),
        "rope_theta": c.rope.theta,
        "rope_scaling": hf.scaling_fields(FORMAT, c.rope) or {"rope_type": "default"},
    }
    return values | ({} if near is None else {WINDOW: near.window})


def expresses(config: ModelConfig) -> bool:
    return alternates(config, TYPES, {"moe"}) and config.mixers["moe"].bias


FAMILY = Family(
    FORMAT, MODELS, NAMES, parse, export, expresses, exported="yes, in floats"
)
