"""Memory traffic: the bytes that decoding reads and writes, by stage (Spector and Re
2023, table 1).

With few rows, a pass is bound by memory bandwidth. It reads the weights once for all
rows, and the state and attention caches of each row. Committing accepted tokens writes
the state once more. Caches count with their whole capacity and a mixture of experts
with all experts, as the compiled passes read them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stree_jax.models import Model, State
from stree_jax.models.layers.mixer import leaves_of
from stree_jax.models.stack.memory import size_of, weights_read
from stree_jax.speculation.drafter import Reads
from stree_jax.speculation.step import Spec


@dataclass(frozen=True)
class Traffic:
    """Memory traffic of one stage in a whole generation.

    Attributes:
      stage: "target", "drafter", "inner drafter", "n-gram" or "heads".
      passes: forward passes of the model, or lookups in an n-gram table.
      weights: bytes of weights, or of the table, that were read.
      state: bytes of SSM states and windows that were read and written.
      caches: bytes of attention caches that were read.
    """

    stage: str
    passes: int
    weights: int
    state: int
    caches: int

    def total(self, caches: bool = True) -> int:
        """Returns all bytes, with or without the attention caches."""
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
    """Returns the traffic of each stage of a generation; the target comes first.

    Args:
      spec: the configuration of the decoder.
      state: the target's state; only its size matters.
      reads: the result of `Drafter.reads`, copied to the host.
      calls: number of target passes.
    """
    stages = [of_passes("target", spec.target, state, calls, calls)]
    for one in reads:
        passes = int(max(one.passes, default=0))
        count, commits = passes * one.each, min(calls, passes)
        own, caches = state_and_caches(one.state)
        moved = count * one.weights, (passes + commits) * own, passes * caches
        stages.append(Traffic(one.stage, count, *moved))
    return tuple(stages)
