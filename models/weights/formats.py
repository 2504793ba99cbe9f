"""The table of weight formats, and functions that find a weight's format."""

from typing import Any

import numpy as np

from stree_jax.models.weights.format import BFLOAT16, FLOAT32, Format
from stree_jax.models.weights.int8_format import INT8
from stree_jax.models.weights.kept_format import KEPT, KEPT_INT8
from stree_jax.models.weights.plain_format import plain_format

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        plain_format(FLOAT32),
        plain_format(BFLOAT16),
        INT8,
        KEPT,
        KEPT_INT8,
    )
}


def format_named(dtype: Any) -> Format:
    """Returns the format for a `dtype=` argument, which is a format, its name, or a
    dtype."""
    if isinstance(dtype, Format):
        return dtype
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    return FORMATS.get(name) or plain_format(dtype)
