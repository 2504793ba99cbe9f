"""The hybrid stack and its pure functions: a pass over a tree, and its logits."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from stree_jax.models.config import LayerKind, ModelConfig
from stree_jax.models.layers import MLP, Attention, Mamba2Mixer, Norm, linear
from stree_jax.models.moe import MoE
from stree_jax.models.nodes import Nodes, chain_nodes
from stree_jax.models.shared import Adapters, SharedBlock
from stree_jax.models.state import (
    LayerRecord,
    LayerState,
    Pending,
    State,
    init_state,
)

Params = Any  # nested dict of arrays, as `LanguageModel.init` makes it
Records = tuple[LayerRecord, ...]


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


_normal = nn.initializers.normal(0.02)


class ResidualLayer(nn.Module):
    """One pre-norm residual layer, h + f(norm(h)), f chosen by `kind`."""

    config: ModelConfig
    kind: LayerKind
    dtype: Any

    @nn.compact
    def __call__(
        self,
        h: jax.Array,
        nodes: Nodes,
        state: Any,  # LayerState and LayerRecord of this kind
        record: Any,
        rows: jax.Array | None,
        pending: tuple[Any, jax.Array, jax.Array] | None,
        length: jax.Array,
        shared: tuple[SharedBlock, jax.Array] | None,
    ) -> tuple[jax.Array, LayerRecord, LayerState]:
        """`shared` is a shared layer's block, and the embedding of the tokens."""
        c, read = self.config, h
        if self.kind in ("parallel", "shared"):
            r = (None, None) if record is None else record
            p = (None, None) if pending is None else _each(pending)
            mamba, attention = ((nodes, state[i], r[i], rows, p[i]) for i in range(2))
        if shared is not None:
            block, embedding = shared
            adapters = Adapters(c, self.dtype, name="adapters")
            block_args = (h, embedding, adapters, *attention, length)
            f, *others = block(*block_args)
            weight = self.param("linear", _normal, (c.d_model,) * 2, self.dtype)
            read = h + linear(f, weight)
        u = Norm(c.norm, c.norm_eps, self.dtype, name="norm")(read)
        match self.kind:
            case "mamba":
                args = (u, nodes, state, record, rows, pending)
                out, record, state = self._mamba(*args)
            case "attention":
                args = (u, nodes, state, record, rows, pending)
                out, record, state = self._attention(*args, length)
            case "parallel":
                out, *new = self._mamba(u, *mamba)
                more, *others = self._attention(u, *attention, length)
                out = out + more
                record, state = zip(new, others, strict=True)
            case "shared":
                out, *new = self._mamba(u, *mamba)
                record, state = zip(new, others, strict=True)
            case "mlp":
                assert c.mlp is not None
                out = MLP(c.mlp, self.dtype, name="mlp")(u)
            case "moe":
                assert c.moe is not None
                out = MoE(c.moe, self.dtype, name="moe")(u)
        return h + c.residual_multiplier * out, record, state

    def _mamba(self, *args: Any) -> tuple[jax.Array, Any, Any]:
        assert self.config.mamba is not None  # ModelConfig checks it
        return Mamba2Mixer(self.config.mamba, self.dtype, name="mamba")(*args)

    def _attention(self, *args: Any) -> tuple[jax.Array, Any, Any]:
        assert self.config.attention is not None
        return Attention(self.config.attention, self.dtype, name="attention")(*args)


def _each(pending: tuple[Any, jax.Array, jax.Array]) -> list[tuple]:
    """The pending path of each part of a parallel layer."""
    records, path, length = pending
    return [(record, path, length) for record in records]


class LanguageModel(nn.Module):
    """Embedding, residual layers, final norm, head."""

    config: ModelConfig
    dtype: Any = jnp.float32

    def setup(self):
        c = self.config
        init, shape = nn.initializers.normal(0.02), (c.vocab_size, c.d_model)
        self.embedding = self.param("embedding", init, shape, self.dtype)
        self.layers = [ResidualLayer(c, kind, self.dtype) for kind in c.layers]
        blocks = 0 if c.shared is None else c.shared.blocks
        self.shared = [SharedBlock(c, self.dtype) for _ in range(blocks)]
        self.norm = Norm(c.norm, c.norm_eps, self.dtype)
        if not c.tie_embeddings:
            self.lm_head = self.param("lm_head", init, shape, self.dtype)

    def __call__(
        self,
        tokens: jax.Array,
        nodes: Nodes,
        state: State,
        records: Records | None = None,
        rows: jax.Array | None = None,
        pending: Pending | None = None,
    ) -> tuple[jax.Array, Records, State]:
        """Hidden states of the nodes, see `forward_tree`."""
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
            last = None
            if pending is not None:
                last = (pending.records[i], pending.path, pending.length)
            record = None if records is None else records[i]
            h, record, layer_state = layer(
                h, nodes, state.layers[i], record, rows, last, length, shared
            )
            out_records.append(record)
            out_states.append(layer_state)
        return self.norm(h), tuple(out_records), State(tuple(out_states), length)

    def head(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] float32 of hidden states [..., d]."""
        weight = self.embedding if self.config.tie_embeddings else self.lm_head
        with jax.named_scope("head"):
            return linear(hidden, weight) / self.config.logits_divisor

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
    """
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
