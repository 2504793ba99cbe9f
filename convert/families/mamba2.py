"""Converts checkpoints of Mamba2ForCausalLM."""

from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import mamba, read
from stree_jax.convert.families.family import Family
from stree_jax.convert.families.notes import rescaling_notes
from stree_jax.convert.families.table import Field
from stree_jax.convert.families.tensor_map import Part, mamba_rows
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import ModelConfig
from stree_jax.models.stack.config import blocks, named

MODELS = "Mamba2ForCausalLM"
NAMES = replace(mamba.NAMES, parts={"mamba": Part("mixer", mamba_rows)})
SINGULAR = replace(NAMES, embedding="backbone.embedding")

HEADS = Field("num_heads", "num_heads", read.size, 128)
MODEL = hf.model_table("layer_norm_epsilon", 1e-5)
MAMBA = (
    HEADS,
    Field("head_dim", "head_dim", read.size, 64),
    Field("state_size", "d_state", read.size, 128),
    Field("n_groups", "n_groups", read.divisor(HEADS), 8),
    Field("conv_kernel", "d_conv", read.size, 4),
    Field("use_bias", "proj_in_bias", read.bias("in_proj.bias"), False),
    Field("use_bias", "proj_out_bias", read.bias("out_proj.bias"), False),
    Field("use_conv_bias", "conv_bias", read.bias("conv1d.bias"), True),
    hf.TIME_STEP_LIMIT,
)


def parse(fields: ConfigFields) -> ModelConfig:
    model = hf.read_model(MODEL, fields, NAMES, SINGULAR)
    mixer = hf.read_mamba(MAMBA, fields, model["norm_eps"])
    if mixer.d_inner != fields.number("expand", 2) * model["d_model"]:
        sizes = f"{mixer.num_heads} * head_dim {mixer.head_dim}"
        raise fields.error("num_heads", f"{sizes} is not expand * hidden_size")
    hf.check_silu(fields)
    layers: tuple[str, ...] = ("mamba",) * fields.size("num_hidden_layers", 64)
    return ModelConfig(**model, layers=blocks(layers), mixers=named(mamba=mixer))


def export(config: ModelConfig) -> dict[str, Any]:
    mixer = config.mixers["mamba"]
    return {
        "architectures": ["Mamba2ForCausalLM"],
        **hf.write_model("mamba2", MODEL, config),
        "num_hidden_layers": len(config.layers),
        **hf.write_mamba("mamba2", MAMBA, mixer, config.norm_eps),
        "expand": hf.expand("mamba2", config),
    }


def expresses(config: ModelConfig) -> bool:
    return set(config.kinds) == {"mamba"} and not config.mtp


FAMILY = Family(
    "mamba2", MODELS, NAMES, parse, export, expresses, notes=rescaling_notes
)
