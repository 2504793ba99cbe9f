"""Keeps quantized matrices of block drafters as they are in their files.

NVIDIA publishes drafters whose MLPs, projection and pair scores are NVFP4. Matrices
that cannot be kept stay bfloat16, since drafters are small and read few rows at a time.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from stree_jax.convert.tensors.stored_tensors import Tensors
from stree_jax.models.configs.params import Param
from stree_jax.models.configs.params import Path as ParamPath
from stree_jax.models.weights.format import (
    BFLOAT16,
    FLOAT32,
    QUANTIZED,
    Format,
    Layout,
    Part,
)
from stree_jax.models.weights.kept_format import KEPT


def can_be_kept(
    source: Tensors, param: Param, tensors: Sequence[str], format: Format
) -> bool:
    """True if a parameter consists of quantized matrices that the format keeps.

    Args:
      source: the tensors.
      param: the parameter.
      tensors: names of the tensors whose rows are stacked.
      format: the format.
    """
    schemes = [source.scheme(name) for name in tensors]
    shapes = [source.tensors[name].shape for name in tensors]
    return param.quantizable and all(
        scheme is not None and len(shape) == 2 and format.keeps(scheme, shape)
        for scheme, shape in zip(schemes, shapes, strict=True)
    )


def kept(
    source: Tensors, tensors: Sequence[str], format: Format, order: np.ndarray | None
) -> Any:
    """Reads a parameter that can be kept.

    Args:
      source, tensors: as in `can_be_kept`.
      format: the format.
      order: order of the rows. If None, they stay as they are.
    """
    matrices = [source.packed(name) for name in tensors]
    if order is not None:
        [matrix] = matrices
        matrices = [matrix.in_order(order)]
    return jax.device_put(format.keep(matrices))


def layout_of(
    source: Tensors,
    table: Mapping[ParamPath, Param],
    sources: Mapping[ParamPath, Sequence[str]],
) -> Layout:
    """Returns the storage of a drafter's matrices in dtype "kept", from headers only.

    Args:
      source: the tensors.
      table: the parameters.
      sources: the tensors of each parameter that may be kept, by path; those of others
        are dequantized.
    """
    found: list[tuple[ParamPath, tuple[Part, ...]]] = []
    for path, param in table.items():
        tensors = sources.get(path, ())
        if not param.quantizable or not tensors:
            continue
        if can_be_kept(source, param, tensors, KEPT):
            found.append((path, _parts(source, tensors)))
        else:
            dtype = matrix_dtype(source, tensors)
            found.append((path, (Part(dtype.name, param.shape[0]),)))
    return tuple(found)


def _parts(source: Tensors, tensors: Sequence[str]) -> tuple[Part, ...]:
    """Returns the storage of a parameter that can be kept."""
    parts: list[Part] = []
    for name in tensors:
        stored, rows = source.quantized.get(name), source.tensors[name].shape[0]
        factor = bool(stored and stored.scheme.global_scale)
        part = Part(str(source.scheme(name)), rows, factor=factor)
        if parts and parts[-1]._replace(rows=rows) == part:
            part = part._replace(rows=parts.pop().rows + rows)
        parts.append(part)
    return tuple(parts)


def matrix_dtype(source: Tensors, tensors: Sequence[str]) -> np.dtype:
    """Returns the dtype in memory of a matrix that cannot be kept quantized, in a
    drafter whose other matrices are kept."""
    stored = {
        QUANTIZED if source.is_quantized(name) else source.tensors[name].dtype
        for name in tensors
    }
    return BFLOAT16 if stored <= {QUANTIZED, BFLOAT16.name} else FLOAT32


def with_rows(format: Format, paths: Container[tuple[str, ...]], rows: int) -> Format:
    """Returns the format of a model in which the matrices at `paths` have only some of
    their rows, see `Weight.gathered`."""
    layout = tuple(
        (path, (_gathered(parts, rows),) if path in paths else parts)
        for path, parts in format.layout
    )
    return replace(format, layout=layout)


def _gathered(parts: tuple[Part, ...], rows: int) -> Part:
    """Returns the storage of `rows` rows of a matrix."""
    if len(parts) > 1:
        return Part(BFLOAT16.name, rows)
    return parts[0]._replace(rows=rows)
