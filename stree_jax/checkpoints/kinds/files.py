"""The files that a drafter's name stands for."""

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stree_jax.checkpoints.resolve import headers, local_or_hub, resolve
from stree_jax.convert.hub import HubName, repository
from stree_jax.convert.tensors.checkpoint_files import CONFIG, CheckpointFiles
from stree_jax.convert.tensors.quantized import logical
from stree_jax.convert.tensors.stored_tensors import Tensors
from stree_jax.convert.tensors.tensor_files import file_names, open_source, read_json


@dataclass(frozen=True, eq=False)
class DrafterFiles:
    """A drafter's name and its files. Each is looked up when it is first needed, and
    once.

    Attributes:
      name: a word such as "lookup", MODULE:NAME, a path, a bundled name or a name on
        the hub.
      target: path or name of the target model; "" if it is unknown.
      whole: True if the weights are needed. If False, only headers are fetched from the
        hub.
    """

    name: str
    target: str = ""
    whole: bool = False

    @cached_property
    def place(self) -> Path | HubName:
        """The local path, or the name on the hub."""
        return local_or_hub(self.name)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the files in the directory or repository; empty if the drafter's
        name stands for a single file."""
        if Path(self.name).is_file():
            return frozenset()
        place = self.place
        if isinstance(place, HubName):
            single = place.file or place.quant
            return frozenset(() if single else repository(place).sizes)
        return frozenset(file_names(place) if place.is_dir() else ())

    @cached_property
    def config_json(self) -> Mapping[str, Any]:
        """The fields of config.json; empty without this file."""
        if CONFIG not in self.names:
            return {}
        return read_json(resolve(self.name, ((CONFIG,),)) / CONFIG)

    @cached_property
    def path(self) -> Path:
        """A local directory or GGUF file; see `whole`."""
        if self.whole:
            return resolve(self.name)
        stack = ExitStack()
        weakref.finalize(self, stack.close)  # removes headers from the hub
        return stack.enter_context(headers(self.name))

    @cached_property
    def checkpoint(self) -> CheckpointFiles:
        return CheckpointFiles(self.path)

    @cached_property
    def source(self) -> Tensors:
        """The tensors of the directory."""
        return logical(open_source(self.path), self.checkpoint)
