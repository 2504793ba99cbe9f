"""The seam between models and mixers: what a mixer is, and what its arrays are for.

A mixer is what a residual layer adds to the stream. Token mixers (Mamba2, attention)
keep a state; channel mixers (MLP, mixture of experts) do not. Each is one file in
`models.mixers` and one line in its table; everything else asks it through `Mixer`, or
reads the facts on the leaves of its state and record (`leaf`).

Letters as in `stree_jax.models`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

import jax
from flax import linen as nn
from flax import struct

from stree_jax.models.params import Table
from stree_jax.models.weights.plain import SKINNY

Record = TypeVar("Record")
C = TypeVar("C")
Role = Literal["state", "window", "cache", "record"]

FLOAT = 4  # bytes: passes compute in float32


class Leaf(NamedTuple):
    """Facts about one array of a state or a record, whose first axis is B.

    Attributes:
      role: "state" and "window" have a fixed size, "cache" grows with the text, and a
        "record" holds the tokens of one pass; None if the array belongs to no mixer.
      part_axis: the axis that devices divide; None if every device has it whole.
      capacity_axis: the axis with a row for each committed token, or None.
    """

    role: Role | None = None
    part_axis: int | None = None
    capacity_axis: int | None = None


NO_FACTS = Leaf()


def leaf(
    role: Role,
    *,
    part_axis: int | None = None,
    capacity_axis: int | None = None,
    **field: Any,
) -> Any:
    """A field of a `flax.struct.dataclass` that holds an array; see `Leaf`."""
    facts = Leaf(role, part_axis, capacity_axis)
    return struct.field(metadata={"leaf": facts}, **field)


def _has_facts(x: Any) -> bool:
    return dataclasses.is_dataclass(x) and any(
        "leaf" in field.metadata for field in dataclasses.fields(x)
    )


def map_leaves(f: Callable[[Any, Leaf], Any], tree: Any) -> Any:
    """Returns the pytree with `f(array, facts)` in place of every array.

    Arrays outside the states and records of mixers have `NO_FACTS`.
    """

    def visit(x: Any) -> Any:
        if not _has_facts(x):
            return f(x, NO_FACTS)
        fields = {}
        for field in dataclasses.fields(x):
            facts = field.metadata.get("leaf", NO_FACTS)
            fields[field.name] = jax.tree.map(
                lambda z, facts=facts: f(z, facts), getattr(x, field.name)
            )
        return dataclasses.replace(x, **fields)

    return jax.tree.map(visit, tree, is_leaf=_has_facts)


def leaves_of(tree: Any, *roles: Role) -> list[Any]:
    """Returns the arrays of a pytree that have one of these roles."""
    found: list[Any] = []

    def visit(x: Any, facts: Leaf) -> Any:
        if facts.role in roles:
            found.append(x)
        return x

    map_leaves(visit, tree)
    return found


@struct.dataclass
class MixerPending(Generic[Record]):
    """An accepted path whose replay is left to the start of the next step.

    Attributes:
      record: of the tree's T nodes.
      path: [B, M] int32, rows of the accepted tokens in order.
      length: [B] int32, how many entries of `path` count.
    """

    record: Record
    path: jax.Array
    length: jax.Array


def written_over(old: jax.Array, new: jax.Array) -> jax.Array:
    """Returns `new` [B, T, ...] written over the first T rows of `old` [B, T', ...].

    Rows past T keep their numbers, which belong to no path. Padding `new` instead would
    write all of them anew.
    """
    if new.shape[1] >= old.shape[1]:
        return new
    return jax.lax.dynamic_update_slice_in_dim(old, new, 0, axis=1)


class MixerState(Protocol):
    """The state of one mixer: a `flax.struct.dataclass` whose fields are `leaf`s."""

    def commit(self, pending: MixerPending[Any], start: jax.Array) -> Self:
        """Returns the state after an accepted path (activation replay).

        Args:
          pending: the path; a length of 0 leaves a row as it was.
          start: [B] int32, tokens that were committed before the path.
        """
        ...


class Mixer(Generic[C]):
    """How one kind of mixer is configured, stored, run and counted.

    This base class has the answers of a channel mixer. A file of `models.mixers`
    subclasses it and puts one instance into the table.

    Attributes:
      kind: name of the kind in saved configs.
      Config: frozen dataclass of its options.
      Module: Flax module `Module(config, dtype, parts)`, called as
        `module(u, pass_, state, record) -> (out, record, state)`; see `nodes.Pass`.
        `parts` is the number of devices that share the mixer.
      State: type of its state, or None for a channel mixer.
      Record: type of its record, or None.
      records_in_place: True if a CPU kernel writes this mixer's records in place, so
        that a record may stay longer than the pass that is written into it.
      long_chunks: True if prefill gains from passes over more tokens.
      skips_padding: True if on a CPU its passes take the time of the tree's nodes, and
        none for padding.
    """

    kind: str
    Config: type
    Module: type[nn.Module]
    State: type | None = None
    Record: type | None = None
    records_in_place = False
    long_chunks = True
    skips_padding = True

    def check(self, c: C, name: str) -> None:
        """Raises ValueError, beginning with `name`, if a number of a config that was
        read from a file cannot be right."""

    def params(self, c: C, d_model: int) -> Table:
        """Returns its parameters by name; a table in place of a parameter is that of a
        module inside."""
        raise NotImplementedError

    def divides(self, c: C, d_model: int, n: int) -> bool:
        """True if n devices can share the mixer."""
        return all(_divides(entry, n) for entry in self.params(c, d_model).values())

    def part(self, c: C, n: int) -> C:
        """Returns the config of one device's share, if n devices share the mixer."""
        raise NotImplementedError

    def conv_taps(self, c: C) -> int:
        """Returns K, the taps of its convolution; 1 if it has none."""
        return 1

    def init_state(self, c: C, batch: int, capacity: int, dtype: Any) -> Any:
        """Returns the state before any token, with room for `capacity` tokens; None for
        a channel mixer."""
        return None

    def empty_record(self, c: C, batch: int, nodes: int, dtype: Any) -> Any:
        """Returns a record of `nodes` tokens, all zeros; None for a channel mixer."""
        return None

    def record_bytes(self, c: C, batch: int, nodes: int) -> int:
        """Returns the bytes that a pass holds of a layer until the step ends."""
        return 0

    def work_bytes(self, c: C, batch: int, nodes: int, dtype: Any) -> int:
        """Returns the most bytes of temporaries while the mixer runs, as XLA:CPU was
        seen to allocate them."""
        raise NotImplementedError


def _divides(entry: Any, n: int) -> bool:
    if isinstance(entry, dict):
        return all(_divides(inner, n) for inner in entry.values())
    return all(run.divides(n) for run in entry.runs)


def padded_rows(rows: int) -> int:
    """Returns the rows that a product of so many takes on a CPU; see `linear`."""
    if rows <= 4 or rows > SKINNY:
        return rows
    return 8 if rows <= 8 else -(-rows // 16) * 16
