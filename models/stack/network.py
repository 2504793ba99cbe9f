"""The hybrid stack of residual layers: its Flax modules.

`models.layers.mixer` explains the terms state, record and pending path.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from stree_jax.models.base.collectives import gathered, own, total
from stree_jax.models.base.shards import VOCAB, WHOLE, WIDTH, Cut
from stree_jax.models.base.tracing import traced_once
from stree_jax.models.base.trimmed import scattered
from stree_jax.models.configs import mixer_of
from stree_jax.models.configs.mixer import INPUTS
from stree_jax.models.configs.params import (
    ADDED,
    NORM_AFTER,
    SCALAR,
    STREAM,
    model_params,
    mtp_params,
    scalar_params,
    shared_params,
)
from stree_jax.models.layers.embedding import embedded
from stree_jax.models.layers.mixer import Sent
from stree_jax.models.layers.nodes import Nodes, Pass
from stree_jax.models.layers.norm import Affine, Norm
from stree_jax.models.layers.params import declare
from stree_jax.models.mixers import computation_of
from stree_jax.models.stack.config import Block, ModelConfig, ResidualScales, required
from stree_jax.models.stack.param_table import per_layer_sizes
from stree_jax.models.stack.per_layer import PerLayerInputs
from stree_jax.models.stack.shared import Adapters, SharedBlock
from stree_jax.models.stack.state import (
    LayerRecord,
    LayerState,
    Pending,
    Records,
    State,
    init_state,
)
from stree_jax.models.weights.linear import as_row, linear, scaled


class ExpertsOf(NamedTuple):
    """A tap of the experts [B, T, k] int32 that the nodes use in a layer.

    Attributes:
      layer: index of the layer, from 0.
      mixer: name of the mixture of experts.
    """

    layer: int
    mixer: str


# Some drafters read the target's residual stream after certain layers.
# Indices of these layers, from 0; -1 for the embedding
Taps = tuple[int | ExpertsOf, ...]
# [B, T, d] float32 for each layer in a `Taps`, and what `ExpertsOf` says
Tapped = tuple[jax.Array, ...]
# The experts [B, T, k] that the nodes have to use, see `Pass.experts`
Experts = Mapping[ExpertsOf, jax.Array]

LayerInput = tuple[jax.Array, Pass[Any], LayerState, LayerRecord | None]
LayerOutput = tuple[jax.Array, LayerRecord, LayerState]


class ResidualLayer(nn.Module):
    """One residual layer, h + sum of mixers(norm(h)). `Block` names the mixers, and
    says where the norms are."""

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
        """Runs the layer on the residual stream.

        Args:
          h: [B, Tq, d] float32. The residual stream before the layer.
          pass_: the forward pass.
          state, record: the states and records of the layer's token mixers, by name, as
            in `Pass`.
          shared: the layer's shared transformer block and the tokens' embedding
            [B, Tq, d]; None if the layer uses no such block.

        Returns:
          The residual stream after the layer, and the mixers' new records and states by
          name. A channel mixer has no state, and in place of a record what it sends.
        """
        c, mixers_in = self.config, h
        states: LayerState = {}
        records: LayerRecord = {}
        if shared is not None:
            block, embedding = shared
            name = required(c.shared).attention
            adapters = Adapters(c, self.dtype, name="adapters")
            u = jnp.concatenate([h, embedding], axis=-1)
            args = mixer_args(name, pass_, state, record)
            f, records[name], states[name] = block(u, adapters, *args)
            group = self.cut.group(WIDTH)
            p = declare(self, shared_params(c.d_model, group.size), self.dtype)
            mixers_in = h + total(linear(own(f, group), p["linear"]), group)
        norm = Norm(c.norm, c.norm_eps, self.dtype, name="norm")
        after = self.block.norms == "after"
        u = mixers_in if after else norm(mixers_in, pass_.valid_count)
        stream = u if self.block.norms == "stream" else h
        outs = []
        for name in self.block.mixers:
            config, group = c.mixers[name], self.cut.group(name)
            module = computation_of(config).Module(config, self.dtype, group, name=name)
            out, new, then = module(u, *mixer_args(name, pass_, state, record))
            outs.append(out)
            if new is not None:
                records[name] = new
            if then is not None:
                states[name] = then
        added = sum(outs[1:], outs[0])
        if after:
            added = norm(added, pass_.valid_count)
        elif self.block.norms == "both":
            last = Norm(c.norm, c.norm_eps, self.dtype, name=NORM_AFTER)
            added = last(added, pass_.valid_count)
        if self.block.affine:
            stream = Affine(self.dtype, name=STREAM)(stream)
            added = Affine(self.dtype, name=ADDED)(added)
        scales = c.residual_scales.get(self.block.mixers[0], ResidualScales())
        added = scaled(c.residual_multiplier * added, scales.added)
        h = scaled(stream, scales.stream) + added
        if self.block.scaled:
            factor = declare(self, scalar_params(), self.dtype)[SCALAR]
            h = h * as_row(factor, h.ndim)
        return h, records, states


def mixer_args(
    name: str, pass_: Pass[Any], state: LayerState, record: LayerRecord | None
) -> tuple[Pass[Any], Any, Any]:
    """Returns the pass, state and record that a layer hands to one of its mixers."""
    pending = pass_.pending
    if pending is not None:
        pending = replace(pending, record=pending.record.get(name))
    own_record = None if record is None else record.get(name)
    experts = None if pass_.experts is None else pass_.experts.get(name)
    pass_ = replace(pass_, pending=pending, experts=experts)
    return pass_, state.get(name), own_record


@struct.dataclass
class Unbound:
    """A module detached from its parent, with its parameters.

    Detached modules of equal layers compare equal, so `traced_once` shares their trace.
    """

    module: Any = struct.field(pytree_node=False)
    variables: Any


def _run(
    layer: ResidualLayer,
    block: SharedBlock | None,
    embedding: jax.Array,
    *args: *LayerInput,
) -> LayerOutput:
    """Calls a layer; layers of the same kind share one trace."""
    if layer.is_initializing():  # a layer without parameters cannot be detached
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


def run_layers(
    layers: Sequence[ResidualLayer],
    blocks: Sequence[SharedBlock | None],
    h: jax.Array,
    nodes: Nodes,
    state: State,
    records: Records | None,
    rows: jax.Array | None,
    pending: Pending | None,
    valid_count: jax.Array | None = None,
    taps: Taps = (),
    inputs: Iterable[jax.Array] = (),
    experts: Experts | None = None,
    embedding: jax.Array | None = None,
) -> tuple[jax.Array, Tapped, Records, State]:
    """Runs all layers on the residual stream.

    Args:
      layers: the layers.
      blocks: each layer's shared transformer block, or None.
      h: [B, Tq, d] float32. The embeddings, or the residual stream before the layers.
      nodes, state, records, rows, pending, valid_count, taps: see `forward_tapped`.
      inputs: the per-layer inputs [B, Tq, P] float32 of the layers that read one.
      experts: see `forward_tapped`.
      embedding: [B, Tq, d] float32. The embeddings, which shared blocks read, if they
        are not `h`.

    Returns:
      The residual stream [B, Tq, d] after all layers; and tapped streams, records and
      state as from `forward_tapped`.
    """
    length = state.length if pending is None else state.length + pending.length
    embedding = h if embedding is None else embedding
    out_records, out_states = [], []
    streams: dict[int | ExpertsOf, jax.Array] = {-1: h}
    each, seen = iter(inputs), dict[str, Any]()
    for i, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
        last = None if pending is None else pending.layer(i)
        record = None if records is None else records[i]
        source = layer.config.source(layer.block)
        read = next(each) if source == INPUTS else seen.get(source)
        pass_ = Pass(nodes, rows, last, length, valid_count, read)
        if experts is not None:
            names = layer.block.mixers
            given = {name: experts.get(ExpertsOf(i, name)) for name in names}
            pass_ = replace(pass_, experts=given)
        args = (h, pass_, state.layers[i], record)
        h, found, layer_state = _run(layer, block, embedding, *args)
        out_records.append({name: found[name] for name in layer_state})
        out_states.append(layer_state)
        for name, value in found.items():
            if isinstance(value, Sent):
                if value.experts is not None:
                    streams[ExpertsOf(i, name)] = value.experts
                value = value.value
            sent = mixer_of(layer.config.mixers[name]).sends
            seen[sent or name] = layer_state.get(name), value
        if i in taps:
            streams[i] = h
    tapped = tuple(streams[i] for i in taps)
    return h, tapped, tuple(out_records), State(tuple(out_states), length)


class MTPLayers(nn.Module):
    """Multi-token prediction (MTP) layers, as in DeepSeek-V3 (2024, section 2.2) and
    Nemotron-H.

    They read a token and the hidden state that predicted it, and predict the token
    after it: norm(layers(eh_proj [enorm(embedding), hnorm(hidden state)])).
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
        """Runs the MTP layers.

        Args:
          embedding: [B, Tq, d] float32, embeddings of the tokens.
          previous: [B, Tq, d] float32, hidden states that predicted the tokens.
          nodes, state, records, rows, pending: see `forward_tapped`.

        Returns:
          The results of `forward_tapped`, with no tapped streams.
        """
        both = [self.enorm(embedding), self.hnorm(previous)]
        group = self.cut.group(WIDTH)
        u = own(jnp.concatenate(both, axis=-1), group)
        h = total(linear(u, self.eh_proj), group)
        blocks = [None] * len(self.layers)
        args = (nodes, state, records, rows, pending)
        h, _, out, state = run_layers(self.layers, blocks, h, *args)
        return self.norm(h), (), out, state


class LanguageModel(nn.Module):
    """Embedding, residual layers, final norm and head, with MTP layers if
    configured."""

    config: ModelConfig
    dtype: Any = jnp.float32
    cut: Cut = WHOLE

    def setup(self):
        c = self.config
        table = model_params(c.vocab_size, c.d_model, c.tie_embeddings, c.head_rows)
        self.declare_ends(declare(self, table, self.dtype))
        self.layers = [
            ResidualLayer(c, block, self.dtype, self.cut) for block in c.layers
        ]
        count = 0 if c.shared is None else c.shared.blocks
        self.shared = [SharedBlock(c, self.dtype, self.cut) for _ in range(count)]
        self.norm = Norm(c.norm, c.norm_eps, self.dtype)
        self.embedded = Affine(self.dtype)
        if per_layer_sizes(c)[0]:
            self.per_layer = PerLayerInputs(c, self.dtype, self.cut)
        if c.mtp:
            self.mtp = MTPLayers(c, self.dtype, self.cut)

    def declare_ends(self, p: dict[str, Any]) -> None:
        """Sets the embedding and the head from their parameters, in `setup`."""
        self.embedding = p["embedding"]
        self.head_weight = p["embedding" if self.config.tie_embeddings else "lm_head"]
        self.head_ids = p.get("head_ids")

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Looks up the embeddings [B, T, d] float32 of tokens [B, T] int32."""
        h = embedded(self.embedding, tokens, self.cut.group(VOCAB))
        h = h * self.config.embedding_multiplier
        return self.embedded(h) if self.config.affine else h

    def __call__(
        self,
        tokens: jax.Array,
        nodes: Nodes,
        state: State,
        records: Records | None = None,
        rows: jax.Array | None = None,
        pending: Pending | None = None,
        valid_count: jax.Array | None = None,
        taps: Taps = (),
        experts: Experts | None = None,
    ) -> tuple[jax.Array, Tapped, Records, State]:
        """Runs the model; arguments and results as in `forward_tapped`."""
        blocks = [
            None if turn is None else self.shared[turn]
            for turn in self.config.shared_turns
        ]
        valid_count = nodes.valid_count if rows is None else valid_count
        args = (nodes, state, records, rows, pending, valid_count, taps)
        h = self.embed(tokens)
        inputs = self.per_layer(tokens, h) if per_layer_sizes(self.config)[0] else ()
        more = inputs, experts
        h, tapped, out, state = run_layers(self.layers, blocks, h, *args, *more)
        return self.normed(h, valid_count), tapped, out, state

    def normed(self, h: jax.Array, valid_count: jax.Array | None) -> jax.Array:
        """Returns the hidden states [B, T, d] of the last layer's residual stream."""
        out: jax.Array = self.norm(h, valid_count)
        return out

    def predict(
        self, tokens: jax.Array, previous: jax.Array, *args: Any
    ) -> tuple[jax.Array, Tapped, Records, State]:
        """Runs only the MTP layers, on their own state; see `forward_tapped`."""
        return self.mtp(self.embed(tokens), previous, *args)

    def head(
        self, hidden: jax.Array, valid_count: jax.Array | None = None
    ) -> jax.Array:
        """Computes the logits of hidden states; see `logits_of`."""
        with jax.named_scope("head"):
            group, c = self.cut.group(VOCAB), self.config
            own = linear(hidden, self.head_weight, valid_count=valid_count)
            if self.head_ids is not None:
                own = capped(own / c.logits_divisor, c.logits_cap)
                return scattered(own, self.head_ids, group.size * c.vocab_size)
            return capped(gathered(own, group) / c.logits_divisor, c.logits_cap)

    def init_all(self, tokens: jax.Array, nodes: Nodes, state: State) -> jax.Array:
        """Runs every module once, so that `init` creates all parameters."""
        hidden = self(tokens, nodes, state)[0]
        if self.config.mtp:
            mtp_config = replace(self.config, layers=self.config.mtp)
            empty = init_state(mtp_config, tokens.shape[0], 1, self.dtype)
            hidden = self.predict(tokens, hidden, nodes, empty)[0]
        return self.head(hidden)


def capped(logits: jax.Array, cap: float) -> jax.Array:
    """Returns cap * tanh(logits / cap), or the logits themselves if the cap is 0."""
    return cap * jnp.tanh(logits / cap) if cap else logits
