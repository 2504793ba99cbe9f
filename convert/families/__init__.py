"""Model families of checkpoints, one per file: config fields (for reading and writing)
and names of tensors."""

from collections.abc import Callable
from typing import Any

from stree_jax.convert.families import (
    bailing_hybrid,
    bamba,
    falcon_h1,
    falcon_mamba,
    gemma3,
    gpt_oss,
    granite,
    granite3,
    granitemoe,
    jamba,
    kimi_linear,
    lfm2,
    lfm2_moe,
    lfm3,
    llama,
    mamba,
    mamba2,
    mambainllama,
    minimax,
    mistral,
    native,
    nemotron_h,
    olmo_hybrid,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
    zamba2,
)
from stree_jax.convert.families.tensor_map import Names
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import ModelConfig

_ONLY_READ = {"native": native, "mambainllama": mambainllama}
# Models of these families are exported as another family that computes the same.
_WRITTEN_AS_OTHERS = {
    "mistral": mistral,
    "gemma3": gemma3,
    "granite": granite3,
    "granitemoeshared": granitemoe,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "minimax_text_01": minimax,
    "minimax_m1": minimax,
}
_WRITTEN = {
    "mamba": mamba,
    "falcon_mamba": falcon_mamba,
    "mamba2": mamba2,
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma3_text": gemma3,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "gpt_oss": gpt_oss,
    "granitemoe": granitemoe,
    "granitemoehybrid": granite,
    "nemotron_h": nemotron_h,
    "falcon_h1": falcon_h1,
    "bamba": bamba,
    "zamba2": zamba2,
    "jamba": jamba,
    "olmo_hybrid": olmo_hybrid,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "lfm3": lfm3,
    "kimi_linear": kimi_linear,
    "bailing_hybrid": bailing_hybrid,
    "minimax": minimax,
}
# All families by our name of the format, which is the `model_type` if there is one.
_ALL = _ONLY_READ | _WRITTEN_AS_OTHERS | _WRITTEN
HF_TYPES = (*_WRITTEN, *_WRITTEN_AS_OTHERS)  # all supported values of `model_type`
NAMES: dict[str, Names] = {
    **{name: family.NAMES for name, family in _ALL.items()},
    "mamba2-embedding": mamba2.SINGULAR,
}
PARSERS: dict[str, Callable[[ConfigFields], ModelConfig]] = {
    **{name: family.parse for name, family in _ALL.items()},
    "mamba2-embedding": mamba2.parse,
}
# Parsers that also read the MTP layers; see `configs.read_config`.
MTP_PARSERS: dict[str, Callable[[ConfigFields], ModelConfig]] = {
    name: family.parse_with_mtp
    for name, family in _ALL.items()
    if family in (nemotron_h, qwen3_next, qwen3_5, qwen3_5_moe)
}
EXPORTERS: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    name: family.export for name, family in _WRITTEN.items()
}
