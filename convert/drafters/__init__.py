"""Reads published drafters: block drafters (DFlash, DFlash2, DSpark) and EAGLE."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.drafters import dflash, eagle, names
from stree_jax.convert.drafters.fields import (
    has_drafter_fields as has_drafter_fields,
)
from stree_jax.convert.drafters.fields import target_name
from stree_jax.convert.drafters.kept import layout_of
from stree_jax.convert.drafters.names import check_stored
from stree_jax.convert.families.configs import Warn
from stree_jax.convert.families.tensors import noting_nonfinite
from stree_jax.convert.saved.store import weights_named
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.quantized import logical, scheme_names
from stree_jax.convert.tensors.source import Source, open_source, source_dtype
from stree_jax.models import Format, ModelConfig
from stree_jax.models.drafters.dflash import DFlash, DFlashConfig, dflash_table
from stree_jax.models.drafters.eagle import Eagle, EagleConfig
from stree_jax.models.weights.weight import Layout

LATENT = ".kv_a_proj"  # in the names of tensors of latent attention


@dataclass(frozen=True)
class OpenedDrafter:
    """A local drafter whose config and tensor headers have been read.

    Attributes:
      files: its files.
      source: its tensors.
      family: "block" or "eagle".
      warn: called with a line for each assumption.
    """

    files: CheckpointFiles
    source: Source
    family: Literal["block", "eagle"]
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
        return {names.plain_name(name): name for name in self.source.tensors}

    @property
    def target(self) -> str:
        """The name of the target that the config states, or ""."""
        return target_name(self.fields)

    @property
    def target_layers(self) -> int | None:
        """The number of the target's layers that the config states, or None."""
        if self.family == "eagle":
            return None
        return dflash.target_layers(self.files.json(), self.file)

    @cached_property
    def block_config(self) -> DFlashConfig:
        """The architecture of a block drafter."""
        return dflash.dflash_config(
            self.files.json(), self.shapes, warn=self.warn, file=self.file
        )

    def config(self, target: ModelConfig | None) -> DFlashConfig | EagleConfig:
        """Returns the architecture.

        Args:
          target: the target's architecture, which EAGLE drafters need.

        Raises:
          CheckpointError: the drafter is not supported, or does not fit the target.
        """
        if self.family == "block":
            return self.block_config
        return eagle.eagle_config(
            self.files.json(),
            self.shapes,
            self._needed(target),
            warn=self.warn,
            file=self.file,
        )

    def _needed(self, target: ModelConfig | None) -> ModelConfig:
        if target is None:
            raise CheckpointError(
                f"{self.files.path}: an EAGLE drafter; to load it, pass its target"
            )
        return target

    def weight_format(self, dtype: Any = None) -> Format:
        """Returns the format of the weights in memory; see `load_drafter`."""
        usual = weights_named(source_dtype(self.source))
        found = usual if dtype is None else weights_named(dtype)
        return found.fitted(lambda: self.layout) or usual

    @cached_property
    def layout(self) -> Layout:
        """Storage of the matrices in dtype "kept"; empty for EAGLE drafters, which are
        dequantized."""
        if self.family == "eagle":
            return ()
        c = self.block_config
        turned = dflash.interleaved(self.files.json(), self.file)
        sources = names.kept_sources(self.source, c, turned)
        return layout_of(self.source, dflash_table(c), sources)

    @property
    def quantized(self) -> str | None:
        """The storage format of quantized weights, such as "nvfp4"."""
        return scheme_names(self.source)

    def read(
        self,
        target: ModelConfig | None,
        format: Format,
        config: DFlashConfig | None = None,
    ) -> DFlash | Eagle:
        """Reads the weights. Warns once if one is NaN or infinite, as for models.

        Args:
          target: as in `config`.
          format: their format in memory.
          config: the architecture of a block drafter, if it is not `block_config`.
        """
        with noting_nonfinite(self.source, self.warn) as source:
            if self.family == "block":
                own = config or self.block_config
                turned = dflash.interleaved(self.files.json(), self.file)
                return names.read_dflash(source, own, format, turned)
            return eagle.read_eagle(
                self.files.json(),
                _Arrays(source),
                self._needed(target),
                dtype=format,
                shapes=self.shapes,
                warn=self.warn,
                file=self.file,
            )


class _Arrays(Mapping[str, np.ndarray]):
    """The tensors of a source, which are read when they are looked up."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, name: str) -> np.ndarray:
        return self.source.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.tensors)

    def __len__(self) -> int:
        return len(self.source.tensors)


def open_drafter(directory: Path, warn: Warn | None = None) -> OpenedDrafter:
    """Opens a local directory of a drafter. Reads its config and headers only.

    Raises:
      CheckpointError: it is not a drafter of a supported kind, or it is damaged.
    """
    files = CheckpointFiles(directory)
    source = logical(open_source(directory), files)
    if any(LATENT in name for name in source.tensors):
        raise CheckpointError(
            f"{directory}: drafters with latent attention (MLA, as in "
            "Eagle3DeepseekV2ForCausalLM) are not supported"
        )
    if eagle.is_eagle(source.tensors):
        check_stored(source, eagle.plain_name)
        return OpenedDrafter(files, source, "eagle", warn)
    opened = OpenedDrafter(files, source, "block", warn)
    dflash.check_supported(files.json(), opened.shapes, opened.file)
    if not names.is_block(source.tensors):
        raise CheckpointError(
            f"{directory}: not a drafter of a known kind; want the tensors of DFlash, "
            "DFlash2, DSpark or EAGLE"
        )
    check_stored(source, names.plain_name)
    if files.has(names.MASK_FILE) and names.MASK not in opened.plain_names:
        raise CheckpointError(
            f"{directory / names.MASK_FILE}: is a pickle, which is not read; save "
            f"its tensor as {names.MASK} in a safetensors file"
        )
    return opened


def is_drafter_directory(directory: Path) -> bool:
    """True if a local directory is a drafter by its config, or by its tensors if the
    config is that of a model with one layer (EAGLE-2)."""
    files = CheckpointFiles(directory)
    if not files.has("config.json"):
        return False
    values = files.json()
    if has_drafter_fields(values):
        return True
    if values.get("num_hidden_layers") != 1:
        return False
    try:
        return eagle.is_eagle(open_source(directory).tensors)
    except CheckpointError:
        return False  # loading it as a model then reports the fault
