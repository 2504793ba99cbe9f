"""Creates, casts and declares the parameters of tables; see `configs.params`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from stree_jax.models.configs.params import (
    Param,
    Params,
    Path,
    Table,
    array_dtype,
    nest,
    stored,
)
from stree_jax.models.weights.formats import format_named
from stree_jax.models.weights.parameters import is_weight


def declare(module: nn.Module, table: Table, dtype: Any) -> dict[str, Any]:
    """Returns a module's own parameters by name, creating them during initialisation.

    Entries that are tables are skipped: submodules declare them.

    Args:
      module: the module.
      table: its parameters.
      dtype: dtype of new parameters that are not always float32.

    Raises:
      ValueError: an existing parameter does not have the shape of its entry.
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


def init_table(table: dict[Path, Param], key: jax.Array, dtype: Any) -> Params:
    """Initialises new parameters.

    Args:
      table: the parameters by path.
      key: random key.
      dtype: dtype or weight format, or its name, such as "int8".
    """
    format, keys = format_named(dtype), jax.random.split(key, len(table))
    made = {
        path: stored(p, p.init(one, p.shape, jnp.float32), format)
        for one, (path, p) in zip(keys, table.items(), strict=True)
    }
    return nest(made)


def abstract_table(table: dict[Path, Param], dtype: Any) -> Params:
    """Returns `jax.ShapeDtypeStruct`s for the parameters in a dtype or weight format;
    see `init_table`."""
    format = format_named(dtype)

    def abstract(path: Path, param: Param) -> Any:
        if param.quantizable:
            return format.abstract(param.shape, path)
        return jax.ShapeDtypeStruct(param.shape, array_dtype(param, format.dtype))

    return nest({path: abstract(path, param) for path, param in table.items()})


def cast_table(table: dict[Path, Param], params: Params, dtype: Any) -> Params:
    """Returns the same parameters in another dtype or weight format."""
    format, flat = format_named(dtype), by_path(params)
    return nest({path: stored(table[path], x, format) for path, x in flat.items()})


def by_path(params: Params) -> dict[Path, Any]:
    """Flattens nested dictionaries of parameters; keys are paths (tuples of names)."""
    flat = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_weight)[0]
    return {tuple(key.key for key in path): leaf for path, leaf in flat}


def parameter_count(params: Params) -> int:
    """Counts the elements of a model's matrices and vectors, without int8 scales."""
    leaves = jax.tree.leaves(params, is_leaf=is_weight)
    return sum(math.prod(leaf.shape) for leaf in leaves)
