"""Medusa heads: they predict the tokens after the next one from the model's last hidden
state (Cai et al. 2024, section 2.1).

With h the state after the last norm, which the next token is chosen by, head k = 1 .. K
predicts the token at a distance of k from that one:

    softmax(W_k r_k(h)),    r_k(h) = h + silu(A_k h + b_k), once for each block

W_k is the head's own output matrix, or the model's head for all of them.

Letters: K heads, d width of the hidden states, V rows of the vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from stree_jax.models.keys import key_of
from stree_jax.models.model import Model, derived, logits_of
from stree_jax.models.params import (
    ZEROS,
    Param,
    Params,
    Path,
    Table,
    by_path,
    declare,
    nest,
    parameter_count,
    stored,
)
from stree_jax.models.weights.formats import as_weight, format_named
from stree_jax.models.weights.linear import linear
from stree_jax.models.weights.weight import Format

MOST_HEADS, MOST_BLOCKS = 64, 16


@dataclass(frozen=True)
class HeadsConfig:
    """Architecture of Medusa heads.

    Attributes:
      d_model, vocab_size: d and V of the model they belong to.
      heads: K.
      blocks: residual blocks of each.
      own_output: True if each has an output matrix of its own; else all use the model's
        head.
      bias: True if blocks have one.
      accuracy: [K][R]. How often the token at a head's distance is the one of rank r
        among its guesses, given that those before it were tried. If empty, it was not
        measured.
    """

    d_model: int
    vocab_size: int
    heads: int = 4
    blocks: int = 1
    own_output: bool = False
    bias: bool = True
    accuracy: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.heads <= MOST_HEADS:
            raise ValueError(f"heads: want 1..{MOST_HEADS}, got {self.heads}")
        if not 0 <= self.blocks <= MOST_BLOCKS:
            raise ValueError(f"blocks: want 0..{MOST_BLOCKS}, got {self.blocks}")
        if self.blocks == 0 and not self.own_output:
            raise ValueError(
                "blocks: 0 of them, and no outputs, leave nothing to learn"
            )
        if self.accuracy and len(self.accuracy) != self.heads:
            raise ValueError(
                f"accuracy: {len(self.accuracy)} rows for {self.heads} heads"
            )


@struct.dataclass
class Heads:
    """Medusa heads ready to run; a pytree whose only leaves are the parameters.

    Attributes:
      params: nested dictionary of arrays.
      config: the architecture.
    """

    params: Params
    config: HeadsConfig = struct.field(pytree_node=False)

    @property
    def weight_format(self) -> Format:
        """The format that the weights are stored in."""
        first, *_ = self.params["head_0"].values()
        return as_weight(first["weight"]).format

    def __repr__(self) -> str:
        count = parameter_count(self.params)
        c = self.config
        output = "own outputs" if c.own_output else "the model's output"
        return f"Heads({c.heads}, {c.blocks} blocks each, {output}, {count:,})"


def first_heads(heads: Heads, count: int) -> Heads:
    """Returns the first `count` heads, for trees of that depth; copies no arrays."""
    c = heads.config
    params = {f"head_{k}": heads.params[f"head_{k}"] for k in range(count)}
    return Heads(params, replace(c, heads=count, accuracy=c.accuracy[:count]))


def block_params(c: HeadsConfig) -> Table:
    """Returns the parameters of a residual block: zeros, so that a new head predicts
    what the model itself predicts."""
    table = {"weight": Param((c.d_model, c.d_model), ZEROS, quantizable=True)}
    return table | ({"bias": Param((c.d_model,), ZEROS)} if c.bias else {})


def output_params(c: HeadsConfig) -> Table:
    return {"weight": Param((c.vocab_size, c.d_model), quantizable=True)}


class _Part(nn.Module):
    """A product with the weight and bias of a table."""

    table: Any
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        p = declare(self, self.table, self.dtype)
        return linear(x, p["weight"], p.get("bias"))


class Head(nn.Module):
    """One head: its blocks, and its output matrix if it has one."""

    config: HeadsConfig
    dtype: Any

    @nn.compact
    def __call__(self, hidden: jax.Array) -> jax.Array:
        c = self.config
        for i in range(c.blocks):
            block = _Part(nn.FrozenDict(block_params(c)), self.dtype, name=f"block_{i}")
            hidden = hidden + jax.nn.silu(block(hidden))
        if not c.own_output:
            return hidden
        return _Part(nn.FrozenDict(output_params(c)), self.dtype, name="output")(hidden)


class MedusaHeads(nn.Module):
    """The first heads of all, applied to one hidden state."""

    config: HeadsConfig
    dtype: Any

    @nn.compact
    def __call__(self, hidden: jax.Array, count: int) -> jax.Array:
        """Returns [..., count, V], or [..., count, d] for the model's head to multiply,
        from a hidden state [..., d]."""
        c, dtype = self.config, self.dtype
        every = (Head(c, dtype, name=f"head_{k}") for k in range(count))
        return jnp.stack([head(hidden) for head in every], axis=-2)


def head_param(c: HeadsConfig, path: Path) -> Param:
    """Returns a parameter's entry in the table of its block or output."""
    _, part, name = path
    return (output_params(c) if part == "output" else block_params(c))[name]


def cast_heads(config: HeadsConfig, params: Params, dtype: Any) -> Params:
    """Returns the parameters of the same heads in another dtype or weight format."""
    format, flat = format_named(dtype), by_path(params)
    return nest({p: stored(head_param(config, p), x, format) for p, x in flat.items()})


def init_heads(config: HeadsConfig, key: jax.Array, dtype: Any) -> Params:
    """Initialises parameters; `jax.eval_shape` of this is the table of names and
    shapes."""
    format = format_named(dtype)
    if not format.plain:
        return cast_heads(config, init_heads(config, key, jnp.float32), format)
    hidden = jnp.zeros((1, config.d_model), jnp.float32)
    return MedusaHeads(config, format.dtype).init(key, hidden, config.heads)["params"]


def head_shapes(config: HeadsConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Returns the shape of every parameter, by path."""
    made = jax.eval_shape(lambda: init_heads(config, key_of(0), jnp.float32))
    return {path: leaf.shape for path, leaf in by_path(made).items()}


def head_logits(heads: Heads, model: Model, hidden: jax.Array, count: int) -> jax.Array:
    """Returns the logits [..., count, V] float32 of the first `count` heads.

    Args:
      model: the model that the heads belong to.
      hidden: [..., d] float32. Its hidden states after the last norm.
    """
    if not 1 <= count <= heads.config.heads:
        raise ValueError(f"{count} heads asked, there are {heads.config.heads}")
    module = MedusaHeads(heads.config, heads.weight_format.dtype)
    out: Any = module.apply({"params": heads.params}, hidden, count)
    return out if heads.config.own_output else logits_of(model, out)


def head_of(model: Model) -> Model:
    """Returns the model without its layers, which is enough for `logits_of`."""
    names = ("embedding", "lm_head")
    params = {name: model.params[name] for name in names if name in model.params}
    return derived(model, params, model.config)
