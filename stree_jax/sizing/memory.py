"""The bytes of a generation, by part, before any of them is allocated.

What the loop is given (weights, states, caches, records, the drafter's state, the text)
is counted by `jax.eval_shape` of the very functions that make it. What its steps hold
besides is predicted (`temporaries`). `compiled_bytes` asks the compiler, which has the
last word: it compiles the generation's own loop for abstract arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.models import Model, ModelConfig, abstract_params
from stree_jax.models.memory import size_of
from stree_jax.sampling.requests import Requests
from stree_jax.sizing.temporaries import (
    Temporaries,
    caches_of,
    reading_at_most,
    temporaries_of,
)
from stree_jax.speculation import loop, specs
from stree_jax.speculation.accept import NAIVE, Rule, resolve_rule
from stree_jax.speculation.decoding import Decoding
from stree_jax.speculation.drafters.table import AnyDrafter, source_of
from stree_jax.speculation.source import Source
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Topology, resolve_tree
from stree_jax.start import Start

STOPS = 8  # stop tokens that a row has room for, as in `generate`
# Programs ask for more while they run than the compiler says, by up to a twentieth of
# what is not weights (`python -m tests.hard_limit`); predictions are off by 3 %.
SCRATCH, UNFORESEEN = 1.05, 1.08


@dataclass(frozen=True)
class Room:
    """What a generation has room for.

    Attributes:
      batch: B, rows decoded together.
      capacity: tokens of each attention cache, `loop.cache_capacity` at least.
      max_new_tokens: of the output.
    """

    batch: int
    capacity: int
    max_new_tokens: int


@dataclass(frozen=True)
class Memory:
    """Bytes of a generation's loop, by part.

    Attributes:
      weights: of the target.
      drafter_weights: of a drafting model, heads, MTP layers or n-grams, without what
        is the target's own.
      state: the target's SSM states and convolution windows, its lengths.
      caches: the target's keys and values.
      records: of the tree's nodes, which the next step replays.
      drafting: the drafter's state, a model's caches among it.
      text: the output, the requests, counts.
      temporaries: of the steps, see `temporaries`.
      reading: of reading the prompts, at most.
      shared: counted once here, and twice by the compiler: weights of the target that
        the drafter is given, too.
    """

    weights: int
    drafter_weights: int
    state: int
    caches: int
    records: int
    drafting: int
    text: int
    temporaries: Temporaries
    reading: int
    shared: int

    @property
    def parts(self) -> dict[str, int]:
        """All of it by name; the sum is `total`."""
        name = self.temporaries.largest
        most = self.temporaries.phases[name]
        if self.reading > most:
            name, most = "reading the prompts", self.reading
        return {
            "target's weights": self.weights,
            "drafter's weights": self.drafter_weights,
            "SSM and convolution state": self.state,
            "attention caches": self.caches,
            "records of the nodes": self.records,
            "drafter's state": self.drafting,
            "text and requests": self.text,
            f"temporaries ({name})": most,
        }

    @property
    def held(self) -> int:
        """Bytes of the loop's arguments alone, the same on every platform."""
        most = max(self.temporaries.phases.values())
        return self.total - max(most, self.reading)

    @property
    def total(self) -> int:
        """Bytes of the steps or of prefill, whichever takes more."""
        return sum(self.parts.values())

    @property
    def promised(self) -> int:
        """Bytes that suffice for certain: `total`, and a margin on all but the
        weights."""
        weights = self.weights + self.drafter_weights
        return weights + int(UNFORESEEN * (self.total - weights))

    @property
    def steps_total(self) -> int:
        """Bytes of the steps alone, to compare with `compiled_bytes`."""
        more = self.reading - self.temporaries.phases[self.temporaries.largest]
        return self.total - max(more, 0)


def abstract_model(config: ModelConfig, dtype: Any) -> Model:
    """A model of `jax.ShapeDtypeStruct`: what `load` would read, and none of it."""
    return Model(abstract_params(config, dtype), config)


def abstract_program(
    target: Model,
    drafter: AnyDrafter | Source,
    tree: Topology | str | Sequence[int],
    room: Room,
    rule: Rule | str = NAIVE,
) -> tuple[Spec, Decoding]:
    """Returns the arguments of `loop.advance` as `jax.ShapeDtypeStruct`.

    Args:
      target, drafter, tree, rule: as of `specs.make_spec`; models may be abstract.

    Raises:
      ValueError: what does not go together, or too little capacity for the tree.
    """
    tree = resolve_tree(tree)
    rule = resolve_rule(rule, tree) if isinstance(rule, str) else rule

    def spec_of(target: Model, source: Source) -> Spec:
        return specs.make_spec(target, source, tree, rule)

    spec = jax.eval_shape(spec_of, target, source_of(drafter))
    least = loop.cache_capacity(1, room.max_new_tokens, loop.deepest(spec.policy))
    if room.capacity < least:
        raise ValueError(
            f"capacity: {room.capacity} rows of the caches, the tree and "
            f"{room.max_new_tokens} new tokens want {least}"
        )
    # The text's width is in no array that the loop is given.
    return spec, greedy_start(room, 2).shapes(spec)


def greedy_start(room: Room, width: int) -> Start:
    """Greedy text after texts so wide, in tokens."""

    def ids(*shape: int) -> Any:
        return jax.ShapeDtypeStruct((room.batch, *shape), jnp.int32)

    requests = Requests(ids(), None, ids(STOPS), None, None)
    texts = [range(width)] * room.batch
    return Start(texts, requests, room.max_new_tokens, room.capacity)


def memory_of(
    target: Model,
    drafter: AnyDrafter | Source,
    tree: Topology | str | Sequence[int],
    room: Room,
    rule: Rule | str = NAIVE,
) -> Memory:
    """The bytes of a greedy generation by part; arguments as of `abstract_program`."""
    return parts_of(*abstract_program(target, drafter, tree, room, rule), room)


def parts_of(spec: Spec, decoding: Decoding, room: Room) -> Memory:
    """Counts the bytes of a generation at its start; arrays may be abstract."""
    caches = caches_of(decoding.state)
    state, records = size_of(decoding.state), size_of(decoding.pending)
    drafting, weights = size_of(decoding.drafting), size_of(spec.target)
    shared = size_of(spec.drafter.of_target)
    return Memory(
        weights=weights,
        drafter_weights=size_of(spec.drafter) - shared,
        state=state - caches,
        caches=caches,
        records=records,
        drafting=drafting,
        text=size_of(decoding) + size_of(spec.policy) - state - records - drafting,
        temporaries=temporaries_of(spec, room.batch),
        reading=reading_at_most(spec, room.batch, room.capacity),
        shared=shared,
    )


@dataclass(frozen=True)
class CompiledBytes:
    """What the compiler says of a program.

    Attributes:
      arguments: weights, states and all that the loop is given.
      outputs: of its result, without what is written in place of arguments.
      temporaries: of the steps.
    """

    arguments: int
    outputs: int
    temporaries: int

    @property
    def added(self) -> int:
        """Bytes that running the program adds: outputs and temporaries."""
        return self.outputs + self.temporaries

    @property
    def total(self) -> int:
        return self.arguments + self.added


def compiled_bytes(
    target: Model,
    drafter: AnyDrafter | Source,
    tree: Topology | str | Sequence[int],
    room: Room,
    rule: Rule | str = NAIVE,
    reads: int = 0,
) -> CompiledBytes:
    """Compiles a greedy generation's loop and returns its bytes; nothing is allocated.

    It takes as long as compiling does: seconds to a minute. Weights that target and
    drafter share count once, those that a tree has no use for not at all.

    Args:
      reads: tokens of the prompts; 0: the loop, else the program that reads them.

    Raises:
      ValueError: as `abstract_program`; a platform that says nothing of its memory.
    """
    spec, decoding = abstract_program(target, drafter, tree, room, rule)
    if reads:
        found = analysed(greedy_start(room, reads).lowered(spec))
    else:
        found = analysed(lowered_steps(spec, decoding))
    return replace(found, arguments=found.arguments - size_of(spec.drafter.of_target))


def lowered_steps(spec: Spec, decoding: Decoding) -> Any:
    """The program of a generation's steps, for the compiler."""
    return loop.advance_jit.lower(spec, decoding, jax.ShapeDtypeStruct((), jnp.int32))


def analysed(lowered: Any) -> CompiledBytes:
    """Compiles a program and returns its bytes.

    A program that runs later with the same shapes is not compiled again.
    """
    sizes: Any = lowered.compile().memory_analysis()
    if sizes is None:
        raise ValueError("memory: this platform says nothing of what programs need")
    return CompiledBytes(
        sizes.argument_size_in_bytes,
        sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        sizes.temp_size_in_bytes,
    )
