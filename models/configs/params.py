"""Tables of a layer's parameters: names, shapes, initialisers, the axis that devices
divide, and which parameters stay float32.

A model's parameters are a nested dictionary of arrays, such as
`layers_0 / mamba / in_proj`. `param_table.param_shapes` lists them all. A matrix is
[out, in], as in PyTorch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stree_jax.models.base.shards import Run, run_width
from stree_jax.models.weights.format import Format

Path = tuple[str, ...]
# Nested dict of parameters. A parameter is a `jax.Array`, or a `Weight` if the matrix
# is stored in another format, such as int8 with scales.
Params = Any
# Returns a new parameter: (random key, shape, dtype) -> `jax.Array`. Initialisers
# import jax when they are called: the table of a checkpoint's parameters needs none.
Init = Callable[..., Any]
NORM_AFTER = "norm_after"  # name of a layer's second norm, of its mixers' output
# The factor of the residual stream after a layer with `Block.scaled`.
SCALAR = "scalar"
# The biases and scales of a residual layer with `Block.affine`, for the stream and for
# what is added, and those of the model's embedding.
STREAM, ADDED, EMBEDDED = "stream", "added", "embedded"


@dataclass(frozen=True)
class FromJax:
    """An initialiser of `jax.nn.initializers`.

    Attributes:
      name: its name.
      args: arguments of the function that makes it. If empty, it is that function.
    """

    name: str
    args: tuple[float, ...] = ()

    def __call__(self, key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        from jax.nn import initializers

        found = getattr(initializers, self.name)
        return (found(*self.args) if self.args else found)(key, shape, dtype)


NORMAL = FromJax("normal", (0.02,))
ONES, ZEROS = FromJax("ones"), FromJax("zeros")


class Param(NamedTuple):
    """The properties of a parameter.

    Attributes:
      shape: shape of the whole parameter.
      init: initialiser.
      runs: the runs of units (heads, groups or channels) along the axis that devices
        divide. If empty, every device has the whole parameter.
      axis: the axis that devices divide.
      float32: True if the parameter stays float32 in every weight format.
      int32: True if the parameter consists of int32 numbers, such as token ids.
      quantizable: True if only matrix products and row lookups read the parameter, so
        that a weight format may store it in fewer bits.
    """

    shape: tuple[int, ...]
    init: Init = NORMAL
    runs: tuple[Run, ...] = ()
    axis: int = 0
    float32: bool = False
    int32: bool = False
    quantizable: bool = False


Table = dict[str, Any]  # name -> a `Param`, or the `Table` of a submodule


def first_ids(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Initialises token ids [D] as 0 .. D - 1."""
    import jax

    return jax.numpy.arange(shape[0], dtype=np.int32)


def conv_init(count: int) -> Init:
    """Returns PyTorch's initialiser for a depthwise convolution with `count` taps."""
    return FromJax("uniform", (2 / math.sqrt(count),))


def mtp_params(d_model: int, n: int = 1) -> Table:
    """Returns the projection of an MTP module's two inputs (embedding and hidden
    state), or one device's share of it if n devices divide it."""
    both = 2 * d_model // n
    return {
        "eh_proj": Param(
            (d_model, both), runs=(Run(both, both),), axis=1, quantizable=True
        )
    }


def norm_params(kind: str, width: int) -> Table:
    """Returns the parameters of a norm; `ModelConfig.norm` has its kinds."""
    biases = {"bias": Param((width,), ZEROS)} if kind == "layer" else {}
    return {"scale": Param((width,), ONES, float32=kind == "rms_float32")} | biases


def low_rank_params(rank: int, d_in: int, runs: tuple[Run, ...]) -> Table:
    """Returns the two matrices of a low-rank adapter whose output has the rows
    `runs`."""
    up = Param((run_width(runs), rank), runs=runs, quantizable=True)
    return {"down": Param((rank, d_in), quantizable=True), "up": up}


def shared_params(d_model: int, n: int = 1) -> Table:
    """Returns the projection of a shared transformer block's output, or one device's
    share of it if n devices divide it."""
    width = d_model // n
    return {
        "linear": Param(
            (d_model, width), runs=(Run(width, width),), axis=1, quantizable=True
        )
    }


def scalar_params() -> Table:
    """Returns the factor of the residual stream after a layer."""
    return {SCALAR: Param((1,), ONES, float32=True)}


def affine_params(d_model: int) -> Table:
    """Returns a bias and a scale of every channel; see `Block.affine`."""
    return {
        "scale": Param((d_model,), ONES, float32=True),
        "bias": Param((d_model,), ZEROS, float32=True),
    }


def model_params(
    vocab_size: int, d_model: int, tied: bool, head_rows: int = 0
) -> Table:
    """Returns the embedding, and the head unless it is tied to the embedding.

    Args:
      vocab_size: rows of the embedding.
      d_model: width of the model.
      tied: True if the embedding is the head.
      head_rows: see `ModelConfig.head_rows`. Devices do not divide such a head.
    """
    shape, ids = (vocab_size, d_model), (Run(vocab_size, vocab_size),)
    names = ["embedding"] if tied or head_rows else ["embedding", "lm_head"]
    table = {name: Param(shape, runs=ids, quantizable=True) for name in names}
    if head_rows:
        table["lm_head"] = Param((head_rows, d_model), quantizable=True)
        table["head_ids"] = Param((head_rows,), first_ids, int32=True)
    return table


def array_dtype(param: Param, dtype: Any) -> Any:
    """Returns `dtype`, unless the parameter is always float32 or int32."""
    if param.int32:
        return np.int32
    return np.float32 if param.float32 else dtype


def stored(param: Param, array: Any, format: Format, columns: int | None = None) -> Any:
    """Converts a parameter to the form in which a model of this format stores it.

    Args:
      param: the parameter's entry.
      array: the parameter in any float dtype.
      format: the weight format.
      columns: see `Format.store`.
    """
    if param.quantizable:
        return format.store(array, columns)
    return array.astype(array_dtype(param, format.dtype), copy=False)


def nest(flat: dict[Path, Any]) -> dict[str, Any]:
    """Builds nested dictionaries from leaves by path: the inverse of `by_path`."""
    nested: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path
        place = nested
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = leaf
    return nested
