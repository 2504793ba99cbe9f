"""Converts our `ModelConfig` to a config.json for Hugging Face."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families import Family, families
from stree_jax.convert.families.tensor_map import source_shapes
from stree_jax.convert.families.tensors import rows_of
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.stored_tensors import TensorInfo
from stree_jax.models import ModelConfig, param_shapes


def hf_config(
    config: ModelConfig, dtype: str, kept: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Returns a model's config.json for Hugging Face, with the field names of
    transformers 4.

    Args:
      config: the architecture.
      dtype: dtype of the weights, "float32" or "bfloat16".
      kept: fields to copy from the source, which do not affect the model's results.

    Raises:
      CheckpointError: no Hugging Face class has the model's layers and options.
    """
    known = families()
    written = (f for f in known.values() if f.export and f.expresses)
    family = next((f for f in written if f.expresses and f.expresses(config)), None)
    remembered = known.get(config.family)
    if remembered is not None and remembered is not family:
        if _describes(remembered, config):
            family = remembered
    if family is None:
        raise CheckpointError(
            f"layers {config.kinds}: no Hugging Face class has them; `save` and "
            "`stree-jax convert` write any model in our own format"
        )
    return {**_fields(family, config), "torch_dtype": dtype, **kept}


def _fields(family: Family, config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of a family's config, except for the dtype."""
    assert family.export is not None
    return {
        "model_type": family.name,
        "vocab_size": config.vocab_size,
        "bos_token_id": None,
        "pad_token_id": None,
        **family.export(config),
    }


def _describes(family: Family, config: ModelConfig) -> bool:
    """True if the family reads the same architecture from the config and the tensor
    names that it writes."""
    if family.export is None:
        return False
    try:
        values = json.loads(json.dumps(_fields(family, config)))
        shapes, tensors = param_shapes(config), {}
        for row in rows_of(family.names, config):
            each = source_shapes(row, shapes[row.path])
            for name, shape in zip(row.sources, each, strict=True):
                tensors[name] = TensorInfo(Path(), shape, "float32")
        fields = ConfigFields(Path("config.json"), values, tensors=tensors)
        parse = family.parse_with_mtp if config.mtp else family.parse
        found = None if parse is None else parse(fields)
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError):
        return False
    return found == replace(config, num_tokens=config.vocab_size)
