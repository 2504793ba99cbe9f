"""Chooses llama.cpp's architecture for a model, and describes the model in its keys and
tensors.

Nothing states a second time which options an architecture has: the keys and tensor
names are read back by the architecture's own parser, and must give the same config.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families.table import require
from stree_jax.convert.families.tensor_map import Names, Row, source_shapes
from stree_jax.convert.families.tensors import rows_of
from stree_jax.convert.gguf.architectures import ARCHITECTURES
from stree_jax.convert.gguf.checkpoint import ARCHITECTURE
from stree_jax.convert.gguf.keys import CONTEXT_LENGTH, check_neutral
from stree_jax.convert.gguf.multipliers import (
    factor_of,
    times,
    without_multipliers,
)
from stree_jax.convert.gguf.names import EMBEDDING, HEAD
from stree_jax.convert.gguf.rotary import ROPE_FACTORS
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.gguf_blocks import Kind
from stree_jax.convert.tensors.gguf_quantize import BY_NAME
from stree_jax.convert.tensors.stored_tensors import TensorInfo
from stree_jax.models import ModelConfig, param_shapes
from stree_jax.models.stack.param_table import param_at

CONTEXT = 1 << 17  # context length in a file if that of the training is unknown
# Types of files, by their names in `--type`, and llama.cpp's numbers (`general.
# file_type`). The number of q4_k is that of Q4_K_S.
FILE_TYPES = {
    "f32": 0,
    "bf16": 32,
    "f16": 1,
    "q8_0": 7,
    "q4_0": 2,
    "q4_k": 14,
    "q6_k": 18,
}
# What a matrix becomes whose rows are no whole blocks of its type; F16 if neither fits.
# As in llama.cpp's quantizer (`llama-quant.cpp`).
NARROW = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
# The type of the matrix that computes the logits: the head, or a tied embedding.
OF_HEAD = {"Q4_0": "Q6_K", "Q4_K": "Q6_K"}
PARAMETERS = "parameters"  # what an architecture lacks if it has no tensor for one
# Errors of writing and reading a config that an architecture does not have.
MISFITS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, TypeError),
    ValueError,
)
WITHOUT_ENDING = ".ffn_norm.weight"  # "blk.0.ffn_norm" in files of Falcon-H1


@dataclass(frozen=True)
class Described:
    """A model in the terms of one of llama.cpp's architectures.

    Attributes:
      name: name of the architecture.
      source: the model's config.
      config: the config that the file describes, without multipliers that are in the
        weights, and without MTP layers if the architecture has none here.
      names: names of the tensors.
      values: metadata, with the prefix of the architecture.
      factors: divisors of the rotary frequencies, a tensor of the file, or None.
    """

    name: str
    source: ModelConfig
    config: ModelConfig
    names: Names
    values: Mapping[str, Any]
    factors: np.ndarray | None

    def rows(self) -> list[Row]:
        """Returns a `Row` for each parameter."""
        return rows_of(self.names, self.config)

    def spelled(self, name: str) -> str:
        """Returns the name in the file of a tensor that `names` calls `name`."""
        if ARCHITECTURES[self.name].folds and name.endswith(WITHOUT_ENDING):
            return name.removesuffix(".weight")
        return name

    def in_file(self, row: Row, param: np.ndarray) -> np.ndarray:
        """Returns a parameter with the multipliers that the file has in its weights."""
        if not ARCHITECTURES[self.name].folds:
            return param
        return times(param, factor_of(self.source, row.path))


def describe(
    config: ModelConfig, context: int | None = None, prefer: str = ""
) -> Described:
    """Describes a model for a GGUF file.

    Args:
      config: the architecture.
      context: context length of the training, in tokens. If None, `CONTEXT`.
      prefer: name of the architecture to take if it can express the model, such as the
        one of the file that the model is from. Others are tried in the order of
        `ARCHITECTURES`.

    Raises:
      CheckpointError: no architecture of llama.cpp that is read here can express the
        model. The message is one line.
    """
    family = config.family.replace("_", "")  # "qwen3next"
    order = dict.fromkeys([prefer, family, *ARCHITECTURES])
    able = [
        n for n in order if n in ARCHITECTURES and ARCHITECTURES[n].may_write(config)
    ]
    if not able:
        kinds = ", ".join(dict.fromkeys(config.kinds))
        written = [n for n, a in ARCHITECTURES.items() if a.write is not None]
        what = f"{config.family}, " if config.family else ""
        raise CheckpointError(
            f"GGUF: no architecture that is written here has this model's layers "
            f"({what}{kinds}); known: {', '.join(written)}"
        )
    tried = []
    for name in able:
        found, lacking = _as_architecture(name, config, context or CONTEXT)
        if found is not None:
            return found
        tried.append((PARAMETERS in lacking, len(lacking), name, lacking))
    *_, name, lacking = min(tried)
    require(f"llama.cpp's {name}", dict.fromkeys(lacking, False))
    raise AssertionError("unreachable: `require` raises")


def _as_architecture(
    name: str, config: ModelConfig, context: int
) -> tuple[Described | None, list[str]]:
    """Describes a model as one architecture. If the architecture cannot express it,
    returns None and the options that it lacks."""
    architecture = ARCHITECTURES[name]
    plain = config if architecture.add_mtp else replace(config, mtp=())
    conditions: dict[str, bool] = {}
    if architecture.folds:
        plain = without_multipliers(plain)
        same = config.embedding_multiplier == 1 / config.logits_divisor
        fits = same or not config.tie_embeddings
        conditions["multipliers of an embedding that is the head"] = fits
    if architecture.limits is not None:
        conditions |= architecture.limits(plain)
    if lacking := [what for what, holds in conditions.items() if not holds]:
        return None, lacking
    try:
        assert architecture.write is not None
        keys = {CONTEXT_LENGTH: context, **architecture.write(plain)}
        names = architecture.written_names(plain)
        lacking = list(_differences(_read_back(name, plain, names, keys), plain))
    except CheckpointError as error:
        lacking = [str(error).removeprefix(f"GGUF: {name}.")]
    except MISFITS:
        lacking = [PARAMETERS]
    if lacking:
        return None, lacking
    factors = keys.pop(ROPE_FACTORS, None)
    values = {ARCHITECTURE: name, **{f"{name}.{k}": v for k, v in keys.items()}}
    return Described(name, config, plain, names, values, factors), []


def _read_back(
    name: str, config: ModelConfig, names: Names, keys: Mapping[str, Any]
) -> ModelConfig:
    """Returns the config that a file with these keys and names would have."""
    architecture, shapes = ARCHITECTURES[name], param_shapes(config)
    tensors: dict[str, TensorInfo] = {}
    for row in rows_of(names, config):
        each = zip(row.sources, source_shapes(row, shapes[row.path]), strict=True)
        tensors |= {n: TensorInfo(Path(), shape, "float32") for n, shape in each}
    fields = ConfigFields(Path("GGUF"), keys, f"{name}.", tensors)
    check_neutral(fields, architecture.known + architecture.ignored)
    found = architecture.parse(fields)
    add_mtp = architecture.add_mtp
    return found if add_mtp is None else add_mtp(fields, found)


# Attributes of a `ModelConfig` that no key of an architecture describes.
_ELSEWHERE = ("num_tokens", "stop_tokens", "family")


def _differences(found: Any, wanted: Any, name: str = "") -> Iterator[str]:
    """Yields the names of options in which two configs differ, as float32 numbers."""
    if is_dataclass(wanted) and type(found) is type(wanted):
        for field in fields(wanted):
            if field.name not in _ELSEWHERE and field.compare:
                pair = getattr(found, field.name), getattr(wanted, field.name)
                yield from _differences(*pair, f"{name}.{field.name}".lstrip("."))
    elif isinstance(wanted, Mapping) and found.keys() == wanted.keys():
        for key in wanted:
            yield from _differences(found[key], wanted[key], key)
    elif not _equal(found, wanted):
        yield name


def _equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, tuple) and isinstance(found, tuple):
        same = len(found) == len(wanted)
        return same and all(map(_equal, found, wanted))
    if isinstance(wanted, float) and isinstance(found, int | float):
        # A file has float32 numbers. One that was computed may be rounded once more.
        return bool(np.isclose(found, wanted, rtol=1e-6, atol=0))
    return bool(found == wanted)


@dataclass(frozen=True)
class Placed:
    """A tensor of a GGUF file, and the parameter that it is from.

    Attributes:
      row: the parameter's `Row`.
      name: the tensor's name in `Described.names`.
      shape: its shape.
      kind: its storage type.
      wanted: the storage type that the rule gives it. It differs from `kind` if its
        rows are no whole blocks of that type.
    """

    row: Row
    name: str
    shape: tuple[int, ...]
    kind: Kind
    wanted: Kind


def placed(model: Described, type_name: str) -> list[list[Placed]]:
    """Returns the tensors of a file, a list for each parameter.

    Matrices have the type of the file, with two exceptions: `OF_HEAD` and `NARROW`.
    Norms, biases, convolutions, routers and all other parameters are F32.

    Args:
      model: the model.
      type_name: a key of `FILE_TYPES`.
    """
    shapes, found = param_shapes(model.config), []
    head = EMBEDDING if model.config.tie_embeddings else HEAD
    for row in model.rows():
        matrix = param_at(model.config, row.path).quantizable
        each = zip(row.sources, source_shapes(row, shapes[row.path]), strict=True)
        tensors = []
        for name, shape in each:
            wanted = type_name.upper() if matrix else "F32"
            if name == f"{head}.weight":
                wanted = OF_HEAD.get(wanted, wanted)
            choices = (wanted, NARROW.get(wanted, "F16"), "F16")
            fitting = (n for n in choices if shape[-1] % BY_NAME[n].block == 0)
            kind = BY_NAME[next(fitting)]
            tensors.append(Placed(row, name, shape, kind, BY_NAME[wanted]))
        found.append(tensors)
    return found


def check_fits(tensors: list[Placed], type_name: str) -> str | None:
    """Returns a warning if some matrices cannot have the type of the file, or None.

    Raises:
      CheckpointError: no matrix can have it.
    """
    others = [t for t in tensors if t.kind != t.wanted]
    if not others:
        return None
    first = others[0]
    blocks = f"whole blocks of {first.wanted.block} numbers"
    what = f"such as {first.name} with rows of {first.shape[-1]}"
    if not any(t.kind.name == type_name.upper() for t in tensors):
        block = BY_NAME["Q8_0"].block
        able = any(t.wanted.block > 1 and t.shape[-1] % block == 0 for t in tensors)
        raise CheckpointError(
            f"type {type_name}: no matrix has rows that are {blocks} ({what}); choose "
            + ("q8_0, f16 or bf16" if able else "f16 or bf16")
        )
    kinds = " or ".join(sorted({t.kind.name.lower() for t in others}))
    return (
        f"{len(others)} matrices become {kinds}, because their rows are not {blocks} "
        f"({what})"
    )
