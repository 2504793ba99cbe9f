"""The parameters of each layer: names, shapes, how they begin, along which axis they
are cut into parts, which stay float32.

A model's parameters are a nested dictionary of arrays, `layers_0 / mamba / in_proj`;
`shapes.param_shapes` lists them all. A matrix is [out, in], PyTorch's own layout.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import unflatten_dict

from stree_jax.models.sharding.shards import Run, run_width
from stree_jax.models.weights.int8 import INT8, Quantized, quantize

# Small numbers that decide how fast a state forgets, or which expert is taken.
FLOAT32_PARAMS = ("A_log", "dt_bias", "D", "router_bias")  # whatever the dtype

# What `linear` reads as a whole; in a model of int8 these are, where they are matrices.
# (Experts are not: their names are here, but they have three axes.)
PRODUCTS = frozenset(
    ("embedding", "lm_head", "in_proj", "out_proj", "qkv", "out", "gate_up", "up")
    + ("down", "linear", "latent_in", "latent_out", "eh_proj", "weight")
)
# Columns of an int8 weight that share a scale: bench/RESULTS.md, "int8 weights".
GROUP = 128

Path = tuple[str, ...]
Params = Any  # nested dict of arrays, as `LanguageModel.init` makes it
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


def declare(module: nn.Module, table: Table, dtype: Any) -> dict[str, jax.Array]:
    """Declares a module's own parameters: in `dtype`, or float32 if they stay that.

    Tables inside belong to modules inside, which declare them.
    """
    return {
        name: module.param(name, p.init, p.shape, stored_dtype(name, dtype))
        for name, p in table.items()
        if isinstance(p, Param)
    }


def array_dtype(dtype: Any) -> Any:
    """Of caches, records, and all parameters but products, in a model of `dtype`."""
    return jnp.dtype(jnp.bfloat16) if dtype == INT8 else dtype


def stored_dtype(name: str, dtype: Any) -> Any:
    """Of an array of this name, which is no int8 weight, in a model of `dtype`."""
    return jnp.float32 if name in FLOAT32_PARAMS else array_dtype(dtype)


def is_int8(name: str, shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether a model of `dtype` keeps this parameter in int8."""
    return dtype == INT8 and name in PRODUCTS and len(shape) == 2


def group_of(columns: int, group: int = GROUP) -> int | None:
    """The largest divisor of the columns that is half to all of a group, or None: no
    such divisor, and a scale for the whole row."""
    sizes = range(min(group, columns), group // 2 - 1, -1)
    return next((n for n in sizes if n and columns % n == 0), None)


@partial(jax.jit, static_argnums=1)  # or each step of it would be an array
def _int8(weight: jax.Array, group: int | None) -> Quantized:
    return quantize(weight, group)


def stored(
    name: str, weight: jax.Array, dtype: Any, group: int | None = GROUP
) -> jax.Array | Quantized:
    """A parameter as a model of `dtype` keeps it.

    Args:
      weight: of any float dtype.
      group: of int8, columns that share a scale, about; None: a scale for each row.
    """
    if is_int8(name, weight.shape, dtype):
        size = None if group is None else group_of(weight.shape[1], group)
        return _int8(weight, size)
    return weight.astype(stored_dtype(name, dtype))


def cast_params(params: Params, dtype: Any, group: int | None = GROUP) -> Params:
    """The parameters of the same model, which is none of int8, in `dtype`.

    FLOAT32_PARAMS stay float32; group as of `stored`.
    """

    def cast(path: tuple, leaf: jax.Array) -> jax.Array | Quantized:
        return stored(path[-1].key, leaf, dtype, group)

    return jax.tree_util.tree_map_with_path(cast, params)


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, Quantized)


def by_path(params: Params) -> dict[Path, Any]:
    """The parameters in nested dictionaries by the names that lead to them."""
    flat = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_quantized)[0]
    return {tuple(key.key for key in path): leaf for path, leaf in flat}


def parameter_count(params: Params) -> int:
    """Of the numbers that a model has; scales are none."""
    leaves = jax.tree.leaves(params, is_leaf=_is_quantized)
    return sum(math.prod(leaf.shape) for leaf in leaves)


def nest(flat: dict[Path, Any]) -> dict[str, Any]:
    """The nested dictionary of which these are the leaves, the inverse of `by_path`."""
    return unflatten_dict(flat)
