"""Chooses the default tree and acceptance rule for a source of draft tokens."""

from collections.abc import Sequence

from stree_jax.models import Model
from stree_jax.speculation.accept import Rule, resolve_rule
from stree_jax.speculation.adaptive.policy import StepTimes
from stree_jax.speculation.drafters.table import AnyDrafter, source_of
from stree_jax.speculation.source import Source, picked_tree
from stree_jax.speculation.specs import check_times, make_spec
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Auto, Beam, Topology, resolve_tree

DEFAULT_RULE = "naive/coupled"


def spec_for(
    model: Model,
    drafter: AnyDrafter | Source,
    tree: Topology | str | Sequence[int] | None,
    rule: Rule | str | None,
    times: StepTimes | None,
) -> Spec:
    """Returns the configuration of a decoder. Raises ValueError for arguments that do
    not fit together."""
    source = source_of(drafter, model.config)
    if source.value is None and tree is not None:
        raise ValueError("tree: a tree needs a drafter to fill it; give drafter=")
    source.check(model)
    shape = tree_for(source, tree, rule)
    check_times(times)
    if times is not None and not isinstance(shape, Auto):
        raise ValueError("times: only tree 'auto' uses them")
    if rule is None:
        rule = "naive" if isinstance(shape, Beam) else DEFAULT_RULE
    source.check_tree(shape)
    rule = resolve_rule(rule, shape if source.has_q else picked_tree(shape))
    return make_spec(model, source, shape, rule, times)


def tree_for(
    drafter: AnyDrafter | Source,
    tree: Topology | str | Sequence[int] | None,
    rule: Rule | str | None,
) -> Topology:
    """Returns the tree of a name. If the name is None, returns the default tree.

    The default is "auto" if the source prefers it and the rule allows it, and otherwise
    the source's fixed tree. "sparse:N" is the best tree of N nodes by the accuracies
    that are stored with Medusa heads.
    """
    source = source_of(drafter)
    kind, _, nodes = tree.partition(":") if isinstance(tree, str) else ("", "", "")
    if kind == "sparse":
        return source.sparse_tree(nodes)
    if tree is not None:
        return resolve_tree(tree)
    if not source.prefers_auto:
        return source.fixed_tree()
    try:
        resolve_rule(DEFAULT_RULE if rule is None else rule, Auto())
    except ValueError:
        return source.fixed_tree()  # an unknown rule raises an error later
    return Auto()
