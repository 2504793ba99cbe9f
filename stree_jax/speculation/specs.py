"""Who decodes, and how: a `Spec` from models, heads and names.

Letters: as `loop`.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from stree_jax.checks import shown
from stree_jax.models import (
    Model,
    base_model,
    mtp_model,
    without_mtp,
)
from stree_jax.models.heads import Heads, head_of
from stree_jax.speculation.accept import Rule, resolve_rule
from stree_jax.speculation.adaptive.drafter import AdaptiveDrafter
from stree_jax.speculation.adaptive.guessed_levels import Stage
from stree_jax.speculation.adaptive.policy import (
    AdaptivePolicy,
    StepTimes,
    assumed_times,
)
from stree_jax.speculation.drafter import (
    Drafter,
    NoDrafter,
)
from stree_jax.speculation.drafters.beam import beam_drafter
from stree_jax.speculation.drafters.lookup import LookupDrafter
from stree_jax.speculation.drafters.medusa import MedusaDrafter
from stree_jax.speculation.drafters.model import ModelDrafter, fill_tree
from stree_jax.speculation.drafters.mtp import MTPDrafter
from stree_jax.speculation.drafters.ngrams import NGrams
from stree_jax.speculation.drafters.staged import Staged
from stree_jax.speculation.policy import FixedTree
from stree_jax.speculation.step import Spec, passes_skip
from stree_jax.speculation.tree import Auto, Beam, Budget, Topology, Tree

AUTO = "auto"  # the default drafter of the API and, but for the demo, of commands
LOOKUP = "lookup"  # the drafter that needs no model
MTP = "mtp"  # layers of the target itself
MODEL_WIDTH, MODEL_DEPTH = 3, 8  # most of a model's levels, with tree "auto"
HEADS_WIDTH = 5  # their guesses cost nothing after the first, and spread
GUESSES = 2  # at least, that n-grams make of a model's level, with tree "auto"


def is_custom(drafter: Any) -> bool:
    """True if an object has the methods of the `Drafter` protocol."""
    methods = ("init", "propose", "commit")
    return not isinstance(drafter, type) and all(hasattr(drafter, m) for m in methods)


def named_drafter(drafter: Any) -> Any:
    """Returns "lookup" for "auto", which stands for it, and any other value as it is.

    Raises:
      ValueError: the name "none", which the command line has for None.
    """
    if not isinstance(drafter, str):
        return drafter
    if drafter.lower() in ("none", "plain"):
        raise ValueError(
            f"drafter: got the string {drafter!r}; give None for plain decoding"
        )
    return LOOKUP if drafter == AUTO else drafter


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
    drafter: Model | Heads | Drafter | str | None,
    tree: Topology,
    rule: Rule,
    times: StepTimes | None = None,
) -> Spec:
    """Who decodes, from models.

    Args:
      drafter: a model fills static trees, or searches a beam; `Heads` fill static trees
        that are no deeper than there are heads; `NGrams` fill static trees, and guess
        for the model of a `Staged`, with tree "auto", too; "lookup" looks the text's
        end up in the text, as does tree "auto" with any; "mtp" fills static trees with
        the target's own layers for it; None drafts nothing.
      times: of steps, for tree "auto"; None: assumed ones.

    Raises:
      ValueError: they do not go together.
    """
    check_times(times)
    V = target.config.num_tokens
    if tree.children > V and not isinstance(tree, Auto):
        raise ValueError(
            f"tree: {tree.children} children a node, but only {V} tokens to fill them"
        )
    if isinstance(drafter, str) and drafter == MTP:
        return _mtp_spec(target, tree, rule)
    target = without_mtp(target)  # and without what else an API's model has
    if isinstance(drafter, str) and drafter != LOOKUP:
        raise ValueError(
            f"drafter: want a model, 'lookup' or 'mtp', got {shown(drafter)}"
        )
    if isinstance(tree, Auto):
        adaptive = _adaptive_drafter(target, drafter, tree)
        if times is None:
            times = assumed_times(tree, adaptive.model is not None)
        if np.shape(times.verify) != np.shape(tree.sizes):
            raise ValueError(
                f"times: want one of each size {tree.sizes}, "
                f"got {np.shape(times.verify)}"
            )
        policy = AdaptivePolicy(times, tree, shares=passes_skip(target))
        return Spec(target, adaptive, policy, rule)
    own: Drafter
    match drafter:
        case None:
            own = NoDrafter()
        case str():
            own, tree = LookupDrafter(), picked_tree(tree)
        case Heads():
            own, tree = _on_target(drafter, target), _as_deep(drafter, tree)
        case NGrams():
            own, tree = drafter, _fillable(tree)
            resolve_rule(rule, picked_tree(tree))  # they have no probabilities to test
        case Staged():
            own, tree = bare(drafter), _fillable(tree)
        case Model():
            model = without_mtp(drafter)
            beam = isinstance(tree, Beam)
            own = beam_drafter(model) if beam else ModelDrafter(model, fill_tree)
        case _:
            if not is_custom(drafter):
                raise ValueError(
                    "drafter: want a model, heads, n-grams, 'lookup', 'mtp' or an "
                    f"instance of a custom drafter, got {shown(drafter)}"
                )
            _check_pytree(drafter)
            if isinstance(tree, Beam):
                raise ValueError(
                    "tree: a custom drafter fills a fixed tree, such as 'E' or "
                    "'chain:4'; beams want a model"
                )
            own = drafter
    return Spec(target, own, FixedTree(tree), rule)


def _check_pytree(drafter: Any) -> None:
    """Raises ValueError for a custom drafter that jax.jit does not take."""
    for leaf in jax.tree.leaves(drafter):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
            raise ValueError(
                f"drafter: {type(drafter).__name__} is not a pytree of arrays; make "
                "its class a flax.struct.dataclass, with fields that are not arrays "
                "as struct.field(pytree_node=False)"
            )


def _adaptive_drafter(target: Model, drafter: Any, tree: Auto) -> AdaptiveDrafter:
    """Who drafts for tree "auto": lookup, and beside it a model or heads."""
    guesser: Model | MedusaDrafter | None = None
    width, levels, stage = MODEL_WIDTH, MODEL_DEPTH, None
    match drafter:
        case Staged():
            guesser = without_mtp(drafter.model)
            if isinstance(drafter.guesser, NGrams):
                ahead = min(drafter.ahead, tree.depth)
                stage = Stage(drafter.guesser, ahead, max(drafter.width, GUESSES))
        case Model():
            guesser = without_mtp(drafter)
        case Heads():
            guesser = _on_target(drafter, target)
            width, levels = HEADS_WIDTH, drafter.config.heads
        case NGrams():
            _fillable(tree)
        case str():
            pass
        case _:
            raise ValueError(
                "tree: 'auto' wants a model, heads or 'lookup' to draft; a custom "
                "drafter fills a fixed tree, such as 'E' or 'chain:4'"
            )
    return AdaptiveDrafter(
        guesser,
        width=min(width, target.config.num_tokens),
        depth=min(levels, tree.depth),
        largest=tree.menu[-1],
        stage=stage,
    )


def _on_target(heads: Heads, target: Model) -> MedusaDrafter:
    return MedusaDrafter(heads, head_of(target))


def _mtp_spec(target: Model, tree: Topology, rule: Rule) -> Spec:
    """A target whose own layers draft for it; raises ValueError if it has none."""
    if not target.config.mtp:
        raise ValueError(
            "drafter: 'mtp' wants a target loaded with its MTP layers: "
            "stree_jax.load(path, mtp=True)"
        )
    if not isinstance(tree, Tree):
        raise ValueError("tree: 'mtp' fills a fixed tree, such as 'E' or 'chain:4'")
    drafter = MTPDrafter(mtp_model(target))
    return Spec(without_mtp(target), drafter, FixedTree(tree), rule)


def bare(drafter: Any) -> Any:
    """Stages without what API's models have beside parameters; a model is a stage."""
    match drafter:
        case Staged():
            model, guesser = base_model(drafter.model), bare(drafter.guesser)
            return replace(drafter, model=model, guesser=guesser)
        case Model():
            return Staged(base_model(drafter))
        case _:
            return drafter


def _fillable(tree: Topology) -> Topology:
    if not isinstance(tree, Tree):
        raise ValueError(
            "tree: n-grams fill a fixed tree, alone or for a drafter, such as 'E' or "
            "'chain:4'; beams and 'auto' want a model"
        )
    return tree


def _as_deep(heads: Heads, tree: Topology) -> Tree:
    count = heads.config.heads
    if not isinstance(tree, Tree):
        raise ValueError(
            f"tree: heads fill a fixed tree, such as 'chain:{count}', or 'auto'; "
            "beams want a model"
        )
    if tree.depth > count:
        raise ValueError(
            f"tree: {tree.depth} levels want as many heads, and there are {count}"
        )
    return tree


def picked_tree(tree: Topology) -> Topology:
    """A tree of as many nodes, as deep, whose nodes lookup chooses."""
    return tree if tree.size == 1 else Budget(tree.size, tree.depth)
