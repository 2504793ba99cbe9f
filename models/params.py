"""The parameters of each layer: names, shapes, how they begin, which stay float32.

A model's parameters are a nested dictionary of arrays, `layers_0 / mamba / in_proj`;
`model.param_shapes` lists them all. A matrix is [out, in], PyTorch's own layout.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import unflatten_dict

from stree_jax.models.config import (
    AttentionConfig,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)

# Small numbers that decide how fast a state forgets, or which expert is taken.
FLOAT32_PARAMS = ("A_log", "dt_bias", "D", "router_bias")  # whatever the dtype

Path = tuple[str, ...]
Params = Any  # nested dict of arrays, as `LanguageModel.init` makes it
Init = Callable[..., jax.Array]

NORMAL = nn.initializers.normal(0.02)
ONES, ZEROS = nn.initializers.ones, nn.initializers.zeros


def _init_A_log(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def _init_dt_bias(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Inverse softplus of steps drawn log-uniformly from 0.001 to 0.1 (Mamba2)."""
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(0.1)))
    return dt + jnp.log(-jnp.expm1(-dt))


class Param(NamedTuple):
    """Shape and initialiser of a parameter."""

    shape: tuple[int, ...]
    init: Init = NORMAL


Table = dict[str, Param]  # by name, in the order in which they are drawn


def _taps(count: int) -> Init:
    """How a convolution of this many taps begins, as PyTorch's."""
    return nn.initializers.uniform(2 / math.sqrt(count))


def mamba_params(c: MambaConfig, d_model: int) -> Table:
    D = (c.d_inner,) if c.D_per_channel else (c.num_heads,)
    table = {
        "in_proj": Param((c.d_in_proj, d_model)),
        "conv_weight": Param((c.d_xBC, c.d_conv), _taps(c.d_conv)),
        "dt_bias": Param((c.num_heads,), _init_dt_bias),
        "A_log": Param((c.num_heads,), _init_A_log),
        "D": Param(D, ONES),
        "out_proj": Param((d_model, c.d_inner + c.d_mlp)),
    }
    if c.proj_in_bias:
        table["in_proj_bias"] = Param((c.d_in_proj,), ZEROS)
    if c.conv_bias:
        table["conv_bias"] = Param((c.d_xBC,), ZEROS)
    if c.proj_out_bias:
        table["out_proj_bias"] = Param((d_model,), ZEROS)
    if c.norm is not None:
        table["norm"] = Param((c.d_inner,), ONES)
    return table


def attention_params(c: AttentionConfig, d_model: int) -> Table:
    d_in, d_out = c.d_qkv + 2 * c.d_mlp, c.num_heads * c.head_dim + c.d_mlp
    width = c.d_out or d_model
    table = {"qkv": Param((d_in, d_model)), "out": Param((width, d_out))}
    if c.qkv_bias:
        table["qkv_bias"] = Param((d_in,), ZEROS)
    if c.out_bias:
        table["out_bias"] = Param((width,), ZEROS)
    if c.d_conv:
        table["conv_weight"] = Param((c.d_qkv, c.d_conv), _taps(c.d_conv))
        table["conv_bias"] = Param((c.d_qkv,), ZEROS)
    return table


def mlp_params(c: MLPConfig, d_model: int) -> Table:
    """`gate_up` holds the rows [gate; up]; without a gate there is `up`."""
    first, rows = ("gate_up", 2 * c.d_hidden) if c.gated else ("up", c.d_hidden)
    table = {first: Param((rows, d_model)), "down": Param((d_model, c.d_hidden))}
    if c.bias:
        table[f"{first}_bias"] = Param((rows,), ZEROS)
        table["down_bias"] = Param((d_model,), ZEROS)
    return table


def moe_params(c: MoEConfig, d_model: int) -> Table:
    """Of E experts: `into` holds the rows [gate; up] of each if they are gated."""
    E, width = c.num_experts, c.d_latent or d_model
    rows = c.d_hidden * (2 if c.gated else 1)
    table = {
        "router": Param((E, d_model)),
        "into": Param((E, rows, width)),
        "down": Param((E, width, c.d_hidden)),
    }
    if c.router == "sigmoid":
        table["router_bias"] = Param((E,), ZEROS)
    if c.d_latent:
        table["latent_in"] = Param((c.d_latent, d_model))
        table["latent_out"] = Param((d_model, c.d_latent))
    return table


def mtp_params(d_model: int) -> Table:
    """What makes one width of two: a token's embedding and a hidden state."""
    return {"eh_proj": Param((d_model, 2 * d_model))}


def norm_params(kind: str, width: int) -> Table:
    biases = {} if kind == "rms" else {"bias": Param((width,), ZEROS)}
    return {"scale": Param((width,), ONES)} | biases


def low_rank_params(rank: int, d_in: int, d_out: int) -> Table:
    return {"down": Param((rank, d_in)), "up": Param((d_out, rank))}


def shared_params(d_model: int) -> Table:
    """Of a shared layer, beside its mixer, adapters and norm."""
    return {"linear": Param((d_model, d_model))}


def model_params(c: ModelConfig) -> Table:
    """What belongs to no layer, but for the last norm and the shared blocks."""
    shape = (c.vocab_size, c.d_model)
    names = ["embedding"] if c.tie_embeddings else ["embedding", "lm_head"]
    return {name: Param(shape) for name in names}


def declare(module: nn.Module, table: Table, dtype: Any) -> dict[str, jax.Array]:
    """A layer's parameters by name, in `dtype` or, of FLOAT32_PARAMS, in float32."""
    return {
        name: module.param(name, init, shape, stored_dtype(name, dtype))
        for name, (shape, init) in table.items()
    }


def stored_dtype(name: str, dtype: Any) -> Any:
    """The dtype of the parameter of this name in a model of `dtype`."""
    return jnp.float32 if name in FLOAT32_PARAMS else dtype


def cast_params(params: Params, dtype: Any) -> Params:
    """The parameters of the same model in `dtype`; FLOAT32_PARAMS stay float32."""

    def cast(path: tuple, leaf: jax.Array) -> jax.Array:
        return leaf.astype(stored_dtype(path[-1].key, dtype))

    return jax.tree_util.tree_map_with_path(cast, params)


def by_path(params: Params) -> dict[Path, Any]:
    """The leaves of nested dictionaries by the names that lead to them."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {tuple(key.key for key in path): leaf for path, leaf in leaves}


def nest(flat: dict[Path, Any]) -> dict[str, Any]:
    """The nested dictionary of which these are the leaves, the inverse of `by_path`."""
    return unflatten_dict(flat)
