"""Creates a model's initial parameters, casts them, and computes their shapes."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.models.configs.params import (
    Param,
    Params,
    Path,
    array_dtype,
    nest,
    stored,
)
from stree_jax.models.layers.nodes import chain_nodes
from stree_jax.models.layers.params import by_path
from stree_jax.models.stack.config import ModelConfig
from stree_jax.models.stack.network import LanguageModel
from stree_jax.models.stack.param_table import param_at, param_shapes, param_table
from stree_jax.models.stack.state import init_state
from stree_jax.models.weights.formats import format_named


def init_params(config: ModelConfig, key: jax.Array, dtype: Any) -> Params:
    """Initialises the parameters of a model.

    Args:
      config: the architecture.
      key: random key.
      dtype: dtype or format of the weights, or its name, such as "int8".
    """
    format = format_named(dtype)
    if not format.plain:
        return cast_params(config, init_params(config, key, jnp.float32), format)
    model, inputs = _model_and_inputs(config, format.dtype)
    return model.init(key, *inputs, method="init_all")["params"]


def _model_and_inputs(config: ModelConfig, dtype: Any) -> tuple[LanguageModel, Any]:
    """Returns the module, and arguments of its method `init_all`: one token."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    nodes = chain_nodes(1, 1, config.conv_taps)
    state = init_state(config, 1, 1, dtype)
    return LanguageModel(config, dtype), (tokens, nodes, state)


@cache
def check_sizes(config: ModelConfig) -> None:
    """Checks that the sizes in a config fit each other, by tracing one layer of each
    kind.

    Raises:
      ValueError, TypeError, ArithmeticError: they do not.
    """
    layers, mtp = (tuple(dict.fromkeys(z)) for z in (config.layers, config.mtp))
    _check_by_tracing(replace(config, layers=layers, mtp=mtp))


def _check_by_tracing(config: ModelConfig) -> None:
    """Traces one forward pass over parameters of the shapes in the table.

    Tracing `init_params` would find the same errors, but takes three times as long: it
    traces the random numbers, too.
    """
    params = nest({p: _plain(param) for p, (param, _) in param_table(config).items()})

    def run(params: Params) -> Any:
        model, inputs = _model_and_inputs(config, jnp.float32)
        return model.apply({"params": params}, *inputs, method="init_all")

    jax.eval_shape(run, params)


def _plain(param: Param) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(param.shape, array_dtype(param, jnp.float32))


def cast_params(config: ModelConfig, params: Params, dtype: Any) -> Params:
    """Converts parameters to another dtype or weight format.

    Args:
      config: the architecture.
      params: arrays; all parameters of the model, or some of them.
      dtype: as for `init_params`. Parameters that decide how fast a state decays or
        which expert is chosen stay float32 (`Param.float32`).
    """
    format = format_named(dtype)
    flat = by_path(params)
    return nest({p: stored(param_at(config, p), x, format) for p, x in flat.items()})


def abstract_params(config: ModelConfig, dtype: Any) -> Params:
    """Returns `jax.ShapeDtypeStruct`s for all parameters in a dtype or format."""
    format = format_named(dtype)

    def abstract(path: Path, shape: tuple[int, ...]) -> Any:
        param = param_at(config, path)
        if param.quantizable:
            return format.abstract(shape, path)
        return jax.ShapeDtypeStruct(shape, array_dtype(param, format.dtype))

    check_sizes(config)
    shapes = param_shapes(config)
    return nest({path: abstract(path, shape) for path, shape in shapes.items()})
