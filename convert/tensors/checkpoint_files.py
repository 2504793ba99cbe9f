"""The files of a local checkpoint, each parsed at most once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.gguf_header import Header, is_gguf, read_header
from stree_jax.convert.tensors.stored_tensors import TensorInfo
from stree_jax.convert.tensors.tensor_files import is_file, read_json

CONFIG = "config.json"


@dataclass(frozen=True)
class CheckpointFiles:
    """A local checkpoint: a directory, or a GGUF file.

    Attributes:
      path: path of the directory or file.
    """

    path: Path
    _parsed: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    @property
    def is_gguf(self) -> bool:
        return is_gguf(self.path)

    @cached_property
    def header(self) -> Header:
        """The header of a GGUF file."""
        return read_header(self.path)

    @property
    def config_file(self) -> Path:
        """The path of config.json, for messages."""
        return self.path / CONFIG

    def has(self, name: str) -> bool:
        """True if the directory has this file.

        Raises:
          CheckpointError: it is not a regular file.
        """
        return is_file(self.path / name)

    def json(self, name: str = CONFIG) -> dict[str, Any]:
        """Returns the object in a JSON file, parsed once. Do not modify it.

        Raises:
          CheckpointError: the file is missing or does not contain an object.
        """
        if name not in self._parsed:
            self._parsed[name] = read_json(self.path / name)
        return self._parsed[name]

    def fields(
        self, name: str = CONFIG, tensors: Mapping[str, TensorInfo] | None = None
    ) -> ConfigFields:
        """Returns the fields of a JSON file; see `json`."""
        return ConfigFields(self.path / name, self.json(name), tensors=tensors or {})

    def fields_if_any(self, name: str) -> ConfigFields:
        """Returns the fields of a JSON file; empty if the file is missing."""
        if self.has(name):
            return self.fields(name)
        return ConfigFields(self.path / name, {})
