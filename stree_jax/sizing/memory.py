"""Counts the bytes of a generation by part, before anything is allocated.

The loop's arguments (weights, states, caches, records, the drafter's state, the text)
are counted with `jax.eval_shape` of the functions that make them. The temporaries of
its steps are predicted (`temporaries`). `compiled_bytes` compiles the loop for abstract
arguments and reads the compiler's memory analysis.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from stree_jax.models import Model, ModelConfig, abstract_params
from stree_jax.models.base.shards import Cut
from stree_jax.models.sharding import whole_model
from stree_jax.models.stack.memory import size_of
from stree_jax.sampling.requests import Requests
from stree_jax.sizing.parts import STOPS, BufferSizes, Memory
from stree_jax.sizing.temporaries import caches_of, reading_at_most, temporaries_of
from stree_jax.speculation import loop, specs
from stree_jax.speculation.accept import NAIVE, Rule, resolve_rule
from stree_jax.speculation.decoding import Decoding
from stree_jax.speculation.drafters.table import AnyDrafter, source_of
from stree_jax.speculation.on_mesh import models_laid_out
from stree_jax.speculation.source import Source
from stree_jax.speculation.start import Start
from stree_jax.speculation.step import Spec
from stree_jax.speculation.tree import Topology, resolve_tree


def abstract_model(
    config: ModelConfig,
    dtype: Any,
    mesh: Mesh | AbstractMesh | None = None,
    like: Cut | None = None,
) -> Model:
    """Returns the model that `load` would return, as `jax.ShapeDtypeStruct`s. On a
    mesh, `like` is the cut of a model that is divided in the same way."""
    if mesh is not None:
        return whole_model.abstract_model(config, dtype, mesh, like)
    return Model(abstract_params(config, dtype), config)


def abstract_program(
    target: Model,
    drafter: AnyDrafter | Source,
    tree: Topology | str | Sequence[int],
    room: BufferSizes,
    rule: Rule | str = NAIVE,
) -> tuple[Spec, Decoding]:
    """Returns the arguments of `loop.advance` as `jax.ShapeDtypeStruct`.

    Args:
      target, drafter, tree, rule: as in `specs.make_spec`; models may be abstract.

    Raises:
      ValueError: arguments that do not fit together, or too little capacity for the
        tree.
    """
    tree = resolve_tree(tree)
    rule = resolve_rule(rule, tree) if isinstance(rule, str) else rule

    def spec_of(target: Model, source: Source) -> Spec:
        return specs.make_spec(target, source, tree, rule)

    spec = jax.eval_shape(spec_of, target, source_of(drafter, target.config))
    spec = models_laid_out(spec)
    least = loop.cache_capacity(1, room.max_new_tokens, loop.deepest(spec.policy))
    if room.capacity < least:
        raise ValueError(
            f"capacity: the tree and {room.max_new_tokens} new tokens need {least} "
            f"cache rows, got {room.capacity}"
        )
    # No argument of the loop has the width of the prompts in its shape.
    return spec, greedy_start(room, 2).shapes(spec)


def greedy_start(room: BufferSizes, width: int) -> Start:
    """Returns the `Start` of greedy decoding after prompts of `width` tokens, with
    shapes instead of arrays."""

    def ids(*shape: int) -> Any:
        return jax.ShapeDtypeStruct((room.batch, *shape), jnp.int32)

    requests = Requests(ids(), None, ids(STOPS), None, None)
    texts = [range(width)] * room.batch
    return Start(texts, requests, room.max_new_tokens, room.capacity)


def memory_of(
    target: Model,
    drafter: AnyDrafter | Source,
    tree: Topology | str | Sequence[int],
    room: BufferSizes,
    rule: Rule | str = NAIVE,
) -> Memory:
    """Counts the bytes of greedy decoding; arguments as in `abstract_program`."""
    return parts_of(*abstract_program(target, drafter, tree, room, rule), room)


def parts_of(spec: Spec, decoding: Decoding, room: BufferSizes) -> Memory:
    """Counts the bytes of a generation from its first state; arrays may be abstract."""
    caches = caches_of(decoding.state)
    copied = caches_of(decoding.drafting) if spec.drafter.copies_caches else 0
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
        temporaries=temporaries_of(spec, room.batch, copied),
        reading=reading_at_most(spec, room.batch, room.capacity) + copied,
        shared=shared,
    )


@dataclass(frozen=True)
class CompiledBytes:
    """The compiler's memory analysis of a program, in bytes.

    Attributes:
      arguments: weights, states and all other arguments.
      outputs: results that are not written in place of arguments.
      temporaries: memory that the program needs while it runs.
    """

    arguments: int
    outputs: int
    temporaries: int

    @property
    def added(self) -> int:
        """Bytes that the program allocates: outputs and temporaries."""
        return self.outputs + self.temporaries

    @property
    def total(self) -> int:
        return self.arguments + self.added


def compiled_bytes(
    target: Model,
    drafter: AnyDrafter | Source,
    tree: Topology | str | Sequence[int],
    room: BufferSizes,
    rule: Rule | str = NAIVE,
    reads: int = 0,
) -> CompiledBytes:
    """Compiles the loop of greedy decoding and returns its bytes; allocates nothing.

    Compiling takes seconds to a minute. Weights that target and drafter share count
    once; weights that the tree does not use are not counted.

    Args:
      reads: if 0, the loop is compiled; otherwise prefill of so many tokens.

    Raises:
      ValueError: as `abstract_program`, or if the platform has no memory analysis.
    """
    spec, decoding = abstract_program(target, drafter, tree, room, rule)
    if reads:
        found = analysed(greedy_start(room, reads).lowered(spec))
    else:
        found = analysed(lowered_steps(spec, decoding))
    return replace(found, arguments=found.arguments - size_of(spec.drafter.of_target))


def lowered_steps(spec: Spec, decoding: Decoding) -> Any:
    """Lowers the decoding loop of a generation for XLA, without compiling it."""
    return loop.advance_jit.lower(spec, decoding, jax.ShapeDtypeStruct((), jnp.int32))


def analysed(lowered: Any) -> CompiledBytes:
    """Compiles a lowered program and returns its bytes.

    jax caches the compiled program: running it later does not compile it again.
    """
    sizes: Any = lowered.compile().memory_analysis()
    if sizes is None:
        raise ValueError("memory: this platform does not report the memory of programs")
    return CompiledBytes(
        sizes.argument_size_in_bytes,
        sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        sizes.temp_size_in_bytes,
    )
