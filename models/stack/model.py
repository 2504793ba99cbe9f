"""The hybrid stack of residual layers, and its forward pass as pure functions.

`models.layers.mixer` explains the terms state, record and pending path.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import serialization, struct

from stree_jax.common.checks import shown
from stree_jax.models.base.content import Content
from stree_jax.models.base.shards import (
    VOCAB,
    WHOLE,
    WIDTH,
    Cut,
    gathered,
    own,
    total,
)
from stree_jax.models.base.tracing import traced_once
from stree_jax.models.base.trimmed import scattered
from stree_jax.models.layers.embedding import embedded
from stree_jax.models.layers.mixer import INPUTS
from stree_jax.models.layers.nodes import Nodes, Pass
from stree_jax.models.layers.norm import Affine, Norm
from stree_jax.models.layers.params import (
    ADDED,
    NORM_AFTER,
    SCALAR,
    STREAM,
    Params,
    declare,
    model_params,
    mtp_params,
    parameter_count,
    scalar_params,
    shared_params,
)
from stree_jax.models.mixers import mixer_of
from stree_jax.models.stack.config import Block, ModelConfig, ResidualScales, required
from stree_jax.models.stack.per_layer import PerLayerInputs, per_layer_sizes
from stree_jax.models.stack.shared import Adapters, SharedBlock
from stree_jax.models.stack.state import (
    LayerRecord,
    LayerState,
    Pending,
    Records,
    State,
    init_state,
)
from stree_jax.models.weights.formats import format_of, storage_named
from stree_jax.models.weights.linear import as_row, linear, scaled
from stree_jax.models.weights.weight import Format

if TYPE_CHECKING:
    from tokenizers import Tokenizer


Static = tuple[ModelConfig, Content, jax.sharding.Mesh | None, Cut]


def model_pytree(kind: type) -> type:
    """Class decorator that registers `Model`, or a subclass of it, as a pytree and with
    Flax's serialization, which writes its parameters."""

    def parts(model: Any) -> tuple[list[tuple[Any, Params]], Static]:
        static = model.config, model._content, model.mesh, model.cut
        return [(jax.tree_util.GetAttrKey("params"), model.params)], static

    def whole(static: Static, children: Iterable[Params]) -> Any:
        config, content, mesh, cut = static
        model = kind(*children, config, content.value, mesh=mesh, cut=cut)
        if not content.accepts_all:  # what a written program returns has no tokenizer
            model.__dict__["_content"] = content  # so that its text is read only once
        return model

    def state(model: Any) -> dict[str, Any]:
        return {"params": serialization.to_state_dict(model.params)}

    def restored(model: Any, state: dict[str, Any]) -> Any:
        params = serialization.from_state_dict(model.params, state["params"])
        return replace(model, params=params)

    jax.tree_util.register_pytree_with_keys(kind, parts, whole)
    serialization.register_serialization_state(kind, state, restored)
    return kind


@model_pytree
@dataclass(frozen=True, eq=False)
class Model:
    """A model ready to run: a pytree whose only leaves are the arrays of `params`.

    Functions of `jax.jit`, `jax.grad` and `jax.export` take and return it. Its other
    fields are static. Tokenizers are compared by their content, so that two copies of
    one model share compiled programs.

    Attributes:
      params: nested dictionary of arrays.
      config: the architecture.
      tokenizer: the checkpoint's tokenizer, or None. Change a copy of it, not the
        tokenizer itself: its content is read once.
      mesh: mesh that the parameters are sharded over, see `stree_jax.shard`. If None,
        the model is on one device.
      cut: how the devices of the mesh divide the model. Inside `jax.shard_map` the
        model is one device's share, and `config` has the sizes of that share.

    Example:
      >>> model = stree_jax.load("demo")
      >>> zeros = jax.tree.map(jnp.zeros_like, model)  # a Model
      >>> zeros.tokenizer is model.tokenizer
      True
    """

    params: Params
    config: ModelConfig
    tokenizer: "Tokenizer | None" = None
    mesh: jax.sharding.Mesh | None = field(default=None, kw_only=True)
    cut: Cut = field(default=WHOLE, kw_only=True)

    def replace(self, **changes: Any) -> "Model":
        """Returns a copy with other values of some fields."""
        return replace(self, **changes)

    @property
    def module(self) -> Any:
        """The Flax module that the parameters belong to.

        Raises:
          ValueError: the model is on a mesh, where only a device's share has a module.
        """
        if self.mesh is not None:
            raise ValueError(
                "model: on a mesh, only generate, generate_tokens and score can run it"
            )
        return LanguageModel(self.config, param_dtype(self.params), self.cut)

    @property
    def weight_format(self) -> Format:
        """The format that the weights are stored in."""
        return format_of(self.params)

    @cached_property
    def _content(self) -> Content:
        """The tokenizer, as the static part of the pytree holds it."""
        return Content(self.tokenizer)

    def __repr__(self) -> str:
        config = self.config
        try:
            count = f"{parameter_count(self.params):,} parameters"
            stored = f"{count} in {storage_named(self.params)}"
        except (AttributeError, KeyError, TypeError):  # of a mapped tree: no arrays
            stored = "without arrays"
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(config.kinds).items())
        return (
            f"{type(self).__name__}({stored}, "
            f"layers: {kinds}; d_model {config.d_model}, {config.num_tokens} tokens)"
        )


def check_model(name: str, model: Any) -> None:
    """Raises ValueError if an argument is not a model.

    Args:
      name: the argument's name.
      model: its value. For a path, a likely mistake, the message suggests `load`.
    """
    if isinstance(model, str | os.PathLike):
        what = "string" if isinstance(model, str) else "path"
        path = shown(os.fspath(model))
        raise ValueError(f"{name}: got a {what}; pass stree_jax.load({path})")
    if not isinstance(model, Model):
        raise ValueError(
            f"{name}: want a model of stree_jax.load, got {shown(type(model))}"
        )


# Some drafters read the target's residual stream after certain layers.
Taps = tuple[int, ...]  # indices of these layers, from 0; -1 for the embedding
Tapped = tuple[jax.Array, ...]  # [B, T, d] float32 for each layer in a `Taps`

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
            module = mixer_of(config).Module(config, self.dtype, group, name=name)
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
    return replace(pass_, pending=pending), state.get(name), own_record


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
) -> tuple[jax.Array, Tapped, Records, State]:
    """Runs all layers on the residual stream.

    Args:
      layers: the layers.
      blocks: each layer's shared transformer block, or None.
      h: [B, Tq, d] float32, the embeddings.
      nodes, state, records, rows, pending, valid_count, taps: see `forward_tapped`.
      inputs: the per-layer inputs [B, Tq, P] float32 of the layers that read one.

    Returns:
      The residual stream [B, Tq, d] after all layers; and tapped streams, records and
      state as from `forward_tapped`.
    """
    length = state.length if pending is None else state.length + pending.length
    out_records, out_states, streams, embedding = [], [], {-1: h}, h
    each, seen = iter(inputs), dict[str, Any]()
    for i, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
        last = None if pending is None else pending.layer(i)
        record = None if records is None else records[i]
        source = layer.config.source(layer.block)
        read = next(each) if source == INPUTS else seen.get(source)
        pass_ = Pass(nodes, rows, last, length, valid_count, read)
        args = (h, pass_, state.layers[i], record)
        h, found, layer_state = _run(layer, block, embedding, *args)
        out_records.append({name: found[name] for name in layer_state})
        out_states.append(layer_state)
        for name, value in found.items():
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
    ) -> tuple[jax.Array, Tapped, Records, State]:
        """Runs the model; arguments and results as in `forward_tapped`."""
        in_turn = cycle(self.shared)
        blocks = [
            next(in_turn) if block.shared else None for block in self.config.layers
        ]
        valid_count = nodes.valid_count if rows is None else valid_count
        args = (nodes, state, records, rows, pending, valid_count, taps)
        h = self.embed(tokens)
        inputs = self.per_layer(tokens, h) if per_layer_sizes(self.config)[0] else ()
        h, tapped, out, state = run_layers(self.layers, blocks, h, *args, inputs)
        return self.norm(h, valid_count), tapped, out, state

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


def param_dtype(params: Params) -> Any:
    """Returns the dtype of KV caches, records, and parameters that are plain arrays.

    SSM states are always float32.
    """
    return format_of(params).dtype


def forward_hidden(
    model: Model, state: State, tokens: jax.Array, nodes: Nodes, **options: Any
) -> tuple[jax.Array, Records, State]:
    """Runs one forward pass over the nodes of a tree, like `forward_tapped`, but does
    not return the residual streams of single layers.

    Args:
      model, state, tokens, nodes: as in `forward_tapped`.
      **options: its other arguments, except `taps`.

    Returns:
      The hidden states [B, Tq, d] float32 of the queried nodes; the records of all
      nodes, from which `commit` computes the state after an accepted path; and the
      state after the accepted path `pending` (without it, `state` itself).
    """
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
    valid_count: jax.Array | None = None,
    taps: Taps = (),
) -> tuple[jax.Array, Tapped, Records, State]:
    """Runs one forward pass over the nodes of a tree.

    The tree is not committed: the returned state includes `pending`, but not the nodes.

    Args:
      model: the model.
      state: the state of the committed tokens.
      tokens: [B, Tq] int32, tokens of the queried nodes.
      nodes: topology of all T nodes.
      records: to add nodes level by level, the records of the nodes so far. If None,
        all nodes are queried.
      rows: [Tq] int32, indices of the queried nodes among the T; indices >= T are
        dropped. If None, all nodes are queried.
      pending: the pending path, which is replayed into the state first (Algorithm 1 of
        STree). If None, there is no path to replay.
      previous: [B, Tq, d] float32, hidden states that predicted the tokens. Only for
        the model of `mtp.mtp_model`.
      valid_count: [B] int32. With `rows`, the queried nodes [:valid_count] are valid
        and the rest is padding. If None, all are valid. Without `rows`,
        `nodes.valid_count` is used instead.
      taps: indices of layers, from 0, whose residual stream is returned; -1 for the
        embedding. An MTP model returns none.

    Returns:
      Hidden states [B, Tq, d] float32, the input of `logits_of`; for each tap i the
      residual stream [B, Tq, d] float32 after layer i, before any further norm; the
      records of all T nodes; and the state after `pending`. If the records in `pending`
      have more than T rows, a layer's new records may be those with the first T rows
      overwritten. Outputs of padding rows are unspecified.

    Raises:
      ValueError: `rows` and `pending` are both given.
    """
    if rows is not None and pending is not None:
        raise ValueError("rows: not supported with a pending path; commit it first")
    module, variables = model.module, {"params": model.params}
    args = (nodes, state, records, rows, pending)
    if previous is None:
        return module.apply(variables, tokens, *args, valid_count, taps)
    return module.apply(variables, tokens, previous, *args, method="predict")


def logits_of(
    model: Model, hidden: jax.Array, valid_count: jax.Array | None = None
) -> jax.Array:
    """Computes the logits [..., V] float32 of hidden states [..., d].

    Args:
      model: the model.
      hidden: [..., d] float32.
      valid_count: [B] int32, for hidden states [B, T, d]: rows [:valid_count] are
        valid, and logits of the rest are unspecified. If None, all are valid.
    """
    variables = {"params": model.params}
    return model.module.apply(variables, hidden, valid_count, method="head")


def forward_tree(
    model: Model, state: State, tokens: jax.Array, nodes: Nodes
) -> tuple[jax.Array, Records]:
    """Runs one forward pass over a tree whose nodes are all valid.

    Args:
      model: the model.
      state: the state of the committed tokens.
      tokens: [B, T] int32, tokens of the nodes.
      nodes: topology of the nodes.

    Returns:
      The logits [B, T, V] float32, and the nodes' records for `commit`.
    """
    hidden, records, _ = forward_hidden(model, state, tokens, nodes)
    return logits_of(model, hidden), records
