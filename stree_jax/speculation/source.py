"""The base class of draft sources, which wrap the values that users pass as `drafter`.

A source checks such a value (a model, heads, "lookup" and so on) and answers questions
about it before anything is compiled. `Source.bind` then makes the drafter for a target
and a tree. Each kind of source is a class in the file of its drafter in
`speculation/drafters/`, and an entry of the table in `drafters/table.py`.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from stree_jax.common.checks import shown
from stree_jax.models import (
    Model,
    ModelConfig,
    init_state,
    param_dtype,
    without_mtp,
)
from stree_jax.models.layers.mixer import Leaf, map_leaves
from stree_jax.models.sharding.parts import part_config
from stree_jax.models.sharding.placement import axis_size
from stree_jax.speculation.drafter import DrafterBase, DraftState
from stree_jax.speculation.gain import Acceptance
from stree_jax.speculation.tree import (
    DEEPEST,
    MOST_CHILDREN,
    Budget,
    Topology,
    Tree,
    resolve_tree,
)

DEFAULT_TREE = "E"  # for sources whose default tree is not "auto"
# Assumed, not measured: the guess of rank r + 1 is accepted 0.4 times as often as that
# of rank r.
RANK_DECAY = 0.4


@dataclass(frozen=True)
class Work:
    """The work of drafting, from which its time is estimated.

    Attributes:
      models: models that run one forward pass per level.
      read_once: bytes that a step reads once for all levels.
    """

    models: tuple[Model, ...] = ()
    read_once: int = 0


class Vocabulary(NamedTuple):
    """The vocabulary of a part of a drafter.

    Attributes:
      name: name of the part, for messages.
      num_tokens: number of tokens.
      tokenizer: its tokenizer, or None.
    """

    name: str
    num_tokens: int
    tokenizer: Any


class Source:
    """A source of draft tokens.

    Attributes:
      value: the value that the user passed as `drafter`.
      name: its name in plans and messages.
      has_q: True if its drafts can include q, the probabilities from which the draft
        tokens were drawn. Some acceptance rules need them.
      by_level: True if, with tree "auto", each level of the tree takes a forward pass.
      one_pass: True if one forward pass drafts the candidates of all levels, so that a
        tree of any shape costs the same.
      needs_trace: True if a step must be traced to find out whether the drafts include
        what the acceptance rule needs. This is so for custom drafters.
      needs_mtp: True if the target must be loaded with its MTP layers.
      top1: assumed acceptance rate of first guesses.
      trees: names of the trees that the memory planner considers. If empty, it computes
        the trees with the largest expected acceptance length.
    """

    value: Any
    name: str = "drafter"
    has_q: bool = True
    by_level: bool = True
    one_pass: bool = False
    needs_trace: bool = False
    needs_mtp: bool = False
    top1: float = 0.6
    trees: tuple[str, ...] = ()

    def check(self, target: Model) -> None:
        """Raises ValueError if the source does not fit the target."""

    def check_tree(self, tree: Topology) -> None:
        """Raises ValueError if the source does not support the tree."""

    def check_past(self, target: Model, past: DraftState, batch: int) -> None:
        """Raises ValueError if a cached state of the drafter does not fit."""

    def vocabularies(self, name: str) -> Iterator[Vocabulary]:
        """Yields the vocabularies that should be equal to the target's.

        Args:
          name: name of the drafter, for messages.
        """
        return iter(())

    @property
    def prefers_auto(self) -> bool:
        """True if tree "auto" is the default tree."""
        return False

    @property
    def timed_as(self) -> "Source | None":
        """The source whose measured step times for tree "auto" also apply to this
        source, or None."""
        return self if self.prefers_auto else None

    @property
    def kind(self) -> str:
        """The published name of its method, such as "DSpark"; "" without one."""
        return ""

    @property
    def count(self) -> int:
        """Number of parts, such as heads; 0 if it is not divided into parts."""
        return 0

    @property
    def models(self) -> tuple[Model, ...]:
        """The draft models; in a staged drafter, the one that drafts for the target
        comes first."""
        return ()

    def fixed_tree(self) -> Topology:
        """Returns the default tree if "auto" is not the default."""
        return resolve_tree(DEFAULT_TREE)

    def sparse_tree(self, nodes: str) -> Tree:
        """Returns the tree named "sparse:N": the N nodes with the largest expected
        acceptance length for the measured accuracies of Medusa heads.

        Args:
          nodes: N, as text.
        """
        raise ValueError("tree: 'sparse:N' needs the accuracies of Medusa heads")

    def bind(self, target: Model, tree: Topology) -> DrafterBase:
        """Returns the drafter for a target and a tree that `check_tree` accepts.

        For tree "auto" the drafter is a `Searcher`, which computes candidates level by
        level, or another drafter if all tokens come from prompt lookup.
        """
        raise NotImplementedError

    def filled(self, tree: Topology) -> Topology:
        """Returns the tree that steps use if the user asks for `tree`. It is `tree`
        unless overridden."""
        return tree

    @property
    def search_size(self) -> tuple[int, int]:
        """Maximum nodes per level and maximum levels with tree "auto"."""
        return 3, 8

    def narrowed(self, count: int) -> Self:
        """Returns a source that uses only the first `count` parts."""
        return self

    def narrower(self) -> Iterator["Source"]:
        """Yields the source itself, and those with fewer parts (`narrowed`), which need
        less memory."""
        yield self

    def acceptance(self) -> Acceptance:
        """Returns the measured or assumed acceptance rates by depth and rank."""
        return assumed_acceptance(self.top1)

    def readings(self, target: Model) -> dict[str, Any]:
        """Returns variants of the drafter, each with one option changed that configs
        often state wrongly, by a description. The values are drafters or sources.
        `check-drafter` tests whether a variant agrees better with the target."""
        return {}

    def work(self, target: Model) -> Work:
        """Returns the work of drafting for a target."""
        return Work(tuple(map(without_mtp, self.models)))


def assumed_acceptance(top1: float, depth: int = DEEPEST) -> Acceptance:
    """Returns acceptance rates that are the same at every depth and fall with the rank
    by `RANK_DECAY`.

    Args:
      top1: acceptance rate of first guesses, above 0.
      depth: number of depths.
    """
    ranks = top1 * RANK_DECAY ** np.arange(MOST_CHILDREN)
    ranks[1:] *= min(1, (1 - top1) / ranks[1:].sum())  # a row sums to at most 1
    return Acceptance(np.tile(ranks, (depth, 1)))


def picked_tree(tree: Topology) -> Topology:
    """Returns a `Budget` with the size and depth of a tree; a tree of one node is
    returned unchanged."""
    return tree if tree.size == 1 else Budget(tree.size, tree.depth)


def not_a_source(name: str, value: Any) -> ValueError:
    """Returns the error for a value that is not a source of draft tokens."""
    if isinstance(value, type):
        what = f"got the class {value.__name__}; give an instance of it"
    elif isinstance(value, str):
        what = (
            f"got a string; give stree_jax.load_drafter({shown(value)}), 'lookup', "
            "'mtp', or None for plain decoding"
        )
    elif isinstance(value, os.PathLike):
        what = f"got a path; give stree_jax.load_drafter({shown(os.fspath(value))})"
    else:
        what = f"want a model of stree_jax.load, got {shown(type(value))}"
    return ValueError(f"{name}: {what}")


def check_state(name: str, model: Model, state: Any, batch: int) -> None:
    """Raises ValueError if a state does not have the layers and sizes of a model's
    state. The capacities of caches are not compared."""
    dtype = param_dtype(model.params)
    config: ModelConfig = part_config(model.config, model.cut)
    own = jax.eval_shape(lambda: init_state(config, batch, 1, dtype))
    check_sizes(name, model, own, state)


def check_sizes(name: str, model: Model, own: Any, state: Any) -> None:
    """Raises ValueError if a state does not have the layers and sizes of `own`, except
    the capacities of caches.

    Args:
      name: what the error message begins with.
      model: the target or a draft model, whose mesh the state is on.
      own: the state that each device of the mesh should have, as shapes.
      state: the state, whose arrays consist of the parts of all devices.
    """
    parts = 1
    if model.mesh is not None:
        parts = axis_size(model.mesh, model.cut.axis)

    def whole(part: Any, info: Leaf) -> Any:
        shape = list(part.shape)
        if info.part_axis is not None:
            shape[info.part_axis] *= parts
        return jax.ShapeDtypeStruct(tuple(shape), part.dtype)

    def sizes(state: Any) -> Any:
        found = []

        def visit(x: Any, info: Leaf) -> Any:
            axes = (i for i in range(x.ndim) if i != info.capacity_axis)
            found.append((x.dtype, tuple(x.shape[i] for i in axes)))
            return x

        map_leaves(visit, state)
        return jax.tree.structure(state), found

    if sizes(map_leaves(whole, own)) != sizes(state):
        raise ValueError(f"{name}: its state does not fit this model")
