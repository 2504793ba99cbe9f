"""Sampling settings, as users write them and as arrays on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax.common.checks import (
    as_integer,
    as_real,
    class_with_hints,
    flag,
    integer,
    shown,
    with_hints,
)
from stree_jax.common.rows import repeated, symbolic_dimension
from stree_jax.models.base.keys import key_of
from stree_jax.models.base.serialization import register_for_export
from stree_jax.sampling.ranges import BIAS, BIASES, RANGES, SEED
from stree_jax.sampling.threefry import as_threefry, is_typed

FILTERS = "top_k", "top_p", "min_p"
PENALTIES = "repetition_penalty", "presence_penalty", "frequency_penalty"


@class_with_hints
@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one prompt.

    Attributes:
      temperature: divides the logits; 0 is greedy decoding.
      top_k: keeps the k most probable tokens (and ties with the k-th); 0 is off.
      top_p: keeps the smallest set of tokens with at least this total probability; 1 is
        off.
      min_p: keeps tokens with at least this probability relative to the best token; 0
        is off.
      repetition_penalty: divides positive and multiplies negative logits of tokens that
        occur in the text, including the prompt; 1 is off.
      presence_penalty: is subtracted from the logits of tokens that occur in the output
        so far; 0 is off.
      frequency_penalty: is subtracted as many times as a token occurs in the output so
        far; 0 is off.
      logit_bias: pairs of a token id and a number that is added to its logit, or a
        mapping; -100 in effect forbids a token.
      seed: seed of the random numbers. If None, the index of the prompt is used. The
        same seed gives the same text, whatever else is in the batch.

    Example:
      >>> stree_jax.Sampling(temperature=0.7, top_p=0.9, seed=1).top_k
      0
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, one in RANGES.items():
            object.__setattr__(self, name, one.number(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        if self.seed is not None:
            object.__setattr__(self, "seed", SEED.number("seed", self.seed))

    @property
    def changes_nothing(self) -> bool:
        """True for plain greedy decoding, which takes the largest logit."""
        return self == Sampling(temperature=0, seed=self.seed)

    @property
    def penalised(self) -> bool:
        """True if the logits of tokens depend on the text so far."""
        off = self.repetition_penalty == 1 and self.presence_penalty == 0
        return not off or self.frequency_penalty != 0


def _pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """Returns `Sampling.logit_bias` as pairs, ordered by token.

    Raises:
      ValueError: it has another form, or names a token twice.
    """
    items = bias.items() if isinstance(bias, Mapping) else bias
    if isinstance(bias, str | bytes):
        items = None
    want = f"pairs of a token id and {BIAS.want}"
    try:
        pairs = [(as_integer(token), as_real(add)) for token, add in items]
    except (TypeError, ValueError):
        pairs = [(None, None)]
    found = [
        (token, add)
        for token, add in pairs
        if token is not None and add is not None and token >= 0 and BIAS.holds(add)
    ]
    if len(found) != len(pairs):
        raise ValueError(f"logit_bias: want {want}, got {shown(bias)}")
    if len(dict(found)) != len(found):
        raise ValueError(f"logit_bias: want each token once, got {shown(bias)}")
    return tuple(sorted(found))


@register_for_export
@struct.dataclass
class Filters:
    """Filters of the tokens that B rows may choose.

    Attributes:
      top_k: [B] int32.
      top_p, min_p: [B] float32.
    """

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    def any(self) -> jax.Array:
        """True if any row has a filter, as [] bool."""
        return ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)).any()


def check_rows(name: str, rows: "SamplingRows") -> None:
    """Raises ValueError if values of settings as arrays, where they are known, are ones
    that `Sampling` refuses.

    Args:
      name: the argument's name, for the message.
      rows: the settings.
    """
    RANGES["temperature"].check(f"{name}: temperature", rows.temperature)
    if rows.filters is not None:
        for one in FILTERS:
            RANGES[one].check(f"{name}: {one}", getattr(rows.filters, one))
    if rows.penalties is not None:
        for one in PENALTIES:
            value = getattr(rows.penalties, one.removesuffix("_penalty"))
            RANGES[one].check(f"{name}: {one}", value)
    if rows.bias is not None:
        BIASES.check(f"{name}: logit_bias", rows.bias)


def no_filters(rows: int) -> Filters:
    """Returns filters that keep all tokens."""
    off, all_of_it = jnp.zeros((rows,), jnp.float32), jnp.ones((rows,), jnp.float32)
    return Filters(jnp.zeros((rows,), jnp.int32), all_of_it, off)


@register_for_export
@struct.dataclass
class Penalties:
    """Penalties of B rows on tokens that the text contains already.

    Attributes:
      repetition, presence, frequency: [B] float32.
    """

    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array


@register_for_export
@struct.dataclass
class SamplingRows:
    """`Sampling` of B rows as arrays on the device.

    Attributes:
      temperature: [B] float32.
      filters: filters of the rows, or None if no row has a filter, which makes programs
        smaller.
      penalties: penalties of the rows, or None if no row has any.
      key: [B] typed keys.
      bias: [B, V] float32. Added to the logits, or None if no row has a bias.
    """

    temperature: jax.Array
    filters: Filters | None
    penalties: Penalties | None
    key: jax.Array
    bias: jax.Array | None = None

    @property
    def greedy(self) -> jax.Array:
        """[B] bool. True for rows of temperature 0."""
        return self.temperature == 0


def row_key(key: jax.Array, seed: jax.Array, sample: jax.Array) -> jax.Array:
    """Returns the key [] of a row. It depends on `key`, the seed and the index of the
    sample only."""
    return jax.random.fold_in(jax.random.fold_in(key, seed), sample)


@partial(jax.jit, static_argnames=("samples",))
def row_keys(key: jax.Array, seeds: jax.Array, samples: int) -> jax.Array:
    """Returns the keys [B * samples] of rows with seeds [B]."""
    numbers = jnp.arange(samples, dtype=jnp.int32)
    by_sample = jax.vmap(row_key, in_axes=(None, None, 0))
    by_seed = jax.vmap(by_sample, in_axes=(None, 0, None))
    return by_seed(key, seeds, numbers).reshape(-1)


@with_hints
def sampling_rows(
    settings: Sequence[Sampling],
    key: jax.Array | None = None,
    samples: int = 1,
    *,
    filters: bool = False,
    num_tokens: int | None = None,
) -> SamplingRows:
    """Converts the settings of B prompts to arrays of B * `samples` rows, prompt by
    prompt.

    Args:
      settings: one for each prompt.
      key: base of all random numbers, see `threefry.as_threefry`. If None, the key of
        seed 0 is used.
      samples: rows per prompt.
      filters: if True, filters are present even if no row uses them, so that rows can
        be replaced by others later.
      num_tokens: V, the size of the vocabulary. Needed if a prompt has a `logit_bias`.

    Raises:
      ValueError: `key` is not a single key, or a bias is for a token >= V.
    """
    texts = isinstance(settings, str | bytes)
    if texts or not isinstance(settings, Sequence):
        raise ValueError(f"settings: want a list of Sampling, got {shown(settings)}")
    for i, one in enumerate(settings):
        if not isinstance(one, Sampling):
            raise ValueError(f"settings[{i}]: want a Sampling, got {shown(one)}")
    filters = flag("filters", filters)
    samples = integer("samples", samples, 1, 2**16, f"1..{2**16} rows per prompt")
    if num_tokens is not None:
        want = "the size of the vocabulary"
        num_tokens = integer("num_tokens", num_tokens, 1, 2**31 - 1, want)
    by_prompt = _by_prompt(settings, filters, num_tokens)
    if any(s.seed is not None for s in settings):
        _check_single("settings", key)
        chosen = [i if s.seed is None else s.seed for i, s in enumerate(settings)]
        by_prompt["seeds"] = np.array(chosen, np.uint32)
    return sampling_arrays(len(settings), **by_prompt, key=key, samples=samples)


def rows_of_one(
    sampling: Sampling,
    prompts: Any,
    key: jax.Array | None,
    samples: int,
    num_tokens: int,
) -> SamplingRows:
    """Returns `sampling_rows` of B prompts with the same settings.

    Args:
      sampling: the settings.
      prompts: B, which may be symbolic.
      key, samples, num_tokens: as in `sampling_rows`.

    Raises:
      ValueError: as `sampling_rows`.
    """
    by_prompt = _by_prompt([sampling], False, num_tokens)
    alone = {name: value[0] for name, value in by_prompt.items() if value is not None}
    if sampling.seed is not None:
        _check_single("sampling", key)
        alone["seeds"] = jnp.broadcast_to(jnp.uint32(sampling.seed), (prompts,))
    return sampling_arrays(prompts, **alone, key=key, samples=samples)


def _by_prompt(
    settings: Sequence[Sampling], filters: bool, num_tokens: int | None
) -> dict[str, Any]:
    """Returns the arguments of `sampling_arrays` with one value for each prompt, other
    than seeds."""

    def rows(name: str) -> np.ndarray:
        return np.array([getattr(s, name) for s in settings])

    penalised = any(s.penalised for s in settings)
    filters = filters or any(s.top_k or s.top_p != 1 or s.min_p for s in settings)
    names = "temperature", *FILTERS * filters, *PENALTIES * penalised
    table = _bias_table(settings, num_tokens)
    return {name: rows(name) for name in names} | {"logit_bias": table}


def _check_single(name: str, key: Any) -> None:
    """Raises ValueError for several keys with settings, the argument `name`, that have
    a seed."""
    if is_typed(key) and key.shape:
        got = f"keys {list(key.shape)}"
        raise ValueError(f"key: want a single key, since {name} has a seed, got {got}")


def _bias_table(
    settings: Sequence[Sampling], num_tokens: int | None
) -> np.ndarray | None:
    """Returns the biases [B, V] float32 of B prompts, or None if none has any."""
    if not any(one.logit_bias for one in settings):
        return None
    if num_tokens is None:
        raise ValueError("num_tokens: needed for logit_bias, got None")
    found = np.zeros((len(settings), num_tokens), np.float32)
    for row, one in zip(found, settings, strict=True):
        for token, add in one.logit_bias:
            if token >= num_tokens:
                want = f"token ids below {num_tokens}, the size of the vocabulary"
                raise ValueError(f"logit_bias: want {want}, got {token}")
            row[token] = add
    return found


@with_hints
def sampling_arrays(
    prompts: Any,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    repetition_penalty: Any = None,
    presence_penalty: Any = None,
    frequency_penalty: Any = None,
    logit_bias: Any = None,
    key: jax.Array | None = None,
    seeds: Any = None,
    samples: int = 1,
) -> SamplingRows:
    """Makes the settings of B prompts from arrays, which `jax.jit` may trace.

    Each setting is one number, or [B] numbers. A program contains filters if one of
    `top_k`, `top_p` and `min_p` is given, and penalties if one of them is given. Values
    are those that `Sampling` takes. Inside `jit` they are unknown, and not checked:
    others give texts of no meaning.

    Args:
      prompts: B, static; in programs for `jax.export`, it may be symbolic.
      temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
        frequency_penalty: as in `Sampling`.
      logit_bias: [V] or [B, V] numbers that are added to the logits; -inf for tokens
        that must not be drawn.
      key: base of all random numbers; or [B] typed keys, one for each prompt. If None,
        the key of seed 0.
      seeds: [B] ints, folded into a single `key`. If None, 0 .. B - 1.
      samples: n, rows per prompt; static.

    Returns:
      The settings of B n rows, prompt by prompt.

    Raises:
      ValueError: a setting has another shape or type, `key` is neither one key nor B
        keys, or, outside `jit`, a value is one that `Sampling` refuses.

    Example:
      >>> sampling_arrays(4, temperature=0.7, key=jax.random.key(1)).temperature.shape
      (4,)
    """
    if not symbolic_dimension(prompts):
        what = "a number of prompts, static"
        prompts = integer("prompts", prompts, 1, 2**31 - 1, what)
    samples = integer("samples", samples, 1, 2**16, f"1..{2**16} rows per prompt")

    def rows(name: str, value: Any, default: Any, dtype: Any) -> jax.Array:
        value = default if value is None else value
        RANGES[name].check(name, value)
        try:
            table = jnp.asarray(value, dtype)
        except (TypeError, ValueError):
            table = None
        if table is None or table.shape not in ((), (prompts,)):
            want = f"a number or {prompts} numbers, one for each prompt"
            raise ValueError(f"{name}: want {want}, got {shown(value)}")
        return repeated(jnp.broadcast_to(table, (prompts,)), samples)

    filters = None
    if not (top_k is None and top_p is None and min_p is None):
        filters = Filters(
            rows("top_k", top_k, 0, jnp.int32),
            rows("top_p", top_p, 1.0, jnp.float32),
            rows("min_p", min_p, 0.0, jnp.float32),
        )
    given = repetition_penalty, presence_penalty, frequency_penalty
    penalties = None
    if any(value is not None for value in given):
        off = zip(PENALTIES, given, (1.0, 0.0, 0.0), strict=True)
        penalties = Penalties(*(rows(*one, jnp.float32) for one in off))
    bias = None
    if logit_bias is not None:
        BIASES.check("logit_bias", logit_bias)
        bias = jnp.asarray(logit_bias, jnp.float32)
        if bias.ndim not in (1, 2) or bias.shape[:-1] not in ((), (prompts,)):
            want = f"[V] numbers, or [{prompts}, V], one row for each prompt"
            raise ValueError(f"logit_bias: want {want}, got {shown(logit_bias)}")
        bias = jnp.broadcast_to(bias, (prompts, bias.shape[-1]))
        bias = repeated(bias, samples)
    return SamplingRows(
        temperature=rows("temperature", temperature, 1.0, jnp.float32),
        filters=filters,
        penalties=penalties,
        key=_keys(key, seeds, prompts, samples),
        bias=bias,
    )


def _keys(key: Any, seeds: Any, prompts: Any, samples: int) -> jax.Array:
    """Returns the keys [B n] of the rows of B prompts."""
    if is_typed(key) and key.shape == (prompts,):
        if seeds is not None:
            raise ValueError("seeds: want a single key with them, got one per prompt")
        # Every prompt has its own base, in which it is the only one.
        first = jnp.zeros((1,), jnp.uint32)
        return jax.vmap(lambda key: row_keys(as_threefry(key), first, samples))(
            key
        ).reshape(-1)
    # Always Threefry: with other generators, the numbers of a row depend on its batch.
    base = key_of(0) if key is None else as_threefry(key)
    if seeds is None:
        seeds = jnp.arange(prompts, dtype=jnp.uint32)
    SEED.check("seeds", seeds)
    seeds = jnp.asarray(seeds, jnp.uint32)
    if seeds.shape != (prompts,):
        raise ValueError(f"seeds: want {prompts} integers, got {shown(seeds)}")
    return row_keys(base, seeds, samples)
