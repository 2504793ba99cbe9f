"""Who decodes, from what `generate` is told: the tree and rule that suit a drafter."""

from collections.abc import Sequence

import numpy as np

from stree_jax import models
from stree_jax.arguments import check_drafter
from stree_jax.checkpoints.load import Model
from stree_jax.checks import decimal, shown
from stree_jax.models.heads import Heads
from stree_jax.speculation.accept import Rule, resolve_rule
from stree_jax.speculation.adaptive.policy import StepTimes
from stree_jax.speculation.drafter import Drafter
from stree_jax.speculation.drafters.ngrams import NGrams
from stree_jax.speculation.drafters.staged import Staged
from stree_jax.speculation.gain import Acceptance, greedy_tree
from stree_jax.speculation.specs import LOOKUP, MTP, check_times, make_spec, picked_tree
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import (
    MAX_NODES,
    Auto,
    Beam,
    Topology,
    Tree,
    chain,
    resolve_tree,
)

DEFAULT_TREE = "E"
SPARSE_NODES = 16  # of the default tree of heads
ASSUMED_RANKS = 10
DEFAULT_RULE = "naive/coupled"


def spec_for(
    model: Model,
    drafter: models.Model | Heads | Drafter | str | None,
    tree: Topology | str | Sequence[int] | None,
    rule: Rule | str | None,
    times: StepTimes | None,
) -> Spec:
    """Returns how to decode; raises ValueError for what does not go together."""
    if drafter is None and tree is not None:
        raise ValueError("tree: a tree needs a drafter to fill it; give drafter=")
    shape: Topology = chain(0)
    if drafter is not None:
        check_drafter(model, drafter)
        shape = tree_for(drafter, tree, rule)
    check_times(times)
    if times is not None and not isinstance(shape, Auto):
        raise ValueError("times: only tree 'auto' asks for them")
    if rule is None:
        rule = "naive" if isinstance(shape, Beam) else DEFAULT_RULE
    lookup = isinstance(drafter, str) and drafter == LOOKUP
    if lookup and isinstance(shape, Beam):
        raise ValueError(
            "tree: a beam is searched by a model; give one, or take 'auto'"
        )
    no_q = lookup or isinstance(drafter, NGrams)
    rule = resolve_rule(rule, picked_tree(shape) if no_q else shape)
    return make_spec(model, drafter, shape, rule, times)


def tree_for(
    drafter: models.Model | Heads | Drafter | str,
    tree: Topology | str | Sequence[int] | None,
    rule: Rule | str | None,
) -> Topology:
    """The tree of this name; None: what suits the drafter and the rule.

    That is "auto" for models, with or without n-grams that guess for them, for heads
    and for lookup, unless the rule wants a fixed tree;
    else the sparse one of `usual_nodes` for heads, and `DEFAULT_TREE` for others.
    "sparse:N" is the best tree of N nodes by the accuracies that came with heads.
    """
    kind, _, nodes = tree.partition(":") if isinstance(tree, str) else ("", "", "")
    if kind == "sparse":
        if not isinstance(drafter, Heads):
            raise ValueError("tree: 'sparse:N' goes by the accuracies of Medusa heads")
        return sparse_tree(drafter, nodes)
    if tree is not None:
        return resolve_tree(tree)
    fixed = resolve_tree(DEFAULT_TREE)
    if isinstance(drafter, Heads):
        fixed = sparse_tree(drafter, usual_nodes(drafter))
    by_itself = isinstance(drafter, models.Model | Heads | str) and drafter != MTP
    guessed = isinstance(drafter, Staged) and isinstance(drafter.guesser, NGrams)
    if not (by_itself or guessed):
        return fixed
    try:
        resolve_rule(DEFAULT_RULE if rule is None else rule, Auto())
    except ValueError:  # of rules that are none at all, the fixed tree says so
        return Auto() if isinstance(drafter, str) else fixed
    return Auto()


def sparse_tree(heads: Heads, nodes: int | str) -> Tree:
    """The tree of so many nodes that gains most by the heads' accuracies; see
    `cost.greedy_tree`."""
    size = decimal(str(nodes)) or 0
    if not 1 < size <= MAX_NODES:
        raise ValueError(
            f"tree: sparse:N wants N in 2..{MAX_NODES}, got {shown(nodes)}"
        )
    return greedy_tree(Acceptance(np.array(accuracy_of(heads))), size)


def usual_nodes(heads: Heads) -> int:
    """Of the default tree: few heads or ranks have no more combinations."""
    levels, ranks = np.shape(accuracy_of(heads))
    return min(SPARSE_NODES, sum(ranks**depth for depth in range(levels + 1)))


def accuracy_of(heads: Heads) -> tuple[tuple[float, ...], ...]:
    """[K][R] of `HeadsConfig.accuracy`, or what is assumed where nobody measured."""
    if heads.config.accuracy:
        return heads.config.accuracy
    ranks = range(ASSUMED_RANKS)
    best = (0.6 * 0.8**k for k in range(heads.config.heads))
    return tuple(tuple(0.6 * p * 0.4**r for r in ranks) for p in best)
