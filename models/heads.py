"""Medusa heads: what comes after the next token, from the model's own last state (Cai
et al. 2024, section 2.1).

With h the state behind the last norm that the next token is chosen by, head k = 1 .. K
says what follows that token at a distance of k:

    softmax(W_k r_k(h)),    r_k(h) = h + silu(A_k h + b_k), as often as it has blocks

W_k is its own, or the model's head for all of them.

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
    Table,
    by_path,
    cast_params,
    declare,
    parameter_count,
)
from stree_jax.models.weights.int8 import INT8
from stree_jax.models.weights.linear import linear

MOST_HEADS, MOST_BLOCKS = 64, 16


@dataclass(frozen=True)
class HeadsConfig:
    """Architecture of Medusa heads.

    Attributes:
      d_model, vocab_size: d and V, of the model they belong to.
      heads: K.
      blocks: residual blocks of each.
      own_output: whether each has an output matrix of its own; else the model's head
        is everyone's.
      bias: whether blocks have one.
      accuracy: [K][R], how often the token at a head's distance is the one of rank r
        among its guesses, given that those before it were tried; (): not measured.
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

    def __repr__(self) -> str:
        count = parameter_count(self.params)
        c = self.config
        output = "own outputs" if c.own_output else "the model's output"
        return f"Heads({c.heads}, {c.blocks} blocks each, {output}, {count:,})"


def first_heads(heads: Heads, count: int) -> Heads:
    """The first `count` alone, for trees that are no deeper; arrays are not copied."""
    c = heads.config
    params = {f"head_{k}": heads.params[f"head_{k}"] for k in range(count)}
    return Heads(params, replace(c, heads=count, accuracy=c.accuracy[:count]))


def block_params(c: HeadsConfig) -> Table:
    """Zeros: a head begins as what the model itself says next."""
    table = {"weight": Param((c.d_model, c.d_model), ZEROS, quantizable=True)}
    return table | ({"bias": Param((c.d_model,), ZEROS)} if c.bias else {})


def output_params(c: HeadsConfig) -> Table:
    return {"weight": Param((c.vocab_size, c.d_model), quantizable=True)}


class _Part(nn.Module):
    """A product with what a table declares."""

    table: Any
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        p = declare(self, self.table, self.dtype)
        return linear(x, p["weight"], p.get("bias"))


class Head(nn.Module):
    """One head up to its output, or with its own."""

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
    """The first heads, of one hidden state."""

    config: HeadsConfig
    dtype: Any

    @nn.compact
    def __call__(self, hidden: jax.Array, count: int) -> jax.Array:
        """[..., count, V], or [..., count, d] for the model's head, of [..., d]."""
        c, dtype = self.config, self.dtype
        every = (Head(c, dtype, name=f"head_{k}") for k in range(count))
        return jnp.stack([head(hidden) for head in every], axis=-2)


def heads_dtype(params: Params) -> Any:
    """Of all weights."""
    first, *_ = params["head_0"].values()
    return first["weight"].dtype


def init_heads(config: HeadsConfig, key: jax.Array, dtype: Any) -> Params:
    """Fresh parameters; `jax.eval_shape` of this is the table of names and shapes."""
    if dtype == INT8:
        return cast_params(init_heads(config, key, jnp.float32), dtype)
    hidden = jnp.zeros((1, config.d_model), jnp.float32)
    return MedusaHeads(config, dtype).init(key, hidden, config.heads)["params"]


def head_shapes(config: HeadsConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Shape of every parameter, by path."""
    made = jax.eval_shape(lambda: init_heads(config, key_of(0), jnp.float32))
    return {path: leaf.shape for path, leaf in by_path(made).items()}


def head_logits(heads: Heads, model: Model, hidden: jax.Array, count: int) -> jax.Array:
    """Logits [..., count, V] float32 of the first `count` heads.

    Args:
      model: whose hidden states [..., d] float32 they are, behind the last norm.
    """
    if not 1 <= count <= heads.config.heads:
        raise ValueError(f"{count} heads asked, there are {heads.config.heads}")
    module = MedusaHeads(heads.config, heads_dtype(heads.params))
    out: Any = module.apply({"params": heads.params}, hidden, count)
    return out if heads.config.own_output else logits_of(model, out)


def head_of(model: Model) -> Model:
    """The model without its layers: what `logits_of` needs."""
    names = ("embedding", "lm_head")
    params = {name: model.params[name] for name in names if name in model.params}
    return derived(model, params, model.config)
