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
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from stree_jax.models.base.shards import ALONE, Group
from stree_jax.models.configs.mixer import Arrays

Record = TypeVar("Record")
Role = Literal["state", "window", "cache", "record"]


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


def zeros(kind: type | None, arrays: Arrays) -> Any:
    """Returns a state or record of a mixer, all zeros.

    Args:
      kind: its type.
      arrays: from `Mixer.state_arrays` or `Mixer.record_arrays`.
    """
    assert kind is not None, "a channel mixer has no state"
    return kind(**{name: jnp.zeros(*each) for name, each in arrays.items()})


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
    """The values that a channel mixer returns in place of a record. They last for one
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
