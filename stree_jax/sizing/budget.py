"""Finds the fastest setup (drafter and tree) of loaded models within a memory limit.

`fit.fastest` searches. The `GenerateTask` here describes to it what a call of
`generate(memory=)` needs. `server/fitting.py` does the same for a server.
"""

import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax

from stree_jax import models
from stree_jax.models import Model
from stree_jax.models.stack.memory import size_of
from stree_jax.sizing.candidates import by_speed
from stree_jax.sizing.fit import Count, RequestT, Task, fastest
from stree_jax.sizing.memory import analysed, lowered_steps, parts_of
from stree_jax.sizing.parts import SCRATCH, BufferSizes
from stree_jax.sizing.units import shown_bytes
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.buckets import bucket
from stree_jax.speculation.default_tree import spec_for
from stree_jax.speculation.drafters.table import AnyDrafter
from stree_jax.speculation.loop import commit_jit, deepest
from stree_jax.speculation.on_mesh import everywhere
from stree_jax.speculation.start import Start
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Auto, Topology

log = logging.getLogger(__name__)


class Setup(NamedTuple):
    """A decoder configuration: its name in messages, and its `Spec`."""

    name: str
    spec: Spec

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class LoadedTask(Task[RequestT, Setup]):
    """A search among the setups of loaded models. All loaded models count towards the
    limit, including a drafter that is not used.

    Attributes:
      model, drafter, tree, rule: as in `generate`. If a tree is named, no other is
        tried.
    """

    model: Model
    drafter: AnyDrafter
    tree: Topology | str | Sequence[int] | None
    rule: Rule | str | None

    @abstractmethod
    def buffers(self, request: RequestT) -> BufferSizes:
        """Returns the buffer sizes at which step times are looked up."""

    @cached_property
    def weights(self) -> int:
        """Bytes of the weights of the model and the drafter."""
        return weights_given(self.model, self.drafter)

    @cached_property
    def plainest(self) -> Setup:
        """The setup that needs least memory: plain decoding, or the named tree."""
        if self.tree is None:
            return self._setup("plain decoding", None, None)
        return self._setup(f"tree {self.tree}", self.drafter, self.tree)

    def _setup(self, name: str, drafter: Any, tree: Any) -> Setup:
        """Returns a setup, on the model's mesh if it has one."""
        spec = spec_for(self.model, drafter, tree, self.rule, None)
        mesh = self.model.mesh
        return Setup(name, spec if mesh is None else everywhere(mesh, spec))

    def least(self, request: RequestT) -> Setup:
        return self.plainest

    def candidates(self, request: RequestT) -> Iterator[Setup]:
        if self.drafter is None or self.tree is not None:
            yield self.plainest
            return
        for one in by_speed(self.model, self.drafter, self.buffers(request)):
            try:
                if one.source == "none":
                    yield self.plainest
                else:
                    yield self._setup(str(one), one.drafter, one.tree)
            except ValueError:  # `spec_for`: the acceptance rule excludes this tree
                continue

    def at_most(self, need: int) -> int:
        """Returns the peak bytes of a program that needs `need` besides the weights."""
        return self.weights + int(SCRATCH * need)


def weights_given(model: models.Model, drafter: object) -> int:
    """Returns the bytes of all arrays of a target and its drafter, each once."""
    leaves = jax.tree.leaves((model, drafter))
    # A drafter may be a name such as "lookup", which has no arrays.
    return size_of({id(x): x for x in leaves if hasattr(x, "dtype")})


@dataclass(frozen=True)
class GenerateTask(LoadedTask[Start]):
    """The search for one call of `generate`; its request is the call's `Start`.

    Attributes:
      keep: True if the state is committed at the end so that the text can be continued.
    """

    keep: bool

    def buffers(self, request: Start) -> BufferSizes:
        return BufferSizes(request.rows, request.caches(Auto().depth), request.room)

    def count(self, request: Start, candidate: Setup) -> Count:
        spec = candidate.spec
        room = BufferSizes(
            request.rows, request.caches(deepest(spec.policy)), request.room
        )
        memory = parts_of(spec, request.shapes(spec), room)
        unused = self.weights - memory.weights - memory.drafter_weights
        more = unused + _beside(request)
        steps, promised = memory.steps_total, memory.promised
        if jax.default_backend() != "cpu":  # temporaries are modelled for the CPU only
            steps = promised = memory.held
        parts = replace(
            memory, reading=0
        ).parts  # prefill is not in `steps_total` either
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
        if request.past is not None:  # the number of rows is fixed by the cached state
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
    """Returns the fastest setup that fits in `limit` bytes and the bytes left over.
    Raises ValueError if nothing fits; see `fit.refusal`."""
    (found,) = fastest(task, [start], limit)
    if task.tree is None:
        took = f"{shown_bytes(found.size)} of {shown_bytes(limit)}"
        log.info("memory: %s takes %s", found.candidate.name, took)
    return found.candidate.spec, limit - found.size


def _beside(start: Start) -> int:
    """Returns the bytes of the cached state that is kept in addition to the new one."""
    return 0 if start.past is None or start.take_past else size_of(start.past)


def needs(spec: Spec, start: Start, keep: bool) -> Iterator[int]:
    """Compiles each program of a generation and yields the bytes that it needs in
    addition to the weights. `keep` is as in `GenerateTask`."""
    yield _prefill(spec, start)
    decoding = start.shapes(spec)
    held = size_of(decoding)
    yield held + analysed(lowered_steps(spec, decoding)).added + _beside(start)
    if keep:
        last = decoding.pending
        place = {"mesh": spec.target.mesh, "cut": spec.target.cut}
        path = last.records, last.path, last.length
        end = commit_jit.lower(decoding.state, *path, **place)
        yield held + analysed(end).added
        yield _prefill(spec, start.continued(spec))


def _prefill(spec: Spec, start: Start) -> int:
    """Returns the bytes that prefill needs in addition to the weights."""
    past = 0 if start.past is None else size_of(start.past)
    ids = 4 * len(start.text) * start.width(deepest(spec.policy))
    return past + size_of(start.requests) + ids + analysed(start.lowered(spec)).added


def _rows(start: Start, rows: int) -> Any:
    """Returns the abstract requests of the first `rows` rows."""

    def first(x: jax.Array) -> Any:
        by_row = x.ndim > 0 and x.shape[0] == start.rows
        return jax.ShapeDtypeStruct(
            (rows, *x.shape[1:]) if by_row else x.shape, x.dtype
        )

    return jax.tree.map(first, start.requests)
