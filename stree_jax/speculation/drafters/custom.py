"""A custom drafter: any object with the methods of the `Drafter` protocol."""

from typing import Any

import jax
from flax import struct

from stree_jax.checks import as_integer, shown
from stree_jax.models import Model, Taps
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.search import Query, Search, Searcher
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.drafter import DraftState, Prompts, Update
from stree_jax.speculation.source import Source
from stree_jax.speculation.tree import Auto, Beam, Topology

METHODS = ("init", "propose", "commit")


@struct.dataclass
class CustomDrafter(Searcher):
    """A drafter around an object that need not inherit `DrafterBase`.

    Attributes:
      inner: the object. Beside the methods of `Drafter` it may have `taps`,
        `observes_prompts`, and `search` for tree "auto".
    """

    inner: Any

    @property
    def taps(self) -> Taps:  # type: ignore[override]
        return tuple(getattr(self.inner, "taps", ()))

    @property
    def observes_prompts(self) -> bool:
        old_name = getattr(self.inner, "hears_prompts", bool(self.taps))
        return bool(getattr(self.inner, "observes_prompts", old_name))

    def init(self, prompts: Prompts, past: DraftState | None) -> DraftState:
        return self.inner.init(prompts, past)

    def propose(
        self,
        state: DraftState,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, DraftState]:
        return self.inner.propose(state, root, tree, dist, rule)

    def commit(self, state: DraftState, update: Update) -> DraftState:
        return self.inner.commit(state, update)

    def search(self, state: DraftState, query: Query) -> tuple[DraftState, Search]:
        return self.inner.search(state, query)


@struct.dataclass
class CustomSource(Source):
    """A custom drafter."""

    drafter: Any
    needs_trace = True

    @classmethod
    def of(cls, value: Any) -> Source | None:
        is_class = isinstance(value, type)
        fits = not is_class and all(hasattr(value, name) for name in METHODS)
        return cls(value) if fits else None

    @property
    def value(self) -> Any:
        return self.drafter

    @property
    def models(self) -> tuple[Model, ...]:
        return CustomDrafter(self.drafter).models

    def check(self, target: Model) -> None:
        for leaf in jax.tree.leaves(self.drafter):
            if not hasattr(leaf, "dtype") and not isinstance(
                leaf, int | float | complex
            ):
                raise ValueError(
                    f"drafter: {type(self.drafter).__name__} is not a pytree of "
                    "arrays; make its class a flax.struct.dataclass, with fields that "
                    "are not arrays as struct.field(pytree_node=False)"
                )
        taps, count = getattr(self.drafter, "taps", ()), len(target.config.layers)
        if not isinstance(taps, tuple) or not all(
            as_integer(i) is not None and 0 <= i < count for i in taps
        ):
            raise ValueError(
                f"taps: want a tuple of layers in 0..{count - 1}, got {shown(taps)}"
            )

    def check_tree(self, tree: Topology) -> None:
        if isinstance(tree, Beam):
            raise ValueError(
                "tree: a custom drafter fills a fixed tree, such as 'E' or 'chain:4'; "
                "beams want a model"
            )
        if isinstance(tree, Auto) and not hasattr(self.drafter, "search"):
            raise ValueError(
                "tree: 'auto' wants a custom drafter with `search`, see "
                "stree_jax.speculation.adaptive.search; others fill a fixed tree, such "
                "as 'E' or 'chain:4'"
            )

    def bind(self, target: Model, tree: Topology, rule: Rule) -> CustomDrafter:
        return CustomDrafter(self.drafter)

    def searcher(self, target: Model, tree: Auto) -> CustomDrafter:
        return CustomDrafter(self.drafter)
