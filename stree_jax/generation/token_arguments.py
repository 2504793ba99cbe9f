"""Checks the arguments of `generate_tokens`, which may be traced by `jax.jit`.

Outside `jit`, wrong values raise. Inside, values are unknown: only types and shapes are
checked, and values are clipped to the valid range.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.common.checks import shown
from stree_jax.common.rows import repeated, spread
from stree_jax.constraints.constraint import Constraint
from stree_jax.constraints.rows import constraint_rows, constraints_by_row
from stree_jax.cpu_kernels import symbolic_size
from stree_jax.models import Model, empty_routing, expert_taps
from stree_jax.models.stack.network import ExpertsOf
from stree_jax.models.stack.routing import UNKNOWN, routed_experts
from stree_jax.sampling.constraints import Constraints
from stree_jax.sampling.requests import StopAutomata
from stree_jax.sampling.settings import (
    Sampling,
    SamplingRows,
    check_rows,
    rows_of_one,
    sampling_rows,
)


def known(value: Any) -> bool:
    """True if the values of an array are known while a program is traced."""
    return not isinstance(value, jax.core.Tracer)


def integers(name: str, value: Any, want: str) -> Any:
    """Returns an array of integers, as a NumPy array if its values are known and not
    spread over several devices.

    Raises:
      ValueError: it is no array (or nested list) of integers. The message says what is
        wanted.
    """
    try:
        table = np.asarray(value) if known(value) and not spread(value) else value
        if table.size == 0:
            table = table.astype(np.int32)
    except (TypeError, ValueError):  # rows of different lengths, or tracers in a list
        table = np.asarray(None)
    if not jnp.issubdtype(table.dtype, jnp.integer):
        if isinstance(value, jax.Array | np.ndarray):
            raise ValueError(f"{name}: want integers, got {table.dtype}")
        raise ValueError(f"{name}: want {want}, got {shown(value)}")
    return table


def check_range(name: str, table: Any, low: int, high: int) -> None:
    """Raises ValueError if known values are not all in low .. high."""
    if known(table) and table.size and not low <= table.min() <= table.max() <= high:
        raise ValueError(
            f"{name}: {table.min()}..{table.max()} are not all in {low}..{high}"
        )


def right_padded(
    prompts: Any, lengths: Any, mask: Any, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns prompts [B, S] int32, padded on the right, and their lengths [B] int32.

    Args:
      prompts: [B, S] ints. Padding may have any ids.
      lengths: [B] ints in 1 .. S, for prompts that are padded on the right; or None.
      mask: [B, S], true for tokens, for padding anywhere; or None. Without `lengths`
        and `mask`, prompts have no padding.
      vocab_size: V.

    Raises:
      ValueError: a type, a shape or a known value is wrong.
    """
    prompts = integers("prompts", prompts, "an array of integers [B, S]")
    if prompts.ndim != 2:
        raise ValueError(f"prompts: want [B, S] and lengths [B], got {prompts.shape}")
    if 0 in prompts.shape:
        raise ValueError(f"prompts: want at least one token, got shape {prompts.shape}")
    batch, S = prompts.shape
    if mask is not None:
        if lengths is not None:
            raise ValueError("mask: give either lengths or mask, not both")
        prompts, lengths = _compacted(prompts, mask)
    elif lengths is None:
        lengths = np.full((batch,), S, np.int32)
    lengths = integers("lengths", lengths, "an array of integers [B]")
    if lengths.shape != (batch,):
        raise ValueError(
            f"lengths: want one for each of {batch} prompts, got {lengths.shape}"
        )
    check_range("prompts", prompts, 0, vocab_size - 1)
    check_range("lengths" if mask is None else "mask: tokens", lengths, 1, S)
    lengths = jnp.clip(jnp.asarray(lengths, jnp.int32), 1, S)
    return jnp.clip(jnp.asarray(prompts, jnp.int32), 0, vocab_size - 1), lengths


def _compacted(prompts: Any, mask: Any) -> tuple[Any, Any]:
    """Returns the tokens of each row moved to its start, and their number."""
    mask = _checked_mask(mask)
    if mask.shape != prompts.shape:
        raise ValueError(f"mask: want {prompts.shape}, got {mask.shape}")
    both = isinstance(prompts, np.ndarray) and isinstance(mask, np.ndarray)
    module: Any = np if both else jnp
    mask = mask.astype(bool)
    order = module.argsort(~mask, axis=1, stable=True)
    moved = module.take_along_axis(module.where(mask, prompts, 0), order, axis=1)
    return moved, mask.sum(axis=1).astype(np.int32)


def _checked_mask(mask: Any) -> Any:
    """Returns a mask as an array of bools or integers.

    Floats are refused: in other libraries they are added to scores, with 0 for tokens.

    Raises:
      ValueError: the mask has another dtype, or known integers other than 0 and 1.
    """
    want = "bools, or integers 0 and 1"
    try:
        traced = not all(map(known, jax.tree.leaves(mask)))  # also rows in a list
        table = jnp.asarray(mask) if traced or spread(mask) else np.asarray(mask)
    except (TypeError, ValueError):
        raise ValueError(f"mask: want {want} [B, S], got {shown(mask)}") from None
    if table.dtype != bool and not jnp.issubdtype(table.dtype, jnp.integer):
        raise ValueError(f"mask: want {want} (True for tokens), got {table.dtype}")
    if table.dtype != bool:
        check_range(f"mask: want {want}", table, 0, 1)
    return table


def counts(name: str, value: Any, batch: int, low: int, high: int) -> jax.Array:
    """Returns one number of tokens for each prompt, [B] int32.

    Args:
      name: the argument's name.
      value: an integer or [B] ints.
      batch: B.
      low, high: smallest and largest number.

    Raises:
      ValueError: it is neither, or a known value is not in low .. high.
    """
    want = f"an integer or an array of integers [{batch}]"
    table = integers(name, value, want)
    if table.shape not in ((), (batch,)):
        raise ValueError(f"{name}: want {want}, got shape {table.shape}")
    check_range(name, table, low, high)
    table = jnp.clip(jnp.asarray(table, jnp.int32), low, high)
    return jnp.broadcast_to(table, (batch,))


def stop_table(model: Model, stop_tokens: Any, batch: int) -> jax.Array:
    """Returns the stop tokens [B, n] int32 of each prompt, padded with -1.

    Args:
      model: the target. Its stop tokens are used if `stop_tokens` is None.
      stop_tokens: the argument of `generate_tokens`.
      batch: B.

    Raises:
      ValueError: values are not token ids, or the shape is wrong.
    """
    if stop_tokens is None:
        stop_tokens = model.config.stop_tokens
    want = f"a token id, a list of them, or an array [{batch}, n] padded with -1"
    stops = integers("stop_tokens", stop_tokens, want)
    by_row = stops.ndim == 2 and stops.shape[0] == batch
    if stops.ndim > 1 and not by_row:
        raise ValueError(f"stop_tokens: want {want}, got shape {stops.shape}")
    check_range("stop_tokens", stops, -1 if by_row else 0, model.config.num_tokens - 1)
    stops = jnp.asarray(stops, jnp.int32)
    return (
        stops if by_row else jnp.broadcast_to(stops.reshape(1, -1), (batch, stops.size))
    )


def given_routing(model: Model, routing: Any, batch: int, T: int) -> jax.Array:
    """Returns the experts [B, T, L, k] int32 that tokens have to use.

    Raises:
      ValueError: the model has no experts, or a type, a shape or a known value is
        wrong.
    """
    taps = check_experts(model)
    shape = empty_routing(model.config, batch, T).shape
    table = integers("routing", routing, f"an array of integers {shape}")
    if table.shape != shape:
        what = "texts, tokens, layers with experts, experts per token"
        raise ValueError(f"routing: want {shape} ({what}), got {table.shape}")
    for i, tap in enumerate(taps):
        most = routed_experts(model.config, tap.mixer)[0]
        check_range("routing", table[:, :, i], UNKNOWN, most - 1)
    if known(table):
        module: Any = np if isinstance(table, np.ndarray) else jnp
        ordered = module.sort(table, axis=3)
        if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
            raise ValueError("routing: want different experts for each token")
    return jnp.maximum(jnp.asarray(table, jnp.int32), UNKNOWN)


def check_experts(model: Model) -> tuple[ExpertsOf, ...]:
    """Returns the model's mixtures of experts.

    Raises:
      ValueError: it has none.
    """
    taps = expert_taps(model.config)
    if not taps:
        raise ValueError("routing: the model has no experts; leave it out")
    return taps


def check_automata(automata: StopAutomata, batch: int, num_tokens: int) -> None:
    """Raises ValueError if automata of stop strings do not fit B prompts or the
    vocabulary."""
    got = automata.automaton.shape, automata.table.shape[-1]
    if got != ((batch,), num_tokens):
        raise ValueError(
            f"stop_strings: want automata of {batch} prompts and {num_tokens} tokens, "
            f"got {got[0]} and {got[1]}"
        )


def rows_of_sampling(
    sampling: Any, key: jax.Array | None, batch: int, n: int, num_tokens: int
) -> SamplingRows | None:
    """Returns the sampling settings of B prompts with n samples each, or None for
    greedy decoding.

    Args:
      sampling: what a user gave.
      key: base of the random numbers, or None.
      batch, n: B and n.
      num_tokens: V, the size of the vocabulary.

    Raises:
      ValueError: `sampling` has another type or number of rows, or `key` is given
        without a `Sampling`.
    """
    if isinstance(sampling, Sampling):
        return rows_of_one(sampling, batch, key, n, num_tokens)
    if isinstance(sampling, list | tuple) and all(
        isinstance(one, Sampling) for one in sampling
    ):
        if len(sampling) != batch:
            raise ValueError(f"sampling: {len(sampling)} rows, but {batch} prompts")
        return sampling_rows(sampling, key, n, num_tokens=num_tokens)
    if key is not None:
        raise ValueError("key: only used with Sampling; give sampling=Sampling(...)")
    if sampling is None:
        return None
    if not isinstance(sampling, SamplingRows):
        raise ValueError(
            "sampling: want a Sampling, or a list of one for each row, got "
            f"{shown(sampling)}"
        )
    rows = sampling.temperature.shape[0]
    if rows != batch * n:
        each = "" if n == 1 else f" with {n} samples each"
        raise ValueError(f"sampling: {rows} rows, but {batch} prompts{each}")
    if (bias := sampling.bias) is not None and bias.shape[1] != num_tokens:
        want = f"one number for each of the {num_tokens} tokens of the vocabulary"
        raise ValueError(f"sampling: logit_bias: want {want}, got {bias.shape[1]}")
    check_rows("sampling", sampling)
    return sampling


def rows_of_constraint(model: Model, constraint: Any, batch: int) -> Constraints | None:
    """Returns the automata of constraints [B], or None without constraints.

    Args:
      model: the target.
      constraint: what a user gave.
      batch: B.

    Raises:
      ValueError: `constraint` has another type or number of rows, or it cannot be
        compiled for this model's tokens.
    """
    if constraint is None:
        return None  # B may be symbolic
    if not isinstance(constraint, Constraints):
        if not symbolic_size(batch):
            return constraint_rows(model, constraints_by_row(constraint, batch))
        if not isinstance(constraint, Constraint):
            raise ValueError(
                "constraint: want a Constraint for all prompts, or the automata of "
                f"constraint_rows, for a symbolic batch; got {shown(constraint)}"
            )
        alone = constraint_rows(model, [constraint])
        return None if alone is None else repeated_constraints(alone, batch)
    got, V = constraint.automaton.shape, model.config.num_tokens
    if (got, constraint.classes.shape[-1]) != ((batch,), V):
        raise ValueError(
            f"constraint: want automata of {batch} prompts and {V} tokens, got "
            f"{got} and {constraint.classes.shape[-1]}"
        )
    return constraint


def repeated_constraints(constraints: Constraints, n: Any) -> Constraints:
    """Returns the automata of B prompts for B n rows, prompt by prompt."""
    automaton, start = constraints.automaton, constraints.start
    rows = dict(automaton=repeated(automaton, n), start=repeated(start, n))
    return replace(constraints, **rows)
