"""One case: a copy of a checkpoint, damaged once or twice."""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.damage.fields import fields, foreign, nonsense
from tests.damage.files import add_special, arrays, cut, flip, header_text, replace_file
from tests.damage.gguf_edits import gguf_edit
from tests.damage.pickles import pickles
from tests.damage.sources import (
    GGUF,
    HARMFUL,
    LAYOUTS,
    OWN,
    SOURCES,
    Rng,
    Useless,
    source,
)
from tests.damage.tensors import paths, shards, tensors

Damage = Callable[[Path, Rng], str]
DAMAGES: dict[str, Damage] = {
    "bytes": flip,
    "header": header_text,
    "cut": cut,
    "replaced": replace_file,
    "added": add_special,
    "fields": fields,
    "foreign": foreign,
    "nonsense": nonsense,
    "tensors": tensors,
    "shards": shards,
    "paths": paths,
    "pickles": pickles,
}
WEIGHTS = [2, 2, 2, 2, 1, 6, 2, 2, 4, 1, 2, 2]
OWN_DAMAGES: dict[str, Damage] = {
    "arrays": arrays,
    "bytes": flip,
    "cut": cut,
    "replaced": replace_file,
    "added": add_special,
    "fields": fields,
    "foreign": foreign,
    "nonsense": nonsense,
}
OWN_WEIGHTS = [3, 2, 2, 2, 1, 3, 1, 1]
GGUF_DAMAGES: dict[str, Damage] = {
    "edit": gguf_edit,
    "bytes": flip,
    "cut": cut,
    "replaced": replace_file,
}
GGUF_WEIGHTS = [8, 3, 2, 1]


@dataclass(frozen=True)
class Case:
    """A damaged copy in `directory`. Destinations go to `folder / "out"`.

    Attributes:
      what: the checkpoint, and the damage done to it.
      original: the sound checkpoint.
    """

    name: str
    kind: str
    what: tuple[str, ...]
    folder: Path
    original: Path

    @property
    def directory(self) -> Path:
        return self.folder / "src"

    @property
    def src(self) -> Path:
        """The path given to commands: the directory, or the first GGUF file."""
        if self.name not in GGUF:
            return self.directory
        return self.directory / min(file.name for file in self.original.iterdir())

    @property
    def own(self) -> bool:
        return self.name in OWN

    @property
    def harmful(self) -> bool:
        return self.what[-1].startswith(HARMFUL)


def once(damage: Damage, directory: Path, rng: Rng, again: bool) -> str | None:
    """Applies one damage. Returns its description, or None if it did not apply or
    failed on earlier damage."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return damage(directory, rng)
    except Exception as error:
        if again or isinstance(error, Useless):
            return None
        raise


def make_case(
    seed: int, number: int, sources: Path, folder: Path, only: str = ""
) -> Case:
    """Makes the case of a number. The same arguments always make the same case.

    Args:
      sources: folder of sound checkpoints.
      folder: an existing, empty folder.
      only: prefix of the names of its checkpoints.
    """
    rng = Rng(f"{seed}.{number}")
    named = [name for name in SOURCES if name.startswith(only)]
    name = rng.choice(named if only or rng.random() < 0.8 else list(OWN))
    own, gguf = name in OWN, name in GGUF
    layout = rng.choice(LAYOUTS)
    original = source(sources, name, "own" if own else layout)
    shutil.copytree(original, folder / "src")
    (folder / "out").mkdir()
    kinds, weights = (OWN_DAMAGES, OWN_WEIGHTS) if own else (DAMAGES, WEIGHTS)
    if gguf:
        kinds, weights = GGUF_DAMAGES, GGUF_WEIGHTS
    done: list[tuple[str, str]] = []
    wanted = rng.choice([1, 1, 1, 2])
    for kind in rng.choices(list(kinds), weights, k=100):
        if len(done) == wanted:
            break
        if what := once(kinds[kind], folder / "src", rng, bool(done)):
            done.append((kind, what))
    first = name if own else f"{name} ({layout})"
    kind = done[0][0] if len(done) == 1 else "two"
    kind = f"own {kind}" if own else f"gguf {kind}" if gguf else kind
    described = (first, *(what for _, what in done))
    return Case(name, kind, described, folder, original)


def contents(directory: Path) -> dict[str, Any]:
    """Returns the parts of an own-format directory whose changes must be detected.

    These are the bytes of params/ and of the tokenizer, and the fields of config.json.
    """
    files = [*(directory / "params").rglob("*"), directory / "tokenizer.json"]
    found: dict[str, Any] = {
        str(file.relative_to(directory)): file.read_bytes()
        for file in files
        if file.is_file()
    }
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return found | {"config": config}


def changed(case: Case) -> list[str]:
    """Returns the names of changed parts in a directory that was accepted.

    A config.json without its checksum counts as edited on purpose.
    """
    before, after = contents(case.original), contents(case.src)
    if "checksum" not in after["config"]:
        del before["config"]
    return [name for name in before if before[name] != after.get(name)]
