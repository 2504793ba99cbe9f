"""The protocol of sources of drafts: what users pass as `drafter`, as an object that
answers for itself.

A source is not yet bound to a target or a tree. Each kind is a class beside its drafter
in `speculation/drafters/` and a line of the table in `drafters/table.py`.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from stree_jax.checks import shown
from stree_jax.models import Model, ModelConfig, init_state, param_dtype
from stree_jax.models.mixer import Leaf, map_leaves
from stree_jax.models.sharding.parts import part_config
from stree_jax.models.sharding.placement import axis_size
from stree_jax.models.sharding.shards import MODEL
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

DEFAULT_TREE = "E"  # where tree "auto" is not the default
RANK_DECAY = 0.4  # assumed: how the share of right guesses falls from rank to rank


@dataclass(frozen=True)
class Work:
    """What drafting takes, for a guess of its seconds.

    Attributes:
      models: models that run a pass for every level.
      read_once: bytes that a step reads for all levels together.
    """

    models: tuple[Model, ...] = ()
    read_once: int = 0


class Vocabulary(NamedTuple):
    """The tokens of a part of a drafter: their number, and a tokenizer or None."""

    name: str
    num_tokens: int
    tokenizer: Any


class Source:
    """A source of drafts.

    Attributes:
      value: as `generate` takes it.
      name: in plans and messages.
      has_q: whether drafts can say the probabilities they were drawn with.
      by_level: whether every level that tree "auto" searches takes a pass.
      needs_trace: whether only a traced step shows that drafts fit the rule.
      needs_mtp: whether the target is loaded with its MTP layers.
      top1: assumed share of first guesses that are right.
      trees: names of the trees to consider. If empty, those that gain most.
    """

    value: Any
    name: str = "drafter"
    has_q: bool = True
    by_level: bool = True
    needs_trace: bool = False
    needs_mtp: bool = False
    top1: float = 0.6
    trees: tuple[str, ...] = ()

    def check(self, target: Model) -> None:
        """Raises ValueError if the source does not fit the target."""

    def check_tree(self, tree: Topology) -> None:
        """Raises ValueError for a tree that the source does not fill."""

    def check_past(self, target: Model, past: DraftState, batch: int) -> None:
        """Raises ValueError for a drafter's `past` that does not fit."""

    def vocabularies(self, name: str) -> Iterator[Vocabulary]:
        """Yields the vocabularies that should be the target's.

        Args:
          name: what the drafter is called.
        """
        return iter(())

    @property
    def prefers_auto(self) -> bool:
        """True if tree "auto" is the default tree."""
        return False

    @property
    def timed_as(self) -> "Source | None":
        """The source whose measured steps of tree "auto" are the same as its own."""
        return self if self.prefers_auto else None

    @property
    def count(self) -> int:
        """Number of parts, such as heads; 0 if it has no parts."""
        return 0

    @property
    def models(self) -> tuple[Model, ...]:
        """The models that draft, the outermost first."""
        return ()

    def fixed_tree(self) -> Topology:
        """Returns the default tree where "auto" is not."""
        return resolve_tree(DEFAULT_TREE)

    def sparse_tree(self, nodes: str) -> Tree:
        """Returns the tree "sparse:`nodes`", the best one by measured accuracies."""
        raise ValueError("tree: 'sparse:N' goes by the accuracies of Medusa heads")

    def bind(self, target: Model, tree: Topology) -> DrafterBase:
        """Returns the drafter of a target, for a tree that `check_tree` takes. For tree
        "auto" it is a `Searcher`, or another drafter if n-gram lookup drafts alone."""
        raise NotImplementedError

    def filled(self, tree: Topology) -> Topology:
        """Returns the tree whose steps run when `tree` is asked for."""
        return tree

    @property
    def search_size(self) -> tuple[int, int]:
        """Most nodes of a level, and most levels, with tree "auto"."""
        return 3, 8

    def narrowed(self, count: int) -> Self:
        """Returns the first `count` parts as a source."""
        return self

    def narrower(self) -> Iterator["Source"]:
        """Yields the source itself, and those with fewer parts."""
        yield self

    def acceptance(self) -> Acceptance:
        """Returns how often a guess is right by depth and rank, measured or assumed."""
        ranks = self.top1 * RANK_DECAY ** np.arange(MOST_CHILDREN)
        return Acceptance(np.tile(ranks, (DEEPEST, 1)))

    def work(self, target: Model) -> Work:
        """Returns what drafting for a target takes."""
        return Work(self.models)


def picked_tree(tree: Topology) -> Topology:
    """Returns a tree of as many nodes, as deep, whose nodes the drafter picks."""
    return tree if tree.size == 1 else Budget(tree.size, tree.depth)


def not_a_source(name: str, value: Any) -> ValueError:
    """Returns the error for a value that is not a source of drafts."""
    if isinstance(value, type):
        what = f"got the class {value.__name__}; give an instance of it"
    elif isinstance(value, str):
        what = (
            f"got a string; give stree_jax.load({shown(value)}), 'lookup', 'mtp', or "
            "None for plain decoding"
        )
    elif isinstance(value, os.PathLike):
        what = f"got a path; give stree_jax.load({shown(os.fspath(value))})"
    else:
        what = f"want a model of stree_jax.load, got {shown(type(value))}"
    return ValueError(f"{name}: {what}")


def check_state(name: str, model: Model, state: Any, batch: int) -> None:
    """Raises ValueError for a state without the layers and sizes of a model's; the
    capacity of caches is not compared."""

    def sizes(state: Any) -> Any:
        found = []

        def visit(x: Any, facts: Leaf) -> Any:
            axes = (i for i in range(x.ndim) if i != facts.capacity_axis)
            found.append((x.dtype, tuple(x.shape[i] for i in axes)))
            return x

        map_leaves(visit, state)
        return jax.tree.structure(state), found

    dtype, parts = param_dtype(model.params), 1
    if model.mesh is not None:
        parts = axis_size(model.mesh, MODEL)

    def whole(part: Any, facts: Leaf) -> Any:
        shape = list(part.shape)
        if facts.part_axis is not None:
            shape[facts.part_axis] *= parts
        return jax.ShapeDtypeStruct(tuple(shape), part.dtype)

    config: ModelConfig = part_config(model.config, model.cut)
    own = jax.eval_shape(lambda: init_state(config, batch, 1, dtype))
    if sizes(map_leaves(whole, own)) != sizes(state):
        raise ValueError(f"{name}: its state does not fit this model")
