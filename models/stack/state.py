"""The state that a model carries between forward passes, and the records of a tree.

`layers.mixer` explains what states, records and the pending path are. Here they are
those of a whole model: a tuple with one dictionary per layer, which has an entry for
each of the layer's token mixers by name. It is {} for a layer with only an MLP.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax import cpu_kernels
from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.configs import MIXERS
from stree_jax.models.configs.mixer import Mixer
from stree_jax.models.layers.mixer import Leaf, MixerPending, map_leaves, zeros
from stree_jax.models.mixers import COMPUTATIONS, computation_of
from stree_jax.models.stack.config import ModelConfig, token_mixers

LayerState = dict[str, Any]  # the `MixerState` of each token mixer, by name
LayerRecord = dict[str, Any]  # the record of each token mixer, by name
Records = tuple[LayerRecord, ...]


@register_for_export
@struct.dataclass
class State:
    """A model's state after the committed tokens: KV caches and SSM states.

    Attributes:
      layers: one dictionary per layer, see the module's docstring.
      length: [B] int32, number of committed tokens.
    """

    layers: tuple[LayerState, ...]
    length: jax.Array

    def __repr__(self) -> str:
        rows = getattr(self.length, "shape", None)
        return f"State({len(self.layers)} layers, length {rows})"


@register_for_export
@struct.dataclass
class Pending:
    """The pending path: the accepted path of the last tree, which the next forward pass
    replays into the state before it computes its own tree.

    Attributes:
      records: the records of the last tree's T nodes, one dictionary per layer.
      path: [B, M] int32, indices of the accepted nodes in that tree, in order.
      length: [B] int32, number of valid entries of `path`.
    """

    records: Records
    path: jax.Array
    length: jax.Array

    def layer(self, i: int) -> MixerPending[LayerRecord]:
        """Returns the pending path with only the records of layer i."""
        return MixerPending(self.records[i], self.path, self.length)


def _by_layer(config: ModelConfig, make: Callable[[Mixer[Any], Any], Any]) -> Any:
    return tuple(
        {name: make(*one) for name, one in token_mixers(config, block).items()}
        for block in config.layers
    )


def init_state(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> State:
    """Returns the state before any token.

    Args:
      config: the architecture.
      batch: B.
      capacity: S, tokens for which the KV caches have space.
      dtype: dtype of the caches. SSM states are always float32.
    """

    def empty(mixer: Mixer[Any], c: Any) -> Any:
        arrays = mixer.state_arrays(c, batch, capacity, dtype)
        return zeros(computation_of(c).State, arrays)

    return State(_by_layer(config, empty), jnp.zeros((batch,), jnp.int32))


def init_records(config: ModelConfig, batch: int, nodes: int, dtype: Any) -> Records:
    """Returns a model's records of `nodes` nodes, all zeros."""

    def empty(mixer: Mixer[Any], c: Any) -> Any:
        arrays = mixer.record_arrays(c, batch, nodes, dtype)
        return zeros(computation_of(c).Record, arrays)

    return _by_layer(config, empty)


def shortened(record: LayerRecord) -> LayerRecord:
    """Returns a layer's record cut to one node, for steps of plain decoding.

    A record that CPU kernels write in place keeps all of its rows. The pending path
    then refers only to the first one.
    """

    kinds = (kind for kind, m in MIXERS.items() if m.records_in_place)
    in_place = {COMPUTATIONS[kind].Record for kind in kinds}

    def short(one: Any) -> Any:
        if cpu_kernels.available() and type(one) in in_place:
            return one
        return jax.tree.map(lambda x: x[:, :1], one)

    return {name: short(one) for name, one in record.items()}


def cache_rows(state: State) -> int | None:
    """Returns S, the rows of the KV caches. None for a model without attention."""
    rows: list[int] = []

    def visit(x: jax.Array, leaf: Leaf) -> jax.Array:
        if leaf.capacity_axis is not None:
            rows.append(x.shape[leaf.capacity_axis])
        return x

    map_leaves(visit, state)
    return rows[0] if rows else None


def recurrent_layers(state: State) -> list[str]:
    """Returns the kinds of token mixers whose states are not only KV caches. If there
    are none, the state can be cut back to any of its tokens."""
    mixers = (mixer for layer in state.layers for mixer in layer.values())
    kinds = (type(x).__name__.removesuffix("State") for x in mixers if not _caches(x))
    return list(dict.fromkeys(kinds))


def _caches(mixer: Any) -> bool:
    """True if the state of a mixer consists of KV caches."""
    axes: list[int | None] = []
    map_leaves(lambda x, leaf: axes.append(leaf.capacity_axis), mixer)
    return None not in axes


def grow(state: State, capacity: int) -> State:
    """Returns the state with KV caches for at least `capacity` tokens."""

    def pad(x: jax.Array, leaf: Leaf) -> jax.Array:
        axis = leaf.capacity_axis
        if axis is None:
            return x
        more = [(0, 0)] * x.ndim
        more[axis] = (0, max(capacity - x.shape[axis], 0))
        return jnp.pad(x, more)

    return map_leaves(pad, state)


def commit(state: State, records: Records, path: jax.Array, length: jax.Array) -> State:
    """Replays an accepted path of a tree and returns the state after it, without
    running the model again.

    Args:
      state: the state before the tree that `records` belong to.
      records: the records of the tree's T nodes, one dictionary per layer.
      path: [B, M] int32, indices of the accepted nodes in the tree, in order.
      length: [B] int32, number of valid entries of `path`; 0 leaves a row unchanged.
    """

    def layer(states: LayerState, record: LayerRecord) -> LayerState:
        return {
            name: one.commit(MixerPending(record[name], path, length), state.length)
            for name, one in states.items()
        }

    layers = tuple(map(layer, state.layers, records))
    return State(layers, state.length + length)
