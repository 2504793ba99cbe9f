"""Memory traffic: the bytes that decoding reads and writes, by stage (Spector and Re
2023, table 1).

With few rows, a pass takes as long as reading what it works on. It reads the weights
once for all rows, and each row's state and attention caches; text that is committed is
written into the state once more. Counted is what the compiled passes go over: caches by
their capacity, and of a mixture all experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stree_jax.models import Model, State
from stree_jax.models.memory import size_of, weights_read
from stree_jax.models.mixer import leaves_of
from stree_jax.speculation.drafter import Reads
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


def state_and_caches(state: State | None) -> tuple[int, int]:
    """Returns the bytes of a state without its attention caches, and of the caches."""
    caches = size_of(leaves_of(state, "cache"))
    return size_of(state) - caches, caches


def of_passes(
    stage: str, model: Model, state: State, passes: int, commits: int
) -> Traffic:
    """Counts the bytes that a model's passes and commits read and write."""
    own, caches = state_and_caches(state)
    return Traffic(
        stage,
        passes,
        passes * weights_read(model),
        (passes + commits) * own,
        passes * caches,
    )


def traffic_of(
    spec: Spec, state: State, reads: Sequence[Reads], calls: int
) -> tuple[Traffic, ...]:
    """Returns the traffic of a generation, the target's first.

    Args:
      state: the target's; only its size matters.
      reads: of the drafter, with passes on the host.
      calls: target passes, of all rows together.
    """
    stages = [of_passes("target", spec.target, state, calls, calls)]
    for one in reads:
        passes = int(max(one.passes, default=0))
        count, commits = passes * one.each, min(calls, passes)
        own, caches = state_and_caches(one.state)
        moved = count * one.weights, (passes + commits) * own, passes * caches
        stages.append(Traffic(one.stage, count, *moved))
    return tuple(stages)
