"""Fresh parameters of a model, and their shapes in a format."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.models.config import ModelConfig
from stree_jax.models.model import LanguageModel
from stree_jax.models.nodes import chain_nodes
from stree_jax.models.param_table import param_shapes
from stree_jax.models.params import Params, cast_params, nest, stored
from stree_jax.models.state import init_state
from stree_jax.models.weights.int8 import INT8


def init_params(config: ModelConfig, key: jax.Array, dtype: Any) -> Params:
    """Freshly initialised parameters.

    `jax.eval_shape` of this is the table of every parameter's name, shape and dtype.
    """
    if dtype == INT8:
        return cast_params(init_params(config, key, jnp.float32), dtype)
    tokens = jnp.zeros((1, 1), jnp.int32)
    nodes = chain_nodes(1, 1, config.conv_taps)
    state = init_state(config, 1, 1, dtype)
    model = LanguageModel(config, dtype)
    return model.init(key, tokens, nodes, state, method="init_all")["params"]


def abstract_params(config: ModelConfig, dtype: Any) -> Params:
    """`jax.ShapeDtypeStruct` of every parameter in `dtype`, int8 weights too."""
    flat = {
        path: _abstract(path[-1], shape, dtype)
        for path, shape in param_shapes(config).items()
    }
    return nest(flat)


@cache
def _abstract(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    weight = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(lambda weight: stored(name, weight, dtype), weight)
