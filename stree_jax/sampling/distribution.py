"""From logits to the distribution a token is drawn from, row by row.

The order is that of Hugging Face: repetition penalty, temperature, top-k, top-p, min-p.
Target and drafter are processed by the same function, so that an acceptance rule
compares the two distributions that tokens are really drawn from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

# What a random number is for: each purpose has a stream of its own.
NOISE, DRAFT, ACCEPT = 0, 1, 2

_FLOAT32 = np.finfo(np.float32)


@dataclass(frozen=True)
class Sampling:
    """How one row is sampled.

    Attributes:
      temperature: divides the logits; 0 is greedy.
      top_k: only the k most probable tokens (and ties with the k-th); 0 is off.
      top_p: only the fewest tokens whose probabilities reach p together; 1 is off.
      min_p: only tokens at least this probable relative to the best one; 0 is off.
      repetition_penalty: divides positive and multiplies negative logits of tokens
        that are in the text already, the prompt included; 1 is off.
      seed: of the row's random numbers; None: the number of its prompt. The same seed
        gives the same text whatever the row's neighbours are.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        def check(name: str, kinds: tuple, good: Any, want: str) -> None:
            value = getattr(self, name)
            right = isinstance(value, kinds) and not isinstance(value, bool)
            if not (right and good(value)):
                raise ValueError(f"{name}: want {want}, got {value!r}")

        # What float32 can hold: smaller numbers are 0 on the device.
        least, most = float(_FLOAT32.tiny), float(_FLOAT32.max)
        real, whole = (int, float, np.number), (int, np.integer)
        check("temperature", real, lambda t: t == 0 or least <= t <= most, "0 or more")
        check("top_k", whole, lambda k: 0 <= k < 2**31, "an integer >= 0 (0 is off)")
        check("top_p", real, lambda p: least <= p <= 1, "a number in (0, 1]")
        check("min_p", real, lambda p: 0 <= p < 1, "a number in [0, 1)")
        check("repetition_penalty", real, lambda r: least <= r <= most, "a number > 0")
        if self.seed is not None:
            check("seed", whole, lambda s: 0 <= s < 2**32, "an integer in [0, 2^32)")


@struct.dataclass
class SamplingRows:
    """`Sampling` of B rows, on the device.

    Attributes:
      temperature, top_p, min_p: [B] float32; top_k: [B] int32.
      penalty: [B] float32, or None where no row has a repetition penalty.
      key: [B] typed keys, one a row.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    penalty: jax.Array | None
    key: jax.Array

    @property
    def greedy(self) -> jax.Array:
        """[B] bool, rows of temperature 0."""
        return self.temperature == 0


def row_keys(key: jax.Array, seeds: jax.Array, samples: int) -> jax.Array:
    """Keys [B * samples]: of a row's seed and of the sample's number, and no more."""

    def one(seed: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, seed)
        return jax.vmap(lambda j: jax.random.fold_in(own, j))(jnp.arange(samples))

    return jax.vmap(one)(seeds).reshape(-1)


def sampling_rows(
    settings: Sequence[Sampling], key: jax.Array | None = None, samples: int = 1
) -> SamplingRows:
    """Settings of B prompts as arrays of B * `samples` rows, prompt by prompt.

    Args:
      settings: one a prompt.
      key: base of all random numbers, a key of `jax.random.key`; default: `key(0)`.
      samples: rows per prompt.

    Raises:
      ValueError: a key whose random numbers would depend on a row's place.
    """
    key = jax.random.key(0) if key is None else key
    if not isinstance(key, jax.Array):
        raise ValueError(f"key: want a key of jax.random.key, got {key!r}")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.shape != () or str(jax.random.key_impl(key)) != "threefry2x32":
        raise ValueError(
            "key: want one threefry key (jax.random.key(seed)): other generators give "
            "a row other numbers in another batch"
        )
    seeds = [i if s.seed is None else s.seed for i, s in enumerate(settings)]

    def rows(name: str, dtype: type) -> jax.Array:
        values: np.ndarray = np.array([getattr(s, name) for s in settings], dtype)
        return jnp.asarray(np.repeat(values, samples))

    penalised = any(s.repetition_penalty != 1 for s in settings)
    return SamplingRows(
        temperature=rows("temperature", np.float32),
        top_k=rows("top_k", np.int32),
        top_p=rows("top_p", np.float32),
        min_p=rows("min_p", np.float32),
        penalty=rows("repetition_penalty", np.float32) if penalised else None,
        key=row_keys(key, jnp.asarray(np.array(seeds, np.uint32)), samples),
    )


def keys_at(rows: SamplingRows, purpose: int, place: jax.Array) -> jax.Array:
    """Keys [B] for one purpose at places [B] of the rows' outputs."""

    def one(key: jax.Array, i: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, purpose), i)

    return jax.vmap(one)(rows.key, place)


def gumbel(rows: SamplingRows, keys: jax.Array, vocab_size: int) -> jax.Array:
    """Gumbel noise [..., V] of keys [B, ...]; 0 for greedy rows.

    `argmax(log_probs + noise)` is a draw, the k largest are k draws without
    replacement in the order they were drawn, and for greedy rows both are just the
    most probable tokens.
    """
    flat = jax.vmap(lambda k: jax.random.gumbel(k, (vocab_size,)))(keys.reshape(-1))
    noise = flat.reshape(*keys.shape, vocab_size)
    greedy = rows.greedy.reshape(-1, *[1] * (noise.ndim - 1))
    return jnp.where(greedy, 0.0, noise)


def _by_row(values: jax.Array) -> jax.Array:
    """[B] as [B, 1, 1], against [B, Q, V]."""
    return values[:, None, None]


def _threshold(bits: jax.Array, weight: jax.Array, need: jax.Array) -> jax.Array:
    """The largest bound whose elements weigh enough together, bit by bit.

    A sort would do the same at many times the cost, and would break ties by place.

    Args:
      bits: [B, Q, V] uint32, ordered as the logits are.
      weight: [B, Q, V] float32, at least 0.
      need: [B, 1, 1] float32; infinity (off) gives 0, which keeps everything.

    Returns:
      [B, Q, 1] uint32: sum(weight where bits >= bound) >= need.
    """

    def bit(i: jax.Array, bound: jax.Array) -> jax.Array:
        more = bound | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        reached = jnp.where(bits >= more, weight, 0.0).sum(axis=-1, keepdims=True)
        return jnp.where(reached >= need, more, bound)

    start = jnp.zeros((*bits.shape[:-1], 1), jnp.uint32)
    return lax.fori_loop(0, 32, bit, start)


def _filtered(rows: SamplingRows, z: jax.Array) -> jax.Array:
    """z [B, Q, V], largest 0, with -inf outside top-k, then top-p, then min-p."""
    raw = lax.bitcast_convert_type(z, jnp.uint32)
    bits = jnp.where(raw >> 31 == 1, ~raw, raw | jnp.uint32(1 << 31))
    top_k = jnp.where(rows.top_k > 0, rows.top_k.astype(jnp.float32), jnp.inf)
    bound = _threshold(bits, jnp.ones_like(z), _by_row(top_k))
    z = jnp.where(bits >= bound, z, -jnp.inf)
    p = jax.nn.softmax(z, axis=-1)
    top_p = jnp.where(rows.top_p < 1, rows.top_p, jnp.inf)
    bound = _threshold(bits, p, _by_row(top_p))
    z = jnp.where(bits >= bound, z, -jnp.inf)
    return jnp.where(z >= jnp.log(_by_row(rows.min_p)), z, -jnp.inf)


def processed(
    rows: SamplingRows, logits: jax.Array, seen: jax.Array | None
) -> jax.Array:
    """Log-probabilities that the next token is drawn from.

    A greedy row has those of temperature 1; its token is their argmax.

    Args:
      logits: [B, Q, V] float32, -inf for tokens that are out of the question.
      seen: [B, Q, V] bool, tokens in the text before; None without a penalty.

    Returns:
      [B, Q, V] float32, normalised; -inf for tokens that are filtered out.
    """
    if rows.penalty is not None and seen is not None:
        penalty = _by_row(rows.penalty)
        punished = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(seen, punished, logits)
    # The largest logit becomes 0 first, so that a tiny temperature cannot overflow.
    z = logits - logits.max(axis=-1, keepdims=True)
    z = z / _by_row(jnp.where(rows.greedy, 1.0, rows.temperature))
    some = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
    z = lax.cond(some.any(), lambda z: _filtered(rows, z), lambda z: z, z)
    return jax.nn.log_softmax(z, axis=-1)
