"""The hybrid stack and its pure functions: a pass over a tree, and its logits."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from operator import attrgetter
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from stree_jax.cpu_kernels import table_rows
from stree_jax.models.config import LayerKind, ModelConfig, given
from stree_jax.models.mixers.attention import Attention
from stree_jax.models.mixers.mamba2 import Mamba2Mixer
from stree_jax.models.mixers.mlp import MLP
from stree_jax.models.mixers.moe import MoE
from stree_jax.models.nodes import Nodes, Pass
from stree_jax.models.norm import Norm
from stree_jax.models.params import (
    Params,
    array_dtype,
    declare,
    model_params,
    mtp_params,
    parameter_count,
    shared_params,
)
from stree_jax.models.sharding.shards import WHOLE, Cut, gathered, own, own_rows, total
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
from stree_jax.models.tracing import traced_once
from stree_jax.models.weights.int8 import Quantized
from stree_jax.models.weights.linear import linear


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

    def __repr__(self) -> str:
        count = parameter_count(self.params)
        return f"{type(self).__name__}({count:,} parameters, {self.config})"


def derived(model: Model, params: Params, config: ModelConfig) -> Model:
    """A plain model with other parameters, on the same devices."""
    return Model(params, config, mesh=model.mesh, cut=model.cut)


def base_model(model: Model) -> Model:
    """A model without what an API's has beside."""
    return derived(model, model.params, model.config)


Taps = tuple[int, ...]  # layers whose residual stream is wanted, see `forward_tapped`
Tapped = tuple[jax.Array, ...]  # the residual streams [B, T, d] float32 of the taps

LayerInput = tuple[jax.Array, Pass[Any], Any, Any]  # h, pass_, state, record
LayerOutput = tuple[jax.Array, LayerRecord, LayerState]


class ResidualLayer(nn.Module):
    """One pre-norm residual layer, h + f(norm(h)), f chosen by `kind`."""

    config: ModelConfig
    kind: LayerKind
    dtype: Any
    cut: Cut = WHOLE

    @nn.compact
    def __call__(
        self,
        h: jax.Array,
        pass_: Pass[Any],
        state: Any,  # LayerState and LayerRecord of this kind
        record: Any,
        shared: tuple[SharedBlock, jax.Array] | None,
    ) -> LayerOutput:
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
            n = self.cut.width
            p = declare(self, shared_params(c.d_model, n), self.dtype)
            read = h + total(linear(own(f, n), p["linear"]), n)
        live = pass_.live
        u = Norm(c.norm, c.norm_eps, self.dtype, name="norm")(read, live)
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
                out = MLP(given(c.mlp), self.dtype, self.cut.mlp, name="mlp")(
                    u, live=live
                )
            case "moe":
                out = MoE(given(c.moe), self.dtype, self.cut.moe, name="moe")(u)
        if both:
            record = ParallelRecord(m_record, a_record)
            state = ParallelState(m_state, a_state)
        return h + c.residual_multiplier * out, record, state

    def _mamba(self, *args: Any) -> tuple[jax.Array, Any, Any]:
        options, parts = given(self.config.mamba), (self.cut.mamba, self.cut.norm)
        return Mamba2Mixer(options, self.dtype, *parts, name="mamba")(*args)

    def _attention(self, *args: Any) -> tuple[jax.Array, Any, Any]:
        options, parts = given(self.config.attention), self.cut.attention
        return Attention(options, self.dtype, parts, name="attention")(*args)


def _part(
    mixer: Literal["mamba", "attention"], pass_: Pass[Any], state: Any, record: Any
) -> tuple[Pass[Any], Any, Any]:
    """Pass, state and record, of a layer with both mixers, that one is given."""
    of, pending = attrgetter(mixer), pass_.pending
    if pending is not None:
        pending = replace(pending, record=of(pending.record))
    own_record = None if record is None else of(record)
    return replace(pass_, pending=pending), of(state), own_record


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
        table = mtp_params(c.d_model, self.cut.width)
        self.eh_proj = declare(self, table, self.dtype)["eh_proj"]
        self.layers = [ResidualLayer(c, kind, self.dtype, self.cut) for kind in c.mtp]
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
        n = self.cut.width
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
        p = declare(self, model_params(c), self.dtype)
        self.embedding = p["embedding"]
        self.head_weight = p["embedding" if c.tie_embeddings else "lm_head"]
        kinds, shared = c.layers, c.shared
        self.layers = [ResidualLayer(c, kind, self.dtype, self.cut) for kind in kinds]
        blocks = 0 if shared is None else shared.blocks
        self.shared = [SharedBlock(c, self.dtype, self.cut) for _ in range(blocks)]
        self.norm = Norm(c.norm, c.norm_eps, self.dtype)
        if c.mtp:
            self.mtp = MTPLayers(c, self.dtype, self.cut)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """What the layers read of tokens [B, T]: [B, T, d] float32."""
        # XLA:CPU looks nothing up in 16 bits. It makes the rows float32; where it may,
        # the whole table, before a loop, and keeps that.
        table, tokens = jax.lax.optimization_barrier((self.embedding, tokens))
        n = self.cut.vocab
        ids, here = own_rows(tokens, table.shape[0], n)
        if isinstance(table, Quantized):
            h = table.rows(ids)
        else:
            h = table_rows(table, ids, definition=_looked_up)
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
            next(in_turn) if kind == "shared" else None for kind in self.config.layers
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
            logits = gathered(own, self.cut.vocab)
            return logits / self.config.logits_divisor

    def init_all(self, tokens: jax.Array, nodes: Nodes, state: State) -> jax.Array:
        """Touches every parameter, for `init`."""
        hidden = self(tokens, nodes, state)[0]
        if self.config.mtp:
            of_mtp = replace(self.config, layers=self.config.mtp)
            empty = init_state(of_mtp, tokens.shape[0], 1, self.dtype)
            hidden = self.predict(tokens, hidden, nodes, empty)[0]
        return self.head(hidden)


def _looked_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table[ids].astype(jnp.float32)


def param_dtype(params: Params) -> Any:
    """The dtype of caches, records, and all parameters that are arrays (SSM state is
    float32 always): that of the weights, or bfloat16 beside int8."""
    return array_dtype(weights_dtype(params))


def weights_dtype(params: Params) -> Any:
    """The dtype that a model was loaded in: float32, bfloat16, or int8."""
    return params["embedding"].dtype


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
