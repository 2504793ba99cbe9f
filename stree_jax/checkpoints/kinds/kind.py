"""The base class of kinds of drafters.

A kind says how a drafter's files are read, described, trimmed and written. Each kind is
one instance in a file of this folder, and an entry of `kinds.table.KINDS` with a
function that finds it. How
the loaded value drafts is the business of its `Source` (`speculation.source`), or of
its methods if it is a custom drafter.
"""

from pathlib import Path
from typing import Any, NamedTuple

from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.models import Format, Model, ModelConfig
from stree_jax.speculation.drafters.ngrams import NGrams


class Target(NamedTuple):
    """The model that a drafter was trained for, as a note in its files.

    Attributes:
      name: path or hub id; "" if it is unknown.
      layers: number of its layers, as `boundary_count` counts them, or None.
    """

    name: str = ""
    layers: int | None = None


class DrafterKind:
    """A kind of drafter.

    Attributes:
      name: its name in messages.
      value: the type of a loaded drafter, or several types.
      needs_mtp: True if the target must be loaded with its MTP layers.
      config_needs_target: True if `read_config` loads the target.
      can_trim: True if a drafter can be restricted to some of the tokens.
    """

    name: str
    value: type | tuple[type, ...] = ()
    needs_mtp: bool = False
    config_needs_target: bool = False
    can_trim: bool = False

    def check(self, files: DrafterFiles) -> None:
        """Raises ValueError if a name without files is wrong."""

    def read_config(self, files: DrafterFiles, target: ModelConfig) -> Any:
        """Reads a drafter without its weights, for `plan`. Returns a `DrafterConfig`,
        or a drafter whose arrays may be `jax.ShapeDtypeStruct`."""
        raise NotImplementedError

    def load(self, files: DrafterFiles, target: Model | None, dtype: Any) -> Any:
        """Loads the drafter with weights in `dtype`, for a target if that is known. If
        `dtype` is None, weights stay as they are stored."""
        raise NotImplementedError

    def default_dtype(self, files: DrafterFiles, target: Format, dtype: Any) -> Any:
        """Returns the dtype of a drafter whose target has the format `target`, if the
        user asks for `dtype` (None for the stored one)."""
        return dtype

    def holds(self, value: Any) -> bool:
        """True if a loaded drafter is of this kind."""
        return isinstance(value, self.value)

    def save(self, value: Any, dst: Path, target: Target) -> None:
        """Writes a drafter; see `save_drafter`."""
        raise CheckpointError(f"drafter: {self.name} has no files to write")

    def trimmed(self, value: Any, target: Model, ids: Any) -> Any:
        """Returns the drafter with only the tokens `ids` [D] int32, in ascending order,
        if `can_trim`."""
        raise NotImplementedError

    def trimmed_config(
        self, config: Any, target: ModelConfig, count: int, weights: Format
    ) -> Any:
        """Returns the result of `read_config` with only `count` of the tokens, if
        `can_trim`. The target's weights have the format `weights`."""
        raise NotImplementedError

    def with_ngrams(
        self, value: Any, ngrams: NGrams, levels: int | None, width: int | None
    ) -> Any:
        """Returns the drafter with n-grams that propose tokens for it; see
        `load_pair`."""
        raise ValueError(
            f"--ngrams: proposes tokens for a draft model, not {self.name}"
        )

    def facts(self, files: DrafterFiles, draft_vocab: int | None) -> dict[str, Any]:
        """Describes a drafter from its headers; see `drafters.drafter_info`."""
        raise NotImplementedError
