"""The fastest setup of loaded models that fits in a number of bytes.

`generate(memory=)` is a `GenerateTask` of the search in `fit`; a server's task is in
`server/fitting.py`, with the same setups.
"""

import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax

from stree_jax import models
from stree_jax.buckets import bucket
from stree_jax.checkpoints.load import Model
from stree_jax.default_tree import spec_for
from stree_jax.models.memory import size_of
from stree_jax.sizing.candidates import by_speed
from stree_jax.sizing.fit import Asked, Count, Task, fastest
from stree_jax.sizing.memory import SCRATCH, Room, analysed, lowered_steps, parts_of
from stree_jax.sizing.units import shown_bytes
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.drafters.table import AnyDrafter
from stree_jax.speculation.loop import commit_jit, deepest
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Auto, Topology
from stree_jax.start import Start

log = logging.getLogger(__name__)


class Setup(NamedTuple):
    """A way to decode: its name for messages, and what the loop takes."""

    name: str
    spec: Spec

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class LoadedTask(Task[Asked, Setup]):
    """A search among the setups of loaded models. Everything that is loaded counts,
    also a drafter that is not used.

    Attributes:
      model, drafter, tree, rule: as of `generate`; a tree that is named is the only
        one that is tried.
    """

    model: Model
    drafter: AnyDrafter
    tree: Topology | str | Sequence[int] | None
    rule: Rule | str | None

    @abstractmethod
    def buffers(self, request: Asked) -> Room:
        """Returns the sizes whose measured step times order the candidates."""

    @cached_property
    def weights(self) -> int:
        """Bytes of the model and the drafter."""
        return weights_given(self.model, self.drafter)

    @cached_property
    def plainest(self) -> Setup:
        """Plain decoding, or the tree that is named."""
        if self.tree is None:
            spec = spec_for(self.model, None, None, self.rule, None)
            return Setup("plain decoding", spec)
        spec = spec_for(self.model, self.drafter, self.tree, self.rule, None)
        return Setup(f"tree {self.tree}", spec)

    def least(self, request: Asked) -> Setup:
        return self.plainest

    def candidates(self, request: Asked) -> Iterator[Setup]:
        if self.drafter is None or self.tree is not None:
            yield self.plainest
            return
        target = models.Model(self.model.params, self.model.config)
        for one in by_speed(target, self.drafter, self.buffers(request)):
            try:
                if one.who == "none":
                    yield self.plainest
                else:
                    asked = self.model, one.drafter, one.tree, self.rule
                    spec = spec_for(*asked, None)
                    yield Setup(str(one), spec)
            except ValueError:  # a rule that this tree does not go with
                continue

    def at_most(self, need: int) -> int:
        """Returns the bytes while a program runs that needs `need` beside weights."""
        return self.weights + int(SCRATCH * need)


def weights_given(model: models.Model, drafter: object) -> int:
    """Returns the bytes of all arrays of a target and its drafter, each once."""
    leaves = jax.tree.leaves((model, drafter))
    return size_of({id(x): x for x in leaves if hasattr(x, "dtype")})  # or it's a name


@dataclass(frozen=True)
class GenerateTask(LoadedTask[Start]):
    """One generation; a request is what it starts with.

    Attributes:
      keep: whether the state is committed at the end, and further turns read on.
    """

    keep: bool

    def buffers(self, request: Start) -> Room:
        return Room(request.rows, request.caches(Auto().depth), request.room)

    def count(self, request: Start, candidate: Setup) -> Count:
        spec = candidate.spec
        room = Room(request.rows, request.caches(deepest(spec.policy)), request.room)
        memory = parts_of(spec, request.shapes(spec), room)
        unused = self.weights - memory.weights - memory.drafter_weights
        more = unused + _beside(request)
        steps, promised = memory.steps_total, memory.promised
        if jax.default_backend() != "cpu":  # temporaries are known for the CPU alone
            steps = promised = memory.held
        parts = replace(memory, reading=0).parts  # as in `steps_total`
        return Count(steps + more, promised + more, parts)

    def compiled(self, request: Start, candidate: Setup) -> Iterator[int]:
        return map(self.at_most, needs(candidate.spec, request, self.keep))

    def numbers(self, request: Start) -> dict[str, tuple[int, int]]:
        found = {
            "max_new_tokens": (1, request.room),
            "capacity": (1, request.capacity),
            "prompts": (1, len(request.text)),
            "n": (1, request.samples),
        }
        if request.past is not None:  # its rows are fixed
            del found["prompts"]
        return found

    def lowered(self, request: Start, name: str, value: int) -> Start:
        match name:
            case "max_new_tokens":
                return replace(request, room=bucket(value))
            case "capacity":
                return replace(request, capacity=value)
            case "prompts":
                rows = _rows(request, value * request.samples)
                return replace(request, text=request.text[:value], requests=rows)
        rows = _rows(request, len(request.text) * value)
        return replace(request, samples=value, requests=rows)


def fitted(task: GenerateTask, start: Start, limit: int) -> tuple[Spec, int]:
    """Finds the fastest setup that fits in `limit` bytes, and returns how many bytes it
    leaves. Raises ValueError if nothing fits; see `fit.refusal`."""
    (found,) = fastest(task, [start], limit)
    if task.tree is None:
        took = f"{shown_bytes(found.size)} of {shown_bytes(limit)}"
        log.info("memory: %s takes %s", found.candidate.name, took)
    return found.candidate.spec, limit - found.size


def _beside(start: Start) -> int:
    """Returns the bytes of a past that stays as it is, beside the new state."""
    return 0 if start.past is None or start.take_past else size_of(start.past)


def needs(spec: Spec, start: Start, keep: bool) -> Iterator[int]:
    """Yields the bytes beside the weights while each program runs, by the compiler's
    word; `keep` as of `GenerateTask`."""
    yield _prefill(spec, start)
    decoding = start.shapes(spec)
    held = size_of(decoding)
    yield held + analysed(lowered_steps(spec, decoding)).added + _beside(start)
    if keep:
        last = decoding.pending
        end = commit_jit.lower(decoding.state, last.records, last.path, last.length)
        yield held + analysed(end).added
        yield _prefill(spec, start.continued(spec))


def _prefill(spec: Spec, start: Start) -> int:
    """Returns the bytes beside the weights while the prompts are processed."""
    past = 0 if start.past is None else size_of(start.past)
    ids = 4 * len(start.text) * start.width(deepest(spec.policy))
    return past + size_of(start.requests) + ids + analysed(start.lowered(spec)).added


def _rows(start: Start, rows: int) -> Any:
    """Returns the requests of fewer rows, abstract."""

    def first(x: jax.Array) -> Any:
        by_row = x.ndim > 0 and x.shape[0] == start.rows
        return jax.ShapeDtypeStruct(
            (rows, *x.shape[1:]) if by_row else x.shape, x.dtype
        )

    return jax.tree.map(first, start.requests)
