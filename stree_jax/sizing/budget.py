"""`generate` within a number of bytes: the fastest setup that fits, or a refusal before
any token."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax

from stree_jax.buckets import bucket
from stree_jax.models.memory import size_of
from stree_jax.sizing.fit import Count, Number, fastest, number_of
from stree_jax.sizing.memory import Room, analysed, lowered_steps, parts_of
from stree_jax.sizing.setups import LoadedTask, Setup
from stree_jax.sizing.units import shown_bytes
from stree_jax.speculation.loop import commit_jit, deepest
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Auto
from stree_jax.start import Start

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerateTask(LoadedTask[Start]):
    """One generation; a request is what it starts with.

    Attributes:
      keep: whether the state is committed at the end, and further turns read on.
    """

    keep: bool

    def buffers(self, request: Start) -> Room:
        return Room(request.rows, request.caches(Auto().depth), request.room)

    def described(self, request: Start, candidate: Setup) -> str:
        return candidate.name

    def count(self, request: Start, candidate: Setup) -> Count:
        spec = candidate.spec
        room = Room(request.rows, request.caches(deepest(spec.policy)), request.room)
        memory = parts_of(spec, request.shapes(spec), room)
        unused = self.weights - memory.weights - memory.drafter_weights
        more = unused + _beside(request)
        steps, promised = memory.steps_total, memory.promised
        if jax.default_backend() != "cpu":  # temporaries are known for the CPU alone
            steps = promised = memory.held
        return Count(self.weights, steps + more, promised + more, memory.parts)

    def compiled(self, request: Start, candidate: Setup) -> Iterator[int]:
        return map(self.at_most, needs(candidate.spec, request, self.keep))

    def numbers(self, request: Start) -> list[Number[Start]]:
        prompts = Number("prompts", 1, len(request.text), _fewer_prompts)
        return [
            Number("max_new_tokens", 1, request.room, _shorter),
            number_of(request, "capacity", 1),
            *([prompts] if request.past is None else []),
            Number("n", 1, request.samples, _fewer_samples),
        ]


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


def _shorter(start: Start, tokens: int) -> Start:
    return replace(start, room=bucket(tokens))


def _fewer_prompts(start: Start, prompts: int) -> Start:
    requests = _rows(start, prompts * start.samples)
    return replace(start, text=start.text[:prompts], requests=requests)


def _fewer_samples(start: Start, samples: int) -> Start:
    return replace(
        start, samples=samples, requests=_rows(start, len(start.text) * samples)
    )


def _rows(start: Start, rows: int) -> Any:
    """Returns the requests of fewer rows, abstract."""

    def first(x: jax.Array) -> Any:
        by_row = x.ndim > 0 and x.shape[0] == start.rows
        return jax.ShapeDtypeStruct(
            (rows, *x.shape[1:]) if by_row else x.shape, x.dtype
        )

    return jax.tree.map(first, start.requests)
