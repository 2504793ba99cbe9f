"""The compiled programs of a batch: their shapes, and when they are compiled.

Programs are lowered from shapes and compiled without running. JAX then finds them
when the batch calls the same functions with arrays of these shapes. A program that is
not compiled in advance is compiled by the first request that needs it.
"""

import enum
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.common.programs import Jitted
from stree_jax.generation.arguments import stop_token_table
from stree_jax.models import Model
from stree_jax.models.base.keys import key_of
from stree_jax.models.stack.memory import size_of
from stree_jax.sampling import logprobs
from stree_jax.server.batch import Batch
from stree_jax.server.rows import (
    GREEDY,
    Layout,
    Sizes,
    TextRequest,
    for_program,
    requests_of,
)
from stree_jax.speculation.batch_rows import admit_jit, past_jit, past_of, vacant_jit
from stree_jax.speculation.decoding import Decoding
from stree_jax.speculation.loop import (
    advance_jit,
    init_decoding_jit,
    resume_decoding_jit,
)
from stree_jax.speculation.on_mesh import laid_out, past_laid_out
from stree_jax.speculation.step import Spec

NUMBER = jax.ShapeDtypeStruct((), jnp.int32)


@dataclass(frozen=True)
class BatchShapes:
    """The shapes and dtypes of the server's arrays (`jax.ShapeDtypeStruct`), from which
    programs are compiled before the arrays exist.

    Attributes:
      layout: sizes of the arrays.
      requests: decoding options of one row, such as its sampling settings.
      one: the decoding state of a single row after its prefill.
      whole: the decoding state of the batch, with the fields for sampling.
      lists: log-probabilities of the batch's output and of the likeliest tokens.
      past: the states of target and drafter after a row's text, as the prefix cache
        stores them.
    """

    layout: Layout
    requests: Any
    one: Decoding
    whole: Decoding
    lists: Any
    past: Any

    def held(self, sizes: Sizes) -> int:
        """Returns the bytes that are always allocated, without the weights. They
        include a state of the prompt that is being prefilled, and if states are cached,
        one that may be in transit to or from the cache."""
        states = 1 + bool(sizes.prefix_memory)
        kept = sizes.prefix_memory + states * size_of(self.past)
        return size_of(self.whole) + size_of(self.lists) + kept


def batch_shapes(model: Model, spec: Spec, sizes: Sizes) -> BatchShapes:
    """Computes the shapes of the arrays of a server's batch. Allocates nothing.

    Args:
      model: the target model.
      spec: the configuration of the decoder.
      sizes: the sizes of the batch.
    """
    layout = Layout.of(model.config, spec, sizes)
    stops = jnp.asarray(stop_token_table(model, None, 1))
    V = model.config.num_tokens
    requests = requests_of(TextRequest([0], 1, GREEDY), stops, key_of(0), V)
    text = _text(layout.widths[0])
    one = init_decoding_jit.shapes(spec, *text, requests, **_sizes(layout), past=None)
    one = laid_out(spec, one)
    whole = laid_out(spec, vacant_jit.shapes(spec, one, rows=sizes.rows))
    lists = jax.eval_shape(
        partial(logprobs.empty, sizes.rows, layout.output_size, sizes.top_logprobs)
    )
    past = past_laid_out(model, jax.eval_shape(past_of, spec, whole, NUMBER))
    return BatchShapes(layout, requests, one, whole, lists, past)


def _sizes(layout: Layout) -> dict[str, Any]:
    earlier = None
    if layout.earlier:
        earlier = jax.ShapeDtypeStruct((1, layout.earlier), jnp.int32)
    return {
        "max_new_tokens": layout.output_size,
        "capacity": layout.capacity,
        "earlier": earlier,
    }


def _text(width: int) -> tuple[Any, Any]:
    """Returns the shapes of one prompt's token ids [1, width] and of its length [1]."""
    ids = jax.ShapeDtypeStruct((1, width), jnp.int32)
    return ids, jax.ShapeDtypeStruct((1,), jnp.int32)


class When(enum.Enum):
    """When a program is compiled: before requests are answered, afterwards in the
    background, or by the first request that needs it."""

    FIRST = enum.auto()
    LATER = enum.auto()
    NEEDED = enum.auto()


@dataclass(frozen=True)
class Program:
    """A compiled program of a batch.

    Attributes:
      name: its name in messages.
      function: the function.
      args: shapes of its arguments.
      options: its arguments by name: shapes, or static values.
      when: when it is compiled.
      extra: bytes of arrays that are allocated while it runs, in addition to its
        temporaries and the arrays of the batch.
    """

    name: str
    function: Jitted
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    when: When = When.LATER
    extra: int = 0

    def lower(self) -> Any:
        """Traces the program and returns a `jax.stages.Lowered`."""
        return self.function.lower(*self.args, **self.options)

    def compile(self) -> None:
        """Compiles the program, or reads a kept one, without running it."""
        self.function.prepare(*self.args, **self.options)


def programs(
    specs: Mapping[bool, Spec], shapes: BatchShapes, prefixes: bool
) -> Iterator[Program]:
    """Yields the programs of a batch.

    Programs that decode greedy and sampled texts after short prompts are compiled
    before the server answers. The program with log-probabilities is compiled when a
    request needs it, because few clients use it and it takes more memory than any other
    (84 MB for SmolLM2-135M).

    Args:
      specs: the configuration of the decoder: `specs[True]` if any row of the batch is
        sampled, `specs[False]` if all rows are greedy.
      shapes: shapes of the arrays.
      prefixes: True if the server caches states of prefixes.
    """
    spec, layout = specs[False], shapes.layout
    for width, past in product(layout.widths, (None, shapes.past)):
        args = spec, *_text(width), shapes.requests
        short = width == layout.widths[0] and past is None
        yield Program(
            f"prefill of {width - 1} tokens" + (" after a prefix" if past else ""),
            resume_decoding_jit if past else init_decoding_jit,
            args,
            _sizes(layout) | {"past": past},
            When.FIRST if short else When.LATER,
        )
    admitted = spec, shapes.whole, NUMBER, shapes.one
    extra = size_of(shapes.one)
    yield Program("new texts in rows", admit_jit, admitted, {}, When.FIRST, extra)
    for name, sampled, lists, when in (
        ("greedy texts", False, None, When.FIRST),
        ("sampled texts", True, None, When.FIRST),
        (
            "with log-probabilities, penalties or biases",
            True,
            shapes.lists,
            When.NEEDED,
        ),
    ):
        d = for_program(shapes.whole, sampled, lists)
        step = specs[sampled], d, NUMBER
        yield Program(f"decoding {name}", advance_jit, step, {}, when)
    if prefixes:
        yield Program("caching a state", past_jit, (spec, shapes.whole, NUMBER))


def warm(batch: Batch, say: Callable[[str], None]) -> list[Program]:
    """Compiles the programs of `When.FIRST`, which the server needs before it answers
    requests. Returns the programs of `When.LATER`.

    If the step times of tree "auto" have not been measured on this machine, also
    measures them, which runs programs.

    Args:
      batch: the server's batch.
      say: prints a line about the progress.
    """
    shapes = batch_shapes(batch.model, batch.specs[False], batch.sizes)
    for sampled in (False, True):
        batch.time_steps(for_program(shapes.whole, sampled, None))
    found = list(programs(batch.specs, shapes, batch.sizes.prefix_memory > 0))
    first = [program for program in found if program.when is When.FIRST]
    compiled: list[Future[None]] = []
    try:
        for i, program in enumerate(first):
            say(f"compiling: {program.name} ({i + 1} of {len(first)})")
            compiled.append(_in_thread(program.compile))
    finally:
        wait(compiled)
    for future in compiled:
        future.result()
    return [program for program in found if program.when is When.LATER]


def _in_thread(call: Callable[[], Any]) -> Future[None]:
    """Calls a function in a new daemon thread and returns a future of its result.

    XLA then compiles or loads a program while others are traced. A daemon thread does
    not delay the end of the process, unlike a ThreadPoolExecutor's threads.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="compiling", daemon=True).start()
    return future
