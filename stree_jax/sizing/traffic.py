"""Memory traffic: the bytes that decoding reads and writes, by stage (Spector and Re
2023, table 1).

With few rows, a pass takes as long as reading what it works on. It reads the weights
once for all rows, and each row's state and attention caches; text that is committed is
written into the state once more. Counted is what the compiled passes go over: caches by
their capacity, and of a mixture all experts.
"""

from dataclasses import dataclass, replace
from typing import Any

from stree_jax.models import Model, State
from stree_jax.models.heads import Heads
from stree_jax.models.memory import size_of
from stree_jax.models.mixer import leaves_of
from stree_jax.speculation.adaptive.drafter import Looking
from stree_jax.speculation.drafters.medusa import LastHidden, MedusaDrafter
from stree_jax.speculation.drafters.model import Reading
from stree_jax.speculation.drafters.mtp import Heard
from stree_jax.speculation.drafters.ngrams import WAYS, NGrams
from stree_jax.speculation.drafters.staged import StagedState
from stree_jax.speculation.step import Spec


@dataclass(frozen=True)
class Traffic:
    """Of one stage in a whole generation.

    Attributes:
      stage: "target", "drafter", "inner drafter", "n-gram" or "heads".
      passes: of the model, or lookups of an n-gram table.
      weights: bytes read of them; what is read of a table.
      state: bytes read and written of states.
      caches: bytes read of attention caches.
    """

    stage: str
    passes: int
    weights: int
    state: int
    caches: int

    def total(self, caches: bool = True) -> int:
        """Bytes, with or without what attention caches take."""
        return self.weights + self.state + (self.caches if caches else 0)


def weights_read(model: Model) -> int:
    """Bytes of weights that a pass reads: all but an embedding that is no head."""
    total = size_of(model.params)
    if not model.config.tie_embeddings:
        total -= size_of(model.params["embedding"])
    return total


def state_and_caches(state: State) -> tuple[int, int]:
    """Returns the bytes of a state without its attention caches, and of those."""
    caches = size_of(leaves_of(state, "cache"))
    return size_of(state) - caches, caches


def of_passes(
    stage: str, model: Model, state: State, passes: int, commits: int
) -> Traffic:
    """What so many passes and commits of a model take."""
    own, caches = state_and_caches(state)
    return Traffic(
        stage,
        passes,
        passes * weights_read(model),
        (passes + commits) * own,
        passes * caches,
    )


@dataclass(frozen=True)
class Drafting:
    """A drafting model, or a table that drafts for one.

    Attributes:
      stage: its name.
      who: what is read.
      state: a model's.
      passes: [B] int32, of the model, or of the one that asks the table.
      levels: that the table guesses for each of them.
      contexts: that it looks up for a level; None: the inner nodes of a fixed tree.
    """

    stage: str
    who: Model | NGrams | MedusaDrafter
    state: State | None
    passes: Any
    levels: int = 0
    contexts: int | None = None


def drafting_stages(drafter: Any, drafting: Any) -> list[Drafting]:
    """Who drafted, the outermost first; what keeps no count is left out."""
    if isinstance(drafting, Reading | Heard):
        return [Drafting("drafter", drafter.model, drafting.state, drafting.passes)]
    if isinstance(drafting, Looking) and isinstance(drafting.reading, LastHidden):
        return [Drafting("heads", drafter.model, None, drafting.passes)]
    if isinstance(drafting, Looking) and isinstance(drafting.reading, State):
        own = Drafting("drafter", drafter.model, drafting.reading, drafting.passes)
        stage = drafter.stage
        if stage is None:
            return [own]
        contexts = drafter.width + (stage.ahead - 1) * stage.width
        table = Drafting("n-gram", stage.ngrams, None, drafting.guessing, 1, contexts)
        return [own, table]
    if isinstance(drafting, LastHidden):
        return [Drafting("heads", drafter, None, drafting.passes)]
    if not isinstance(drafting, StagedState):
        return []
    own, *_ = drafting_stages(drafter, drafting.reading)
    if isinstance(drafter.guesser, NGrams):
        each = drafter.ahead * (1 if drafter.width == 1 else 2)  # others, apart
        return [own, Drafting("n-gram", drafter.guesser, None, own.passes, each)]
    inner = drafting_stages(drafter.guesser, drafting.inner)
    return [own, *(replace(d, stage=f"inner {d.stage}") for d in inner)]


def traffic_of(
    spec: Spec, state: State, drafting: list[Drafting], calls: int
) -> tuple[Traffic, ...]:
    """Of a generation, the target first.

    Args:
      state: the target's; only its size is looked at.
      drafting: with passes on the host.
      calls: of the target, for all rows together.
    """
    stages = [of_passes("target", spec.target, state, calls, calls)]
    for d in drafting:
        passes = int(max(d.passes, default=0))
        if isinstance(d.who, MedusaDrafter):
            stages.append(_heads(d.who, passes, spec))
        elif isinstance(d.who, NGrams):
            contexts = d.contexts
            if contexts is None:
                (tree,) = spec.policy.menu
                contexts = getattr(tree, "inner", 1)
            stages.append(_lookups(d.who, passes * d.levels * contexts))
        elif d.state is not None:
            commits = min(calls, passes)
            stages.append(of_passes(d.stage, d.who, d.state, passes, commits))
    return tuple(stages)


def _heads(drafter: MedusaDrafter, passes: int, spec: Spec) -> Traffic:
    """Of drafting so often with as many heads as trees are deep."""
    deepest = max(tree.depth for tree in spec.policy.menu)
    each = heads_read(drafter.heads, min(deepest, drafter.heads.config.heads))
    if not drafter.heads.config.own_output:
        each += weights_read(drafter.output)
    return Traffic("heads", passes, passes * each, 0, 0)


def heads_read(heads: Heads, count: int) -> int:
    """Bytes of the first `count` heads, without an output that is the model's."""
    first = [heads.params[f"head_{k}"] for k in range(count)]
    return size_of(first)


def _lookups(ngrams: NGrams, count: int) -> Traffic:
    """Of looking up so many contexts, each in the tables of all lengths."""
    K = ngrams.common.shape[0]
    bytes_ = sum(4 * (WAYS * t.contexts.shape[1] + 2 * K + 1) for t in ngrams.tables)
    return Traffic("n-gram", count, count * bytes_, 0, 0)
