"""Makes drafters with random weights for a target, and compiles rounds of drafting.

A round drafts a chain, and then reads the whole chain and one more token as new text,
as after a step that accepted all of it.
"""

import math
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bench.passes import CONTEXT, Case, Program
from bench.shapes import NAMES, random_draft_model
from stree_jax.common.words import LOOKUP, MTP, suggestion
from stree_jax.models import Model, ModelConfig, State, format_named
from stree_jax.models.base.keys import default_numbers, key_of
from stree_jax.models.drafters.dflash import DFlash, DFlashConfig, init_dflash
from stree_jax.models.stack.boundaries import boundary_count
from stree_jax.models.weights.int8_format import INT8
from stree_jax.sampling.distribution import Distribution
from stree_jax.sampling.requests import Requests
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.drafter import Prompts, Update
from stree_jax.speculation.drafters.table import AnyDrafter, source_of
from stree_jax.speculation.source import Source
from stree_jax.speculation.tree import DEEPEST, resolve_tree
from stree_jax.training.dspark import DSparkSize, dspark_config

DSPARK = "dspark"
DRAFTERS = (LOOKUP, MTP, DSPARK, *NAMES)
# LiquidAI's DSpark drafter of LFM2.5-1.2B. Its MLPs are three times as wide as the
# target, four query heads share a key head, and it reads five residual streams.
SIZE = DSparkSize(layers=5, drafts=9, rank=256, window=0, causal=False)
TAPS = 5


def check_drafter(name: str, target: str, config: ModelConfig) -> None:
    """Raises ValueError if a drafter is unknown, or the target has none of this kind.

    Args:
      name: one of `DRAFTERS`.
      target: the target's name, for the message.
      config: the target's architecture, with its MTP layers.
    """
    if name not in DRAFTERS:
        raise ValueError(f"--pairs: unknown {name!r}; {suggestion(name, DRAFTERS)}")
    if name == MTP and not config.mtp:
        raise ValueError(f"--pairs: {target} has no MTP layers; leave out ':{MTP}'")
    if name == DSPARK:
        try:
            dspark_of(config)
        except ValueError as error:
            raise ValueError(f"--pairs: {target}:{DSPARK}: {error}") from error


def dspark_of(target: ModelConfig) -> DFlashConfig:
    """Returns a DSpark drafter of the proportions that LiquidAI publishes."""
    taps = min(TAPS, boundary_count(target))
    size = replace(SIZE, mlp=3 * target.d_model, taps=taps)
    config = dspark_config(target, size, mask=0)
    heads = config.attention.num_heads
    shared = replace(config.attention, num_kv_heads=math.gcd(heads, heads // 4))
    return replace(config, attention=shared)


def random_drafter(name: str, target: Model, dtype: Any) -> AnyDrafter:
    """Returns a drafter with random weights, in the format in which one is loaded by
    default.

    Args:
      name: one of `DRAFTERS`. A shape is a draft model, which gets the target's
        vocabulary.
      target: the target.
      dtype: dtype or format of the target.
    """
    usual, config = format_named(dtype).for_drafters(), target.config
    if name in (LOOKUP, MTP):
        return name
    if name == DSPARK:
        with default_numbers():
            block = dspark_of(config)
            kept = dtype if usual is None else INT8
            return DFlash(init_dflash(block, key_of(1), kept), block)
    return random_draft_model(name, config, usual or dtype)


def most_drafts(source: Source) -> int:
    """Returns the length of the longest chain that a source drafts."""
    return source.search_size[1] if source.one_pass else DEEPEST


def compile_drafting(
    target: Model, drafter: AnyDrafter, drafts: int, passes: int
) -> Program:
    """Compiles `passes` rounds of drafting a chain, greedily, after `CONTEXT` tokens.

    Args:
      target: the target; MTP layers and block drafters use parts of it.
      drafter: the drafter.
      drafts: number of tokens of the chain.
      passes: rounds in a call.
    """
    config, tree = target.config, resolve_tree(f"chain:{drafts}")
    bound = source_of(drafter, config).bind(target, tree)
    one, new = jnp.ones((1,), jnp.int32), drafts + 1
    requests = Requests(one, None, jnp.full((1, 1), -1, jnp.int32), None, None)
    dist = Distribution(requests, 0 * one, None, config.num_tokens)
    prompts = Prompts(one[None], one, CONTEXT + new + 1, new)
    seen = jnp.zeros((1, new, config.d_model), jnp.float32)
    tokens = jnp.arange(new, dtype=jnp.int32)[None] % config.num_tokens
    # Arguments of the program, so that the compiler does not know them.
    given = one, Update(tokens, new * one, seen, (seen,) * len(bound.taps))

    def run(bound: Any, carry: Any, given: Any) -> Any:
        def once(_: jax.Array, carry: Any) -> Any:
            # The barrier keeps XLA from computing a part of a round before the loop.
            state, (root, update) = lax.optimization_barrier((carry[0], given))
            rule = Rule("naive", "top_k")
            draft, state = bound.propose(state, root, tree, dist, rule)
            return _in_context(bound.commit(state, update)), None, draft.tokens

        return lax.fori_loop(0, passes, once, carry)

    first = jax.jit(lambda bound: _in_context(bound.init(prompts, None)))

    def begin() -> Any:
        return first(bound), None, jnp.copy(tokens)

    began = time.perf_counter()
    program = jax.jit(run, donate_argnums=1)
    compiled = program.lower(bound, begin(), given).compile()
    return Program(
        case=Case(new, "packed"),
        run=lambda carry: compiled(bound, carry, given),
        begin=begin,
        passes=passes,
        compile_s=time.perf_counter() - began,
        memory={},
    )


def _in_context(state: Any) -> Any:
    """Returns a drafter's state in which all models' states have `CONTEXT` tokens."""

    def at(part: Any) -> Any:
        if not isinstance(part, State):
            return part
        return replace(part, length=jnp.full_like(part.length, CONTEXT))

    return jax.tree.map(at, state, is_leaf=lambda part: isinstance(part, State))
