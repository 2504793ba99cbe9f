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

from stree_jax.models.config import (
    AttentionConfig,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    given,
)
from stree_jax.models.sharding.shards import Run, run_width
from stree_jax.models.weights.formats import is_weight
from stree_jax.models.weights.weight import Format

Path = tuple[str, ...]
Params = Any  # nested dict of arrays and weights
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


Table = dict[str, Param]  # by name, in the order in which they are drawn


def _taps(count: int) -> Init:
    """How a convolution of this many taps begins, as PyTorch's."""
    return nn.initializers.uniform(2 / math.sqrt(count))


def mamba_runs(c: MambaConfig) -> dict[str, tuple[Run, ...]]:
    """What the channels of a mixer consist of: "inner" of y, "heads", "xBC"; "first" of
    the MLP inside."""
    H, inside = c.num_heads, (Run(c.d_mlp, c.d_mlp),) if c.d_mlp else ()
    x, B, C = c.widths
    grouped = c.x_heads is not None
    own = c.x_heads or H
    return {
        "first": inside,
        "inner": (Run(c.d_inner, H),),
        "heads": (Run(H, H),),
        "xBC": (
            Run(x, own, grouped),
            Run(B, own if grouped else c.n_groups, True),
            Run(C, c.n_groups, True),
        ),
    }


def mamba_params(c: MambaConfig, d_model: int) -> Table:
    parts = mamba_runs(c)
    first, inner, heads, xBC = (parts[k] for k in ("first", "inner", "heads", "xBC"))
    into = 2 * first + inner + xBC + heads
    table = {
        "in_proj": Param((c.d_in_proj, d_model), runs=into, quantizable=True),
        "conv_weight": Param((c.d_xBC, c.d_conv), _taps(c.d_conv), xBC),
        "dt_bias": Param((c.num_heads,), _init_dt_bias, heads, float32=True),
        "A_log": Param((c.num_heads,), _init_A_log, heads, float32=True),
        "D": Param((c.d_inner,), ONES, inner, float32=True)
        if c.D_per_channel
        else Param((c.num_heads,), ONES, heads, float32=True),
        "out_proj": Param(
            (d_model, c.d_inner + c.d_mlp), runs=first + inner, axis=1, quantizable=True
        ),
    }
    if c.proj_in_bias:
        table["in_proj_bias"] = Param((c.d_in_proj,), ZEROS, into)
    if c.conv_bias:
        table["conv_bias"] = Param((c.d_xBC,), ZEROS, xBC)
    if c.proj_out_bias:
        table["out_proj_bias"] = Param((d_model,), ZEROS)
    if c.norm is not None:
        table["norm"] = Param((c.d_inner,), ONES, inner)
    return table


def attention_runs(c: AttentionConfig) -> tuple[Run, Run, Run]:
    """What the channels of q, k and v consist of."""
    kv = Run(c.num_kv_heads * c.head_dim, c.num_kv_heads, True)
    return Run(c.num_heads * c.head_dim, c.num_heads), kv, kv


def attention_params(c: AttentionConfig, d_model: int) -> Table:
    d_in, d_out = c.d_qkv + 2 * c.d_mlp, c.num_heads * c.head_dim + c.d_mlp
    width, heads = c.d_out or d_model, attention_runs(c)
    inside = (Run(c.d_mlp, c.d_mlp),) if c.d_mlp else ()
    into = (*heads, *2 * inside)
    table = {
        "qkv": Param((d_in, d_model), runs=into, quantizable=True),
        "out": Param(
            (width, d_out), runs=(heads[0], *inside), axis=1, quantizable=True
        ),
    }
    if c.qkv_bias:
        table["qkv_bias"] = Param((d_in,), ZEROS, into)
    if c.out_bias:
        table["out_bias"] = Param((width,), ZEROS)
    if c.d_conv:
        table["conv_weight"] = Param((c.d_qkv, c.d_conv), _taps(c.d_conv), heads)
        table["conv_bias"] = Param((c.d_qkv,), ZEROS, heads)
    if c.qk_norm_eps is not None:  # one scale for all heads, so every part has it
        table["q_norm"] = Param((c.head_dim,), ONES)
        table["k_norm"] = Param((c.head_dim,), ONES)
    return table


def _hidden_runs(c: MLPConfig | MoEConfig) -> tuple[Run, ...]:
    """What the rows of an MLP's first product consist of."""
    return (Run(c.d_hidden, c.d_hidden),) * (2 if c.gated else 1)


def mlp_params(c: MLPConfig, d_model: int) -> Table:
    """`gate_up` holds the rows [gate; up]; without a gate there is `up`."""
    first, rows = ("gate_up", 2 * c.d_hidden) if c.gated else ("up", c.d_hidden)
    into = _hidden_runs(c)
    table = {
        first: Param((rows, d_model), runs=into, quantizable=True),
        "down": Param((d_model, c.d_hidden), runs=into[:1], axis=1, quantizable=True),
    }
    if c.bias:
        table[f"{first}_bias"] = Param((rows,), ZEROS, into)
        table["down_bias"] = Param((d_model,), ZEROS)
    return table


def moe_params(c: MoEConfig, d_model: int) -> Table:
    """Of E experts: `into` holds the rows [gate; up] of each if they are gated.

    Every part has some channels of every expert, so that parts have equal work whatever
    is chosen.
    """
    E, width, into = c.num_experts, c.d_latent or d_model, _hidden_runs(c)
    rows = c.d_hidden * (2 if c.gated else 1)
    table = {
        "router": Param((E, d_model)),
        "into": Param((E, rows, width), runs=into, axis=1),
        "down": Param((E, width, c.d_hidden), runs=into[:1], axis=2),
    }
    if c.router == "sigmoid":
        table["router_bias"] = Param((E,), ZEROS, float32=True)
    if c.d_latent:
        table["latent_in"] = Param((c.d_latent, d_model), quantizable=True)
        table["latent_out"] = Param((d_model, c.d_latent), quantizable=True)
    return table


def mtp_params(d_model: int, n: int = 1) -> Table:
    """What makes one width of two, a token's embedding and a hidden state; or a part
    of n."""
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


def adapter_runs(c: ModelConfig) -> dict[str, tuple[Run, ...]]:
    """The rows that each adapter of a shared layer adds to."""
    runs = {"gate_up": _hidden_runs(given(c.mlp))}
    if given(c.shared).attention_adapter:
        qkv = attention_runs(given(c.attention))
        runs |= {name: (run,) for name, run in zip("qkv", qkv, strict=True)}
    return runs


def shared_params(d_model: int, n: int = 1) -> Table:
    """Of a shared layer, beside its mixer, adapters and norm; or a part of n."""
    width = d_model // n
    return {
        "linear": Param(
            (d_model, width), runs=(Run(width, width),), axis=1, quantizable=True
        )
    }


def model_params(c: ModelConfig) -> Table:
    """What belongs to no layer, but for the last norm and the shared blocks."""
    shape, ids = (c.vocab_size, c.d_model), (Run(c.vocab_size, c.vocab_size),)
    names = ["embedding"] if c.tie_embeddings else ["embedding", "lm_head"]
    return {name: Param(shape, runs=ids, quantizable=True) for name in names}


def declare(module: nn.Module, table: Table, dtype: Any) -> dict[str, Any]:
    """Returns a layer's parameters by name: those that the module is applied to, or new
    ones in `dtype` or float32.

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

    return {name: param(name, entry) for name, entry in table.items()}


def is_stored(param: Param | None) -> bool:
    """True if a weight format stores this parameter in its own way."""
    return param is not None and param.quantizable


def array_dtype(param: Param | None, dtype: Any) -> Any:
    """Returns the dtype of a parameter that is an array: `dtype`, or float32 where its
    entry says so. A norm has no entry."""
    return jnp.float32 if param is not None and param.float32 else dtype


def stored(
    param: Param | None, array: Any, format: Format, columns: int | None = None
) -> Any:
    """Returns a parameter as a model of this format keeps it.

    Args:
      param: its entry.
      array: of any float dtype.
      columns: see `Format.store`.
    """
    if is_stored(param):
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
