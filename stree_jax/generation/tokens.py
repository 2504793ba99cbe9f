"""The public function `generate_tokens`: generation as a pure function of arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax.common.checks import integer, shown, with_hints
from stree_jax.models import Model, check_model
from stree_jax.models.base.serialization import register_for_export
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import Sampling, SamplingRows, sampling_rows
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.policy import StepTimes
from stree_jax.speculation.decoding import OUT_OF_LENGTH
from stree_jax.speculation.default_tree import spec_for
from stree_jax.speculation.drafters.table import AUTO, AnyDrafter
from stree_jax.speculation.loop import FOREVER, MOST_TOKENS, advance, init_decoding
from stree_jax.speculation.tree import Topology


@register_for_export
@struct.dataclass
class GeneratedTokens:
    """The result of `generate_tokens`: a pytree of arrays.

    Attributes:
      tokens: [B, max_new_tokens] int32. The generated tokens of each row, then zeros.
      length: [B] int32. Number of generated tokens, with the stop token.
      stopped: [B] bool. True if the row ended with a stop token, False if it reached
        `max_new_tokens`.
      calls: [B] int32. Target passes after prefill while the row was running.
      origin: [B, max_new_tokens] uint8. What proposed each token, see
        `docs/reference/results.md`.
      margin: [B] float32. Smallest gap between the two best scores at any choice.
    """

    tokens: jax.Array
    length: jax.Array
    stopped: jax.Array
    calls: jax.Array
    origin: jax.Array
    margin: jax.Array

    @property
    def mask(self) -> jax.Array:
        """[B, max_new_tokens] bool. True for generated tokens, False for padding."""
        places = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
        return places[None] < self.length[:, None]

    def __repr__(self) -> str:
        shape = getattr(self.tokens, "shape", None)
        fields = ", ".join(self.__annotations__)
        return f"GeneratedTokens(tokens {shape}; fields: {fields})"


@with_hints
def generate_tokens(
    model: Model,
    prompts: jax.Array,
    lengths: jax.Array,
    *,
    max_new_tokens: int,
    drafter: AnyDrafter = AUTO,
    tree: Topology | str | Sequence[int] | None = None,
    times: StepTimes | None = None,
    rule: Rule | str | None = None,
    sampling: Sampling | Sequence[Sampling] | SamplingRows | None = None,
    key: jax.Array | None = None,
    stop_tokens: Any = None,
) -> GeneratedTokens:
    """Generates tokens, as one pure function that can be used inside `jax.jit`.

    The options have the names, meanings and default values that they have in
    `generate`.

    Args:
      model: the target model, which verifies the draft tokens.
      prompts: [B, S] ints, padded on the right.
      lengths: [B] ints in 1 .. S.
      max_new_tokens: maximum number of tokens per row, static.
      drafter: proposes draft tokens: a draft model, heads of the target, "lookup",
        "mtp", or "auto". None for plain decoding.
      tree: the draft tree, its name, or a list of parents. "auto" chooses a tree at
        every step. If None, the drafter's default tree.
      times: for tree "auto", step times measured on this machine, see `stree_jax.tune`.
        If None, assumed times.
      rule: how draft tokens are accepted and drawn, see `accept.resolve_rule`.
      sampling: settings for all rows, or one for each row; or the arrays that
        `sampling.settings.sampling_rows` makes of them, which may be arguments of
        `jax.jit`. If None, decoding is greedy.
      key: base of all random numbers. If None, the key of seed 0.
      stop_tokens: [n] ints. If None, the target's stop tokens.

    Returns:
      The generated tokens, as `GeneratedTokens`.

    Raises:
      ValueError: an argument has a wrong type or shape. Outside `jit`, also if a token
        id is outside the vocabulary or a length is outside 1 .. S. Inside `jit` values
        are unknown, and ids and lengths are clipped to the valid range instead.

    Example:
      >>> model = stree_jax.load("demo")
      >>> ids = model.tokenizer.encode("def f(").ids
      >>> run = jax.jit(stree_jax.generate_tokens, static_argnames="max_new_tokens")
      >>> out = run(model, jnp.array([ids]), jnp.array([len(ids)]), max_new_tokens=8)
      >>> out.tokens.shape
      (1, 8)
    """
    check_model("model", model)
    _check_prompts(model, prompts, lengths)
    what = f"1..{MOST_TOKENS} tokens, static under jit"
    max_new_tokens = integer("max_new_tokens", max_new_tokens, 1, MOST_TOKENS, what)
    batch, S = prompts.shape
    stops = _stop_table(model, stop_tokens)
    rows = _sampling_rows(sampling, key, batch)
    lengths = jnp.clip(jnp.asarray(lengths, jnp.int32), 1, S)
    prompts = jnp.clip(jnp.asarray(prompts, jnp.int32), 0, model.config.vocab_size - 1)
    requests = Requests(
        max_new_tokens=jnp.full((batch,), max_new_tokens, jnp.int32),
        min_new_tokens=None,
        stop_tokens=jnp.broadcast_to(stops, (batch, stops.shape[1])),
        stop_strings=None,
        sampling=rows,
    )
    spec = spec_for(model, drafter, tree, rule, times)
    decoding = init_decoding(
        spec, prompts, lengths, requests, max_new_tokens=max_new_tokens
    )
    done = advance(spec, decoding, jnp.int32(FOREVER))
    stopped = done.finish != OUT_OF_LENGTH
    return GeneratedTokens(
        done.tokens, done.length, stopped, done.calls, done.origin, done.margin
    )


def _check_prompts(model: Model, prompts: Any, lengths: Any) -> None:
    """Raises ValueError for wrong types and shapes and, outside `jit`, wrong values."""
    for name, value in (("prompts", prompts), ("lengths", lengths)):
        if not isinstance(value, jax.Array | np.ndarray):
            raise ValueError(f"{name}: want an array of integers, got {shown(value)}")
        if not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(f"{name}: want integers, got {value.dtype}")
    if prompts.ndim != 2 or lengths.shape != prompts.shape[:1]:
        raise ValueError(
            "prompts: want [B, S] and lengths [B], "
            f"got {prompts.shape} and {lengths.shape}"
        )
    S, V = prompts.shape[1], model.config.vocab_size
    if 0 in prompts.shape:
        raise ValueError(f"prompts: want at least one token, got shape {prompts.shape}")
    bounds = ("prompts", prompts, 0, V - 1), ("lengths", lengths, 1, S)
    for name, value, low, high in bounds:
        if isinstance(value, jax.core.Tracer):
            continue
        table = np.asarray(value)
        if not low <= table.min() <= table.max() <= high:
            raise ValueError(
                f"{name}: {table.min()}..{table.max()} are not all in {low}..{high}"
            )


def _stop_table(model: Model, stop_tokens: Any) -> jax.Array:
    """Returns stop tokens [1, n] int32; those of the model if `stop_tokens` is
    None."""
    if stop_tokens is None:
        stop_tokens = model.config.stop_tokens
    known = not isinstance(stop_tokens, jax.core.Tracer)
    try:
        stops = np.asarray(stop_tokens) if known else stop_tokens
    except (TypeError, ValueError):  # rows of different lengths, or values inside jit
        stops = np.asarray(None)
    V = model.config.num_tokens
    if known and stops.size == 0:
        stops = stops.astype(np.int32)
    if stops.ndim > 1 or not jnp.issubdtype(stops.dtype, jnp.integer):
        raise ValueError(
            f"stop_tokens: want a token id or a list of them, got {shown(stop_tokens)}"
        )
    if known and stops.size and not 0 <= stops.min() <= stops.max() < V:
        raise ValueError(f"stop_tokens: {stops.tolist()} are not all in 0..{V - 1}")
    return jnp.asarray(stops, jnp.int32).reshape(1, -1)


def _sampling_rows(
    sampling: Any, key: jax.Array | None, batch: int
) -> SamplingRows | None:
    """Returns the sampling settings of `batch` rows, or None for greedy decoding."""
    if isinstance(sampling, Sampling):
        sampling = [sampling] * batch
    if isinstance(sampling, list | tuple) and all(
        isinstance(one, Sampling) for one in sampling
    ):
        sampling, key = sampling_rows(sampling, key), None
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
    if rows != batch:
        raise ValueError(f"sampling: {rows} rows, but {batch} prompts")
    return sampling
