"""MambaForCausalLM (state-spaces/mamba-*-hf): Mamba-1 layers.

`falcon_mamba` and `jamba` have the same mixer, so they share this code.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import read
from stree_jax.convert.families.family import Family
from stree_jax.convert.families.notes import rescaling_notes
from stree_jax.convert.families.table import Field, read_fields, write_fields
from stree_jax.convert.families.tensor_map import (
    Names,
    Part,
    Path,
    Row,
    conv_rows,
    module_rows,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import Mamba1Config, ModelConfig
from stree_jax.models.stack.config import blocks, named

FORMAT = "mamba"
MODELS = "MambaForCausalLM (state-spaces/mamba-*-hf)"
PROJECTIONS = {name: name for name in ("in_proj", "out_proj", "x_proj")}
NORMS = {"dt_norm": "dt_layernorm", "B_norm": "b_layernorm", "C_norm": "c_layernorm"}


def mamba1_rows(ours: Path, theirs: str, c: Mamba1Config) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a Mamba-1 mixer."""
    yield from module_rows(ours, theirs, PROJECTIONS)
    yield from conv_rows(ours, theirs)
    yield Row((*ours, "dt_proj"), (f"{theirs}.dt_proj.weight",))
    yield Row((*ours, "dt_bias"), (f"{theirs}.dt_proj.bias",))
    for name in ("A_log", "D"):
        yield Row((*ours, name), (f"{theirs}.{name}",))
    for name, norm in NORMS.items():
        yield Row((*ours, name), (f"{theirs}.{norm}.weight",))


def spelled(names: Names, tensors: Collection[str]) -> Names:
    """Returns the names that a file uses; see `Names.spelling`."""
    singular = names.embedding.removesuffix("s")
    if f"{singular}.weight" in tensors:
        return replace(names, embedding=singular)
    return names


NAMES = Names(
    embedding="backbone.embeddings",
    norm="backbone.norm_f",
    layer="backbone.layers.{i}.",
    mixer_norm="norm",
    parts={"mamba1": Part("mixer", mamba1_rows)},
    spelling=spelled,
)
SINGULAR = replace(NAMES, embedding="backbone.embedding")

MODEL = hf.model_table("layer_norm_epsilon", 1e-5, 768, True)
WIDTH = 768  # default width of the model


def expanded(expand: str, width: int) -> read.Read:
    """Returns a reader of the inner width of a mixer, for `table.Field`.

    The reader returns the `Field`'s own field, such as `intermediate_size`, if the
    config has it, and otherwise the multiplier times the model's width. transformers
    does the same. In Falcon Mamba's configs the two values differ, and the former is
    right.

    Args:
      expand: name of the multiplier's field.
      width: default width of the model.
    """

    def channels(source: ConfigFields, name: str, default: Any) -> int:
        whole = source.size(expand, 2) * source.size("hidden_size", width)
        return source.size(name, whole) if name else whole

    return channels


def rank(width: int) -> read.Read:
    """Returns a reader of the rank of dt, for `table.Field`. "auto" means a 16th of the
    model's width.

    Args:
      width: default width of the model.
    """

    def rank_of(source: ConfigFields, name: str, default: Any) -> int:
        if source.get(name, "auto") == "auto":
            return -(-source.size("hidden_size", width) // 16)
        return source.size(name)

    return rank_of


MIXER = (
    Field("intermediate_size", "d_inner", expanded("expand", WIDTH)),
    Field("time_step_rank", "dt_rank", rank(WIDTH)),
    Field("state_size", "d_state", read.size, 16),
    Field("conv_kernel", "d_conv", read.size, 4),
    Field("use_bias", "proj_in_bias", read.bias("in_proj.bias"), False),
    Field("use_bias", "proj_out_bias", read.bias("out_proj.bias"), False),
    Field("use_conv_bias", "conv_bias", read.bias("conv1d.bias"), True),
)


def parse_with(
    fields: ConfigFields, table: Sequence[Field], **options: Any
) -> ModelConfig:
    """Parses the config of a model of Mamba-1 layers. `mamba` and `falcon_mamba` share
    this code.

    Args:
      fields: the fields of the config file.
      table: the fields of the mixer.
      **options: further options of the mixer.
    """
    model = hf.read_model(MODEL, fields, NAMES, SINGULAR)
    hf.check_silu(fields)
    layers: tuple[str, ...] = ("mamba1",) * fields.size("num_hidden_layers", 32)
    mixer = Mamba1Config(**read_fields(table, fields), **options)
    return ModelConfig(**model, layers=blocks(layers), mixers=named(mamba1=mixer))


def parse(fields: ConfigFields) -> ModelConfig:
    return parse_with(fields, MIXER)


def export_with(
    format: str, table: Sequence[Field], config: ModelConfig, *elsewhere: str
) -> dict[str, Any]:
    """Writes the fields that `parse_with` reads.

    Args:
      format: the family, for messages.
      table: the fields of the mixer.
      config: the architecture.
      *elsewhere: options of the mixer that the family checks itself.
    """
    mixer = config.mixers["mamba1"]
    return {
        **hf.write_model(format, MODEL, config),
        "num_hidden_layers": len(config.layers),
        **write_fields(format, table, mixer, elsewhere),
        # intermediate_size takes precedence, see `expanded`.
        "expand": max(mixer.d_inner // config.d_model, 1),
    }


def export(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["MambaForCausalLM"],
        **export_with(FORMAT, MIXER, config),
    }


def expresses(config: ModelConfig) -> bool:
    return set(config.kinds) == {"mamba1"} and not config.mixers["mamba1"].norm


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses, notes=rescaling_notes)
