"""`serve --memory`: chooses a setup, rows, context and prefixes that fit in a limit.

The bytes of a batch's arrays are computed from shapes, and the programs that it would
run are compiled and analysed, before anything is allocated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import jax

from stree_jax.models import Model
from stree_jax.models.stack.memory import size_of
from stree_jax.server.programs import batch_shapes, programs
from stree_jax.server.rows import Layout, Sizes, for_program
from stree_jax.sizing.budget import LoadedTask, Setup
from stree_jax.sizing.fit import Count
from stree_jax.sizing.memory import analysed, parts_of
from stree_jax.sizing.parts import UNFORESEEN, BufferSizes
from stree_jax.sizing.temporaries import reading_at_most
from stree_jax.sizing.units import shown_bytes
from stree_jax.speculation.batch_rows import refilled
from stree_jax.speculation.step import Spec

MIN_CONTEXT = 128  # tokens


def smaller(wish: Sizes, named: Sequence[str], shards: int = 1) -> Iterator[Sizes]:
    """Yields the wanted sizes and smaller ones, in order of preference: first less
    memory for prefixes, which only save time, then fewer rows, then a smaller context.

    Args:
      wish: the wanted sizes.
      named: fields that must not change.
      shards: groups of devices over which the rows are spread; divides `wish.rows`.
    """

    def halves(name: str, least: int) -> list[int]:
        found = [getattr(wish, name)]
        while name not in named and found[-1] > least and found[-1] // 2 >= least:
            found.append(found[-1] // 2)
        return found

    most, fixed = wish.prefix_memory, "prefix_memory" in named
    memory = [most] if fixed or not most else [most, most // 4, most // 16, 0]
    fields = halves("context", MIN_CONTEXT), halves("rows", shards), memory
    for context, rows, kept in product(*fields):
        if rows % shards:
            continue
        yield replace(wish, context=context, rows=rows, prefix_memory=kept)


class ServeTask(LoadedTask[Sizes]):
    """The search for a setup of the server that fits in memory; see `sizing.fit.Task`.

    In the names of `Task`, a `request` is the `Sizes` of the server's batch that are
    wanted, not an HTTP request. A `candidate` is a decoder's configuration.
    """

    def buffers(self, request: Sizes) -> BufferSizes:
        layout = Layout.of(self.model.config, self.plainest.spec, request)
        return BufferSizes(request.rows, layout.capacity, layout.output_size)

    def described(self, request: Sizes, candidate: Setup) -> str:
        kept = shown_bytes(request.prefix_memory)
        sizes = f"{request.rows} rows, context {request.context}, {kept} of prefixes"
        return f"{candidate.name}, {sizes}"

    def count(self, request: Sizes, candidate: Setup) -> Count:
        """Predicts the bytes that greedy decoding needs. `Count.promised`, the upper
        bound, also covers the prefill of one row."""
        spec = candidate.spec
        shapes = batch_shapes(self.model, spec, request)
        room = BufferSizes(
            request.rows, shapes.layout.capacity, shapes.layout.output_size
        )
        memory = parts_of(spec, for_program(shapes.whole, False, None), room)
        # `reading` is the memory for the prefill of all rows together, but the server
        # prefills one row at a time (`read` below).
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
                "kept prefixes": request.prefix_memory,
                "log-probabilities": size_of(shapes.lists),
            },
        )

    def compiled(self, request: Sizes, candidate: Setup) -> Iterator[int]:
        return map(self.at_most, needs(self.model, candidate.spec, request))

    def numbers(self, request: Sizes) -> dict[str, tuple[int, int]]:
        least = {"context": MIN_CONTEXT, "rows": 1, "prefix_memory": 0}
        return {name: (low, getattr(request, name)) for name, low in least.items()}


def needs(model: Model, spec: Spec, sizes: Sizes) -> Iterator[int]:
    """Yields for each program of the server the bytes that are allocated while the
    program runs, by XLA's memory analysis. The weights do not count."""
    spec = refilled(spec)
    shapes, prefixes = batch_shapes(model, spec, sizes), sizes.prefix_memory > 0
    held = shapes.held(sizes)  # includes the cached states
    for program in programs({False: spec, True: spec}, shapes, prefixes):
        yield held + program.extra + analysed(program.lower()).added
