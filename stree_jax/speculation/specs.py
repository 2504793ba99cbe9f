"""Makes a `Spec` from a target, a drafter and a tree.

Letters: as `loop`.
"""

from typing import Any

import numpy as np

from stree_jax.common.checks import shown
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


def check_times(times: Any) -> None:
    """Raises ValueError unless `times` is None or a `StepTimes`."""
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
    """Returns the configuration of a decoder.

    Args:
      target: the target model.
      drafter: one of
        - a draft model, which fills static trees or searches a beam,
        - `Heads`, which fill static trees that are at most as deep as the number of
          heads,
        - `NGrams`, which fill static trees,
        - `Staged`, which fills static trees and also guesses levels for tree "auto",
        - "lookup" (prompt lookup), which copies continuations from earlier in the text.
          Tree "auto" does so with any drafter,
        - "mtp", which uses the target's MTP layers,
        - "auto", which is "mtp" for a target with MTP layers, and otherwise "lookup",
        - a custom drafter, which fills static trees, and trees of "auto" if it has a
          `search`,
        - None, for plain decoding.
      tree: the tree to draft.
      rule: the acceptance rule.
      times: measured step times for tree "auto". If None, times are assumed.

    Raises:
      ValueError: the arguments do not fit together.
    """
    check_times(times)
    V = target.config.num_tokens
    if tree.children > V and not isinstance(tree, Auto):
        raise ValueError(
            f"tree: {tree.children} children per node, but the vocabulary has only {V} "
            "tokens"
        )
    source = source_of(drafter, target.config)
    source.check(target)
    source.check_tree(tree)
    # A plain `Model`, without the fields that only the API's model has.
    plain_target = without_mtp(target)
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
            f"times: want one per size {tree.sizes}, got {np.shape(times.verify)}"
        )
    policy = AdaptivePolicy(times, tree, shares=passes_skip(plain_target))
    return Spec(plain_target, adaptive, policy, rule)
