"""The interface of a checkpoint family."""

import pathlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from stree_jax.convert.families.table import require
from stree_jax.convert.families.tensor_map import Names
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.stored_tensors import TensorInfo
from stree_jax.models import ModelConfig

TRANSFORMERS = "transformers 5.24"
RECOMPUTED = "an independent float64 recomputation"


@dataclass(frozen=True)
class Family:
    """A checkpoint format: reads and writes its config fields and tensor names.

    Attributes:
      name: its `model_type`.
      models: the models in this format, for the table of supported models.
      names: names of the tensors.
      parse: reads the architecture, without MTP layers.
      parse_with_mtp: reads the architecture with the MTP layers. If None, MTP layers
        are not supported.
      export: writes the fields of the config, or raises CheckpointError if the class
        lacks an option of the model. If None, models are exported as another family.
      expresses: function (config) that returns True if a model with this config is
        exported as this family. It returns True for at most one family that has an
        `export`. A model that was loaded from another family is exported as that one
        if possible (`ModelConfig.family`).
      exported: whether `stree-jax export` writes this format, in words.
      compared: the implementation that its logits are tested against.
      file, field: the file next to config.json, or the field of a config without
        `model_type`, by which the format is recognised. If empty, `model_type` is
        `name`.
      has_dt_floor: True if transformers clamps dt to at least `time_step_min`.
      notes: yields warnings about fields of the config.
    """

    name: str
    models: str
    names: Names
    parse: Callable[[ConfigFields], ModelConfig]
    export: Callable[[ModelConfig], dict[str, Any]] | None = None
    expresses: Callable[[ModelConfig], bool] | None = None
    parse_with_mtp: Callable[[ConfigFields], ModelConfig] | None = None
    exported: str = "yes"
    compared: str = TRANSFORMERS
    file: str = ""
    field: str = ""
    has_dt_floor: bool = False
    notes: Callable[[ConfigFields], Iterator[str]] | None = None

    @property
    def mark(self) -> str:
        """The file or field by which a checkpoint is recognised, for messages."""
        return self.file or self.field or self.name

    def also(self, name: str, models: str, **changes: Any) -> "Family":
        """Returns a family that reads `model_type` `name` in the same way, and whose
        models are exported as this family. Other attributes are changed by keyword."""
        changes = {"exported": f"as {self.name}", **changes}
        return replace(self, name=name, models=models, export=None, **changes)


def read_back(
    format: str,
    names: Names,
    parse: Callable[[ConfigFields], ModelConfig],
    config: ModelConfig,
    values: dict[str, Any],
) -> dict[str, Any]:
    """Returns the fields of a config that an export wrote.

    Args:
      format: the family, for the message.
      names: the family's names of tensors.
      parse: reads a config of the family.
      config: the exported model.
      values: the fields.

    Raises:
      CheckpointError: `parse` reads another model from them.
    """
    file, shape = pathlib.Path("config.json"), (config.vocab_size, config.d_model)
    tensors = {f"{names.embedding}.weight": TensorInfo(file, shape, "float32")}
    found = parse(ConfigFields(file, {"model_type": format, **values}, tensors=tensors))
    same = found == replace(config, num_tokens=config.vocab_size)
    require(format, {"layers or options": same})
    return values


def alternates(
    config: ModelConfig, first: Collection[str], second: Collection[str]
) -> bool:
    """True if the layers alternate between kinds in `first` and kinds in `second`."""
    kinds = config.kinds
    fit = set(kinds[::2]) <= set(first) and set(kinds[1::2]) <= set(second)
    return fit and bool(kinds) and len(kinds) % 2 == 0
