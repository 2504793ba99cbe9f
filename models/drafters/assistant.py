"""Assistants of Gemma 4: small transformers that draft with the keys and values of
their target.

An assistant has no keys and values of its own. Each of its layers attends to those of
one layer of the target: the last one of the same type (with or without a window) that
has its own. It reads pairs: the target's embedding e of a token, and a vector u that
predicted the token. For the last token of the text, u is the target's hidden state. For
a draft token, u is what the assistant hands down from its parent.

    h = pre [e, u],  x = norm(layers(h)),  logits = head x,  handed down: u = post x

Draft tokens leave no keys and values. All nodes of a tree see the same text, up to the
token before the tree's root, and have the position of the root.

Here the drafter has a copy of the KV caches of these layers of the target. It computes
the keys and values from the target's residual streams before the layers, with the
target's weights.

Letters: dt width of the target, d width of the assistant, V tokens of the vocabulary, E
clusters of tokens.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.base.shards import ALONE, WHOLE, Cut
from stree_jax.models.configs.attention import AttentionConfig
from stree_jax.models.configs.kv_reader import KVReaderConfig
from stree_jax.models.configs.params import Param, Params, Path, Table, first_ids
from stree_jax.models.layers.embedding import embedded
from stree_jax.models.layers.nodes import Nodes, Pass, chain_nodes
from stree_jax.models.layers.norm import Norm
from stree_jax.models.layers.params import declare, init_table, parameter_count
from stree_jax.models.mixers.attention import AttentionRecord
from stree_jax.models.stack.config import Block, ModelConfig
from stree_jax.models.stack.config_json import from_json, to_json
from stree_jax.models.stack.model import (
    Model,
    model_pytree,
    param_dtype,
)
from stree_jax.models.stack.model_json import register_model
from stree_jax.models.stack.network import LanguageModel, ResidualLayer, Tapped, Taps
from stree_jax.models.stack.param_table import param_table
from stree_jax.models.stack.state import (
    Pending,
    Records,
    State,
    commit,
    init_records,
)
from stree_jax.models.weights.format import Format
from stree_jax.models.weights.linear import linear
from stree_jax.models.weights.parameters import as_weight


@dataclass(frozen=True)
class AssistantConfig(ModelConfig):
    """Architecture of an assistant.

    The fields of `ModelConfig` describe the assistant. Its embedding is only its head.
    With its target (`assistant_model`), `layers` begin with the target's layers whose
    keys and values it reads.

    Attributes:
      target_width: dt.
      clusters: E. If 0, the head scores all tokens. Else it scores those of the
        clusters whose centroids fit best; the logits of other tokens are -inf.
      clusters_read: number of clusters that are scored.
      sources: number of the target's layers among `layers`.
      source_norm_eps: epsilon of the norms of the target's layers.
      target: name of the model that it was trained for; may be empty.
    """

    target_width: int = 0
    clusters: int = 0
    clusters_read: int = 0
    sources: int = 0
    source_norm_eps: float = 0.0
    target: str = ""

    def _check_sources(self) -> None:
        if self.sources:  # else the layers that it reads are not known yet
            super()._check_sources()

    @property
    def readers(self) -> dict[str, KVReaderConfig]:
        """The attention of its layers, by the name of the mixer that it reads."""
        mixers = self.mixers.values()
        return {c.kv_from: c for c in mixers if isinstance(c, KVReaderConfig)}


def _projections(c: AssistantConfig) -> Table:
    """Returns the parameters outside layers, norm and head."""
    d, dt, V, E = c.d_model, c.target_width, c.vocab_size, c.clusters
    table: Table = {
        "pre": Param((d, 2 * dt), quantizable=True),
        "post": Param((dt, d), quantizable=True),
    }
    if E:
        table["centroids"] = Param((E, d), quantizable=True)
        table["ordering"] = Param((V,), first_ids, int32=True)
    return table


def assistant_table(c: AssistantConfig) -> dict[Path, Param]:
    """Returns the shape and initialiser of every parameter of an assistant without its
    target, by path."""
    own = {path: entry.param for path, entry in param_table(c).items()}
    return own | {(name,): param for name, param in _projections(c).items()}


def init_assistant(config: AssistantConfig, key: jax.Array, dtype: Any) -> Params:
    """Initialises the parameters of a new assistant.

    Args:
      config: the architecture, without a target.
      key: random key.
      dtype: dtype or weight format, or its name, such as "int8".
    """
    return init_table(assistant_table(config), key, dtype)


@struct.dataclass
class Assistant:
    """An assistant of Gemma 4: a pytree whose only leaves are the parameters.

    Attributes:
      params: nested dictionary of arrays, without those of the target.
      config: the architecture.
    """

    params: Params
    config: AssistantConfig = struct.field(pytree_node=False)

    @property
    def weight_format(self) -> Format:
        """The format that the weights are stored in."""
        return as_weight(self.params["pre"]).format

    def __repr__(self) -> str:
        c, count = self.config, parameter_count(self.params)
        layers = f"{sum(bool(c.source(block)) for block in c.layers)} layers"
        return f"Assistant({layers}, of a target {c.target_width} wide, {count:,})"


@model_pytree
@dataclass(frozen=True, eq=False)
class AssistantModel(Model):
    """An assistant with its target's arrays: a model whose forward passes take
    `previous`, as those of `mtp.mtp_model` do.

    Its hidden states are x [B, Tq, d], from which it computes both the logits and the
    vectors that it hands down.
    """

    config: AssistantConfig

    @property
    def module(self) -> Any:
        return AssistantModule(self.config, param_dtype(self.params), self.cut)


register_for_export(
    Assistant,
    lambda fields: [to_json(fields[0])],
    lambda values: (from_json(values[0], AssistantConfig),),
)
register_model(AssistantModel, AssistantConfig)


def source_layers(c: AssistantConfig, target: ModelConfig) -> dict[str, int]:
    """Returns the target's layers whose keys and values an assistant reads: their
    indices by the name of their attention.

    Raises:
      ValueError: the target has no such layer, or one with other heads.
    """
    found = {}
    for name, reader in c.readers.items():
        own = target.mixers.get(name)
        alone = (i for i, x in enumerate(target.layers) if x.mixers == (name,))
        found[name] = max(alone, default=-1)
        kind = "layer with a window" if reader.window else "layer without a window"
        if found[name] < 0 or not isinstance(own, AttentionConfig):
            raise ValueError(
                f"drafter: an assistant of Gemma 4 reads the keys of a {kind}, which "
                "the target does not have; use the model that it was trained on"
            )
        sizes = (reader.num_kv_heads, reader.head_dim)
        if sizes != (own.num_kv_heads, own.head_dim):
            raise ValueError(
                f"drafter: reads {sizes[0]} KV heads of size {sizes[1]} of a {kind}, "
                f"but the target has {own.num_kv_heads} of size {own.head_dim}; use "
                "the model that it was trained on"
            )
    return found


def taps_of(c: AssistantConfig, target: ModelConfig) -> Taps:
    """Returns the taps of the streams that enter these layers."""
    return tuple(i - 1 for i in source_layers(c, target).values())


def assistant_model(assistant: Assistant, target: Model) -> AssistantModel:
    """Returns an assistant with its target's arrays, ready to run. Copies no arrays."""
    c, of = assistant.config, target.config
    places = source_layers(c, of)
    params = dict(assistant.params)
    params["lm_head"] = params["embedding"]
    params["embedding"] = target.params["embedding"]
    for i, place in enumerate(places.values()):
        params[f"sources_{i}"] = target.params[f"layers_{place}"]
    config = replace(
        c,
        layers=(*(of.layers[i] for i in places.values()), *c.layers),
        mixers={**{name: of.mixers[name] for name in places}, **c.mixers},
        num_tokens=of.num_tokens,
        tie_embeddings=False,
        embedding_multiplier=of.embedding_multiplier,
        sources=len(places),
        source_norm_eps=of.norm_eps,
    )
    return AssistantModel(params, config)


def read_by_pass(model: AssistantModel) -> AssistantModel:
    """Returns an assistant with only the arrays that a pass over draft tokens reads, to
    count their bytes: without the target's layers, and without a head in clusters, of
    which it reads a few rows."""
    left_out = {f"sources_{i}" for i in range(model.config.sources)}
    left_out |= {"lm_head"} if model.config.clusters else set()
    params = {n: x for n, x in model.params.items() if n not in left_out}
    return replace(model, params=params)


class AssistantModule(LanguageModel):
    """The module of an `AssistantModel`."""

    config: AssistantConfig
    dtype: Any = jnp.float32
    cut: Cut = WHOLE

    def setup(self):
        c = self.config
        ends: Table = {
            "embedding": Param((c.vocab_size, c.target_width), quantizable=True),
            "lm_head": Param((c.vocab_size, c.d_model), quantizable=True),
        }
        p = declare(self, ends | _projections(c), self.dtype)
        self.declare_ends(p)
        self.pre, self.post = p["pre"], p["post"]
        self.centroids, self.ordering = p.get("centroids"), p.get("ordering")
        of_target = replace(c, norm_eps=c.source_norm_eps)
        self.sources = [ResidualLayer(of_target, x, self.dtype) for x in self._sources]
        own = c.layers[c.sources :]
        self.layers = [ResidualLayer(c, block, self.dtype) for block in own]
        self.norm = Norm(c.norm, c.norm_eps, self.dtype)

    @property
    def _sources(self) -> tuple[Block, ...]:
        return self.config.layers[: self.config.sources]

    def keys(self, streams: Tapped, nodes: Nodes, state: State) -> Records:
        """Computes the keys and values of tokens.

        Args:
          streams: for each source layer, the target's stream [B, T, dt] before it.
          nodes: the chain of the tokens.
          state: the state of the tokens before them.

        Returns:
          The records of all layers, for `commit`. XLA drops what only the outputs of
          the target's layers need.
        """
        pass_ = Pass[Any](nodes, None, None, state.length, nodes.valid_count)
        B, T = nodes.depth.shape
        records = list(init_records(self.config, B, T, self.dtype))
        for i, (layer, stream) in enumerate(zip(self.sources, streams, strict=True)):
            records[i] = layer(stream, pass_, state.layers[i], None, None)[1]
        return tuple(records)

    def at_root(self, tokens: jax.Array, hidden: jax.Array, state: State) -> jax.Array:
        """Computes x [B, 1, d] of the last tokens [B, 1] of the text, from the target's
        hidden states [B, 1, dt] that predicted them."""
        return self._run(tokens, hidden, state, None)

    def predict(
        self,
        tokens: jax.Array,
        previous: jax.Array,
        nodes: Nodes,
        state: State,
        records: Records | None = None,
        rows: jax.Array | None = None,
        pending: Pending | None = None,
    ) -> tuple[jax.Array, Tapped, Records, State]:
        """Runs the assistant on draft tokens.

        Args:
          tokens: [B, Tq] int32.
          previous: [B, Tq, d] float32. The hidden states x of their parents.
          nodes, state, records, rows, pending: see `forward_tapped`. Nodes have no
            records, and `pending` must be None.

        Returns:
          The results of `forward_tapped`, with no tapped streams.
        """
        valid_count = nodes.valid_count if rows is None else None
        handed = linear(previous, self.post, valid_count=valid_count)
        x = self._run(tokens, handed, state, valid_count)
        return x, (), () if records is None else records, state

    def _run(
        self,
        tokens: jax.Array,
        u: jax.Array,
        state: State,
        valid_count: jax.Array | None,
    ) -> jax.Array:
        """Computes x [B, Tq, d] of pairs of tokens [B, Tq] and vectors u [B, Tq, dt],
        all with the position of the root."""
        pairs = jnp.concatenate([self.embed(tokens), u], axis=-1)
        h = linear(pairs, self.pre, valid_count=valid_count)
        nodes, length = _below_last(tokens, state.length)
        rows = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.int32)
        read = {
            name: (one, _last_keys(one, nodes, length, self.dtype))
            for layer in state.layers[: self.config.sources]
            for name, one in layer.items()
        }
        for layer in self.layers:
            source = read.get(self.config.source(layer.block))
            pass_ = Pass[Any](nodes, rows, None, length, valid_count, source)
            h = layer(h, pass_, {}, None, None)[0]
        return self.norm(h, valid_count)

    def head(
        self, hidden: jax.Array, valid_count: jax.Array | None = None
    ) -> jax.Array:
        """Computes the logits of hidden states x; see `logits_of`."""
        c = self.config
        if self.centroids is None or self.ordering is None:
            return super().head(hidden, valid_count)
        with jax.named_scope("head"):
            fit = linear(hidden, self.centroids, valid_count=valid_count)
            best = jax.lax.top_k(fit, c.clusters_read)[1]
            ids = self.ordering.reshape(c.clusters, -1)[best]
            ids = ids.reshape(*best.shape[:-1], -1)
            rows = embedded(self.head_weight, ids, ALONE)
            own = jnp.einsum("...nd,...d->...n", rows, hidden)
            empty = jnp.full((*ids.shape[:-1], c.vocab_size), -jnp.inf, own.dtype)
            return jnp.put_along_axis(empty, ids, own, axis=-1, inplace=False)


def _below_last(tokens: jax.Array, length: jax.Array) -> tuple[Nodes, jax.Array]:
    """Returns a forest in which each token [B, Tq] is a child of the last committed
    token, which is node 0; and the number of tokens [B] before that one.

    So every token sees exactly the committed text, and has the position after it.
    """
    batch, count = tokens.shape
    depth = jnp.ones((batch, 1 + count), jnp.int32).at[:, 0].set(0)
    mask = jnp.zeros((batch, 1 + count, 1 + count), bool).at[:, :, 0].set(True)
    return Nodes(mask, depth, depth[:, :, None]), length - 1


def _last_keys(state: Any, nodes: Nodes, row: jax.Array, dtype: Any) -> AttentionRecord:
    """Returns a record of `nodes` whose node 0 has the keys and values of cache row
    `row` [B] int32; those of the others are 0."""

    def record(cache: jax.Array) -> jax.Array:
        at = jnp.maximum(row, 0)[:, None, None, None]
        last = jnp.take_along_axis(cache, at, axis=2).swapaxes(1, 2).view(dtype)
        B, _, Hk, hd = last.shape
        return jnp.zeros((B, nodes.depth.shape[1], Hk, hd), dtype).at[:, :1].set(last)

    return AttentionRecord(record(state.k), record(state.v))


def _call(model: AssistantModel, method: str, *args: Any) -> Any:
    return model.module.apply({"params": model.params}, *args, method=method)


def keep_keys(
    model: AssistantModel, state: State, streams: Tapped, length: jax.Array
) -> State:
    """Returns the state after tokens.

    Args:
      model: the assistant.
      state: the state before the tokens.
      streams: for each source layer, the target's stream [B, T, dt] float32 before it.
      length: [B] int32, number of valid tokens.
    """
    batch, T, _ = streams[0].shape
    nodes = chain_nodes(batch, T, 1, length=length)
    records = _call(model, "keys", streams, nodes, state)
    return commit(state, records, nodes.depth, length)


def read_root(
    model: AssistantModel, state: State, tokens: jax.Array, hidden: jax.Array
) -> jax.Array:
    """Computes the hidden states x [B, 1, d] float32 at the last tokens of the text.

    Args:
      model: the assistant.
      state: the state after the tokens before them.
      tokens: [B, 1] int32.
      hidden: [B, 1, dt] float32. The target's hidden states that predicted them.
    """
    return _call(model, "at_root", tokens, hidden, state)
