"""A `Spec` from a target, a source of drafts and a tree.

Letters: as `loop`.
"""

from typing import Any

import numpy as np

from stree_jax.checks import shown
from stree_jax.models import Model, without_mtp
from stree_jax.speculation.accept import Rule, resolve_rule
from stree_jax.speculation.adaptive.drafter import AdaptiveDrafter
from stree_jax.speculation.adaptive.policy import (
    AdaptivePolicy,
    StepTimes,
    assumed_times,
)
from stree_jax.speculation.adaptive.search import Searcher
from stree_jax.speculation.drafters.table import AnyDrafter, source_of
from stree_jax.speculation.policy import FixedTree
from stree_jax.speculation.source import Source, picked_tree
from stree_jax.speculation.step import Spec, passes_skip
from stree_jax.speculation.tree import Auto, Topology

AUTO = "auto"  # the default drafter of the API and, but for the demo, of commands


def check_times(times: Any) -> None:
    """Raises ValueError for step times of another type."""
    if times is not None and not isinstance(times, StepTimes):
        hint = "; give its .on_device()" if hasattr(times, "on_device") else ""
        raise ValueError(
            "times: want StepTimes, as tune(...).on_device() makes them, got "
            f"{shown(times)}{hint}"
        )


def make_spec(
    target: Model,
    drafter: AnyDrafter | Source,
    tree: Topology,
    rule: Rule,
    times: StepTimes | None = None,
) -> Spec:
    """Returns how a target is decoded.

    Args:
      drafter: a model fills static trees, or searches a beam; `Heads` fill static trees
        that are no deeper than there are heads; `NGrams` fill static trees; `Staged`
        does, and guesses for tree "auto", too; "lookup" drafts what followed the text's
        last tokens before, as does tree "auto" beside any drafter; "mtp" uses the
        target's own layers; a custom drafter fills static trees, and those of "auto" if
        it has a `search`; None drafts nothing.
      times: of steps, for tree "auto". If None, they are assumed.

    Raises:
      ValueError: the arguments do not go together.
    """
    check_times(times)
    V = target.config.num_tokens
    if tree.children > V and not isinstance(tree, Auto):
        raise ValueError(
            f"tree: {tree.children} children a node, but only {V} tokens to fill them"
        )
    source = source_of(drafter)
    source.check(target)
    source.check_tree(tree)
    plain_target = without_mtp(target)  # and without what else an API's model has
    bound = source.bind(target, tree)
    if not isinstance(tree, Auto):
        if not source.has_q:
            resolve_rule(rule, picked_tree(tree))
        return Spec(plain_target, bound, FixedTree(source.filled(tree)), rule)
    searcher = bound if isinstance(bound, Searcher) else None
    width, levels = source.search_size
    adaptive = AdaptiveDrafter(
        searcher,
        width=min(width, V),
        depth=min(levels, tree.depth),
        largest=tree.menu[-1],
    )
    if times is None:
        times = assumed_times(tree, searcher is not None)
    if np.shape(times.verify) != np.shape(tree.sizes):
        raise ValueError(
            f"times: want one of each size {tree.sizes}, got {np.shape(times.verify)}"
        )
    policy = AdaptivePolicy(times, tree, shares=passes_skip(plain_target))
    return Spec(plain_target, adaptive, policy, rule)
