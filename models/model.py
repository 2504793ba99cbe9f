"""The hybrid stack and its pure functions: a pass over a tree, and its logits."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from stree_jax.models.config import Block, ModelConfig, given
from stree_jax.models.mixers import mixer_of
from stree_jax.models.nodes import Nodes, Pass
from stree_jax.models.norm import Norm
from stree_jax.models.params import (
    Params,
    declare,
    model_params,
    mtp_params,
    parameter_count,
    shared_params,
)
from stree_jax.models.sharding.shards import (
    VOCAB,
    WHOLE,
    WIDTH,
    Cut,
    gathered,
    own,
    own_rows,
    total,
)
from stree_jax.models.shared import Adapters, SharedBlock
from stree_jax.models.state import (
    LayerRecord,
    LayerState,
    Pending,
    Records,
    State,
    init_state,
)
from stree_jax.models.tracing import traced_once
from stree_jax.models.weights.formats import as_weight, format_of
from stree_jax.models.weights.linear import linear
from stree_jax.models.weights.weight import Format


@struct.dataclass
class Model:
    """A model ready to run; a pytree whose only leaves are the parameters.

    Attributes:
      params: nested dictionary of arrays.
      config: the architecture.
      mesh: the devices that the arrays are cut over, see `stree_jax.shard`; None: one.
      cut: of a part, which is one device's within `jax.shard_map`, how it was cut.
    """

    params: Params
    config: ModelConfig = struct.field(pytree_node=False)
    mesh: jax.sharding.Mesh | None = struct.field(
        pytree_node=False, default=None, kw_only=True
    )
    cut: Cut = struct.field(pytree_node=False, default=WHOLE, kw_only=True)

    @property
    def module(self) -> Any:
        """The Flax module that the parameters belong to.

        Raises:
          ValueError: they are on a mesh, where a device's part has a module.
        """
        if self.mesh is not None:
            raise ValueError(
                "model: on a mesh it runs by generate, generate_tokens and score alone"
            )
        return LanguageModel(self.config, param_dtype(self.params), self.cut)

    @property
    def weight_format(self) -> Format:
        """The format that the weights are stored in."""
        return format_of(self.params)

    def __repr__(self) -> str:
        config, count = self.config, parameter_count(self.params)
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(config.kinds).items())
        return (
            f"{type(self).__name__}({count:,} parameters in {self.weight_format}, "
            f"layers: {kinds}; d_model {config.d_model}, {config.num_tokens} tokens)"
        )


def derived(model: Model, params: Params, config: ModelConfig) -> Model:
    """A plain model with other parameters, on the same devices."""
    return Model(params, config, mesh=model.mesh, cut=model.cut)


def base_model(model: Model) -> Model:
    """A model without what an API's has beside."""
    return derived(model, model.params, model.config)


Taps = tuple[int, ...]  # layers whose residual stream is wanted, see `forward_tapped`
Tapped = tuple[jax.Array, ...]  # the residual streams [B, T, d] float32 of the taps

LayerInput = tuple[jax.Array, Pass[Any], LayerState, LayerRecord | None]
LayerOutput = tuple[jax.Array, LayerRecord, LayerState]


class ResidualLayer(nn.Module):
    """One residual layer, h + sum of mixers(norm(h)); see `Block`."""

    config: ModelConfig
    block: Block
    dtype: Any
    cut: Cut = WHOLE

    @nn.compact
    def __call__(
        self,
        h: jax.Array,
        pass_: Pass[Any],
        state: LayerState,
        record: LayerRecord | None,
        shared: tuple[SharedBlock, jax.Array] | None,
    ) -> LayerOutput:
        """Runs the layer on the residual stream h [B, Tq, d]; see `Pass`.

        Args:
          state, record: of the layer's token mixers, by name.
          shared: the layer's shared transformer block and the tokens' embedding
            [B, Tq, d]; None if the layer uses no such block.
        """
        c, read = self.config, h
        states: LayerState = {}
        records: LayerRecord = {}
        if shared is not None:
            block, embedding = shared
            name = given(c.shared).attention
            adapters = Adapters(c, self.dtype, name="adapters")
            u = jnp.concatenate([h, embedding], axis=-1)
            args = _of_mixer(name, pass_, state, record)
            f, records[name], states[name] = block(u, adapters, *args)
            n = self.cut.of(WIDTH)
            p = declare(self, shared_params(c.d_model, n), self.dtype)
            read = h + total(linear(own(f, n), p["linear"]), n)
        u = Norm(c.norm, c.norm_eps, self.dtype, name="norm")(read, pass_.live)
        outs = []
        for name in self.block.mixers:
            config, n = c.mixers[name], self.cut.of(name)
            module = mixer_of(config).Module(config, self.dtype, n, name=name)
            out, new, after = module(u, *_of_mixer(name, pass_, state, record))
            outs.append(out)
            if new is not None:
                records[name], states[name] = new, after
        return h + c.residual_multiplier * sum(outs[1:], outs[0]), records, states


def _of_mixer(
    name: str, pass_: Pass[Any], state: LayerState, record: LayerRecord | None
) -> tuple[Pass[Any], Any, Any]:
    """Returns the pass, state and record that one mixer of a layer gets."""
    pending = pass_.pending
    if pending is not None:
        pending = replace(pending, record=pending.record.get(name))
    own_record = None if record is None else record.get(name)
    return replace(pass_, pending=pending), state.get(name), own_record


@struct.dataclass
class Unbound:
    """A module apart from its model, so that modules of a kind are equal, and its
    parameters."""

    module: Any = struct.field(pytree_node=False)
    variables: Any


def _run(
    layer: ResidualLayer,
    block: SharedBlock | None,
    embedding: jax.Array,
    *args: *LayerInput,
) -> LayerOutput:
    """layer(*args, shared), of which layers that are alike have one trace."""
    if layer.is_initializing():  # there are no parameters yet
        return layer(*args, None if block is None else (block, embedding))
    shared = None if block is None else (Unbound(*block.unbind()), embedding)
    return _applied(Unbound(*layer.unbind()), shared, *args)


@traced_once
def _applied(
    layer: Unbound, shared: tuple[Unbound, jax.Array] | None, *args: *LayerInput
) -> LayerOutput:
    if shared is None:
        return layer.module.apply(layer.variables, *args, None)
    block, embedding = shared
    bound = block.module.bind(block.variables)
    return layer.module.apply(layer.variables, *args, (bound, embedding))


def through(
    layers: Sequence[ResidualLayer],
    blocks: Sequence[SharedBlock | None],
    h: jax.Array,
    nodes: Nodes,
    state: State,
    records: Records | None,
    rows: jax.Array | None,
    pending: Pending | None,
    live: jax.Array | None = None,
    taps: Taps = (),
) -> tuple[jax.Array, Tapped, Records, State]:
    """Returns the residual stream h [B, Tq, d] after all layers; as `forward_tapped`.

    Args:
      blocks: the block that each layer shares, or None.
    """
    length = state.length if pending is None else state.length + pending.length
    out_records, out_states, streams, embedding = [], [], {}, h
    for i, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
        last = None if pending is None else pending.layer(i)
        record = None if records is None else records[i]
        pass_ = Pass(nodes, rows, last, length, live)
        args = (h, pass_, state.layers[i], record)
        h, record, layer_state = _run(layer, block, embedding, *args)
        out_records.append(record)
        out_states.append(layer_state)
        if i in taps:
            streams[i] = h
    tapped = tuple(streams[i] for i in taps)
    return h, tapped, tuple(out_records), State(tuple(out_states), length)


class MTPLayers(nn.Module):
    """Layers that read a token and the hidden state it was chosen by, and predict what
    follows it: norm(layers(eh_proj [enorm(embedding), hnorm(hidden state)])).

    Multi-token prediction, as DeepSeek-V3 (2024, section 2.2) and Nemotron-H have it.
    """

    config: ModelConfig
    dtype: Any
    cut: Cut = WHOLE

    def setup(self):
        c = self.config
        norm = partial(Norm, c.norm, c.norm_eps, self.dtype)
        self.enorm = norm()
        self.hnorm = norm()
        table = mtp_params(c.d_model, self.cut.of(WIDTH))
        self.eh_proj = declare(self, table, self.dtype)["eh_proj"]
        self.layers = [ResidualLayer(c, block, self.dtype, self.cut) for block in c.mtp]
        self.norm = norm()

    def __call__(
        self,
        embedding: jax.Array,
        previous: jax.Array,
        nodes: Nodes,
        state: State,
        records: Records | None = None,
        rows: jax.Array | None = None,
        pending: Pending | None = None,
    ) -> tuple[jax.Array, Tapped, Records, State]:
        """As `forward_tapped`, of embeddings and hidden states [B, Tq, d] float32."""
        both = [self.enorm(embedding), self.hnorm(previous)]
        n = self.cut.of(WIDTH)
        h = total(linear(own(jnp.concatenate(both, axis=-1), n), self.eh_proj), n)
        blocks = [None] * len(self.layers)
        args = (nodes, state, records, rows, pending)
        h, _, out, state = through(self.layers, blocks, h, *args)
        return self.norm(h), (), out, state


class LanguageModel(nn.Module):
    """Embedding, residual layers, final norm, head; maybe MTP layers beside them."""

    config: ModelConfig
    dtype: Any = jnp.float32
    cut: Cut = WHOLE

    def setup(self):
        c = self.config
        table = model_params(c.vocab_size, c.d_model, c.tie_embeddings)
        p = declare(self, table, self.dtype)
        self.embedding = p["embedding"]
        self.head_weight = p["embedding" if c.tie_embeddings else "lm_head"]
        self.layers = [
            ResidualLayer(c, block, self.dtype, self.cut) for block in c.layers
        ]
        count = 0 if c.shared is None else c.shared.blocks
        self.shared = [SharedBlock(c, self.dtype, self.cut) for _ in range(count)]
        self.norm = Norm(c.norm, c.norm_eps, self.dtype)
        if c.mtp:
            self.mtp = MTPLayers(c, self.dtype, self.cut)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Looks up the embeddings [B, T, d] float32 of tokens [B, T]."""
        # XLA:CPU looks nothing up in 16 bits. It makes the rows float32; where it may,
        # the whole table, before a loop, and keeps that.
        table, tokens = jax.lax.optimization_barrier((self.embedding, tokens))
        n = self.cut.of(VOCAB)
        ids, here = own_rows(tokens, table.shape[0], n)
        h = as_weight(table).rows(ids)
        if n > 1:
            h = total(jnp.where(here[..., None], h, 0.0), n)
        return h * self.config.embedding_multiplier

    def __call__(
        self,
        tokens: jax.Array,
        nodes: Nodes,
        state: State,
        records: Records | None = None,
        rows: jax.Array | None = None,
        pending: Pending | None = None,
        live: jax.Array | None = None,
        taps: Taps = (),
    ) -> tuple[jax.Array, Tapped, Records, State]:
        """As `forward_tapped`."""
        in_turn = cycle(self.shared)
        blocks = [
            next(in_turn) if block.shared else None for block in self.config.layers
        ]
        live = nodes.count if rows is None else live
        args = (nodes, state, records, rows, pending, live, taps)
        h, tapped, out, state = through(self.layers, blocks, self.embed(tokens), *args)
        return self.norm(h, live), tapped, out, state

    def predict(
        self, tokens: jax.Array, previous: jax.Array, *args: Any
    ) -> tuple[jax.Array, Tapped, Records, State]:
        """As `forward_tapped`, of the MTP layers alone: `state` is theirs."""
        return self.mtp(self.embed(tokens), previous, *args)

    def head(self, hidden: jax.Array, live: jax.Array | None = None) -> jax.Array:
        """As `logits_of`."""
        with jax.named_scope("head"):
            own = linear(hidden, self.head_weight, live=live)
            logits = gathered(own, self.cut.of(VOCAB))
            return logits / self.config.logits_divisor

    def init_all(self, tokens: jax.Array, nodes: Nodes, state: State) -> jax.Array:
        """Touches every parameter, for `init`."""
        hidden = self(tokens, nodes, state)[0]
        if self.config.mtp:
            of_mtp = replace(self.config, layers=self.config.mtp)
            empty = init_state(of_mtp, tokens.shape[0], 1, self.dtype)
            hidden = self.predict(tokens, hidden, nodes, empty)[0]
        return self.head(hidden)


def param_dtype(params: Params) -> Any:
    """Returns the dtype of caches, records, and parameters that are plain arrays (SSM
    states are float32 always)."""
    return format_of(params).dtype


def forward_hidden(
    model: Model, state: State, tokens: jax.Array, nodes: Nodes, **options: Any
) -> tuple[jax.Array, Records, State]:
    """Returns what `forward_tapped` does, without taps; `options` are its own."""
    hidden, _, records, state = forward_tapped(model, state, tokens, nodes, **options)
    return hidden, records, state


def forward_tapped(
    model: Model,
    state: State,
    tokens: jax.Array,
    nodes: Nodes,
    *,
    records: Records | None = None,
    rows: jax.Array | None = None,
    pending: Pending | None = None,
    previous: jax.Array | None = None,
    live: jax.Array | None = None,
    taps: Taps = (),
) -> tuple[jax.Array, Tapped, Records, State]:
    """Runs the nodes of a tree in one packed pass.

    Args:
      state: committed tokens; not changed, except that `pending` is replayed.
      tokens: [B, Tq] int32, tokens of the queried nodes.
      nodes: topology of all T nodes.
      records, rows: to add nodes level by level: records of the nodes so far and the
        rows [Tq] of the new ones among T (rows >= T are dropped).
      pending: last step's accepted path, replayed first (Algorithm 1).
      previous: only for `mtp.mtp_model`, [B, Tq, d] float32: the hidden states that
        the tokens were chosen by.
      live: [B] int32. Only the first `live` of the new nodes in `rows` are wanted. If
        None, all of them are.
      taps: layers whose residual stream is returned, counted from 0. An MTP model has
        no taps.

    Returns:
      hidden states [B, Tq, d] float32 for `logits_of`; for each tap i the residual
      stream [B, Tq, d] float32 after layer i, before the next layer's norm (after the
      last layer: before the final norm); records of all T nodes; and the state after
      `pending`. Where `pending` has records of more nodes, a layer's may be those with
      the first T written over. Rows of padding are unspecified.

    Raises:
      ValueError: `rows` and `pending` are both given.
    """
    if rows is not None and pending is not None:
        raise ValueError("rows: of a state without a pending path; commit it first")
    module, variables = model.module, {"params": model.params}
    args = (nodes, state, records, rows, pending)
    if previous is None:
        return module.apply(variables, tokens, *args, live, taps)
    return module.apply(variables, tokens, previous, *args, method="predict")


def logits_of(
    model: Model, hidden: jax.Array, live: jax.Array | None = None
) -> jax.Array:
    """Logits [..., V] float32 of hidden states [..., d].

    Args:
      live: [B] int32, of hidden states [B, T, d] how many are a node's: `Nodes.count`.
    """
    return model.module.apply({"params": model.params}, hidden, live, method="head")


def forward_tree(
    model: Model, state: State, tokens: jax.Array, nodes: Nodes
) -> tuple[jax.Array, Records]:
    """Logits [B, T, V] and records of a tree's nodes; `commit` takes the records."""
    hidden, records, _ = forward_hidden(model, state, tokens, nodes)
    return logits_of(model, hidden), records
