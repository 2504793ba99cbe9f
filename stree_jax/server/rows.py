"""The requests of the rows of a server's batch, and the sizes of its arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.constraints.token_tables import TokenTables
from stree_jax.models import PREFILL_CHUNK, ModelConfig, reading_chunk
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import (
    PENALTIES,
    Penalties,
    Sampling,
    row_key,
    sampling_rows,
)
from stree_jax.speculation.buckets import bucket, cache_capacity
from stree_jax.speculation.decoding import Decoding
from stree_jax.speculation.loop import deepest
from stree_jax.speculation.step import Spec

GREEDY = Sampling(temperature=0)
NO_TOKEN = -1  # padding of lists of stop tokens
MAX_STOP_IDS = 16  # stop tokens of a request, in addition to the model's own


@jax.jit
def seeded_key(
    key: jax.Array, low: jax.Array, high: jax.Array, sample: jax.Array
) -> jax.Array:
    """Returns the key [] of a row with a 64-bit seed. If the upper half of the seed is
    0, it is `row_key` of the lower half, so that small seeds give the same texts as in
    `generate`."""
    base = jnp.where(high == 0, key, jax.random.fold_in(key, high))
    return row_key(base, low, sample)


@dataclass(frozen=True)
class Sizes:
    """The sizes for which programs are compiled.

    Attributes:
      rows: maximum number of texts that are decoded together.
      context: maximum number of tokens of a prompt and its answer together.
      steps: decoding steps per segment, which is one call of the decoding loop. Rows
        are assigned to texts between segments.
      top_logprobs: maximum number of alternatives with log-probabilities per token.
      prefix_memory: maximum bytes of cached states. If 0, states are not cached. See
        `prefixes.Prefixes`.
      earlier: tokens of past answers of the same API key from which prompt lookup
        drafts. If 0, it does not.
    """

    rows: int = 4
    context: int = 2048
    steps: int = 8
    top_logprobs: int = 5
    prefix_memory: int = 0
    earlier: int = 0


@dataclass(frozen=True)
class TextRequest:
    """A request for one text.

    Attributes:
      ids: token ids of the prompt, at least one.
      max_new_tokens: maximum number of new tokens, which must fit in the context.
      sampling: the sampling settings, with a seed; `GREEDY` for greedy decoding.
      sample: index among the samples of the prompt, which differ in their random
        numbers.
      seed_high: the upper 32 bits of a 64-bit seed. `sampling` has the lower 32 bits.
      ignore_eos: if True, the model's stop tokens do not end the text.
      min_new_tokens: number of new tokens before a stop token may end the text.
      stop_ids: up to `MAX_STOP_IDS` further tokens that end the text.
      logprobs: True if log-probabilities are requested.
      shared: number of tokens at the beginning of the prompt that other conversations
        may share, such as a system prompt. The states after them are cached.
      constraint: automaton that the text follows, or None.
      owner: number of the API key whose past answers may be drafted.
      private: True if the text shares nothing with other requests: neither cached
        prefixes nor past answers.
    """

    ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    sample: int = 0
    seed_high: int = 0
    ignore_eos: bool = False
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    logprobs: bool = False
    shared: int = 0
    constraint: TokenTables | None = None
    owner: int = 0
    private: bool = False

    @property
    def needs_all(self) -> bool:
        """True if only the program with all arrays can decode the text."""
        own = self.sampling.penalised or self.sampling.logit_bias
        return bool(self.logprobs or self.min_new_tokens or own)


@dataclass(frozen=True)
class RowUpdate:
    """The tokens that a segment added to a row.

    Attributes:
      tokens: the new tokens.
      origins: [n] uint8. What proposed each token, an index into `draft.ORIGINS`.
      calls: number of target passes.
      finish: why the row has finished, or that it is running, as in `Decoding.finish`.
      raw: [n] float32. Log-probabilities of the tokens, or None if not requested.
      top, top_tokens: [n, k] float32 and int32. Log-probabilities of the likeliest
        tokens, and these tokens.
    """

    tokens: list[int]
    origins: np.ndarray
    calls: int
    finish: int
    raw: np.ndarray | None = None
    top: np.ndarray | None = None
    top_tokens: np.ndarray | None = None


@dataclass
class Row:
    """Host-side record of a batch row that is assigned to a request.

    Attributes:
      request: the request.
      length: number of tokens of the text so far.
      calls: number of target passes so far.
      tokens: the text so far.
    """

    request: TextRequest
    length: int = 0
    calls: int = 0
    tokens: list[int] = field(default_factory=list)


def reading_widths(config: ModelConfig, context: int) -> list[int]:
    """Returns the widths in tokens to which prompts are padded, in ascending order.

    The width of a prompt decides the chunk size of its prefill. Only the largest width
    for each chunk size is used, so there are few widths, and a prompt is prefilled in
    the same chunks as by `generate`.
    """
    texts = range(1, context + 1, PREFILL_CHUNK)
    widths = sorted({bucket(max(n - 1, 1)) + 1 for n in (*texts, context)})
    return sorted({reading_chunk(config, width): width for width in widths}.values())


@dataclass(frozen=True)
class Layout:
    """Sizes of the arrays of a batch.

    Attributes:
      widths: the widths in tokens to which prompts are padded.
      output_size: O, the size of the output buffer of a row in tokens.
      capacity: tokens of a row for which the KV caches have space.
      earlier: tokens of past answers; 0 if the drafter does not use them.
    """

    widths: tuple[int, ...]
    output_size: int
    capacity: int
    earlier: int = 0

    @classmethod
    def of(cls, config: ModelConfig, spec: Spec, sizes: Sizes) -> "Layout":
        widths = reading_widths(config, sizes.context)
        depth = deepest(spec.policy)
        capacity = cache_capacity(max(widths), 0, depth, resumed=True)
        earlier = sizes.earlier if spec.drafter.looks_up else 0
        return cls(tuple(widths), bucket(sizes.context), capacity, earlier)


def requests_of(
    request: TextRequest, stops: jax.Array, key: jax.Array, num_tokens: int
) -> Requests:
    """Returns the decoding options of one row as arrays for the device. All arrays are
    present, because other rows of the batch may need them.

    Args:
      request: the request for the row's text.
      stops: [1, n] int32. The model's stop tokens.
      key: base key of the random numbers.
      num_tokens: V, the size of the vocabulary.
    """
    own = request.sampling
    sampling = sampling_rows([own], filters=True, num_tokens=num_tokens)
    penalties = Penalties(*(jnp.float32([getattr(own, name)]) for name in PENALTIES))
    bias = sampling.bias
    if bias is None:
        bias = jnp.zeros((1, num_tokens), jnp.float32)
    low, high = (
        jnp.asarray(np.uint32(word))
        for word in (request.sampling.seed or 0, request.seed_high)
    )
    own_key = seeded_key(key, low, high, jnp.int32(request.sample))
    if request.ignore_eos:
        stops = jnp.full_like(stops, NO_TOKEN)
    further = np.full((1, MAX_STOP_IDS), NO_TOKEN, np.int32)
    further[0, : len(request.stop_ids)] = request.stop_ids
    return Requests(
        max_new_tokens=jnp.asarray([request.max_new_tokens], jnp.int32),
        min_new_tokens=jnp.asarray([request.min_new_tokens], jnp.int32),
        stop_tokens=jnp.concatenate([stops, jnp.asarray(further)], axis=1),
        stop_strings=None,
        sampling=replace(sampling, key=own_key[None], penalties=penalties, bias=bias),
    )


def for_program(d: Decoding, sampled: bool, lists: Any) -> Decoding:
    """Returns a batch with only the fields that its decoding program needs. The other
    fields are None; `with_parts` puts them back.

    Args:
      d: the batch with all fields.
      sampled: True if any row is sampled.
      lists: the arrays of log-probabilities, if any row has `TextRequest.needs_all`.
        Otherwise None.
    """
    if lists is None:
        own = d.requests.sampling if sampled else None
        sampling = None if own is None else replace(own, penalties=None, bias=None)
        requests = replace(d.requests, sampling=sampling, min_new_tokens=None)
        d = replace(d, requests=requests, counts=None)
    return replace(d, logprobs=lists)


def with_parts(d: Decoding, whole: Decoding) -> Decoding:
    """Returns a batch with the fields that `for_program` set to None put back.

    Args:
      d: the batch that a decoding program returned.
      whole: the batch before the program ran, with all fields.
    """
    own, sampling = d.requests.sampling, whole.requests.sampling
    assert sampling is not None  # set by `requests_of`
    if d.counts is not None:  # the program had all fields
        return replace(d, logprobs=None)
    if own is not None:
        sampling = replace(own, penalties=sampling.penalties, bias=sampling.bias)
    least = whole.requests.min_new_tokens
    requests = replace(d.requests, sampling=sampling, min_new_tokens=least)
    return replace(d, requests=requests, counts=whole.counts, logprobs=None)
