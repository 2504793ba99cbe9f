"""A server within so many bytes: who decodes, how many rows, how long their texts.

As `budget` does it for one generation: what a batch holds is counted by shapes, and the
very programs that it would run are compiled and asked what they need, before anything
is allocated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.arguments import stop_token_table
from stree_jax.checkpoints.checkpoint import Model
from stree_jax.models.keys import key_of
from stree_jax.models.memory import size_of
from stree_jax.sampling import logprobs
from stree_jax.server.batch import GREEDY, Asked, Layout, Sizes, as_asked, requests_of
from stree_jax.sizing.budget import OFF, TRIES, Way, least_way, ways, weights_given
from stree_jax.sizing.memory import SCRATCH, Room, analysed, parts_of
from stree_jax.sizing.units import shown_bytes
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.decoding import Decoding
from stree_jax.speculation.drafters.table import AnyDrafter
from stree_jax.speculation.loop import (
    advance_jit,
    init_decoding,
    init_decoding_jit,
)
from stree_jax.speculation.rows import admit_jit, past_jit, past_of, refilled, vacant
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Topology

SHORTEST = 128  # tokens of context that are offered

NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


@dataclass(frozen=True)
class Fit:
    """What is served within a limit.

    Attributes:
      size: bytes that it takes.
      spare: that it leaves.
    """

    way: Way
    sizes: Sizes
    size: int
    spare: int

    def __str__(self) -> str:
        limit = self.size + self.spare
        size = f"{shown_bytes(self.size)} of {shown_bytes(limit)}"
        return f"{self.way.name}, {in_words(self.sizes)}: {size}"


def in_words(sizes: Sizes) -> str:
    return f"{sizes.rows} rows, context {sizes.context}, {sizes.prefixes} prefixes"


def smaller(wish: Sizes, named: Sequence[str]) -> Iterator[Sizes]:
    """A wish, and what is less in what was not named: prefixes first, as they only save
    time, then rows, and the context last."""

    def halves(name: str, least: int) -> list[int]:
        found = [getattr(wish, name)]
        while name not in named and found[-1] > least and found[-1] // 2 >= least:
            found.append(found[-1] // 2)
        return found

    of = halves("context", SHORTEST), halves("rows", 1), halves("prefixes", 0)
    for context, rows, prefixes in product(*of):
        yield replace(wish, context=context, rows=rows, prefixes=prefixes)


def fitted(
    limit: int,
    model: Model,
    drafter: AnyDrafter,
    tree: Topology | str | Sequence[int] | None,
    rule: Rule | str | None,
    wishes: Sequence[Sizes],
) -> Fit:
    """The first wish that fits, decoded in the way that is expected to be fastest.

    Args:
      limit: bytes; all that is loaded counts, a drafter that is not used as well.
      model, drafter, tree, rule: as of `generate`; of a tree that is named only that
        one is tried.

    Raises:
      ValueError: nothing fits, in one line.
    """
    given, least = weights_given(model, drafter), least_way(model, drafter, tree, rule)
    for sizes in wishes:
        if predicted(model, least.spec, sizes, given) > OFF * limit:
            continue
        layout, failed = Layout.of(model.config, least.spec, sizes), 0
        room = Room(sizes.rows, layout.capacity, layout.room)
        for way in ways(room, least, model, drafter, tree, rule):
            if predicted(model, way.spec, sizes, given) > OFF * limit:
                continue
            if failed >= TRIES and way is not least:
                continue
            size = 0
            for need in needs(model, way.spec, sizes):
                size = max(size, given + int(SCRATCH * need))
                if size > limit:
                    break
            else:
                return Fit(way, sizes, size, limit - size)
            failed += 1
            if way is least:
                break
    raise ValueError(refusal(limit, model, least, wishes[-1], given))


@dataclass(frozen=True)
class _Shapes:
    """Of a batch, abstract.

    Attributes:
      one: a row by itself, just read.
      whole: the batch, all rows drawn.
      lists: of log-probabilities.
      past: of a row that has ended.
    """

    layout: Layout
    requests: Any
    one: Decoding
    whole: Decoding
    lists: Any
    past: Any

    def held(self, sizes: Sizes) -> int:
        """Bytes that are always there, beside the weights."""
        kept = sizes.prefixes * size_of(self.past)
        return size_of(self.whole) + size_of(self.lists) + kept


def _shapes(model: Model, spec: Spec, sizes: Sizes) -> _Shapes:
    layout = Layout.of(model.config, spec, sizes)
    stops = jnp.asarray(stop_token_table(model, None, 1))
    requests = requests_of(Asked([0], 1, GREEDY), stops, key_of(0))
    begin = partial(init_decoding, **_sizes(layout))
    one = jax.eval_shape(begin, spec, *_text(layout.widths[0]), requests)
    whole = jax.eval_shape(partial(vacant, rows=sizes.rows), spec, one)
    lists = jax.eval_shape(
        partial(logprobs.empty, sizes.rows, layout.room, sizes.top_logprobs)
    )
    past = jax.eval_shape(past_of, whole, NUMBER)
    return _Shapes(layout, requests, one, whole, lists, past)


def _sizes(layout: Layout) -> dict[str, Any]:
    return {"max_new_tokens": layout.room, "capacity": layout.capacity}


def _text(width: int) -> tuple[Any, Any]:
    ids = jax.ShapeDtypeStruct((1, width), jnp.int32)
    return ids, jax.ShapeDtypeStruct((1,), jnp.int32)


def predicted(model: Model, spec: Spec, sizes: Sizes, given: int) -> int:
    """Bytes by shapes and `temporaries`; without what drawing takes besides."""
    shapes = _shapes(model, spec, sizes)
    layout = shapes.layout
    room = Room(sizes.rows, layout.capacity, layout.room)
    parts = parts_of(spec, as_asked(shapes.whole, False, None), room)
    held = given + shapes.held(sizes)
    if jax.default_backend() != "cpu":  # where nobody compared what steps hold besides
        return held
    return held + parts.temporaries.total


def needs(model: Model, spec: Spec, sizes: Sizes) -> Iterator[int]:
    """Bytes beside the weights of one program after another, by the compiler's word."""
    spec, shapes = refilled(spec), _shapes(model, spec, sizes)
    held, layout = shapes.held(sizes), shapes.layout
    pasts = [None, shapes.past] if sizes.prefixes else [None]
    for width, past in product(layout.widths, pasts):
        asked = spec, *_text(width), shapes.requests
        yield held + _more(init_decoding_jit.lower(*asked, **_sizes(layout), past=past))
    read = size_of(shapes.one)
    yield held + read + _more(admit_jit.lower(spec, shapes.whole, NUMBER, shapes.one))
    for drawn, lists in ((False, None), (True, None), (True, shapes.lists)):
        d = as_asked(shapes.whole, drawn, lists)
        yield held + _more(advance_jit.lower(spec, d, NUMBER))
    if sizes.prefixes:  # whose arrays are among `held`
        yield held + _more(past_jit.lower(shapes.whole, NUMBER))


def _more(lowered: Any) -> int:
    """What a program makes, and holds while it runs."""
    found = analysed(lowered)
    return found.outputs + found.temporaries


def refusal(limit: int, model: Model, least: Way, sizes: Sizes, given: int) -> str:
    """In one line: how far off the least is."""
    if given > limit:
        why = f"its weights alone are {shown_bytes(given)}"
    else:
        size = max(predicted(model, least.spec, sizes, given), limit + 1)
        why = f"{least.name}, {in_words(sizes)} take {shown_bytes(size)} at least"
    return (
        f"memory: {shown_bytes(limit)} are too few: {why}; ask for less of --rows, "
        "--context, --prefixes or --logprobs, or take a smaller model or --dtype"
    )
