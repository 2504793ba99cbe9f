"""Reads and writes Medusa heads: config.json and medusa_lm_head.safetensors.

Tensors have the names of the public Medusa code: `K.J.linear.weight` and `.bias` are
block J of head K (both from 0), and `K.L.weight` is the output matrix after the last
block, absent if all heads share the model's. vLLM's names (`blocks.K.layers.J.weight`,
`lm_heads.K.weight`) are read too. The number of heads is taken from the tensors,
because published configs are wrong.
"""

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.checkpoints.kinds.finding import HEADS as MEDUSA_FILES
from stree_jax.checkpoints.kinds.kind import DrafterKind, Target
from stree_jax.checkpoints.resolve import resolve, valid_path
from stree_jax.convert import CheckpointError
from stree_jax.convert.families.tensors import check_dtype, noting_nonfinite
from stree_jax.convert.saved.atomic import atomic_directory
from stree_jax.convert.saved.config import dtype_named, weights_named
from stree_jax.convert.tensors.stored_tensors import TensorInfo, Tensors
from stree_jax.convert.tensors.tensor_files import is_file, open_files, read_json
from stree_jax.models import Format, Model, ModelConfig
from stree_jax.models.configs.params import nest, stored
from stree_jax.models.drafters.heads import Heads, HeadsConfig, head_table
from stree_jax.models.layers.params import abstract_table, by_path, parameter_count
from stree_jax.models.stack.memory import size_of
from stree_jax.speculation.drafters.table import DrafterConfig

WEIGHTS = MEDUSA_FILES[0]
FILES = (*MEDUSA_FILES, "model.safetensors", "pytorch_model.bin")
ACCURACY = "medusa_accuracy"
MOST_RANKS, ROUNDED = 64, 1e-9
PUBLIC = re.compile(r"(?:medusa_heads?\.)?(\d{1,3})\.(\d{1,3})\.(?:linear\.)?(\w+)")
BLOCK = re.compile(r"(?:medusa_heads\.)?blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(\w+)")
OUTPUT = re.compile(r"(?:medusa_heads\.)?lm_heads\.(\d{1,3})\.(weight)")

Path_ = tuple[str, ...]


def load_heads(path_or_hub_id: str | Path, dtype: Any = None) -> Heads:
    """Loads Medusa heads from a directory, a hub id, or "demo-heads", the bundled ones.

    Warns of a weight that is NaN or infinite, as for models.

    Args:
      dtype: "float32", "bfloat16" or "int8". If None, bfloat16 weights stay and all
        others become float32. Heads are not quantized, so that "kept" means the same.

    Raises:
      CheckpointError: one line that says what is wrong and where.
    """
    if dtype is not None:
        weights_named(dtype)
    source, names, config = _opened(path_or_hub_id)
    usual = _usual(source)
    kept = usual if dtype is None else weights_named(dtype).fitted(tuple) or usual
    table = head_table(config)
    with noting_nonfinite(source, warnings.warn) as read:
        params = {
            path: stored(table[path], jnp.asarray(read.read(n)), kept)
            for path, n in names.items()
        }
    return Heads(nest(params), config)


def _opened(
    path_or_hub_id: str | Path,
) -> tuple[Tensors, dict[Path_, str], HeadsConfig]:
    """Returns the tensors, their names by parameter path, and the checked
    architecture."""
    directory = resolve(path_or_hub_id, (("config.json",), FILES))
    file = next((directory / n for n in FILES if is_file(directory / n)), None)
    if file is None:
        raise CheckpointError(
            f"{directory}: no Medusa heads; want {' or '.join(FILES)}"
        )
    source = open_files(directory, [file])
    names: dict[Path_, str] = {}
    for path, n in _named(source.tensors, file):
        if (other := names.setdefault(path, n)) != n:
            raise CheckpointError(f"{file}: {n} and {other} are one parameter, twice")
    config = _config(
        directory, file, {path: source.tensors[n] for path, n in names.items()}
    )
    return source, names, config


def _usual(source: Tensors) -> Format:
    found = {info.dtype for info in source.tensors.values()}
    return weights_named("bfloat16" if found == {"bfloat16"} else "float32")


def _named(
    tensors: Mapping[str, TensorInfo], file: Path
) -> Iterator[tuple[Path_, str]]:
    """Yields (parameter path, name) of each tensor."""
    for name, info in tensors.items():
        linear = ".linear." in name
        if found := PUBLIC.fullmatch(name):
            k, j, kind = found.groups()
            part = f"block_{int(j)}" if linear else "output"
        elif found := BLOCK.fullmatch(name):
            k, j, kind = found.groups()
            part = f"block_{int(j)}"
        elif found := OUTPUT.fullmatch(name):
            (k, kind), part = found.groups(), "output"
        else:
            raise CheckpointError(f"{file}: unexpected tensor {name}")
        check_dtype(name, info)
        yield (f"head_{int(k)}", part, kind), name


def _config(
    directory: Path, file: Path, tensors: Mapping[Path_, TensorInfo]
) -> HeadsConfig:
    """Infers the architecture from the tensors and checks each of them."""
    heads = {path[0] for path in tensors}
    blocks = {path[1] for path in tensors if path[1] != "output"}
    first = tensors.get(("head_0", "block_0", "weight"))
    output = tensors.get(("head_0", "output", "weight"))
    known = first or output
    if known is None:
        raise CheckpointError(f"{file}: want block 0 or an output of head 0")
    told = directory / "config.json"
    fields = read_json(told) if is_file(told) else {}
    if any(len(part.shape) != 2 for part in (known, output or known)):
        raise CheckpointError(f"{file}: no matrices of heads")
    rows = output.shape[0] if output else fields.get("vocab_size", 0)
    if type(rows) is not int or rows < 0:
        raise CheckpointError(f"{told}: vocab_size: want a number, got {rows!r}")
    try:
        config = HeadsConfig(
            d_model=known.shape[1],
            vocab_size=rows,
            heads=len(heads),
            blocks=len(blocks),
            own_output=output is not None,
            bias=("head_0", "block_0", "bias") in tensors,
            accuracy=_accuracy(told, fields.get(ACCURACY), len(heads)),
        )
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    table = head_table(config)
    for path, (shape, *_) in table.items():
        if path not in tensors:
            raise CheckpointError(f"{file}: {'.'.join(path)} is missing")
        if tensors[path].shape != shape:
            got = list(tensors[path].shape)
            raise CheckpointError(
                f"{file}: {'.'.join(path)}: want shape {list(shape)}, got {got}"
            )
    if odd := tensors.keys() - table.keys():
        raise CheckpointError(f"{file}: {'.'.join(min(odd))} belongs to no head")
    return config


def _accuracy(file: Path, table: Any, heads: int) -> tuple[tuple[float, ...], ...]:
    """Returns acceptance rates by head and rank [K][R]; a row sums to at most 1."""
    if table is None:
        return ()
    rows: list[Any] = table if isinstance(table, list) else []
    widths = {len(row) if isinstance(row, list) else 0 for row in rows}
    if len(rows) != heads or len(widths) != 1 or not 0 < max(widths) <= MOST_RANKS:
        raise CheckpointError(
            f"{file}: {ACCURACY}: want {heads} rows of up to {MOST_RANKS} shares each"
        )
    for row in rows:
        numbers = all(type(p) in (float, int) and 0 <= p <= 1 for p in row)
        if not numbers or math.fsum(row) > 1 + ROUNDED:
            raise CheckpointError(f"{file}: {ACCURACY}: want shares of 1 together")
    return tuple(tuple(float(p) for p in row) for row in rows)


def public_name(path: Path_, blocks: int) -> str:
    """Returns the tensor name that the public Medusa code gives to a parameter of ours.

    Args:
      path: our path, ("head_K", "block_J" or "output", "weight" or "bias").
      blocks: number of blocks per head; the output matrix follows them.
    """
    head, part, kind = path
    k = head.removeprefix("head_")
    if part == "output":
        return f"{k}.{blocks}.{kind}"
    return f"{k}.{part.removeprefix('block_')}.linear.{kind}"


def save_heads(heads: Heads, dst: str | PathLike[str], base: str = "") -> None:
    """Writes heads in the public layout, atomically; dst must not exist.

    Args:
      base: path or hub id of the target model, stored as a note.

    Raises:
      CheckpointError: one line that says what is wrong; dst is not created.
    """
    from safetensors.numpy import save_file

    if not isinstance(heads, Heads):
        raise CheckpointError(f"heads: want Heads, got {type(heads).__name__}")
    if not isinstance(base, str):
        raise CheckpointError(f"base: want a text, got {type(base).__name__}")
    path = valid_path("dst", dst)
    c = heads.config
    dtype_named(heads.weight_format)
    tensors = {
        public_name(path, c.blocks): np.ascontiguousarray(jax.device_get(leaf))
        for path, leaf in by_path(heads.params).items()
    }
    fields: dict[str, Any] = {
        "model_type": "medusa",
        "base_model_name_or_path": base,
        "medusa_num_heads": c.heads,
        "medusa_num_layers": c.blocks,
        "hidden_size": c.d_model,
        "vocab_size": c.vocab_size,
    }
    if c.accuracy:
        fields[ACCURACY] = c.accuracy
    with atomic_directory(path) as temporary:
        save_file(tensors, temporary / WEIGHTS, {"format": "pt"})
        text = json.dumps(fields, indent=2) + "\n"
        (temporary / "config.json").write_text(text, encoding="utf-8")


class HeadsKind(DrafterKind):
    """Medusa heads."""

    name = "Medusa heads"
    value = Heads

    def read_config(self, files: DrafterFiles, target: ModelConfig) -> DrafterConfig:
        source, _, config = _opened(files.name)
        return DrafterConfig(config, _usual(source))

    def load(self, files: DrafterFiles, target: Model | None, dtype: Any) -> Heads:
        return load_heads(files.name, dtype)

    def save(self, value: Any, dst: Path, target: Target) -> None:
        save_heads(value, dst, target.name)

    def facts(self, files: DrafterFiles, draft_vocab: int | None) -> dict[str, Any]:
        source, _, config = _opened(files.name)
        format = _usual(source)
        arrays = abstract_table(head_table(config), format)
        return {
            "path": files.name,
            "format": self.name,
            "heads": config.heads,
            "blocks": config.blocks,
            "d_model": config.d_model,
            "own_output": config.own_output,
            "parameters": parameter_count(arrays),
            "weight_bytes": size_of(arrays),
            "dtype": format.name,
        }


HEADS = HeadsKind()
