"""The hybrid stack and its pure functions: a pass over a tree, and its logits."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from stree_jax.models.attention import Attention
from stree_jax.models.config import LayerKind, ModelConfig, given
from stree_jax.models.linear import linear
from stree_jax.models.mamba2 import Mamba2Mixer
from stree_jax.models.mlp import MLP
from stree_jax.models.moe import MoE
from stree_jax.models.nodes import Nodes, Pass, chain_nodes
from stree_jax.models.norm import Norm
from stree_jax.models.params import (
    Params,
    Path,
    by_path,
    declare,
    model_params,
    shared_params,
)
from stree_jax.models.shared import Adapters, SharedBlock
from stree_jax.models.state import (
    LayerRecord,
    LayerState,
    ParallelRecord,
    ParallelState,
    Pending,
    Records,
    State,
    init_state,
)

MAX_WIDTH = 1 << 27  # of a layer: no real model's is above this


@struct.dataclass
class Model:
    """A model ready to run; a pytree whose only leaves are the parameters.

    Attributes:
      params: nested dictionary of arrays.
      config: the architecture.
    """

    params: Params
    config: ModelConfig = struct.field(pytree_node=False)

    @property
    def module(self) -> Any:
        """The Flax module that the parameters belong to."""
        return LanguageModel(self.config, param_dtype(self.params))

    def __repr__(self) -> str:
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.params))
        return f"{type(self).__name__}({count:,} parameters, {self.config})"


class ResidualLayer(nn.Module):
    """One pre-norm residual layer, h + f(norm(h)), f chosen by `kind`."""

    config: ModelConfig
    kind: LayerKind
    dtype: Any

    @nn.compact
    def __call__(
        self,
        h: jax.Array,
        pass_: Pass[Any],
        state: Any,  # LayerState and LayerRecord of this kind
        record: Any,
        shared: tuple[SharedBlock, jax.Array] | None,
    ) -> tuple[jax.Array, LayerRecord, LayerState]:
        """As all mixers, of the residual stream h [B, Tq, d].

        Args:
          shared: a shared layer's block, and the tokens' embedding [B, Tq, d].
        """
        c, read, both = self.config, h, self.kind in ("parallel", "shared")
        if both:
            for_mamba = _part("mamba", pass_, state, record)
            for_attention = _part("attention", pass_, state, record)
        if shared is not None:
            block, embedding = shared
            adapters = Adapters(c, self.dtype, name="adapters")
            u = jnp.concatenate([h, embedding], axis=-1)
            f, a_record, a_state = block(u, adapters, *for_attention)
            p = declare(self, shared_params(c.d_model), self.dtype)
            read = h + linear(f, p["linear"])
        u = Norm(c.norm, c.norm_eps, self.dtype, name="norm")(read)
        match self.kind:
            case "mamba":
                out, record, state = self._mamba(u, pass_, state, record)
            case "attention":
                out, record, state = self._attention(u, pass_, state, record)
            case "parallel":
                out, m_record, m_state = self._mamba(u, *for_mamba)
                more, a_record, a_state = self._attention(u, *for_attention)
                out = out + more
            case "shared":
                out, m_record, m_state = self._mamba(u, *for_mamba)
            case "mlp":
                out = MLP(given(c.mlp), self.dtype, name="mlp")(u)
            case "moe":
                out = MoE(given(c.moe), self.dtype, name="moe")(u)
        if both:
            record = ParallelRecord(m_record, a_record)
            state = ParallelState(m_state, a_state)
        return h + c.residual_multiplier * out, record, state

    def _mamba(self, *args: Any) -> tuple[jax.Array, Any, Any]:
        return Mamba2Mixer(given(self.config.mamba), self.dtype, name="mamba")(*args)

    def _attention(self, *args: Any) -> tuple[jax.Array, Any, Any]:
        options = given(self.config.attention)
        return Attention(options, self.dtype, name="attention")(*args)


def _part(
    mixer: Literal["mamba", "attention"], pass_: Pass[Any], state: Any, record: Any
) -> tuple[Pass[Any], Any, Any]:
    """Pass, state and record, of a layer with both mixers, that one is given."""
    of, pending = attrgetter(mixer), pass_.pending
    if pending is not None:
        pending = replace(pending, record=of(pending.record))
    own_record = None if record is None else of(record)
    return replace(pass_, pending=pending), of(state), own_record


class LanguageModel(nn.Module):
    """Embedding, residual layers, final norm, head."""

    config: ModelConfig
    dtype: Any = jnp.float32

    def setup(self):
        c = self.config
        p = declare(self, model_params(c), self.dtype)
        self.embedding = p["embedding"]
        self.head_weight = p["embedding" if c.tie_embeddings else "lm_head"]
        self.layers = [ResidualLayer(c, kind, self.dtype) for kind in c.layers]
        blocks = 0 if c.shared is None else c.shared.blocks
        self.shared = [SharedBlock(c, self.dtype) for _ in range(blocks)]
        self.norm = Norm(c.norm, c.norm_eps, self.dtype)

    def __call__(
        self,
        tokens: jax.Array,
        nodes: Nodes,
        state: State,
        records: Records | None = None,
        rows: jax.Array | None = None,
        pending: Pending | None = None,
    ) -> tuple[jax.Array, Records, State]:
        """As `forward_hidden`."""
        c = self.config
        h = self.embedding[tokens].astype(jnp.float32) * c.embedding_multiplier
        length = state.length if pending is None else state.length + pending.length
        out_records, out_states = [], []
        embedding, calls = h, 0
        for i, layer in enumerate(self.layers):
            shared = None
            if c.layers[i] == "shared":
                shared = (self.shared[calls % len(self.shared)], embedding)
                calls += 1
            last = None if pending is None else pending.layer(i)
            record = None if records is None else records[i]
            pass_ = Pass(nodes, rows, last, length)
            h, record, layer_state = layer(h, pass_, state.layers[i], record, shared)
            out_records.append(record)
            out_states.append(layer_state)
        return self.norm(h), tuple(out_records), State(tuple(out_states), length)

    def head(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] float32 of hidden states [..., d]."""
        with jax.named_scope("head"):
            return linear(hidden, self.head_weight) / self.config.logits_divisor

    def init_all(self, tokens: jax.Array, nodes: Nodes, state: State) -> jax.Array:
        """Touches every parameter, for `init`."""
        return self.head(self(tokens, nodes, state)[0])


def init_params(config: ModelConfig, key: jax.Array, dtype: Any) -> Params:
    """Freshly initialised parameters.

    `jax.eval_shape` of this is the table of every parameter's name, shape and dtype.
    """
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
    kinds = tuple(dict.fromkeys(config.layers))
    _check_widths(config)
    one = replace(config, layers=kinds)
    tree = jax.eval_shape(lambda: init_params(one, jax.random.key(0), jnp.float32))
    flat = {path: leaf.shape for path, leaf in by_path(tree).items()}
    traced = {f"layers_{i}": kind for i, kind in enumerate(kinds)}
    shapes = {path: shape for path, shape in flat.items() if path[0] not in traced}
    if config.shared is not None:  # one layer traces one of the shared blocks
        used = min(config.shared.blocks, config.layers.count("shared"))
        block = {path[1:]: shapes[path] for path in flat if path[0] == "shared_0"}
        for b in range(used):
            shapes |= {(f"shared_{b}", *path): shape for path, shape in block.items()}
    for j, kind in enumerate(config.layers):
        shapes |= {
            (f"layers_{j}", *path[1:]): shape
            for path, shape in flat.items()
            if traced.get(path[0]) == kind
        }
    return MappingProxyType(shapes)


def _check_widths(config: ModelConfig) -> None:
    """Products of sizes that JAX could not even trace; raises ValueError."""
    wide = config.mamba.d_in_proj if config.mamba else 0
    if config.attention is not None:
        wide = max(wide, config.attention.num_heads * config.attention.head_dim)
    if wide > MAX_WIDTH:
        raise ValueError(f"{wide} channels of a layer are more than {MAX_WIDTH}")


def param_dtype(params: Params) -> Any:
    """The dtype of weights, caches and records (SSM state is float32 always)."""
    return params["embedding"].dtype


def forward_hidden(
    model: Model,
    state: State,
    tokens: jax.Array,
    nodes: Nodes,
    *,
    records: Records | None = None,
    rows: jax.Array | None = None,
    pending: Pending | None = None,
) -> tuple[jax.Array, Records, State]:
    """Run the nodes of a tree in one packed pass.

    Args:
      state: committed tokens; not changed, except that `pending` is replayed.
      tokens: [B, Tq] int32, tokens of the queried nodes.
      nodes: topology of all T nodes.
      records, rows: to add nodes level by level: records of the nodes so far and the
        rows [Tq] of the new ones among T (rows >= T are dropped).
      pending: last step's accepted path, replayed first (Algorithm 1).

    Returns:
      hidden states [B, Tq, d] float32 for `logits_of`, records of all T nodes, and the
      state after `pending`.

    Raises:
      ValueError: `rows` and `pending` are both given.
    """
    if rows is not None and pending is not None:
        raise ValueError("rows: of a state without a pending path; commit it first")
    args = (tokens, nodes, state, records, rows, pending)
    return model.module.apply({"params": model.params}, *args)


def logits_of(model: Model, hidden: jax.Array) -> jax.Array:
    """Logits [..., V] float32 of hidden states [..., d]."""
    return model.module.apply({"params": model.params}, hidden, method="head")


def forward_tree(
    model: Model, state: State, tokens: jax.Array, nodes: Nodes
) -> tuple[jax.Array, Records]:
    """Logits [B, T, V] and records of a tree's nodes; `commit` takes the records."""
    hidden, records, _ = forward_hidden(model, state, tokens, nodes)
    return logits_of(model, hidden), records
