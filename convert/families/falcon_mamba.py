"""FalconMambaForCausalLM (Falcon-Mamba-7B): the layers of `mamba`, with norms without
scales of dt, B and C."""

from typing import Any

from stree_jax.convert.families import mamba, read
from stree_jax.convert.families.family import Family
from stree_jax.convert.families.notes import rescaling_notes
from stree_jax.convert.families.table import Field
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import ModelConfig

FORMAT = "falcon_mamba"
MODELS = "Falcon-Mamba"
NAMES = mamba.NAMES
MIXER = (*mamba.MIXER, Field("mixer_rms_eps", "norm_eps", read.positive, 1e-6))


def parse(fields: ConfigFields) -> ModelConfig:
    return mamba.parse_with(fields, MIXER, norm="plain")


def export(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["FalconMambaForCausalLM"],
        **mamba.export_with(FORMAT, MIXER, config, "norm"),
    }


def expresses(config: ModelConfig) -> bool:
    kinds = set(config.kinds)
    return kinds == {"mamba1"} and config.mixers["mamba1"].norm == "plain"


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses, notes=rescaling_notes)
