"""Checkpoint families: a file each, with fields both ways and names of tensors."""

from collections.abc import Callable
from typing import Any

from stree_jax.convert.families import (
    bamba,
    falcon_h1,
    granite,
    llama,
    mamba2,
    mambainllama,
    native,
    nemotron_h,
    zamba2,
)
from stree_jax.convert.fields import ConfigFields
from stree_jax.convert.rows import Names
from stree_jax.models import ModelConfig

# All of them by our name of the format: the `model_type`, where there is one.
NAMES: dict[str, Names] = {
    "native": native.NAMES,
    "mamba2": mamba2.NAMES,
    "mamba2-embedding": mamba2.SINGULAR,
    "llama": llama.NAMES,
    "granitemoehybrid": granite.NAMES,
    "nemotron_h": nemotron_h.NAMES,
    "falcon_h1": falcon_h1.NAMES,
    "bamba": bamba.NAMES,
    "zamba2": zamba2.NAMES,
    "mambainllama": mambainllama.NAMES,
}
PARSERS: dict[str, Callable[[ConfigFields], ModelConfig]] = {
    "native": native.parse,
    "mamba2": mamba2.parse,
    "mamba2-embedding": mamba2.parse,
    "llama": llama.parse,
    "granitemoehybrid": granite.parse,
    "nemotron_h": nemotron_h.parse,
    "falcon_h1": falcon_h1.parse,
    "bamba": bamba.parse,
    "zamba2": zamba2.parse,
    "mambainllama": mambainllama.parse,
}
EXPORTERS: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "mamba2": mamba2.export,
    "llama": llama.export,
    "granitemoehybrid": granite.export,
    "nemotron_h": nemotron_h.export,
    "falcon_h1": falcon_h1.export,
    "bamba": bamba.export,
    "zamba2": zamba2.export,
}
