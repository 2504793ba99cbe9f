"""The interface between models and mixers: `Mixer`, and the roles of its arrays
(`Leaf`).

A mixer computes what a residual layer adds to the residual stream. Token mixers
(Mamba2, attention) keep a state; channel mixers (MLP, mixture of experts) do not. Each
mixer is one file in `models.mixers` and one entry of `MIXERS`. All other code uses a
mixer through `Mixer`, or reads the `Leaf` metadata of the arrays in its state and
record.

Terms that all of `models` uses:

- The committed tokens are the accepted text that a state contains. A state is what a
  mixer keeps of them: a KV cache, or an SSM state with a convolution window.
- A forward pass computes the T nodes of a tree of draft tokens, and does not change
  the state with them. For each node it returns a record: the values from which the
  state after any path of the tree can be computed later (keys and values, or the inputs
  of the SSM recurrence).
- The pending path is the path of the last tree that was accepted and is not yet part of
  the state. The next forward pass first replays it: it computes the state after the
  path from the records of the path's nodes (activation replay, STree), without running
  the model on these tokens again.

Letters as in `stree_jax.models`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

import jax
from flax import linen as nn
from flax import struct

from stree_jax.models.base.shards import ALONE, Group
from stree_jax.models.layers.params import Table
from stree_jax.models.weights.plain import SKINNY

Record = TypeVar("Record")
C = TypeVar("C")
Role = Literal["state", "window", "cache", "record"]

FLOAT = 4  # bytes of a float32, in which forward passes compute
INPUTS = ":inputs"  # `Mixer.source` of mixers that read the layer's per-layer input
ROUTER = ":router"  # `Mixer.source` of mixers that read the vector of an earlier router


class Leaf(NamedTuple):
    """Metadata of one array [B, ...] of a mixer's state or record.

    Attributes:
      role: "state" and "window" arrays have a fixed size, a "cache" has space for each
        token of the text, and a "record" has a row for each node of one forward pass.
        None for arrays outside states and records.
      part_axis: the axis that tensor parallelism divides. If None, every device has the
        whole array.
      capacity_axis: the axis with one row per committed token. If None, there is no
        such axis.
    """

    role: Role | None = None
    part_axis: int | None = None
    capacity_axis: int | None = None


NO_LEAF = Leaf()


def leaf(
    role: Role,
    *,
    part_axis: int | None = None,
    capacity_axis: int | None = None,
    **field: Any,
) -> Any:
    """Declares an array field of a `flax.struct.dataclass` with its `Leaf` metadata."""
    metadata = Leaf(role, part_axis, capacity_axis)
    return struct.field(metadata={"leaf": metadata}, **field)


def _has_leaves(x: Any) -> bool:
    return dataclasses.is_dataclass(x) and any(
        "leaf" in field.metadata for field in dataclasses.fields(x)
    )


def map_leaves(f: Callable[[Any, Leaf], Any], tree: Any) -> Any:
    """Returns the pytree with `f(array, leaf)` in place of every array.

    `leaf` is the array's `Leaf`; `NO_LEAF` for arrays outside states and records.
    """

    def visit(x: Any) -> Any:
        if not _has_leaves(x):
            return f(x, NO_LEAF)
        fields = {}
        for field in dataclasses.fields(x):
            metadata = field.metadata.get("leaf", NO_LEAF)
            fields[field.name] = jax.tree.map(
                lambda z, metadata=metadata: f(z, metadata), getattr(x, field.name)
            )
        return dataclasses.replace(x, **fields)

    return jax.tree.map(visit, tree, is_leaf=_has_leaves)


def leaves_of(tree: Any, *roles: Role) -> list[Any]:
    """Returns the arrays of a pytree whose role is one of `roles`."""
    found: list[Any] = []

    def visit(x: Any, metadata: Leaf) -> Any:
        if metadata.role in roles:
            found.append(x)
        return x

    map_leaves(visit, tree)
    return found


@struct.dataclass
class MixerPending(Generic[Record]):
    """The pending path of one mixer, which the next forward pass replays before it
    computes its own tree.

    Attributes:
      record: the mixer's record of the T nodes of the last tree.
      path: [B, M] int32, indices of the accepted nodes in that tree, in order.
      length: [B] int32, number of valid entries of `path`.
    """

    record: Record
    path: jax.Array
    length: jax.Array


def written_over(old: jax.Array, new: jax.Array) -> jax.Array:
    """Returns `old` [B, T', ...] with its first T rows replaced by `new` [B, T, ...].

    If T >= T', that is `new`. The rows of `old` from T on keep the values of an
    earlier, larger tree, which no pending path refers to. Padding `new` to T' rows
    would cost the time of writing them.
    """
    if new.shape[1] >= old.shape[1]:
        return new
    return jax.lax.dynamic_update_slice_in_dim(old, new, 0, axis=1)


class MixerState(Protocol):
    """The state of one mixer: a `flax.struct.dataclass` whose fields are `leaf`s."""

    def commit(self, pending: MixerPending[Any], start: jax.Array) -> Self:
        """Replays an accepted path and returns the state after it.

        Args:
          pending: the path and the records of its nodes. A length of 0 leaves a row of
            the batch unchanged.
          start: [B] int32, number of committed tokens before the path.
        """
        ...


class Sent(NamedTuple):
    """What a channel mixer may return in place of a record. It is not kept after the
    pass.

    Attributes:
      value: [B, Tq, ...], for mixers of later layers, see `Mixer.sends`. None if they
        receive nothing.
      experts: [B, Tq, k] int32. The experts that each queried node uses; unspecified
        for padding. None for a mixer without experts.
    """

    value: jax.Array | None = None
    experts: jax.Array | None = None


class MixerModule(nn.Module):
    """The Flax module of a mixer, or one device's share of it.

    Attributes:
      config: the config of this device's share.
      dtype: dtype of new parameters, and of caches and records except for their
        float32 arrays.
      parts: the devices that share the mixer.
    """

    config: Any
    dtype: Any
    parts: Group = ALONE


class Mixer(Generic[C]):
    """One kind of mixer: its config, parameters, module, state, and memory use.

    The methods of this base class are those of a channel mixer. Each file of
    `models.mixers` defines a subclass and adds one instance to `MIXERS`.

    Attributes:
      kind: name of the kind in saved configs.
      Config: frozen dataclass of the mixer's options.
      Module: Flax module as `MixerModule`, called as
        `module(u, pass_, state, record) -> (out, record, state)`; see `nodes.Pass`.
      State: type of the mixer's state. None for a channel mixer.
      Record: type of the mixer's record, which holds what a forward pass stores of each
        node so that the state after an accepted path can be computed from it. None for
        a channel mixer.
      records_in_place: True if a CPU kernel writes the new record over the last one. A
        record then has as many rows as the largest tree, and a pass over fewer nodes
        overwrites only the first ones.
      long_chunks: True if prefill is faster with more than `PREFILL_CHUNK` tokens per
        pass.
      skips_padding: True if padding costs no time in this mixer's CPU kernels.
      sends: for a channel mixer that sends an array to later layers (`Sent.value`), the
        `source` by which their mixers find it. If empty, it sends none.
    """

    kind: str
    Config: type
    Module: type[nn.Module]
    State: type | None = None
    Record: type | None = None
    records_in_place = False
    long_chunks = True
    skips_padding = True
    sends = ""

    def check(self, c: C, name: str) -> None:
        """Raises ValueError if a number of a config read from a file is out of range.

        Args:
          c: the config.
          name: the config's path in the file; the message begins with it.
        """

    def params(self, c: C, d_model: int) -> Table:
        """Returns the mixer's parameters by name.

        An entry that is itself a table holds the parameters of a submodule.
        """
        raise NotImplementedError

    def divides(self, c: C, d_model: int, n: int) -> bool:
        """True if n devices can share the mixer."""
        return all(_divides(entry, n) for entry in self.params(c, d_model).values())

    def part(self, c: C, n: int) -> C:
        """Returns the config of one device's share when n devices share the mixer."""
        raise NotImplementedError

    def source(self, c: C) -> str:
        """Returns what the mixer reads of other layers, which it finds in
        `Pass.source`.

        That is the name of another mixer, whose state and record it reads in the last
        layer before it that has that mixer; what such a mixer `sends`; `INPUTS`, the
        per-layer input; or "", nothing.
        """
        return ""

    def experts(self, c: C) -> tuple[int, int]:
        """Returns the number of experts from which a token chooses, and how many of
        them it chooses. (0, 0) for a mixer without experts."""
        return 0, 0

    def conv_taps(self, c: C) -> int:
        """Returns K, the taps of the mixer's convolution; 1 without a convolution."""
        return 1

    def init_state(self, c: C, batch: int, capacity: int, dtype: Any) -> Any:
        """Returns the state before any token, with space for `capacity` tokens. None
        for a channel mixer."""
        return None

    def empty_record(self, c: C, batch: int, nodes: int, dtype: Any) -> Any:
        """Returns a record of `nodes` nodes, all zeros. None for a channel mixer."""
        return None

    def record_bytes(self, c: C, batch: int, nodes: int) -> int:
        """Returns the bytes of one layer's record. It is kept until the next pass has
        replayed the accepted path."""
        return 0

    def work_bytes(self, c: C, batch: int, nodes: int, dtype: Any) -> int:
        """Estimates the peak bytes of temporaries while the mixer runs.

        The formulas match what XLA:CPU was observed to allocate.
        """
        raise NotImplementedError


def _divides(entry: Any, n: int) -> bool:
    if isinstance(entry, dict):
        return all(_divides(inner, n) for inner in entry.values())
    return all(run.divides(n) for run in entry.runs)


def padded_rows(rows: int) -> int:
    """Returns `rows` rounded up as `linear` pads them on a CPU."""
    if rows <= 4 or rows > SKINNY:
        return rows
    return 8 if rows <= 8 else -(-rows // 16) * 16
