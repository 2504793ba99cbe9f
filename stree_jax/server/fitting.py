"""`serve --memory`: chooses a setup, rows, context and prefixes that fit in a limit.

The bytes of a batch's arrays are computed from shapes, and the programs that it would
run are compiled and analysed, before anything is allocated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.arguments import stop_token_table
from stree_jax.checkpoints.load import Model
from stree_jax.models.keys import key_of
from stree_jax.models.memory import size_of
from stree_jax.sampling import logprobs
from stree_jax.server.batch import (
    GREEDY,
    Layout,
    Sizes,
    TextRequest,
    for_program,
    requests_of,
)
from stree_jax.sizing.budget import LoadedTask, Setup
from stree_jax.sizing.fit import Count
from stree_jax.sizing.memory import UNFORESEEN, BufferSizes, analysed, parts_of
from stree_jax.sizing.temporaries import reading_at_most
from stree_jax.speculation.decoding import Decoding
from stree_jax.speculation.loop import (
    advance_jit,
    init_decoding,
    init_decoding_jit,
)
from stree_jax.speculation.rows import admit_jit, past_jit, past_of, refilled, vacant
from stree_jax.speculation.step import Spec

MIN_CONTEXT = 128  # tokens

NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


def smaller(wish: Sizes, named: Sequence[str]) -> Iterator[Sizes]:
    """Yields the wanted sizes and smaller ones, in order of preference: first fewer
    prefixes, which only save time, then fewer rows, then a smaller context.

    Args:
      wish: the wanted sizes.
      named: fields that must not change.
    """

    def halves(name: str, least: int) -> list[int]:
        found = [getattr(wish, name)]
        while name not in named and found[-1] > least and found[-1] // 2 >= least:
            found.append(found[-1] // 2)
        return found

    fields = halves("context", MIN_CONTEXT), halves("rows", 1), halves("prefixes", 0)
    for context, rows, prefixes in product(*fields):
        yield replace(wish, context=context, rows=rows, prefixes=prefixes)


class ServeTask(LoadedTask[Sizes]):
    """The task of fitting a server in memory; a request is the sizes of its batch."""

    def buffers(self, request: Sizes) -> BufferSizes:
        layout = Layout.of(self.model.config, self.plainest.spec, request)
        return BufferSizes(request.rows, layout.capacity, layout.output_size)

    def described(self, request: Sizes, candidate: Setup) -> str:
        kept = f"context {request.context}, {request.prefixes} prefixes"
        return f"{candidate.name}, {request.rows} rows, {kept}"

    def count(self, request: Sizes, candidate: Setup) -> Count:
        """Predicts the bytes of greedy decoding. `promised` also covers the prefill of
        a row."""
        spec = candidate.spec
        shapes = batch_shapes(self.model, spec, request)
        room = BufferSizes(
            request.rows, shapes.layout.capacity, shapes.layout.output_size
        )
        memory = parts_of(spec, for_program(shapes.whole, False, None), room)
        # `reading` counts the prefill of all rows, but one row is read at a time.
        memory = replace(memory, reading=0)
        held, steps = shapes.held(request), memory.temporaries.total
        read = reading_at_most(spec, 1, max(shapes.layout.widths))
        prefill = size_of(shapes.one) + read
        if jax.default_backend() != "cpu":  # temporaries are predicted for CPUs only
            return Count(self.weights + held, self.weights + held, memory.parts)
        return Count(
            predicted=self.weights + held + steps,
            promised=self.weights + int(UNFORESEEN * (held + max(steps, prefill))),
            parts={
                **memory.parts,
                "kept prefixes": request.prefixes * size_of(shapes.past),
                "log-probabilities": size_of(shapes.lists),
            },
        )

    def compiled(self, request: Sizes, candidate: Setup) -> Iterator[int]:
        return map(self.at_most, needs(self.model, candidate.spec, request))

    def numbers(self, request: Sizes) -> dict[str, tuple[int, int]]:
        least = {"context": MIN_CONTEXT, "rows": 1, "prefixes": 0}
        return {name: (low, getattr(request, name)) for name, low in least.items()}


@dataclass(frozen=True)
class BatchShapes:
    """Shapes of a batch's arrays.

    Attributes:
      layout: sizes of the arrays.
      requests: requests of one row.
      one: a row after its prefill.
      whole: the batch, with fields for sampling.
      lists: arrays of log-probabilities.
      past: the state of a finished row, which is cached.
    """

    layout: Layout
    requests: Any
    one: Decoding
    whole: Decoding
    lists: Any
    past: Any

    def held(self, sizes: Sizes) -> int:
        """Returns the bytes that are always allocated, without the weights. One state
        more than the cached ones is being copied to or from the cache."""
        kept = (sizes.prefixes + bool(sizes.prefixes)) * size_of(self.past)
        return size_of(self.whole) + size_of(self.lists) + kept


def batch_shapes(model: Model, spec: Spec, sizes: Sizes) -> BatchShapes:
    """Returns the shapes of a batch's arrays."""
    layout = Layout.of(model.config, spec, sizes)
    stops = jnp.asarray(stop_token_table(model, None, 1))
    requests = requests_of(TextRequest([0], 1, GREEDY), stops, key_of(0))
    begin = partial(init_decoding, **_sizes(layout))
    one = jax.eval_shape(begin, spec, *_text(layout.widths[0]), requests)
    whole = jax.eval_shape(partial(vacant, rows=sizes.rows), spec, one)
    lists = jax.eval_shape(
        partial(logprobs.empty, sizes.rows, layout.output_size, sizes.top_logprobs)
    )
    past = jax.eval_shape(past_of, whole, NUMBER)
    return BatchShapes(layout, requests, one, whole, lists, past)


def _sizes(layout: Layout) -> dict[str, Any]:
    return {"max_new_tokens": layout.output_size, "capacity": layout.capacity}


def _text(width: int) -> tuple[Any, Any]:
    """Returns the shapes of a prompt padded to a width, and of its length."""
    ids = jax.ShapeDtypeStruct((1, width), jnp.int32)
    return ids, jax.ShapeDtypeStruct((1,), jnp.int32)


def needs(model: Model, spec: Spec, sizes: Sizes) -> Iterator[int]:
    """Yields, for each program, the bytes that are allocated while it runs, without the
    weights, by XLA's memory analysis."""
    spec, shapes = refilled(spec), batch_shapes(model, spec, sizes)
    held, layout = shapes.held(sizes), shapes.layout
    pasts = [None, shapes.past] if sizes.prefixes else [None]
    for width, past in product(layout.widths, pasts):
        args = spec, *_text(width), shapes.requests
        prefill = init_decoding_jit.lower(*args, **_sizes(layout), past=past)
        yield held + analysed(prefill).added
    admit = admit_jit.lower(spec, shapes.whole, NUMBER, shapes.one)
    yield held + size_of(shapes.one) + analysed(admit).added
    for sampled, lists in ((False, None), (True, None), (True, shapes.lists)):
        d = for_program(shapes.whole, sampled, lists)
        yield held + analysed(advance_jit.lower(spec, d, NUMBER)).added
    if sizes.prefixes:  # `held` includes the cached states
        yield held + analysed(past_jit.lower(shapes.whole, NUMBER)).added
