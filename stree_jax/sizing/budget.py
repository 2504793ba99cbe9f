"""A generation within so many bytes: who decodes it, or a refusal before any token.

Candidates are looked at in the order of expected speed. What they take is predicted
first (`memory`), and of one that may fit the very programs that would run are compiled:
the compiler has the last word, and what it compiled is what runs.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from stree_jax import models
from stree_jax.buckets import bucket
from stree_jax.checkpoints.checkpoint import Model
from stree_jax.default_tree import spec_for
from stree_jax.models.memory import size_of
from stree_jax.sizing.candidates import by_speed
from stree_jax.sizing.memory import (
    SCRATCH,
    Memory,
    Room,
    analysed,
    lowered_steps,
    parts_of,
)
from stree_jax.sizing.units import shown_bytes
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.drafters.table import AnyDrafter
from stree_jax.speculation.loop import commit_jit, deepest
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Auto, Topology
from stree_jax.start import Start

log = logging.getLogger(__name__)

OFF = 1.05  # predictions are no further off; what is predicted beyond is not compiled
TRIES = 4  # candidates that are compiled and do not fit, before plain decoding is


def fitted(
    limit: int,
    start: Start,
    keep: bool,
    model: Model,
    drafter: AnyDrafter,
    tree: Topology | str | Sequence[int] | None,
    rule: Rule | str | None,
) -> tuple[Spec, int]:
    """The fastest way to decode that fits, and how many bytes it leaves.

    Everything that the call is given counts, a drafter that is not used as well.

    Args:
      limit: bytes.
      start: what is decoded.
      keep: whether its past goes on in further turns, which then must fit, too.
      model, drafter, tree, rule: as of `generate`; of a tree that is named only that
        one is tried.

    Raises:
      ValueError: nothing fits; it says what to ask less of.
    """
    given = weights_given(model, drafter)
    least = least_way(model, drafter, tree, rule)
    # What drafts takes more, and reads the texts, too.
    size = predicted(least.spec, start, given)
    if size <= limit * OFF:
        size = given + int(SCRATCH * _reading(least.spec, start))
    if size > limit:
        raise ValueError(_refusal(limit, start, given, size, least))
    failed = 0
    room = Room(start.rows, start.caches(Auto().depth), start.room)
    for way in ways(room, least, model, drafter, tree, rule):
        if predicted(way.spec, start, given) > limit * OFF:
            continue
        if failed >= TRIES and way is not least:
            continue
        size = 0
        for need in _needs(way.spec, start, keep):
            size = max(size, given + int(SCRATCH * need))
            if size > limit:
                break
        else:
            if tree is None:
                took = f"{shown_bytes(size)} of {shown_bytes(limit)}"
                log.info("memory: %s takes %s", way.name, took)
            return way.spec, limit - size
        failed += 1
        if way is least:
            break
    raise ValueError(_refusal(limit, start, given, size, least))


class Way(NamedTuple):
    """Who may decode."""

    name: str
    spec: Spec


def least_way(model: Model, drafter: Any, tree: Any, rule: Any) -> Way:
    """What takes least: plain decoding, or the tree that is named."""
    if tree is None:
        return Way("plain decoding", spec_for(model, None, None, rule, None))
    return Way(f"tree {tree}", spec_for(model, drafter, tree, rule, None))


def ways(
    room: Room, least: Way, model: Model, drafter: Any, tree: Any, rule: Any
) -> Iterator[Way]:
    """The fastest by expectation first; `least` is one of them, and the last to fit."""
    if drafter is None or tree is not None:
        yield least
        return
    for one in by_speed(models.Model(model.params, model.config), drafter, room):
        try:
            if one.who == "none":
                yield least
            else:
                spec = spec_for(model, one.drafter, one.tree, rule, None)
                yield Way(str(one), spec)
        except ValueError:  # a rule that this tree does not go with
            continue


def weights_given(model: models.Model, drafter: Any) -> int:
    """Bytes of all arrays of a target and its drafter, each once."""
    leaves = jax.tree.leaves((model, drafter))
    return size_of({id(x): x for x in leaves if hasattr(x, "dtype")})  # or it's a name


def predicted(spec: Spec, start: Start, given: int, surely: bool = False) -> int:
    """Bytes as `memory` predicts them: of the steps, or what surely suffices."""
    parts = _parts(spec, start)
    unused = given - parts.weights - parts.drafter_weights
    total = parts.promised if surely else parts.steps_total
    if jax.default_backend() != "cpu":  # where nobody compared what steps hold besides
        total = parts.held
    return total + unused + _beside(start)


def _parts(spec: Spec, start: Start) -> Memory:
    room = Room(start.rows, start.caches(deepest(spec.policy)), start.room)
    return parts_of(spec, start.shapes(spec), room)


def _beside(start: Start) -> int:
    """Bytes of a past that stays as it is, beside the new state."""
    return 0 if start.past is None or start.take_past else size_of(start.past)


def _needs(spec: Spec, start: Start, keep: bool) -> Iterator[int]:
    """Bytes beside the weights of one program after another, by the compiler's word.

    Args:
      keep: whether the past is committed at the end, and read on from.
    """
    yield _reading(spec, start)
    decoding = start.shapes(spec)
    held = size_of(decoding)
    steps = analysed(lowered_steps(spec, decoding))
    yield held + steps.outputs + steps.temporaries + _beside(start)
    if keep:
        last = decoding.pending
        end = commit_jit.lower(decoding.state, last.records, last.path, last.length)
        found = analysed(end)
        yield held + found.outputs + found.temporaries
        yield _reading(spec, start.continued(spec))


def _reading(spec: Spec, start: Start) -> int:
    """Bytes while the texts are read, beside the weights."""
    found = analysed(start.lowered(spec))
    past = 0 if start.past is None else size_of(start.past)
    inputs = size_of(start.requests) + 4 * len(start.text) * start.width(
        deepest(spec.policy)
    )
    return past + inputs + found.outputs + found.temporaries


def _refusal(limit: int, start: Start, given: int, size: int, way: Way) -> str:
    """In one line: how far off the least is, its largest parts, what would fit."""
    name, spec = way
    parts = _parts(spec, start).parts
    two = sorted(parts.items(), key=lambda item: -item[1])[:2]
    largest = " and ".join(f"{part} {shown_bytes(n)}" for part, n in two)

    def fits(changed: Start) -> bool:
        return predicted(spec, changed, given, surely=True) <= limit

    advice = []
    for what, most, shrunk in (
        ("max_new_tokens", start.room, _shorter),
        ("capacity", start.capacity, _smaller),
        ("prompts", len(start.text), _fewer),
        ("n", start.samples, _fewer_samples),
    ):
        number = _most(most, shrunk, start, fits)
        advice += [] if number is None else [f"{what} {number}"]
    shortest = predicted(spec, replace(start, room=1, capacity=0), given, surely=True)
    less = f"the shortest answer takes {shown_bytes(shortest)}: take a smaller model"
    if given > limit:
        less = f"its weights alone are {shown_bytes(given)}: take a smaller model"
    elif advice:
        less = f"it fits with {', or '.join(advice)}"
    return (
        f"memory: {shown_bytes(limit)} are {shown_bytes(max(size - limit, 1))} too few "
        f"for {name}, which takes {shown_bytes(size)} ({largest}); {less}"
    )


def _shorter(start: Start, tokens: int) -> Start:
    return replace(start, room=bucket(tokens))


def _smaller(start: Start, rows: int) -> Start:
    return replace(start, capacity=rows)


def _fewer(start: Start, prompts: int) -> Start:
    if start.past is not None:
        return start
    rows = prompts * start.samples
    requests = jax.tree.map(lambda x: _rows(x, start.rows, rows), start.requests)
    return replace(start, text=start.text[:prompts], requests=requests)


def _fewer_samples(start: Start, samples: int) -> Start:
    rows = len(start.text) * samples
    requests = jax.tree.map(lambda x: _rows(x, start.rows, rows), start.requests)
    return replace(start, samples=samples, requests=requests)


def _rows(x: jax.Array, whole: int, rows: int) -> Any:
    """As many rows of what has one for each of `whole`."""
    if x.ndim == 0 or x.shape[0] != whole:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)


def _most(
    high: int,
    shrunk: Callable[[Start, int], Start],
    start: Start,
    fits: Callable[[Start], bool],
) -> int | None:
    """The largest number below `high` that fits, to two digits; None without any."""
    low = 1
    if high <= low or not fits(shrunk(start, low)):
        return None
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        fit = fits(shrunk(start, middle))
        low, high = (middle, high) if fit else (low, middle)
    return low
