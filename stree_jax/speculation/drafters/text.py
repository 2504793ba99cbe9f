"""Sources that need no model: prompt lookup, and plain decoding."""

from flax import struct

from stree_jax.common.words import LOOKUP
from stree_jax.models import Model
from stree_jax.speculation.drafter import DrafterBase, NoDrafter
from stree_jax.speculation.drafters.lookup import LookupDrafter
from stree_jax.speculation.source import Source, picked_tree
from stree_jax.speculation.tree import Auto, Beam, Topology, chain


@struct.dataclass
class LookupSource(Source):
    """Prompt lookup, which drafts from earlier parts of the text."""

    value = name = LOOKUP
    has_q = False
    prefers_auto = True
    top1 = 0.3
    trees = ("chain:1", "chain:2", "chain:4", "chain:8")

    def check_tree(self, tree: Topology) -> None:
        if isinstance(tree, Beam):
            raise ValueError(
                "tree: a beam is searched by a model; use a draft model, or 'auto'"
            )

    def fixed_tree(self) -> Topology:
        return Auto()  # `resolve_rule` rejects rules that do not fit it

    def filled(self, tree: Topology) -> Topology:
        return picked_tree(tree)

    def bind(self, target: Model, tree: Topology) -> DrafterBase:
        return LookupDrafter()


@struct.dataclass
class PlainSource(Source):
    """Plain decoding, without a draft."""

    value, name = None, "none"
    trees = ("chain:0",)

    @property
    def timed_as(self) -> Source:
        return LookupSource()

    def check_tree(self, tree: Topology) -> None:
        if tree.size > 1:
            raise ValueError("tree: a tree needs a drafter to fill it; give drafter=")

    def fixed_tree(self) -> Topology:
        return chain(0)

    def bind(self, target: Model, tree: Topology) -> DrafterBase:
        return NoDrafter()
