"""Medusa heads, which predict several future tokens in parallel from the model's last
hidden state (Cai et al. 2024, section 2.1).

Let h be the hidden state after the final norm, from which the model predicts the next
token. Head k = 1 .. K predicts the token k positions after that one:

    softmax(W_k r_k(h)),    r_k(h) = h + silu(A_k h + b_k), applied once per block

W_k is the head's own output matrix, or the model's head if the heads share it.

Letters: K heads, d width of the hidden states, V rows of the vocabulary.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.configs.params import ZEROS, Param, Params, Path
from stree_jax.models.layers.params import cast_table, init_table, parameter_count
from stree_jax.models.stack.model import Model, logits_of
from stree_jax.models.weights.format import Format
from stree_jax.models.weights.linear import linear
from stree_jax.models.weights.parameters import as_weight

MAX_HEADS, MAX_BLOCKS = 64, 16


@dataclass(frozen=True)
class HeadsConfig:
    """Architecture of Medusa heads.

    Attributes:
      d_model, vocab_size: d and V of the model that the heads belong to.
      heads: K, the number of heads.
      blocks: number of residual blocks of each head.
      own_output: True if each head has its own output matrix; otherwise all heads use
        the model's head.
      bias: True if the blocks have a bias.
      accuracy: [K][R]. accuracy[k][r] is the share of positions at which head k's guess
        of rank r is right, among the positions where the right tokens of all earlier
        heads have a rank below R. If empty, it has not been measured.
    """

    d_model: int
    vocab_size: int
    heads: int = 4
    blocks: int = 1
    own_output: bool = False
    bias: bool = True
    accuracy: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.heads <= MAX_HEADS:
            raise ValueError(f"heads: want 1..{MAX_HEADS}, got {self.heads}")
        if not 0 <= self.blocks <= MAX_BLOCKS:
            raise ValueError(f"blocks: want 0..{MAX_BLOCKS}, got {self.blocks}")
        if self.blocks == 0 and not self.own_output:
            raise ValueError(
                "blocks: with 0 blocks and no output matrix there is nothing to train"
            )
        if self.accuracy and len(self.accuracy) != self.heads:
            raise ValueError(
                f"accuracy: {len(self.accuracy)} rows for {self.heads} heads"
            )


@struct.dataclass
class Heads:
    """Medusa heads ready to run: a pytree whose only leaves are the parameters.

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


def _config_of(fields: dict[str, Any]) -> HeadsConfig:
    rows = tuple(map(tuple, fields.pop("accuracy")))
    return HeadsConfig(**fields, accuracy=rows)


register_for_export(
    Heads,
    lambda fields: [asdict(fields[0])],
    lambda values: (_config_of(values[0]),),
)


def first_heads(heads: Heads, count: int) -> Heads:
    """Returns the first `count` heads, for trees of that depth; copies no arrays."""
    c = heads.config
    params = {f"head_{k}": heads.params[f"head_{k}"] for k in range(count)}
    return Heads(params, replace(c, heads=count, accuracy=c.accuracy[:count]))


def head_table(c: HeadsConfig) -> dict[Path, Param]:
    """Returns the shape and initialiser of every parameter, by path."""
    # With zeros a new head predicts the same token as the model's own head.
    block = {"weight": Param((c.d_model, c.d_model), ZEROS, quantizable=True)}
    if c.bias:
        block["bias"] = Param((c.d_model,), ZEROS)
    parts = {f"block_{i}": block for i in range(c.blocks)}
    if c.own_output:
        weight = Param((c.vocab_size, c.d_model), quantizable=True)
        parts["output"] = {"weight": weight}
    return {
        (f"head_{k}", part, name): param
        for k in range(c.heads)
        for part, params in parts.items()
        for name, param in params.items()
    }


def init_heads(config: HeadsConfig, key: jax.Array, dtype: Any) -> Params:
    """Initialises the parameters of new heads.

    Args:
      config: the architecture.
      key: random key.
      dtype: dtype or weight format, or its name, such as "int8".
    """
    return init_table(head_table(config), key, dtype)


def cast_heads(config: HeadsConfig, params: Params, dtype: Any) -> Params:
    """Returns the parameters of the same heads in another dtype or weight format."""
    return cast_table(head_table(config), params, dtype)


def head_logits(heads: Heads, model: Model, hidden: jax.Array, count: int) -> jax.Array:
    """Returns the logits [..., count, V] float32 of the first `count` heads.

    Args:
      heads: the heads.
      model: the model that the heads belong to.
      hidden: [..., d] float32. The model's hidden states after the final norm.
      count: number of heads to run.

    Raises:
      ValueError: `count` is not between 1 and the number of heads.
    """
    if not 1 <= count <= heads.config.heads:
        raise ValueError(f"count: want 1..{heads.config.heads} heads, got {count}")
    each = (heads.params[f"head_{k}"] for k in range(count))
    out = jnp.stack([_head(heads.config, p, hidden) for p in each], axis=-2)
    return out if heads.config.own_output else logits_of(model, out)


def _head(c: HeadsConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Computes one head's output from hidden states [..., d]: the logits [..., V], or,
    if the heads share the model's head, the input [..., d] of that head."""
    for i in range(c.blocks):
        block = params[f"block_{i}"]
        y = linear(hidden, block["weight"], block.get("bias"))
        hidden = hidden + jax.nn.silu(y)
    return linear(hidden, params["output"]["weight"]) if c.own_output else hidden


def head_of(model: Model) -> Model:
    """Returns the model with only its embedding and head, enough for `logits_of`."""
    names = ("embedding", "lm_head", "head_ids")
    params = {name: model.params[name] for name in names if name in model.params}
    return model.replace(params=params)
