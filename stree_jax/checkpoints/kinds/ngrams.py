"""Reads and writes n-gram tables as safetensors files with a checksum."""

import hashlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.checkpoints.kinds.kind import DrafterKind, Target
from stree_jax.checkpoints.resolve import valid_path
from stree_jax.common.whole_file import write_whole
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.hub import fetch, hub_name
from stree_jax.models import Model, ModelConfig
from stree_jax.models.stack.memory import size_of
from stree_jax.speculation.drafters.ngrams import ASSUMED_RATES, WAYS, NGrams, Table

FORMAT, VERSION = "stree-jax-ngrams", 1
MOST_HEADER = 2**20  # bytes
FIELDS = ("contexts", "tokens", "log_prob", "back_off")


def save_ngrams(ngrams: NGrams, dst: str | os.PathLike[str]) -> None:
    """Writes a table, atomically; dst must not exist.

    Raises:
      CheckpointError: one line that says what is wrong; dst is not created.
    """
    from safetensors.numpy import save

    if not isinstance(ngrams, NGrams):
        raise CheckpointError(f"ngrams: want NGrams, got {type(ngrams).__name__}")
    dst = valid_path("dst", dst)
    check_new(dst)
    arrays = {"unigram": ngrams.unigram}
    for c, table in enumerate(ngrams.tables, start=1):
        arrays |= {f"{field}_{c}": getattr(table, field) for field in FIELDS}
    tensors = {name: np.asarray(array) for name, array in arrays.items()}
    facts = {
        "format": FORMAT,
        "version": str(VERSION),
        "temperature": repr(float(ngrams.temperature)),
        "rates": json.dumps(ngrams.rates),
    }
    body = save(tensors, facts)
    facts["sha256"] = _digest(*_split(dst, body))
    try:
        write_whole(dst, save(tensors, facts))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{dst}: cannot be written ({error})") from error


def check_new(dst: Path) -> None:
    """Checks that a new file can be created, before hours of work.

    Raises:
      CheckpointError: the file exists, or its folder does not exist.
    """
    try:
        there = dst.exists() or dst.is_symlink()
        folder = dst.absolute().parent.is_dir()
    except (OSError, ValueError) as error:  # too long, or with a null byte
        raise CheckpointError(f"{dst!s:.80}: not a valid path ({error})") from error
    if there:
        raise CheckpointError(f"{dst}: exists already; choose another place")
    if not folder:
        raise CheckpointError(f"{dst.absolute().parent}: no such directory")


def load_ngrams(path: str | os.PathLike[str]) -> NGrams:
    """Loads a table that was written by `save_ngrams` or `stree-jax ngrams`.

    Args:
      path: path of the file, or its name on the hub: OWNER/NAME/FILE.safetensors.

    Raises:
      CheckpointError: one line that says what is wrong and where.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    named = hub_name(str(path))
    path = valid_path("path", path)
    path = path if named is None or path.exists() else fetch(named)
    try:
        if not path.is_file():
            other = path.exists() and not path.is_dir()
            problem = "not a regular file" if other else "no such file"
            raise CheckpointError(f"{path}: {problem}")
        with path.open("rb") as opened:
            head = opened.read(8 + MOST_HEADER)
            _split(path, head)  # check the header before reading a file of unknown size
            body = head + opened.read()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    header, data = _split(path, body)
    facts = header.get("__metadata__")
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise _foreign(path)
    if facts.get("version") != str(VERSION):
        raise CheckpointError(
            f"{path}: version: want {VERSION}, got {facts.get('version')!r}"
        )
    if facts.get("sha256") != _digest(header, data):
        raise CheckpointError(
            f"{path}: damaged: its checksum does not match its content; copy or make "
            "it again"
        )
    try:
        tensors = load(body)
        temperature = float(facts["temperature"])
        rates = _rates(facts.get("rates"))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a table ({error})") from error
    return replace(_checked(path, tensors, temperature), rates=rates)


def _rates(text: str | None) -> tuple[float, ...]:
    """Parses the acceptance rates of a file; empty for older files. Raises TypeError or
    ValueError for invalid rates."""
    if text is None:
        return ASSUMED_RATES
    rates = tuple(float(rate) for rate in json.loads(text))
    if not rates or not all(
        0 <= a <= b <= 1 for a, b in zip(rates, (*rates[1:], 1.0), strict=True)
    ):
        raise ValueError(f"rates: want growing numbers in 0..1, got {text:.80}")
    return rates


def _foreign(path: Path) -> CheckpointError:
    hint = "`stree-jax ngrams` makes one"
    if (path.parent / "config.json").is_file():
        hint = f"if it is a file of a model, pass its directory, {path.parent}"
    return CheckpointError(f"{path}: no n-gram table; {hint}")


def _split(path: Path, body: bytes) -> tuple[dict[str, Any], bytes]:
    """Splits a safetensors file into its header and the bytes after it."""
    size = int.from_bytes(body[:8], "little")
    if not 2 <= size <= min(MOST_HEADER, len(body) - 8):
        raise _foreign(path)
    try:
        header = json.loads(body[8 : 8 + size])
    except (ValueError, RecursionError) as error:
        raise _foreign(path) from error
    if not isinstance(header, dict):
        raise _foreign(path)
    return header, body[8 + size :]


def _digest(header: dict[str, Any], data: bytes) -> str:
    """Returns the SHA-256 of the header, without its checksum, and the data."""
    facts = {k: v for k, v in header["__metadata__"].items() if k != "sha256"}
    rest = json.dumps({**header, "__metadata__": facts}, sort_keys=True)
    return hashlib.sha256(rest.encode() + data).hexdigest()


def _checked(path: Path, tensors: dict[str, np.ndarray], temperature: float) -> NGrams:
    """Checks the shape, dtype and range of each array and returns the table."""

    def array(name: str, kind: type, *shape: int | None) -> np.ndarray:
        found = tensors.pop(name, None)
        if found is None:
            raise CheckpointError(f"{path}: {name}: missing")
        fits = len(found.shape) == len(shape) and all(
            want in (None, got) for want, got in zip(shape, found.shape, strict=True)
        )
        if found.dtype != kind or not fits:
            raise CheckpointError(
                f"{path}: {name}: want {np.dtype(kind)} {list(shape)}, "
                f"got {found.dtype} {list(found.shape)}"
            )
        return found

    def inside(name: str, found: np.ndarray, low: float, high: float) -> np.ndarray:
        if found.size and not ((found >= low) & (found <= high)).all():  # refuses NaN
            raise CheckpointError(f"{path}: {name}: numbers outside {low}..{high}")
        return found

    order, none = sum(name.startswith("contexts_") for name in tensors) + 1, -math.inf
    unigram = inside("unigram", array("unigram", np.float32, None), none, 0)
    tables, V, keep = [], unigram.shape[0], None
    for c in range(1, order):
        contexts = array(f"contexts_{c}", np.int32, None, c)
        slots = contexts.shape[0]
        if slots < WAYS or slots & (slots - 1):
            raise CheckpointError(
                f"{path}: contexts_{c}: {slots} slots, not a power of 2"
            )
        tokens = array(f"tokens_{c}", np.int32, slots, keep)
        keep = tokens.shape[1]
        chance = array(f"log_prob_{c}", np.float32, slots, keep)
        left = array(f"back_off_{c}", np.float32, slots)
        inside(f"contexts_{c}", contexts, -1, V - 1)
        inside(f"tokens_{c}", tokens, -1, V - 1)
        inside(f"log_prob_{c}", chance, none, 1e-3)
        inside(f"back_off_{c}", left, none, 1e3)
        tables.append(Table(*map(jnp.asarray, (contexts, tokens, chance, left))))
    if not tables or not keep or tensors or not 0 < temperature < math.inf:
        odd = next(iter(tensors), "an order of 2, tokens and a temperature above 0")
        raise CheckpointError(f"{path}: {odd}: want those of an n-gram table alone")
    return NGrams.of(jnp.asarray(unigram), tuple(tables), keep, temperature)


class NGramsKind(DrafterKind):
    """A file of n-grams."""

    name = "n-grams"
    value = NGrams

    def read_config(self, files: DrafterFiles, target: ModelConfig) -> NGrams:
        return load_ngrams(files.name)

    def load(self, files: DrafterFiles, target: Model | None, dtype: Any) -> NGrams:
        return load_ngrams(files.name)

    def save(self, value: Any, dst: Path, target: Target) -> None:
        save_ngrams(value, dst)

    def facts(self, files: DrafterFiles, draft_vocab: int | None) -> dict[str, Any]:
        found = load_ngrams(files.name)
        return {
            "path": files.name,
            "format": self.name,
            "order": found.order,
            "vocab_size": found.num_tokens,
            "slots": [table.slots for table in found.tables],
            "tokens_per_context": found.tables[0].tokens.shape[1],
            "temperature": found.temperature,
            "bytes": size_of(found),
        }


N_GRAMS = NGramsKind()
