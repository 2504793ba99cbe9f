"""Shared code of published drafters: block drafters and EAGLE.

Their tensors show which kind they are. Their configs should name the target that they
were trained for.
"""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.checkpoints.kinds.kind import DrafterKind
from stree_jax.common.checks import integer
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.drafters.fields import target_name
from stree_jax.convert.drafters.plain_names import MASK, MASK_FILE, plain_name
from stree_jax.convert.families.configs import Warn
from stree_jax.convert.hub import HubName, hub_name
from stree_jax.convert.saved.config import weights_named
from stree_jax.convert.tensors.checkpoint_files import CONFIG, CheckpointFiles
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.quantized import scheme_names
from stree_jax.convert.tensors.stored_tensors import Tensors
from stree_jax.convert.tensors.tensor_files import source_dtype
from stree_jax.models import Format, Model, ModelConfig, format_named
from stree_jax.models.stack.boundaries import boundary_count
from stree_jax.models.weights.kept import Layout
from stree_jax.models.weights.kept_format import KEPT_INT8
from stree_jax.speculation.drafters.ngram_pairs import WithNGrams, without_pairs
from stree_jax.speculation.drafters.ngrams import NGrams
from stree_jax.speculation.drafters.table import DrafterConfig

INT8 = "int8"  # format of an unquantized drafter whose target is quantized
LATENT = ".kv_a_proj"  # in the names of tensors of latent attention
# Parts of a model's name that say how its weights are stored.
_STORAGE = re.compile(
    r"fp\d+|bf16|nvfp4|mxfp4|awq|gptq|gguf|mlx|bnb|int\d|\d+bit|w\d+a\d+|q\d\w*"
    r"|ud|k|m|s|xl|dynamic|quantized"
)


@dataclass(frozen=True)
class OpenedDrafter:
    """A local drafter whose config and tensor headers have been read.

    Attributes:
      files: its files.
      source: its tensors.
      warn: called with a line for each assumption.
    """

    files: CheckpointFiles
    source: Tensors
    warn: Warn | None = None

    @property
    def file(self) -> Path:
        return self.files.config_file

    @property
    def fields(self) -> ConfigFields:
        return self.files.fields(tensors=self.source.tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.source.tensors.items()}

    @property
    def plain_names(self) -> dict[str, str]:
        """The names of the tensors by the names that most publishers give to them."""
        return {plain_name(name): name for name in self.source.tensors}

    @property
    def target(self) -> str:
        """The name of the target that the config states, or ""."""
        return target_name(self.fields)

    @property
    def target_layers(self) -> int | None:
        """The number of the target's layers that the config states, or None."""
        return None

    @property
    def layout(self) -> Layout:
        """How each matrix is stored if the weights have the format "kept". Empty for
        drafters whose matrices cannot be kept quantized."""
        return ()

    @property
    def quantized(self) -> str | None:
        """The storage format of quantized weights, such as "nvfp4"."""
        return scheme_names(self.source)

    def check(self) -> None:
        """Raises CheckpointError if the drafter is not supported."""

    def check_target(self, target: Model) -> None:
        """Raises ValueError or CheckpointError if the drafter is of another target."""
        stated, layers = self.target_layers, boundary_count(target.config)
        if stated not in (None, layers):
            raise ValueError(
                f"drafter: was trained for a target of {stated} layers, but this one "
                f"has {layers}; use {self.target or 'the model of its training'}"
            )

    def config(self, target: ModelConfig | None) -> Any:
        """Returns the architecture. Raises CheckpointError if the drafter is not
        supported, or does not fit the target."""
        raise NotImplementedError

    def read(self, target: Model | None, format: Format) -> Any:
        """Reads the weights and returns the drafter. Warns once if weights are NaN or
        infinite, as for models.

        Args:
          target: the target model, or None if it is not loaded.
          format: the format of the weights in memory.
        """
        raise NotImplementedError

    def facts(self, format: Format, draft_vocab: int | None) -> dict[str, Any]:
        """Returns a description of the drafter, for `stree-jax info`.

        Args:
          format: the format of the weights in memory, from which their bytes are
            computed.
          draft_vocab: number of tokens to which the head is trimmed, or None.

        Returns:
          A dictionary for JSON. Its entry "format" is the name of the method, such as
          "DFlash", and not of the weights' format.
        """
        raise NotImplementedError

    def weight_format(self, dtype: Any = None) -> Format:
        """Returns the format of the weights in memory; see `load_drafter`."""
        usual = weights_named(source_dtype(self.source))
        found = usual if dtype is None else weights_named(dtype)
        return found.fitted(lambda: self.layout) or usual


class PublishedKind(DrafterKind):
    """A kind of published drafter.

    Attributes:
      opened: the class of its opened files.
    """

    opened: type[OpenedDrafter]
    can_trim = True

    def open(self, files: DrafterFiles, warn: Warn | None = None) -> Any:
        """Opens the files. Reads the config and headers only.

        Raises:
          CheckpointError: the drafter is not of a supported kind, or is damaged.
        """
        if isinstance(files.place, HubName) and MASK_FILE in files.names:
            raise CheckpointError(
                f"{files.name}: {MASK_FILE} is a pickle, which is not read; save its "
                f"tensor as {MASK} in a safetensors file of a local copy"
            )
        if any(LATENT in name for name in files.source.tensors):
            raise CheckpointError(
                f"{files.path}: drafters with latent attention (MLA, as in "
                "Eagle3DeepseekV2ForCausalLM) are not supported"
            )
        opened = self.opened(files.checkpoint, files.source, warn)
        opened.check()
        return opened

    def read_config(self, files: DrafterFiles, target: ModelConfig) -> DrafterConfig:
        opened = self.open(files)
        opened.check_target(Model({}, target))
        return DrafterConfig(
            opened.config(target), _kept_format(opened, KEPT_INT8.name)
        )

    def load(self, files: DrafterFiles, target: Model | None, dtype: Any) -> Any:
        opened = self.open(files, warnings.warn)
        if target is not None:
            opened.check_target(target)
        found = opened.read(target, opened.weight_format(dtype))
        if files.target:
            warn_of_other_target(found.config.target, files.target)
        return found

    def default_dtype(self, files: DrafterFiles, target: Format, dtype: Any) -> Any:
        if (usual := target.for_drafters()) is not None:
            return _kept_format(self.open(files), usual).name
        return INT8 if target.name == INT8 else dtype

    def with_ngrams(
        self, value: Any, ngrams: NGrams, levels: int | None, width: int | None
    ) -> WithNGrams:
        for option, number in (("--ngram-levels", levels), ("--ngram-width", width)):
            if number is not None:
                raise ValueError(f"{option}: for n-grams of a draft model only")
        return WithNGrams(without_pairs("--ngrams", value), ngrams)

    def facts(self, files: DrafterFiles, draft_vocab: int | None) -> dict[str, Any]:
        """Describes a drafter.

        "boundaries" are the places in the target that it reads: after so many layers.
        "kept_weight_bytes" is the size if quantized matrices are kept, which is the
        default for targets whose weights are kept; it is absent if there are none.
        """
        opened = self.open(files)
        format = opened.weight_format()
        facts = opened.facts(format, draft_vocab)
        return {
            "path": files.name,
            "format": facts.pop("format"),
            "target": opened.target or None,
            **facts,
            "dtype": format.name,
            "quantized": opened.quantized,
        }


def _kept_format(opened: OpenedDrafter, usual: str) -> Format:
    """Returns the default format of a drafter's weights, for a target whose quantized
    weights are kept. It is `usual` if matrices of the drafter can be kept quantized,
    too, and otherwise int8. Reads only headers."""
    found = opened.weight_format(usual)
    return format_named(INT8) if found.plain else found


def draft_count(rows: int, vocab: int) -> int:
    """Returns a number of tokens to draft. Raises ValueError if it is out of range."""
    return integer("draft vocabulary", rows, 1, vocab, f"1..{vocab} tokens")


def warn_of_other_target(stated: str, target: str | Path) -> None:
    """Warns if a drafter states another model than the target's name.

    Args:
      stated: the name that the drafter states, or "".
      target: path or hub id of the target. The name of a local directory is taken from
        its config, if that has one.
    """
    name = _name_of(target)
    if stated and name and _plain(stated) != _plain(name):
        warnings.warn(
            f"drafter: was trained for {stated}, but the target is {name}; if few "
            "draft tokens are accepted, use that model",
            stacklevel=2,
        )


def _name_of(target: str | Path) -> str:
    """Returns the published name of a model, or "" if it is unknown."""
    if not Path(target).exists():
        found = hub_name(str(target))
        return "" if found is None else found.repo
    files = CheckpointFiles(Path(target))
    if not Path(target).is_dir() or not files.has(CONFIG):
        return ""
    name = files.json().get("_name_or_path")
    known = isinstance(name, str) and not Path(name).is_absolute()
    return str(name) if known and hub_name(str(name)) else ""


def _plain(name: str) -> tuple[str, ...]:
    """Returns the words of a model's name without its owner and its weights' format."""
    words = re.split(r"[-_ ]+", name.rstrip("/").rpartition("/")[2].lower())
    return tuple(word for word in words if not _STORAGE.fullmatch(word))
