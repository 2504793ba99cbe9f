"""The parameters of each layer: names, shapes, how they begin, along which axis they
are cut into parts, which stay float32.

A model's parameters are a nested dictionary of arrays, `layers_0 / mamba / in_proj`;
`shapes.param_shapes` lists them all. A matrix is [out, in], PyTorch's own layout.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import unflatten_dict

from stree_jax.models.sharding.shards import Run, run_width
from stree_jax.models.weights.formats import is_weight
from stree_jax.models.weights.weight import Format

Path = tuple[str, ...]
Params = Any  # nested dict of arrays and weights
Init = Callable[..., jax.Array]

NORMAL = nn.initializers.normal(0.02)
ONES, ZEROS = nn.initializers.ones, nn.initializers.zeros


class Param(NamedTuple):
    """A parameter.

    Attributes:
      shape: of it.
      init: its initialiser.
      runs: what the axis consists of along which it is cut; (): every part has it all.
      axis: which one that is.
      float32: True if it stays float32 whatever the format of the weights is.
      quantizable: True if it is a matrix that only products and row lookups read, so
        that a weight format may store it in fewer bits.
    """

    shape: tuple[int, ...]
    init: Init = NORMAL
    runs: tuple[Run, ...] = ()
    axis: int = 0
    float32: bool = False
    quantizable: bool = False


Table = dict[str, Any]  # Param, or the Table of a module inside, by name


def conv_init(count: int) -> Init:
    """Returns PyTorch's initialiser of a convolution with this many taps."""
    return nn.initializers.uniform(2 / math.sqrt(count))


def mtp_params(d_model: int, n: int = 1) -> Table:
    """Returns the product that reads a token's embedding and a hidden state, or one
    device's share of it."""
    both = 2 * d_model // n
    return {
        "eh_proj": Param(
            (d_model, both), runs=(Run(both, both),), axis=1, quantizable=True
        )
    }


def norm_params(kind: str, width: int) -> Table:
    biases = {} if kind == "rms" else {"bias": Param((width,), ZEROS)}
    return {"scale": Param((width,), ONES)} | biases


def low_rank_params(rank: int, d_in: int, runs: tuple[Run, ...]) -> Table:
    """An adapter that adds to the rows `runs` of a product."""
    up = Param((run_width(runs), rank), runs=runs, quantizable=True)
    return {"down": Param((rank, d_in), quantizable=True), "up": up}


def shared_params(d_model: int, n: int = 1) -> Table:
    """Returns the product that reads a shared transformer block, or one device's share
    of it."""
    width = d_model // n
    return {
        "linear": Param(
            (d_model, width), runs=(Run(width, width),), axis=1, quantizable=True
        )
    }


def model_params(vocab_size: int, d_model: int, tied: bool) -> Table:
    """Returns the embedding, and the head unless it is tied to the embedding."""
    shape, ids = (vocab_size, d_model), (Run(vocab_size, vocab_size),)
    names = ["embedding"] if tied else ["embedding", "lm_head"]
    return {name: Param(shape, runs=ids, quantizable=True) for name in names}


def declare(module: nn.Module, table: Table, dtype: Any) -> dict[str, Any]:
    """Returns a module's own parameters by name: those that the module is applied to,
    or new ones in `dtype` or float32.

    Tables inside belong to modules inside, which declare them.

    Raises:
      ValueError: a parameter does not have the shape of its entry.
    """

    def param(name: str, entry: Param) -> Any:
        if not module.has_variable("params", name):
            dtype_of = array_dtype(entry, dtype)
            return module.param(name, entry.init, entry.shape, dtype_of)
        found: Any = module.get_variable("params", name)
        if found.shape != entry.shape:
            where = "/".join((*module.path, name))
            raise ValueError(f"{where}: want shape {entry.shape}, got {found.shape}")
        return found

    return {
        n: param(n, entry) for n, entry in table.items() if isinstance(entry, Param)
    }


def array_dtype(param: Param, dtype: Any) -> Any:
    """Returns the dtype of a parameter that is an array: `dtype`, or float32 where its
    entry says so."""
    return jnp.float32 if param.float32 else dtype


def stored(param: Param, array: Any, format: Format, columns: int | None = None) -> Any:
    """Returns a parameter as a model of this format keeps it.

    Args:
      param: its entry.
      array: of any float dtype.
      columns: see `Format.store`.
    """
    if param.quantizable:
        return format.store(array, columns)
    return array.astype(array_dtype(param, format.dtype), copy=False)


def by_path(params: Params) -> dict[Path, Any]:
    """Returns the parameters in nested dictionaries by the names that lead to them."""
    flat = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_weight)[0]
    return {tuple(key.key for key in path): leaf for path, leaf in flat}


def parameter_count(params: Params) -> int:
    """Counts the numbers of a model's matrices and vectors, without scales."""
    leaves = jax.tree.leaves(params, is_leaf=is_weight)
    return sum(math.prod(leaf.shape) for leaf in leaves)


def nest(flat: dict[Path, Any]) -> dict[str, Any]:
    """Returns the nested dictionary that has these leaves: the inverse of `by_path`."""
    return unflatten_dict(flat)
