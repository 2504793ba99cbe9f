"""Custom drafters: any object with the methods of the `Drafter` protocol."""

from typing import Any

import jax
from flax import struct

from stree_jax.common.checks import as_integer, shown
from stree_jax.models import Model, Taps
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.search import Query, Search, Searcher
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.drafter import DraftState, Prompts, Update
from stree_jax.speculation.source import Source
from stree_jax.speculation.tree import Auto, Beam, Topology

METHODS = ("init", "propose", "commit")
NUMBERS = int, float, complex  # types that `jax.jit` accepts as arrays


@struct.dataclass
class Custom(Searcher, Source):
    """A source and drafter that wraps an object, which need not inherit `DrafterBase`.

    Attributes:
      value: the object. It must have the `METHODS`, and may have `taps`,
        `observes_prompts`, and `search` for tree "auto".
    """

    value: Any
    needs_trace = True

    # A property where the base class has a constant, which mypy does not allow.
    @property
    def taps(self) -> Taps:  # type: ignore[override]
        return getattr(self.value, "taps", ())

    @property
    def observes_prompts(self) -> bool:
        old_name = getattr(self.value, "hears_prompts", bool(self.taps))
        return bool(getattr(self.value, "observes_prompts", old_name))

    # A property where the base class has a constant, which mypy does not allow.
    @property
    def looks_up(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.value, "looks_up", False))

    @property
    def cuts_back(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.value, "cuts_back", False))

    def check(self, target: Model) -> None:
        for leaf in jax.tree.leaves(self.value):
            if not hasattr(leaf, "dtype") and not isinstance(leaf, NUMBERS):
                raise ValueError(
                    f"drafter: {type(self.value).__name__} is not a pytree of "
                    "arrays; make its class a flax.struct.dataclass, with fields that "
                    "are not arrays as struct.field(pytree_node=False)"
                )
        taps, count = self.taps, len(target.config.layers)
        layers = [as_integer(i) for i in taps] if isinstance(taps, tuple) else [None]
        if any(i is None or not 0 <= i < count for i in layers):
            raise ValueError(
                f"taps: want a tuple of layers in 0..{count - 1}, got {shown(taps)}"
            )

    def check_tree(self, tree: Topology) -> None:
        if isinstance(tree, Beam):
            raise ValueError(
                "tree: a custom drafter fills a fixed tree, such as 'E' or 'chain:4'; "
                "beams need a draft model"
            )
        if isinstance(tree, Auto) and not hasattr(self.value, "search"):
            raise ValueError(
                "tree: 'auto' needs a custom drafter with `search`, see "
                "stree_jax.speculation.adaptive.search; others fill a fixed tree, such "
                "as 'E' or 'chain:4'"
            )

    def bind(self, target: Model, tree: Topology) -> Searcher:
        return self

    def init(self, prompts: Prompts, past: DraftState | None) -> DraftState:
        return self.value.init(prompts, past)

    def propose(
        self,
        state: DraftState,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, DraftState]:
        return self.value.propose(state, root, tree, dist, rule)

    def commit(self, state: DraftState, update: Update) -> DraftState:
        return self.value.commit(state, update)

    def search(self, state: DraftState, query: Query) -> tuple[DraftState, Search]:
        return self.value.search(state, query)
