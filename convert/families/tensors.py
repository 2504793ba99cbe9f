"""Matches the tensors of a checkpoint with a model's parameters, and reads them."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any

import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families.configs import Warn
from stree_jax.convert.families.tensor_map import (
    Index,
    Names,
    Path,
    Piece,
    Row,
    can_be_cut,
    candidates,
    join,
    nested,
    numbered_layers,
    order_of,
    pieces,
    source_shapes,
)
from stree_jax.convert.tensors.stored_tensors import PIECE, TensorInfo, Tensors, at_once
from stree_jax.models import ModelConfig, param_shapes
from stree_jax.models.stack.config import required
from stree_jax.models.weights.format import QUANTIZED, Format, Packed, flat_experts

Shapes = Mapping[Path, tuple[int, ...]]  # shapes of parameters by path
HEAD = "lm_head.weight"  # usual name of the head
FLOATS = ("float32", "float16", "bfloat16")
UNTIED = (
    '; if the embedding is the head, set "tie_word_embeddings" to true in config.json'
)

_SHARED_TENSOR = re.compile(
    r"((?:model\.)?layers\.)(\d{1,6})(\.shared_transformer\..*)"
)


def rows_of(
    names: Names, config: ModelConfig, shapes: Shapes | None = None
) -> list[Row]:
    """Returns a `Row` for each parameter of a model, with the names of its tensors in
    the checkpoint. If `shapes` is None, it is `param_shapes(config)`."""
    shapes = param_shapes(config) if shapes is None else shapes
    rows = [row for row in candidates(names, config) if row.path in shapes]
    if names.renamed:
        rows = [
            replace(row, sources=tuple(names.renamed.get(n, n) for n in row.sources))
            for row in rows
        ]
    assert {row.path for row in rows} == shapes.keys(), "a parameter without a row"
    return rows


def check_sizes(file: PathLike[str], config: ModelConfig) -> None:
    """Checks that the sizes in the config of a file fit each other. Imports jax.

    Raises:
      CheckpointError: they do not.
    """
    from stree_jax.models.stack import shapes

    try:
        shapes.check_sizes(config)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: {str(error).splitlines()[0]}") from error


def check_tensors(
    source: Tensors,
    rows: list[Row],
    config: ModelConfig,
    names: Names | None = None,
    shapes: Shapes | None = None,
) -> None:
    """Checks that all expected tensors are present, with their shapes and float dtypes,
    and that there are no others.

    Args:
      source: the tensors.
      rows: a `Row` for each parameter.
      config: the config from `settle_names`. If it ties the embeddings, a head in the
        file is a copy and is ignored.
      names: the family's names. If None, the format has no MTP layer after the others.
      shapes: shapes of the parameters. If None, `param_shapes(config)`.

    Raises:
      CheckpointError: a tensor is missing or unexpected, or has another shape or dtype.
    """
    shapes = param_shapes(config) if shapes is None else shapes
    where = source.directory
    expected: dict[str, tuple[int, ...]] = {}
    for row in rows:
        wanted = source_shapes(row, shapes[row.path])
        expected |= dict(zip(row.sources, wanted, strict=True))
    present, head = source.tensors, HEAD if names is None else f"{names.head}.weight"
    for name, shape in expected.items():
        if name not in present:
            hint = UNTIED if name == head else ""
            raise CheckpointError(
                f"{where}: tensor {name} {list(shape)} is missing{hint}"
            )
        info = present[name]
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: {name}: want shape {list(shape)} "
                f"by {source.shapes_from}, got {list(info.shape)}"
            )
        check_dtype(name, info)
    copies = {head} if config.tie_embeddings else set[str]()
    copies |= _shared_copies(source, config).keys()
    mtp = ["mtp."]  # prefixes of MTP layers, which may be left out
    if names is not None and names.mtp_is_last:
        mtp.append(names.layer.format(i=numbered_layers(names, config)))
    if names is not None and names.unread is not None:
        unread = tuple(names.unread(names, config))
        copies |= {name for name in present if name.startswith(unread)}
    for name in sorted(present.keys() - expected.keys() - copies):
        unused = name.endswith("rotary_emb.inv_freq") or name in source.unlisted
        unused |= names is not None and name.endswith(names.ignored)
        unused |= name.startswith(tuple(mtp)) and not config.mtp
        # An unshared block may still have the adapters of layers that do not use it.
        adapter = config.shared is not None and "_adapter_list." in name
        if not unused and not adapter:
            raise CheckpointError(
                f"{present[name].file}: unexpected tensor {name}; {source.shapes_from} "
                "describes a model without it: correct that file, or save the weights "
                "without this tensor"
            )


def without_left_out(
    source: Tensors, names: Names, warn: Warn | None
) -> tuple[Tensors, tuple[str, ...]]:
    """Returns the source without the tensors that a format leaves out, and patterns of
    their names.

    Args:
      source: the tensors.
      names: the family's names.
      warn: called with one line if there are such tensors.
    """
    prefixes = [
        prefix
        for prefix in names.left_out
        if any(name.startswith(prefix) for name in source.tensors)
    ]
    if not prefixes:
        return source, ()
    patterns = tuple(f"{prefix}*" for prefix in prefixes)
    if warn is not None:
        sound = any("audio" in prefix for prefix in prefixes)
        what = "encoders of images and sound" if sound else "the vision encoder"
        warn(
            f"{source.directory}: {', '.join(patterns)} ({what}) is left out; the "
            "model reads text only"
        )
    left = tuple(prefixes)
    kept = {n: t for n, t in source.tensors.items() if not n.startswith(left)}
    return replace(source, tensors=kept), patterns


def settle_names(
    source: Tensors, names: Names, config: ModelConfig, warn: Warn | None
) -> tuple[Names, ModelConfig]:
    """Adapts names and weight ties to the tensors of a file, as transformers does.

    In a model that was saved without its head, all names lack their first component. If
    a file has both tensors of a tied pair and they are equal, one is ignored as a copy;
    if they differ, the model is untied and keeps both. If a file has only the head of a
    tied pair, it is used as the embedding.

    Args:
      source: the tensors.
      names: the family's names.
      config: the architecture by the config file.
      warn: called with one line for each kind of tie that is removed.

    Returns:
      The names of the tensors, and the architecture of the weights.
    """
    if names.spelling is not None:
        names = names.spelling(names, source.tensors)
    bare = nested(names, "")  # as transformers saves models without a head
    if f"{bare.embedding}.weight" in source.tensors:
        names = bare
    embedding, head = f"{names.embedding}.weight", f"{names.head}.weight"
    if config.tie_embeddings and head in source.tensors:
        if embedding not in source.tensors:
            names = replace(names, embedding=names.head)
        elif not _are_equal(source, head, embedding):
            config = replace(config, tie_embeddings=False)
            _warn_of_ties(source, head, embedding, warn)
    for name, original in _shared_copies(source, config).items():
        if not _are_equal(source, name, original):
            count = sum(block.shared for block in config.layers)
            shared = replace(required(config.shared), blocks=count)
            config = replace(config, shared=shared)
            _warn_of_ties(source, name, original, warn)
            break
    return names, config


def _warn_of_ties(source: Tensors, name: str, other: str, warn: Warn | None) -> None:
    if warn is not None:
        warn(
            f"{source.directory}: the config ties {name} to {other}, but the file has "
            "both with different values; the model keeps both"
        )


def _are_equal(source: Tensors, name: str, other: str) -> bool:
    """True if two tensors have equal values; NaN equals NaN."""
    infos = source.tensors[name], source.tensors[other]
    if infos[0].shape != infos[1].shape or any(i.dtype not in FLOATS for i in infos):
        return False
    plain = source.is_plain(name) and source.is_plain(other)
    pieces = [(rows,) for rows in at_once(infos[0].shape)] if plain else [()]

    def read(name: str, index: Index) -> np.ndarray:
        return source.read(name, index=index).astype(np.float32, copy=False)

    return all(
        np.array_equal(read(name, index), read(other, index), equal_nan=True)
        for index in pieces
    )


def _shared_copies(source: Tensors, config: ModelConfig) -> dict[str, str]:
    """Returns the repeated tensors of shared blocks, with the name of the original.

    A file may have a shared block's tensors again for every layer that uses the block.
    """
    copies: dict[str, str] = {}
    if config.shared is None:
        return copies
    layers = [i for i, block in enumerate(config.layers) if block.shared]
    first = {j: layers[c % config.shared.blocks] for c, j in enumerate(layers)}
    for name in source.tensors:
        match = _SHARED_TENSOR.fullmatch(name)
        j = int(match[2]) if match else -1
        if match and j in first and first[j] != j:
            original = f"{match[1]}{first[j]}{match[3]}"
            if original in source.tensors:
                copies[name] = original
    return copies


def check_dtype(name: str, info: TensorInfo) -> None:
    """Raises CheckpointError unless a tensor of weights has a float dtype that is
    read."""
    if info.dtype not in FLOATS:
        raise CheckpointError(
            f"{info.file}: {name}: dtype {info.dtype} is not supported "
            "(want float32, bfloat16 or float16)"
        )


def read_param(
    source: Tensors,
    row: Row,
    shape: tuple[int, ...],
    dtype: Any,
    axis: int = 0,
    places: tuple[slice, ...] = (),
) -> np.ndarray:
    """Reads a parameter, or one device's part of it, in a float dtype.

    Args:
      source: the tensors.
      row: the parameter's `Row`.
      shape: shape of the whole parameter.
      dtype: dtype of the result.
      axis: the axis that is divided among devices.
      places: slices of the axis to read. If empty, the whole parameter is read.
    """
    read = [
        _read_piece(source, piece, dtype) for piece in pieces(row, shape, axis, places)
    ]
    return read[0] if len(read) == 1 else np.concatenate(read, axis=axis)


def _read_piece(source: Tensors, piece: Piece, kept: Any) -> np.ndarray:
    row = piece.row
    each = zip(row.sources, piece.indices, strict=True)
    read = (source.read(name, kept, index) for name, index in each)
    # NumPy cannot concatenate bfloat16 with float16.
    tensors = [tensor.astype(kept, copy=False) for tensor in read]
    try:
        # Memory-mapped pages are copied, because the file may change or be removed.
        mapped = any(map(source.is_mapped, row.sources))
        return join(row, tensors).astype(kept, copy=mapped)
    except CheckpointError as error:
        file = source.tensors[row.sources[0]].file
        raise CheckpointError(f"{file}: {error}") from error


def parts_are_read(source: Tensors, row: Row) -> bool:
    """True if one device's part of a parameter can be read without the rest."""
    return can_be_cut(row) and all(map(source.is_plain, row.sources))


def is_finite(array: np.ndarray) -> bool:
    """True if an array has no NaN and no infinity.

    Checks `PIECE` numbers at a time, to save memory.
    """
    flat = array.reshape(-1)
    some = (flat[i : i + PIECE] for i in range(0, flat.size, PIECE))
    return all(np.isfinite(piece).all() for piece in some)


def nonfinite_note(source: Tensors, name: str) -> str:
    """Returns the warning about a tensor that has NaN or infinity."""
    return f"{source.tensors[name].file}: {name} holds NaN or infinity; kept as it is"


@dataclass(frozen=True)
class _Watched(Tensors):
    """A source that lists the tensors with NaN or infinity among those that it read."""

    nonfinite: list[str] = field(default_factory=list)

    def read(self, name: str, dtype: Any = np.float32, index: Index = ()) -> np.ndarray:
        found = super().read(name, dtype, index)
        if not is_finite(found):
            self.nonfinite.append(name)
        return found


@contextmanager
def noting_nonfinite(source: Tensors, warn: Warn | None) -> Iterator[Tensors]:
    """Yields a source to read weights from, and then warns of the first tensor that had
    NaN or infinity.

    Args:
      source: the tensors.
      warn: called with one line. If None, nothing is reported.
    """
    own = {each.name: getattr(source, each.name) for each in fields(source)}
    watched = _Watched(**own)
    yield watched
    if warn is not None and watched.nonfinite:
        warn(nonfinite_note(source, watched.nonfinite[0]))


def nonfinite_tensor(
    source: Tensors,
    row: Row,
    shape: tuple[int, ...],
    axis: int = 0,
    places: tuple[slice, ...] = (),
) -> str:
    """Returns the name of the parameter's first source tensor that has NaN or infinity.

    If all are finite (the conversion to the dtype overflowed), returns the first name.
    Arguments are as in `read_param`.
    """
    each = (
        named
        for piece in pieces(row, shape, axis, places)
        for named in zip(piece.row.sources, piece.indices, strict=True)
    )
    odd = (n for n, index in each if not is_finite(source.read(n, index=index)))
    return next(odd, row.sources[0])


def dtype_in_file(source: Tensors, row: Row) -> str:
    """Returns the dtype in which a file stores a parameter: "quantized" if any of its
    source tensors is quantized, "bfloat16" if all are bfloat16, else "float32"."""
    if any(map(source.is_quantized, row.sources)):
        return QUANTIZED
    found = {source.tensors[name].dtype for name in row.sources}
    return "bfloat16" if found == {"bfloat16"} else "float32"


def packed_blocks(source: Tensors, row: Row, format: Format) -> list[Packed] | None:
    """Reads the quantized matrices of a parameter without dequantizing them.

    Args:
      source: the tensors.
      row: the parameter's `Row`.
      format: the weight format in which they will be stored.

    Returns:
      The matrices, to be stacked by rows. None as in `packed_orders`.
    """
    orders = packed_orders(source, row, format)
    if orders is None:
        return None
    matrices = [source.packed(name).in_order(order) for name, order in orders]
    if row.groups and row.group_axis == 1:
        columns = order_of(row.groups)
        matrices = [matrix.with_columns(columns) for matrix in matrices]
    return matrices


def packed_experts(source: Tensors, row: Row, format: Format) -> list[Packed] | None:
    """Reads the quantized matrices of experts without dequantizing them.

    Args:
      source: the tensors.
      row: the `Row` of a parameter [E, m, k].
      format: the weight format in which they will be stored.

    Returns:
      Matrices [E m_i, k], for `Format.keep`. None as in `expert_sources`.
    """
    parts = expert_sources(source, row, format)
    if parts is None:
        return None
    matrices = [[source.packed(name) for name in names] for names in parts]
    if any("columns" in matrix.arrays for part in matrices for matrix in part):
        return None
    return list(map(flat_experts, matrices))


def expert_sources(
    source: Tensors, row: Row, format: Format
) -> list[tuple[str, ...]] | None:
    """Finds the quantized tensors that a parameter of experts consists of. Reads only
    headers.

    Args:
      source: the tensors.
      row: the `Row` of a parameter [E, m, k].
      format: the weight format in which they will be stored.

    Returns:
      For each part of an expert's matrix, such as gate and up: the names of one tensor
      [E, m_i, k], or of E tensors [m_i, k]. None if a tensor is not quantized, if the
      format does not support it, or if the experts are stored in different schemes.
      (`packed_experts` also returns None if the columns of an expert are reordered.)
    """
    parts: dict[str, list[tuple[str, ...]]] = {
        "copy": [row.sources],
        "halves": [(name,) for name in row.sources],
        "stack": [row.sources],
        "experts": [row.sources[0::2], row.sources[1::2]],
    }
    for name in row.sources:
        scheme, shape = source.scheme(name), source.tensors[name].shape
        if scheme is None or len(shape) < 2 or not format.keeps(scheme, shape):
            return None
    found = parts.get(row.how)
    if row.groups or found is None:
        return None
    alike = all(len({source.scheme(name) for name in names}) == 1 for names in found)
    return found if alike else None


def packed_orders(
    source: Tensors, row: Row, format: Format
) -> list[tuple[str, Any]] | None:
    """Finds the quantized matrices that a parameter consists of. Reads only headers.

    Args:
      source: the tensors.
      row: the parameter's `Row`.
      format: the weight format in which they will be stored.

    Returns:
      Names of tensors, each with the indices of its matrix rows in our order. None if
      a tensor is not quantized, if the format does not support it, or if the
      conversion changes more than the order of matrix rows or columns.
    """
    for name in row.sources:
        scheme, shape = source.scheme(name), source.tensors[name].shape
        if scheme is None or len(shape) != 2 or not format.keeps(scheme, shape):
            return None
    by_columns = bool(row.groups) and row.group_axis == 1
    if row.how not in ("copy", "concat", "swap", "rows"):
        return None
    if by_columns and not format.keeps_columns:
        return None
    return row_orders(row, [source.tensors[name].shape[0] for name in row.sources])


def row_orders(row: Row, counts: list[int]) -> list[tuple[str, Any]] | None:
    """Returns the source tensors of a parameter in the order in which their matrix rows
    make up the parameter.

    Args:
      row: a `Row` whose conversion changes only the order of matrix rows.
      counts: number of matrix rows of each source tensor.

    Returns:
      Names of source tensors, each with the indices of its matrix rows in our order.
      None if the parameter interleaves rows of several tensors.
    """
    starts = np.cumsum([0, *counts])
    indices = [
        np.arange(start, start + n)[:, None]
        for start, n in zip(starts, counts, strict=False)
    ]
    across = replace(row, groups=()) if row.group_axis == 1 else row
    order = join(across, indices)[:, 0]
    owner = np.searchsorted(starts, order, side="right") - 1
    changes = np.flatnonzero(np.diff(owner)) + 1
    if len(changes) >= len(counts):
        return None
    found = []
    for part in np.split(order, changes):
        j = int(np.searchsorted(starts, part[0], side="right") - 1)
        found.append((row.sources[j], part - starts[j]))
    return found
