"""Runs a model over whole texts layer by layer, for gradients.

`prefill` runs all layers on a chunk of tokens before it reads the next chunk. Its
gradient keeps the states of all layers after every chunk, and the program contains
every layer. Here a layer reads all chunks before the next layer begins: the gradient
keeps the residual streams between layers, and the states of one layer at a time. Layers
that repeat are one loop, if their weights are small compared with the streams. Layers
that read other layers run on a chunk together with these.

Letters: B rows, T tokens, d width, L mixtures of experts, k experts of a token, P width
of per-layer inputs.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.cpu_kernels import symbolic_size
from stree_jax.models.configs import mixer_of
from stree_jax.models.configs.mixer import INPUTS
from stree_jax.models.configs.params import Params
from stree_jax.models.layers.nodes import chain_nodes
from stree_jax.models.stack.chunks import PREFILL_CHUNK
from stree_jax.models.stack.config import Block, ModelConfig
from stree_jax.models.stack.memory import size_of
from stree_jax.models.stack.model import Model, param_dtype
from stree_jax.models.stack.network import ResidualLayer, run_layers
from stree_jax.models.stack.param_table import per_layer_sizes
from stree_jax.models.stack.per_layer import PerLayerInputs
from stree_jax.models.stack.routing import expert_taps, experts_of
from stree_jax.models.stack.shared import SharedBlock
from stree_jax.models.stack.state import State, commit, init_state

EMBEDS = "embeds"  # mark of a first layer that embeds its tokens
FLOAT_BYTES = 4  # of a number of the residual stream
# A program with a loop over layers holds a copy of their weights and of their gradient.
# Without the loop, XLA keeps the states of several layers at once. The loop is used up
# to this many bytes of weights for a byte of residual streams, one stream for a layer
# (`bench gradient`: Mamba2-130m and -370m and Qwen3.5-0.8B, 256 to 8,192 tokens).
MOST_WEIGHTS = 2


class Run(NamedTuple):
    """Layers that repeat: a group of `period` layers from `first` on, `times` times."""

    first: int
    period: int
    times: int


def runs_of(kinds: Sequence[Hashable]) -> list[Run]:
    """Divides a sequence of layers into runs, so that few groups remain.

    Args:
      kinds: the kind of each layer.

    Example:
      >>> runs_of("abababc")
      [Run(first=0, period=2, times=3), Run(first=6, period=1, times=1)]
    """
    runs, first = [], 0
    while first < len(kinds):
        found = Run(first, 1, 1)
        for period in range(1, (len(kinds) - first) // 2 + 1):
            group, times = kinds[first : first + period], 1
            while kinds[(here := first + times * period) : here + period] == group:
                times += 1
            if period * (times - 1) > found.period * (found.times - 1):
                found = Run(first, period, times)
        runs.append(found)
        first += found.period * found.times
    return runs


def units_of(config: ModelConfig) -> list[int]:
    """Divides the layers into units. A unit runs on a whole text before the next unit.

    Most units are one layer. If a layer reads the cache of an earlier layer, or a value
    that it sends, all layers from the earlier one to this one are one unit.

    Returns:
      The first layer of each unit, then the number of layers.
    """
    nearest, last = [], dict[str, int]()
    for i, block in enumerate(config.layers):
        nearest.append(last.get(config.source(block), i))
        for name in config.mixer_names(block):
            last[mixer_of(config.mixers[name]).sends or name] = i
    count = len(nearest)
    return [*(i for i in range(count) if min(nearest[i:]) == i), count]


def chunks(z: jax.Array) -> jax.Array:
    """Divides an array [B, T, ...] into chunks [T / chunk, B, chunk, ...]."""
    return z.reshape(z.shape[0], -1, PREFILL_CHUNK, *z.shape[2:]).swapaxes(0, 1)


def whole(z: jax.Array) -> jax.Array:
    """Joins the chunks of an array; the inverse of `chunks`."""
    z = z.swapaxes(0, 1)
    return z.reshape(z.shape[0], -1, *z.shape[3:])


def float_state(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> State:
    """Returns `init_state` with caches of floats, because integers have no gradient."""
    empty = init_state(config, batch, capacity, dtype)
    return jax.tree.map(lambda z: z.view(dtype) if z.dtype == jnp.uint16 else z, empty)


class Parts(NamedTuple):
    """The inputs of layers other than the residual stream.

    Attributes:
      params: the parameters of each layer.
      routing: [B, T, L, k] int32. The experts that the tokens have to use in the
        layers' L mixtures, see `models.stack.routing`; or None.
      inputs: [B, T, n, P] float32. The per-layer inputs of the n layers that read one,
        or None.
    """

    params: Sequence[Params]
    routing: jax.Array | None
    inputs: jax.Array | None


def residual_stream(
    model: Model, tokens: jax.Array, routing: jax.Array | None = None
) -> jax.Array:
    """Returns the residual stream [B, T, d] float32 after the last layer.

    In reverse mode, each group of layers runs again, first as a whole, then chunk by
    chunk with its intermediates.

    Args:
      model: the model.
      tokens: [B, T] int32, T a multiple of the chunk.
      routing: see `Parts`.
    """
    c, params = model.config, model.params
    embedding = h = _embed(model, tokens)
    layers = [params[f"layers_{i}"] for i in range(len(c.layers))]
    parts = Parts(layers, routing, _per_layer_inputs(model, tokens, embedding))
    kinds = [_kind(*one) for one in zip(c.layers, c.shared_turns, layers, strict=True)]
    if c.embedding_multiplier != 1:
        # XLA may multiply the embedding and add the first layer's output with one
        # rounding. To get the bits of a pass by chunks, this layer embeds the tokens.
        h, kinds[0] = tokens, (EMBEDS, kinds[0])
    firsts = units_of(c)
    units = [tuple(kinds[i:j]) for i, j in pairwise(firsts)]
    for first, period, times in runs_of(units):
        bounds = firsts[first : first + period * times + 1 : period]
        through: Any = partial(_through, model, slice(*bounds[:2]), embedding)
        if bounds[1] - bounds[0] == period:  # a unit of more layers has most states
            through = jax.checkpoint(through)
        own = _of_groups(c, bounds, parts)
        streams = (bounds[-1] - bounds[0]) * tokens.size * c.d_model * FLOAT_BYTES
        most = MOST_WEIGHTS * streams
        few = not symbolic_size(streams) and size_of(own.params) <= most
        if few and times > 1:
            stacked = jax.tree.map(lambda *each: jnp.stack(each), *own.params)
            h, _ = lax.scan(through, h, own._replace(params=stacked))
        else:
            for i, group in enumerate(own.params):
                rest = jax.tree.map(lambda z, i=i: z[i], own[1:])
                h, _ = through(h, Parts(group, *rest))
    return h


def _embed(model: Model, tokens: jax.Array) -> jax.Array:
    variables = {"params": model.params}
    h: jax.Array = model.module.apply(variables, tokens, method="embed")
    return h


def _per_layer_inputs(
    model: Model, tokens: jax.Array, embedding: jax.Array
) -> jax.Array | None:
    """Returns the inputs [B, T, n, P] of the layers that read one, or None."""
    c, dtype = model.config, param_dtype(model.params)
    if not per_layer_sizes(c)[0]:
        return None
    module = PerLayerInputs(c, dtype, model.cut)
    inputs: Any = module.bind({"params": model.params["per_layer"]})(tokens, embedding)
    return jnp.stack(inputs, axis=2)


def _of_groups(c: ModelConfig, bounds: Sequence[int], parts: Parts) -> Parts:
    """Returns the parts of each of n equal groups of layers.

    Args:
      c: the model's config.
      bounds: the first layer of each group, and the end of the last one.
      parts: the parts of all layers.

    Returns:
      Parts whose parameters are a list of n, and whose arrays have n in front.
    """

    def own(layers: Sequence[int], values: jax.Array | None) -> jax.Array | None:
        """Divides values [B, T, m, k] of these m layers."""
        begin, end = (bisect_left(layers, bounds[i]) for i in (0, -1))
        if values is None or begin == end:
            return None
        (batch, T, _, k), n = values.shape, len(bounds) - 1
        values = values[:, :, begin:end].reshape(batch, T, n, (end - begin) // n, k)
        return jnp.moveaxis(values, 2, 0)

    mixtures = [tap.layer for tap in expert_taps(c)]
    readers = [i for i, block in enumerate(c.layers) if c.source(block) == INPUTS]
    params = [tuple(parts.params[i:j]) for i, j in pairwise(bounds)]
    return Parts(params, own(mixtures, parts.routing), own(readers, parts.inputs))


def _kind(block: Block, turn: int | None, params: Params) -> Hashable:
    """Returns what layers of one loop have in common."""
    leaves, tree = jax.tree.flatten(params)
    return block, turn, tree, tuple((x.shape, x.dtype) for x in leaves)


def _through(
    model: Model, layers: slice, embedding: jax.Array, h: jax.Array, parts: Parts
) -> tuple[jax.Array, None]:
    """Returns the residual stream [B, T, d] after a group of layers, and None, as the
    body of a `lax.scan`.

    Args:
      model: the model.
      layers: the layers of the group, or those of an equal one.
      embedding: [B, T, d] float32, which shared blocks read.
      h: [B, T, d] float32. The residual stream before the group; or its tokens [B, T]
        int32, if the group is the first one and embeds them.
      parts: what else the group reads.
    """
    c, (batch, T), dtype = model.config, h.shape[:2], param_dtype(model.params)
    group = replace(c, layers=c.layers[layers])
    bound = [
        ResidualLayer(c, block, dtype, model.cut).bind({"params": own})
        for block, own in zip(group.layers, parts.params, strict=True)
    ]
    blocks = [_shared_block(model, turn) for turn in c.shared_turns[layers]]
    full = jnp.full((batch,), PREFILL_CHUNK, jnp.int32)
    nodes = chain_nodes(batch, PREFILL_CHUNK, group.conv_taps, length=full)

    @jax.checkpoint
    def one_chunk(state: State, parts: Any) -> tuple[State, jax.Array]:
        h, embedding, routing, inputs = parts
        if jnp.issubdtype(h.dtype, jnp.integer):
            h = _embed(model, h)
        h, _, records, state = run_layers(
            bound,
            blocks,
            h,
            nodes,
            state,
            records=None,
            rows=None,
            pending=None,
            valid_count=full,
            inputs=() if inputs is None else jnp.moveaxis(inputs, 2, 0),
            experts=None if routing is None else experts_of(group, routing),
            embedding=embedding,
        )
        return commit(state, records, nodes.depth, full), h

    empty = float_state(group, batch, T, dtype)
    read = h, embedding if any(blocks) else None, parts.routing, parts.inputs
    _, found = lax.scan(one_chunk, empty, jax.tree.map(chunks, read))
    return whole(found), None


def _shared_block(model: Model, turn: int | None) -> SharedBlock | None:
    if turn is None:
        return None
    block = SharedBlock(model.config, param_dtype(model.params), model.cut)
    return block.bind({"params": model.params[f"shared_{turn}"]})
