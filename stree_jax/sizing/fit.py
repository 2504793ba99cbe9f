"""Searches for the fastest setup that fits a memory limit, and words the refusal.

`generate(memory=)`, `plan` and `serve --memory` each describe a `Task`: which
candidates could decode a request, and how their bytes are counted. `fastest` tries
requests in order of preference and candidates in order of expected speed. It predicts
their bytes first. If a candidate may fit, the task compiles the programs that would
run, and the compiler's memory analysis decides.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from stree_jax.sizing.units import shown_bytes

# Predictions are at most this factor too high. A candidate beyond it is not compiled.
TOLERANCE = 1.05
TRIES = 4  # candidates to compile before only the smallest one is tried

RequestT = TypeVar("RequestT")  # a request
SetupT = TypeVar("SetupT")  # a candidate


@dataclass(frozen=True)
class Count:
    """Bytes of a candidate for a request.

    Attributes:
      predicted: expected total.
      promised: total with a margin, an upper bound.
      parts: bytes by name.
    """

    predicted: int
    promised: int
    parts: Mapping[str, int]


@dataclass(frozen=True)
class Found(Generic[RequestT, SetupT]):
    """A request, a candidate that decodes it, and the bytes that it needs."""

    request: RequestT
    candidate: SetupT
    size: int


class Task(ABC, Generic[RequestT, SetupT]):
    """The caller's side of the search: its candidates and how their bytes are counted.

    Attributes:
      tolerance: a candidate is skipped if its prediction exceeds the limit by more than
        this factor.
    """

    tolerance = TOLERANCE

    @abstractmethod
    def least(self, request: RequestT) -> SetupT:
        """Returns the candidate that needs least memory, one of `candidates`."""

    @abstractmethod
    def candidates(self, request: RequestT) -> Iterable[SetupT]:
        """Yields the candidates in order of expected speed, fastest first."""

    @abstractmethod
    def count(self, request: RequestT, candidate: SetupT) -> Count:
        """Predicts the bytes; nothing is allocated or compiled."""

    @abstractmethod
    def compiled(self, request: RequestT, candidate: SetupT) -> Iterable[int]:
        """Compiles each program and yields its bytes. If it yields nothing, the
        prediction decides."""

    @abstractmethod
    def numbers(self, request: RequestT) -> dict[str, tuple[int, int]]:
        """Returns the settings that a refusal may advise to lower, by name, each as
        (lowest useful value, value of the request)."""

    def lowered(self, request: RequestT, name: str, value: int) -> RequestT:
        """Returns the request with another value for one of its `numbers`."""
        changed: Any = replace(cast(Any, request), **{name: value})
        return changed

    def described(self, request: RequestT, candidate: SetupT) -> str:
        """Describes a request and its candidate for a message."""
        return str(candidate)


def fastest(
    task: Task[RequestT, SetupT],
    requests: Iterable[RequestT],
    limit: int,
    count: int = 1,
) -> list[Found[RequestT, SetupT]]:
    """Finds the first request that fits, and its fastest candidates that fit.

    Args:
      task: knows the candidates of a request, and the memory that each needs.
      requests: one or more requests, in order of preference.
      limit: the memory limit in bytes.
      count: the maximum number of candidates to return.

    Returns:
      At least one candidate, in order of expected speed.

    Raises:
      ValueError: nothing fits; see `refusal`.
    """
    smallest: Found[RequestT, SetupT] | None = None
    for request in requests:
        found, least = _fastest_of(task, request, limit, count)
        if found:
            return found
        if smallest is None or least.size <= smallest.size:
            smallest = least
    assert smallest is not None
    raise ValueError(refusal(task, smallest, limit))


def _fastest_of(
    task: Task[RequestT, SetupT], request: RequestT, limit: int, count: int
) -> tuple[list[Found[RequestT, SetupT]], Found[RequestT, SetupT]]:
    """Returns the candidates that fit, and the smallest candidate with its bytes."""
    bound = task.tolerance * limit
    least = task.least(request)
    least_size = task.count(request, least).predicted
    found: list[Found[RequestT, SetupT]] = []
    failed = 0
    # If the smallest candidate is predicted not to fit, no other fits either.
    for candidate in task.candidates(request) if least_size <= bound else ():
        is_least = candidate is least
        size = least_size if is_least else task.count(request, candidate).predicted
        if size > bound or (failed >= TRIES and not is_least):
            continue
        size = _needed(task.compiled(request, candidate), limit) or size
        if is_least:
            least_size = size
        if size <= limit:
            found.append(Found(request, candidate, size))
        failed += size > limit
        if len(found) == count or (is_least and size > limit):
            break
    return found, Found(request, least, least_size)


def _needed(compiled: Iterable[int], limit: int) -> int:
    """Returns the largest number of bytes; stops at the first one over the limit."""
    most = 0
    for size in compiled:
        most = max(most, size)
        if most > limit:
            break
    return most


def refusal(
    task: Task[RequestT, SetupT], least: Found[RequestT, SetupT], limit: int
) -> str:
    """Returns an error message of one line: how many bytes are missing, the largest
    parts, and which settings to lower.

    Args:
      least: the smallest request and candidate that were tried.
    """
    parts = task.count(least.request, least.candidate).parts
    two = sorted(parts.items(), key=lambda item: -item[1])[:2]
    largest_parts = " and ".join(f"{part} {shown_bytes(n)}" for part, n in two)
    return (
        f"memory: {shown_bytes(limit)} are {shown_bytes(least.size - limit)} too few "
        f"for {task.described(least.request, least.candidate)}, which takes "
        f"{shown_bytes(least.size)} ({largest_parts}); "
        + _advice(task, least.request, least.candidate, limit)
    )


def _advice(
    task: Task[RequestT, SetupT], request: RequestT, candidate: SetupT, limit: int
) -> str:
    """Says which settings of a request to lower so that the candidate fits: one of
    them, or several if one is not enough."""

    def promised(changed: RequestT) -> int:
        return task.count(changed, candidate).promised

    def most(name: str, request: RequestT) -> int | None:
        def fits(value: int) -> bool:
            return promised(task.lowered(request, name, value)) <= limit

        return largest(*task.numbers(request)[name], fits)

    numbers = task.numbers(request)
    names = [name for name, (low, value) in numbers.items() if low < value]
    alone = [(name, most(name, request)) for name in names]
    advice = [f"{n} {to}" for n, to in alone if to is not None and to < numbers[n][1]]
    if advice:
        return f"it fits with {', or '.join(advice)}"
    together = []
    for name in reversed(names):
        value = most(name, request)
        together.append(f"{name} {numbers[name][0] if value is None else value}")
        if value is not None:
            return f"it fits with {' and '.join(together)}"
        request = task.lowered(request, name, numbers[name][0])
    size = shown_bytes(promised(request))
    return f"the shortest request takes {size}: take a smaller model or more memory"


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """Returns the largest number in low..high that fits, to two digits, or None if
    `low` does not fit."""
    if not fits(low):
        return None
    if fits(high):
        return high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
