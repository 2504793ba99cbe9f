"""Runs a model over whole texts layer by layer, for gradients.

`prefill` runs all layers on a chunk of tokens before it reads the next chunk. Its
gradient keeps the states of all layers after every chunk, and the program contains
every layer. Here a layer reads all chunks before the next layer begins: the gradient
keeps the residual streams between layers, and the states of one layer at a time. Layers
that repeat are one loop, if their weights are small compared with the streams.

Letters: B rows, T tokens, d width, L mixtures of experts, k experts of a token.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.cpu_kernels import symbolic_size
from stree_jax.models.configs.params import Params
from stree_jax.models.layers.nodes import chain_nodes
from stree_jax.models.stack.chunks import PREFILL_CHUNK
from stree_jax.models.stack.config import Block, ModelConfig
from stree_jax.models.stack.memory import size_of
from stree_jax.models.stack.model import Model, param_dtype
from stree_jax.models.stack.network import ResidualLayer, run_layers
from stree_jax.models.stack.param_table import per_layer_sizes
from stree_jax.models.stack.routing import expert_taps, experts_of
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


def runs_alone(config: ModelConfig) -> bool:
    """True if every layer reads only the residual stream, so that a layer can read a
    whole text before the next one. False for models with shared blocks, per-layer
    inputs, or layers that read other layers' caches."""
    alone = (not block.shared and not config.source(block) for block in config.layers)
    return all(alone) and not per_layer_sizes(config)[0]


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


def residual_stream(
    model: Model, tokens: jax.Array, routing: jax.Array | None = None
) -> jax.Array:
    """Returns the residual stream [B, T, d] float32 after the last layer.

    In reverse mode, each group of layers runs again, first as a whole, then chunk by
    chunk with its intermediates.

    Args:
      model: the model; `runs_alone(model.config)` has to be true.
      tokens: [B, T] int32, T a multiple of the chunk.
      routing: [B, T, L, k] int32. The experts that the tokens have to use, see
        `models.stack.routing`; or None.
    """
    c, params = model.config, model.params
    layers = [params[f"layers_{i}"] for i in range(len(c.layers))]
    kinds = [_kind(*both) for both in zip(c.layers, layers, strict=True)]
    if c.embedding_multiplier == 1:
        h = _embed(model, tokens)
    else:
        # XLA may multiply the embedding and add the first layer's output with one
        # rounding. To get the bits of a pass by chunks, this layer embeds the tokens.
        h, kinds[0] = tokens, (EMBEDS, kinds[0])
    for run in runs_of(kinds):
        first, period, times = run
        places = range(first, first + period * times, period)
        groups = [tuple(layers[i : i + period]) for i in places]
        group = replace(c, layers=c.layers[first : first + period])
        through = jax.checkpoint(partial(_through, model, group))
        given = None if routing is None else _routing_of(c, run, routing)
        streams = times * period * tokens.size * c.d_model * FLOAT_BYTES
        few = not symbolic_size(streams) and size_of(groups) <= MOST_WEIGHTS * streams
        if few and times > 1:
            stacked = jax.tree.map(lambda *each: jnp.stack(each), *groups)
            h, _ = lax.scan(through, h, (stacked, given))
        else:
            for i, own in enumerate(groups):
                h, _ = through(h, (own, None if given is None else given[i]))
    return h


def _embed(model: Model, tokens: jax.Array) -> jax.Array:
    variables = {"params": model.params}
    h: jax.Array = model.module.apply(variables, tokens, method="embed")
    return h


def _routing_of(c: ModelConfig, run: Run, routing: jax.Array) -> jax.Array | None:
    """Returns the routing [times, B, T, L', k] of each group of a run, of its L'
    mixtures, or None if it has none."""
    first, period, times = run
    layers = [tap.layer for tap in expert_taps(c)]
    begin, end = (bisect_left(layers, i) for i in (first, first + period * times))
    if begin == end:
        return None
    batch, T, _, k = routing.shape
    size = (end - begin) // times
    own = routing[:, :, begin:end].reshape(batch, T, times, size, k)
    return jnp.moveaxis(own, 2, 0)


def _kind(block: Block, params: Params) -> Hashable:
    """Returns what layers of one loop have in common."""
    leaves, tree = jax.tree.flatten(params)
    return block, tree, tuple((x.shape, x.dtype) for x in leaves)


def _through(
    model: Model,
    group: ModelConfig,
    h: jax.Array,
    parts: tuple[Sequence[Params], jax.Array | None],
) -> tuple[jax.Array, None]:
    """Returns the residual stream [B, T, d] after a group of layers, and None, as the
    body of a `lax.scan`.

    Args:
      model: the model.
      group: its config, with the layers of the group.
      h: [B, T, d] float32. The residual stream before the group; or its tokens [B, T]
        int32, if the group is the first one and embeds them.
      parts: the parameters of each layer; and the routing [B, T, L', k] of the group's
        mixtures, or None.
    """
    params, routing = parts
    (batch, T), dtype = h.shape[:2], param_dtype(model.params)
    layers = [
        ResidualLayer(model.config, block, dtype, model.cut).bind({"params": own})
        for block, own in zip(group.layers, params, strict=True)
    ]
    full = jnp.full((batch,), PREFILL_CHUNK, jnp.int32)
    nodes = chain_nodes(batch, PREFILL_CHUNK, group.conv_taps, length=full)

    @jax.checkpoint
    def one_chunk(state: State, parts: Any) -> tuple[State, jax.Array]:
        h, routing = parts
        if jnp.issubdtype(h.dtype, jnp.integer):
            h = _embed(model, h)
        h, _, records, state = run_layers(
            layers,
            [None] * len(layers),
            h,
            nodes,
            state,
            records=None,
            rows=None,
            pending=None,
            valid_count=full,
            experts=None if routing is None else experts_of(group, routing),
        )
        return commit(state, records, nodes.depth, full), h

    empty = float_state(group, batch, T, dtype)
    _, found = lax.scan(one_chunk, empty, jax.tree.map(chunks, (h, routing)))
    return whole(found), None
