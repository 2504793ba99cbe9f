"""The table of a model's parameters, and fresh ones."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.models.config import LayerKind, ModelConfig
from stree_jax.models.keys import key_of
from stree_jax.models.model import LanguageModel
from stree_jax.models.nodes import chain_nodes
from stree_jax.models.params import (
    Params,
    Path,
    array_dtype,
    by_path,
    is_stored,
    nest,
    stored,
)
from stree_jax.models.sharding.parts import param_at
from stree_jax.models.state import init_state
from stree_jax.models.weights.formats import format_named

MAX_WIDTH = 1 << 27  # of a layer: no real model's is above this


def init_params(config: ModelConfig, key: jax.Array, dtype: Any) -> Params:
    """Initialises parameters.

    `jax.eval_shape` of this is the table of every parameter's name, shape and dtype.

    Args:
      dtype: of the weights: a name such as "int8", a dtype, or a format.
    """
    format = format_named(dtype)
    if not format.plain:
        return cast_params(config, init_params(config, key, jnp.float32), format)
    dtype = format.dtype
    tokens = jnp.zeros((1, 1), jnp.int32)
    nodes = chain_nodes(1, 1, config.conv_taps)
    state = init_state(config, 1, 1, dtype)
    model = LanguageModel(config, dtype)
    return model.init(key, tokens, nodes, state, method="init_all")["params"]


@cache
def param_shapes(config: ModelConfig) -> Mapping[Path, tuple[int, ...]]:
    """Shape of every parameter, by path: what `init_params` would make.

    Layers of a kind are alike, so one of each is traced, however deep the model is.
    """
    _check_widths(config)
    one = replace(config, layers=_kinds(config.layers), mtp=_kinds(config.mtp))
    tree = jax.eval_shape(lambda: init_params(one, key_of(0), jnp.float32))
    flat = {path: leaf.shape for path, leaf in by_path(tree).items()}
    shapes = {
        path: shape
        for path, shape in flat.items()
        if not any(name.startswith("layers_") for name in path)
    }
    if config.shared is not None:  # one layer traces one of the shared blocks
        used = min(config.shared.blocks, config.layers.count("shared"))
        block = {path[1:]: shapes[path] for path in flat if path[0] == "shared_0"}
        for b in range(used):
            shapes |= {(f"shared_{b}", *path): shape for path, shape in block.items()}
    for within, layers in (((), config.layers), (("mtp",), config.mtp)):
        shapes |= _all_layers(flat, within, layers)
    return MappingProxyType(shapes)


def cast_params(config: ModelConfig, params: Params, dtype: Any) -> Params:
    """Returns the parameters of the same model in another dtype or weight format.

    Args:
      params: arrays, all of the model's or some.
      dtype: as for `init_params`. What decides how fast a state decays or which expert
        is chosen stays float32 (`Param.float32`).
    """
    format = format_named(dtype)
    flat = by_path(params)
    return nest({p: stored(param_at(config, p), x, format) for p, x in flat.items()})


def abstract_params(config: ModelConfig, dtype: Any) -> Params:
    """Returns `jax.ShapeDtypeStruct`s for all parameters in a dtype or format."""
    format = format_named(dtype)

    def abstract(path: Path, shape: tuple[int, ...]) -> Any:
        param = param_at(config, path)
        if is_stored(param):
            return format.abstract(shape)
        return jax.ShapeDtypeStruct(shape, array_dtype(param, format.dtype))

    shapes = param_shapes(config)
    return nest({path: abstract(path, shape) for path, shape in shapes.items()})


def _kinds(layers: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """One layer of each kind, in order."""
    return tuple(dict.fromkeys(layers))


def _all_layers(
    flat: Mapping[Path, tuple[int, ...]], within: Path, layers: Sequence[LayerKind]
) -> dict[Path, tuple[int, ...]]:
    """Shapes of all layers at a path, from those `flat` of one of each kind."""
    kinds, n = _kinds(layers), len(within)
    return {
        (*within, f"layers_{j}", *path[n + 1 :]): shape
        for j, kind in enumerate(layers)
        for path, shape in flat.items()
        if path[: n + 1] == (*within, f"layers_{kinds.index(kind)}")
    }


def _check_widths(config: ModelConfig) -> None:
    """Products of sizes that JAX could not even trace; raises ValueError."""
    wide = config.mamba.d_in_proj if config.mamba else 0
    if config.attention is not None:
        wide = max(wide, config.attention.num_heads * config.attention.head_dim)
    if wide > MAX_WIDTH:
        raise ValueError(f"{wide} channels of a layer are more than {MAX_WIDTH}")
