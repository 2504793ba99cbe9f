"""What a model carries between calls: the states of its mixers, layer by layer.

States and records are pure pytrees: a tuple with one dictionary for each layer, which
has an entry for each of the layer's token mixers, by name; {} for an MLP.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax import cpu_kernels
from stree_jax.models.config import Block, ModelConfig
from stree_jax.models.mixer import Leaf, Mixer, MixerPending, map_leaves
from stree_jax.models.mixers import MIXERS, mixer_of
from stree_jax.pallas_kernels import ATTENTION_BLOCK

LayerState = dict[str, Any]  # a `MixerState` for each token mixer
LayerRecord = dict[str, Any]  # its record
Records = tuple[LayerRecord, ...]


@struct.dataclass
class State:
    """Everything that a model has computed of the committed tokens.

    Attributes:
      layers: one dictionary for each layer, see the module's docstring.
      length: [B] int32, committed tokens.
    """

    layers: tuple[LayerState, ...]
    length: jax.Array

    def __repr__(self) -> str:
        rows = getattr(self.length, "shape", None)
        return f"State({len(self.layers)} layers, length {rows})"


@struct.dataclass
class Pending:
    """An accepted path whose replay is left to the start of the next step.

    Attributes:
      records: of the tree's T nodes, one dictionary for each layer.
      path: [B, M] int32, rows of the accepted tokens in order.
      length: [B] int32, how many entries of `path` count.
    """

    records: Records
    path: jax.Array
    length: jax.Array

    def layer(self, i: int) -> MixerPending[LayerRecord]:
        """Returns what layer i has to replay."""
        return MixerPending(self.records[i], self.path, self.length)


def token_mixers(
    config: ModelConfig, block: Block
) -> dict[str, tuple[Mixer[Any], Any]]:
    """Returns the mixers of a layer that keep a state, and their configs, by name."""
    mixers = {name: config.mixers[name] for name in config.mixer_names(block)}
    found = {name: (mixer_of(c), c) for name, c in mixers.items()}
    return {name: one for name, one in found.items() if one[0].State is not None}


def _by_layer(config: ModelConfig, make: Callable[[Mixer[Any], Any], Any]) -> Any:
    return tuple(
        {name: make(*one) for name, one in token_mixers(config, block).items()}
        for block in config.layers
    )


def init_state(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> State:
    """Returns the state before any token, with room for `capacity` tokens."""
    layers = _by_layer(config, lambda m, c: m.init_state(c, batch, capacity, dtype))
    return State(layers, jnp.zeros((batch,), jnp.int32))


def init_records(config: ModelConfig, batch: int, nodes: int, dtype: Any) -> Records:
    """Returns records of `nodes` tokens, all zeros."""
    return _by_layer(config, lambda m, c: m.empty_record(c, batch, nodes, dtype))


def shortened(record: LayerRecord) -> LayerRecord:
    """Returns a layer's record of one token.

    Where CPU kernels write a mixer's records in place, its record stays as long as it
    is: rows past the first belong to no path.
    """

    in_place = tuple(m.Record for m in MIXERS.values() if m.records_in_place)

    def short(one: Any) -> Any:
        if cpu_kernels.at_hand() and type(one) in in_place:
            return one
        return jax.tree.map(lambda x: x[:, :1], one)

    return {name: short(one) for name, one in record.items()}


def cache_rows(state: State) -> int | None:
    """Returns the rows of the attention caches; None if there is no cache."""
    rows: list[int] = []

    def visit(x: jax.Array, facts: Leaf) -> jax.Array:
        if facts.capacity_axis is not None:
            rows.append(x.shape[facts.capacity_axis])
        return x

    map_leaves(visit, state)
    return rows[0] if rows else None


def whole_blocks(rows: int) -> int:
    """Returns `rows`, rounded up to the blocks that attention on a CPU reads."""
    return -(-rows // ATTENTION_BLOCK) * ATTENTION_BLOCK


def grow(state: State, capacity: int) -> State:
    """Returns the same state with room for at least `capacity` tokens."""

    def pad(x: jax.Array, facts: Leaf) -> jax.Array:
        axis = facts.capacity_axis
        if axis is None:
            return x
        more = [(0, 0)] * x.ndim
        more[axis] = (0, max(capacity - x.shape[axis], 0))
        return jnp.pad(x, more)

    return map_leaves(pad, state)


def commit(state: State, records: Records, path: jax.Array, length: jax.Array) -> State:
    """Returns the state after the accepted path (activation replay).

    Args:
      state: before the tree that `records` belong to.
      records: of the tree's T nodes, one dictionary for each layer.
      path: [B, M] int32, rows of the accepted tokens in order.
      length: [B] int32, how many entries of `path` count; 0 leaves a row as it was.
    """

    def layer(states: LayerState, record: LayerRecord) -> LayerState:
        return {
            name: one.commit(MixerPending(record[name], path, length), state.length)
            for name, one in states.items()
        }

    layers = tuple(map(layer, state.layers, records))
    return State(layers, state.length + length)
