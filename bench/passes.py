"""Compiles and times forward passes of a model over a binary tree, packed and unrolled.

A packed pass runs all nodes with one state. An unrolled pass runs a separate sequence
with its own state for the path to each leaf.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.device_memory import compiled_bytes
from bench.method import take_turns
from bench.unroll import Unrolled
from stree_jax.models import (
    Model,
    ModelConfig,
    Pending,
    State,
    init_records,
    init_state,
    param_dtype,
)
from stree_jax.models.base.argmax import argmax
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.layout import tree_layout
from stree_jax.speculation.step import Verify, packed
from stree_jax.speculation.tree import Tree, make_tree

CONTEXT = 1024
# On a GPU, handing over the arrays of all layers and preparing CUDA graphs takes as
# long as several passes, so a dispatch runs this many.
DISPATCH = 128

Carry = tuple[State, Pending, jax.Array]  # the last is argmax of the logits, [1, T]
Way = Literal["packed", "step", "chunk"]
SCANS: tuple[Way, ...] = ("packed", "step", "chunk")


@dataclass(frozen=True)
class Case:
    """A binary tree of `nodes` nodes, filled level by level, and how it is verified.

    Attributes:
      nodes: T. With 2^L - 1 nodes the tree is full and has L levels, with the root's.
      scan: "packed", or the scan of an unrolled pass.
      context: number of tokens before the tree, which attention layers read in every
        pass.
      capacity: rows of the KV caches, if more than the passes need.
    """

    nodes: int
    scan: Way
    context: int = CONTEXT
    capacity: int = 0

    @property
    def rows(self) -> int:
        """Rows of the KV caches, with space for the context and a path of the tree."""
        return max(self.capacity, self.context + self.tree.depth + 2)

    @property
    def tree(self) -> Tree:
        return make_tree([-1] + [(t - 1) // 2 for t in range(1, self.nodes)])

    @property
    def leaves(self) -> int:
        return self.nodes - self.nodes // 2

    @property
    def verify(self) -> Verify:
        return packed if self.scan == "packed" else Unrolled(self.leaves, self.scan)

    @property
    def tokens(self) -> int:
        """Tokens that one pass computes."""
        paths = self.leaves * (self.tree.depth + 1)
        return self.nodes if self.scan == "packed" else paths

    @property
    def states(self) -> int:
        """States held: the committed one, and a copy a leaf if unrolled."""
        return 1 if self.scan == "packed" else 1 + self.leaves


def draft_of(case: Case, config: ModelConfig) -> Draft:
    """Returns the tree as data, as in decoding, where the compiler does not know it."""
    tokens = jnp.arange(case.nodes, dtype=jnp.int32)[None] % config.num_tokens
    return Draft(tree_layout(case.tree, case.tree.rows(1)), tokens)


def begin_passes(case: Case, model: Model, draft: Draft) -> Carry:
    """Returns a zero state of `context` tokens and a whole path to be replayed."""
    tree, dtype = case.tree, param_dtype(model.params)
    path = draft.layout.paths[:, -1]  # the last node is one of the deepest
    state = init_state(model.config, 1, case.rows, dtype)
    state = replace(state, length=jnp.full((1,), case.context, jnp.int32))
    records = init_records(model.config, 1, case.nodes, dtype)
    count = jnp.full((1,), tree.depth + 1, jnp.int32)
    best = jnp.zeros((1, case.nodes), jnp.int32)
    return state, Pending(records, path, count), best


@dataclass(frozen=True)
class Program:
    """Compiled passes of a case.

    Attributes:
      run: runs passes from a carry, which it consumes, and returns the next carry.
      begin: makes the first carry.
      passes: number of passes per call.
      compile_s: seconds of tracing and compiling.
      memory: see `compiled_bytes`.
    """

    case: Case
    run: Callable[[Carry], Carry]
    begin: Callable[[], Carry]
    passes: int
    compile_s: float
    memory: dict[str, int | None]


def compile_case(model: Model, case: Case, passes: int) -> Program:
    """Compiles `passes` passes of a case: replay, verification, head and argmax."""

    def run(params: Any, carry: Carry, draft: Draft) -> Carry:
        def once(_: jax.Array, carry: Carry) -> Carry:
            # Without the barrier XLA would compute the first layers' products with the
            # draft once, before the loop, because no pass changes the draft.
            (state, pending, _), drafted = lax.optimization_barrier((carry, draft))
            here = replace(model, params=params)
            seen = case.verify(here, state, drafted, pending)
            best = argmax(seen.logits)
            # Every pass reads a context of the same length.
            kept = replace(seen.state, length=state.length)
            return kept, replace(pending, records=seen.records), best

        return lax.fori_loop(0, passes, once, carry)

    program = jax.jit(run, donate_argnums=1)
    draft = draft_of(case, model.config)
    began = time.perf_counter()
    lowered = program.lower(model.params, begin_passes(case, model, draft), draft)
    # Called itself: `program` would compile again for a carry that came from a pass
    # over parameters that are committed to a device.
    compiled = lowered.compile()
    return Program(
        case=case,
        run=lambda carry: compiled(model.params, carry, draft),
        begin=lambda: begin_passes(case, model, draft),
        passes=passes,
        compile_s=time.perf_counter() - began,
        memory=compiled_bytes(compiled),
    )


def passes_per_dispatch() -> int:
    """Returns the number of passes that a call should run on this backend."""
    return 1 if jax.default_backend() == "cpu" else DISPATCH


class Turns:
    """Calls of a program, one after the other; each returns seconds a pass.

    A call takes the number of committed tokens, by default that of the case; for the
    program it is data.

    Attributes:
      best: argmax of the logits [1, T] in the last pass, None before the first.
    """

    def __init__(self, program: Program):
        self.program = program
        self.carry: Carry | None = None
        self.best: np.ndarray | None = None

    def __call__(self, context: int | None = None) -> float:
        # A call consumes its carry, also where it fails, so none is kept meanwhile.
        carry, self.carry = self.carry or self.program.begin(), None
        if context is not None:
            length = jnp.full((1,), context, jnp.int32)
            carry = replace(carry[0], length=length), *carry[1:]
        jax.block_until_ready(carry)
        began = time.perf_counter()
        carry = jax.block_until_ready(self.program.run(carry))
        seconds = time.perf_counter() - began
        self.carry, self.best = carry, np.asarray(carry[2])
        return seconds / self.program.passes


def time_cases(
    programs: Sequence[Program], repeats: int, skip_too_large: bool = False
) -> list[dict[str, Any]]:
    """Times forward passes of compiled programs, which run alternately.

    Args:
      programs: the programs, one per case.
      repeats: number of timed calls of each.
      skip_too_large: if True, the record of a case that runs out of memory has no
        "seconds". Otherwise the error is raised.

    Returns:
      A record per case. If all cases have the same number of nodes, it includes the
      share of the last pass's results that are those of the first case.
    """
    turns = {f"{p.case.scan} {p.case.nodes}": Turns(p) for p in programs}
    seconds, _ = take_turns(dict(turns), repeats, set(), skip_too_large)
    same: list[float | None] = [None] * len(programs)
    if len({p.case.nodes for p in programs}) == 1:
        best = [turn.best for turn in turns.values()]
        same = [
            None if b is None or best[0] is None else float((b == best[0]).mean())
            for b in best
        ]
    return [
        {
            "scan": p.case.scan,
            "nodes": p.case.nodes,
            "tokens": p.case.tokens,
            "states": p.case.states,
            "seconds": seconds[name],
            "same_argmax": same[i],
            "compile_s": p.compile_s,
            **p.memory,
        }
        for i, (name, p) in enumerate(zip(turns, programs, strict=True))
    ]
