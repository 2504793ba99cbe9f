"""What there is to know of a checkpoint format."""

from collections.abc import Callable
from typing import Any, NamedTuple

from stree_jax.convert.fields import ConfigFields
from stree_jax.convert.rows import Names
from stree_jax.models import ModelConfig

THEIRS = "transformers 5.23"
OURS = "an independent float64 recomputation"


class Family(NamedTuple):
    """A checkpoint format.

    Attributes:
      format: our name of it: the `model_type`, where there is one.
      name: how it is recognised: its `model_type`, or the file or field that marks it.
      models: what it holds.
      compared: what its logits are tested against.
      names: of its tensors.
      parse: from the fields of config.json.
      export: to the fields of config.json; raises `CheckpointError` where the family
        cannot express a model. None: such checkpoints are only read.
    """

    format: str
    name: str
    models: str
    compared: str
    names: Names
    parse: Callable[[ConfigFields], ModelConfig]
    export: Callable[[ModelConfig], dict[str, Any]] | None = None
