"""The server's batch on the device, with continuous batching and fixed sizes.

Prompts are padded to a few widths. There are three decoding programs: for batches with
greedy rows only, for batches with sampled rows, too, and for batches with rows that
have log-probabilities, penalties, biases or a minimum length; and as many for batches
with constrained rows. The rows of the batch decide which program runs, but a row's
tokens do not depend on the program. The module `programs` compiles those without
constraints in advance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.constraints.token_tables import TokenTables
from stree_jax.generation.arguments import stop_token_table
from stree_jax.models import PREFILL_CHUNK, Model, ModelConfig, reading_chunk
from stree_jax.models.base.keys import key_of
from stree_jax.sampling import logprobs
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import (
    PENALTIES,
    Penalties,
    Sampling,
    row_key,
    sampling_rows,
)
from stree_jax.server.constrained import ConstrainedRows
from stree_jax.server.prefixes import Prefixes
from stree_jax.sizing import step_times
from stree_jax.speculation.adaptive.policy import AdaptivePolicy
from stree_jax.speculation.batch_rows import (
    admit_jit,
    cancel_jit,
    past_jit,
    refilled,
    vacant_jit,
)
from stree_jax.speculation.buckets import bucket
from stree_jax.speculation.decoding import RUNNING, Decoding
from stree_jax.speculation.drafter import kept as drafter_kept
from stree_jax.speculation.loop import (
    advance_jit,
    cache_capacity,
    deepest,
    init_decoding_jit,
)
from stree_jax.speculation.step import Spec

GREEDY = Sampling(temperature=0)
_SAMPLED = Sampling(temperature=1.0, seed=0)
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
      prefixes: limit on the cached states, in units of the bytes of one row's states.
        If 0, states are not cached. See `prefixes.Prefixes`.
    """

    rows: int = 4
    context: int = 2048
    steps: int = 8
    top_logprobs: int = 5
    prefixes: int = 0


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
    """

    request: TextRequest
    length: int = 0
    calls: int = 0


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
    """

    widths: tuple[int, ...]
    output_size: int
    capacity: int

    @classmethod
    def of(cls, config: ModelConfig, spec: Spec, sizes: Sizes) -> "Layout":
        widths = reading_widths(config, sizes.context)
        depth, resumed = deepest(spec.policy), sizes.prefixes > 0
        capacity = cache_capacity(max(widths), 0, depth, resumed=resumed)
        return cls(tuple(widths), bucket(sizes.context), capacity)


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


class Batch:
    """A batch of rows that are decoded together. It must be used by one thread only.

    After an exception in `admit` or `advance` only `clear` may be called.
    """

    def __init__(
        self, model: Model, spec: Spec, sizes: Sizes, spare: int | None = None
    ) -> None:
        """Makes an empty batch. Its arrays are allocated by the first call of `admit`.

        Args:
          model: the target model.
          spec: the configuration of the decoder.
          sizes: the sizes of the batch.
          spare: bytes available for the copies of arrays on which steps are timed, see
            `step_times.timed`.
        """
        self.model, self.sizes, self.spare = model, sizes, spare
        self.rows: list[Row | None] = [None] * sizes.rows
        self.prefixes = Prefixes(sizes.prefixes)
        self._layout = Layout.of(model.config, spec, sizes)
        spec = refilled(spec)
        self.specs = {False: spec, True: spec}  # key: True if any row is sampled
        self._stops = jnp.asarray(stop_token_table(model, None, 1))
        self._key = key_of(0)  # the default key of `sampling_rows`
        self._decoding: Decoding | None = None
        self._lists: logprobs.LogProbs | None = None
        self._programs: dict[tuple[Any, ...], Callable[..., Decoding]] = {}
        self._constrained = ConstrainedRows(sizes.rows)

    def time_steps(self, shapes: Decoding) -> None:
        """Sets the step times of tree "auto". If they have not been measured on this
        machine, measures them with texts in all rows.

        Args:
          shapes: the shapes of the batch for the decoding program to be timed, a result
            of `for_program`: for greedy or for sampled texts.
        """
        sampled = shapes.requests.sampling is not None
        spec, d = self.specs[sampled], shapes
        if not isinstance(spec.policy, AdaptivePolicy):
            return
        if not step_times.all_known(spec, d):
            new = min(PREFILL_CHUNK, self.sizes.context - 1)
            request = TextRequest([0], new, _SAMPLED if sampled else GREEDY)
            for row in range(self.sizes.rows):
                self.admit(row, request)
            _, d = self._parts()
        self.specs[sampled] = step_times.timed(spec, d, self.spare)
        self._programs.clear()  # of the spec before
        self.clear()  # of the rows that were admitted

    def clear(self) -> None:
        """Frees all rows, their arrays and the cached states."""
        self.prefixes.clear()
        self.rows = [None] * self.sizes.rows
        self._constrained = ConstrainedRows(self.sizes.rows)
        self.rest()

    def rest(self) -> None:
        """Frees the arrays of the rows. All rows must be free. The next `admit`
        allocates the arrays again."""
        self._decoding = self._lists = None

    def _allocate(self) -> None:
        """Allocates the arrays of the rows."""
        one = self._read(TextRequest([0], 1))
        self._decoding = vacant_jit(self.specs[False], one, rows=self.sizes.rows)
        lists = logprobs.empty(
            self.sizes.rows, self._layout.output_size, self.sizes.top_logprobs
        )
        # Separate buffers, because they are donated.
        self._lists = jax.tree.map(jnp.copy, lists)

    def free_rows(self) -> list[int]:
        """Returns the indices of the free rows."""
        return [i for i, row in enumerate(self.rows) if row is None]

    def admit(self, row: int, request: TextRequest) -> int:
        """Prefills the part of a prompt that has no cached state, and assigns a row to
        the text. Returns the number of tokens of the cached prefix."""
        if self._decoding is None:
            self._allocate()
        kept = self.prefixes.take(request.ids)
        cached = 0 if kept is None else len(kept.ids)
        past = None if kept is None else kept.restored()
        past = self._read_shared(request, cached, past)
        spec, one = self.specs[False], self._read(request, past)
        self._keep(request.ids, (one.state, drafter_kept(one.drafting)))
        jax.block_until_ready(one.root)  # the caller measures the prefill
        self._decoding = admit_jit(spec, self._decoding, jnp.int32(row), one)
        self._constrained.set(row, request.constraint)
        self.rows[row] = Row(request)
        return cached

    def _read_shared(self, request: TextRequest, cached: int, past: Any) -> Any:
        """Prefills the beginning of a prompt that other texts share, and caches the
        states after it. Does so only if the shared beginning is longer than the cached
        prefix by a prefill chunk or more.

        Args:
          request: the request with the prompt.
          cached: number of tokens that `past` has read.
          past: cached states after a prefix of the prompt, or None.

        Returns:
          The states after the shared beginning, or `past` if nothing was prefilled.
        """
        if not self.sizes.prefixes:
            return past
        shared = max(request.shared, self.prefixes.common(request.ids))
        if not cached + PREFILL_CHUNK <= shared < len(request.ids) - 1:
            return past
        text = request.ids[: shared + 1]
        one = self._read(replace(request, ids=text), past)
        past = one.state, drafter_kept(one.drafting)
        self._keep(text, past, shared=True)
        return past

    def cancel(self, rows: Sequence[int]) -> None:
        """Frees rows before their texts are finished."""
        marks = np.zeros(self.sizes.rows, bool)
        marks[list(rows)] = True
        self._decoding = cancel_jit(self._decoding, jnp.asarray(marks))
        for row in rows:
            self.rows[row] = None
            self._constrained.set(row, None)

    def advance(self) -> dict[int, RowUpdate]:
        """Runs a segment: `Sizes.steps` decoding steps of all rows. Frees finished
        rows. Returns the new tokens by row."""
        spec, d = self._parts()
        steps = jnp.int32(self.sizes.steps)
        kind = d.requests.sampling is None, d.logprobs is None, _sizes_of(d)
        if kind not in self._programs:  # finding it takes a few milliseconds
            self._programs[kind] = advance_jit.ready(spec, d, steps)
        d = self._programs[kind](spec, d, steps)
        wanted = {
            name: getattr(d, name)
            for name in ("tokens", "length", "finish", "origin", "used", "logprobs")
        }
        host = jax.device_get(wanted)
        if d.logprobs is not None:
            self._lists = d.logprobs
        assert self._decoding is not None  # checked by `_parts`
        self._decoding = with_parts(self._constrained.without(d), self._decoding)
        rows = enumerate(self.rows)
        updates = {i: _row_update(host, i, row) for i, row in rows if row}
        for i, update in updates.items():
            if update.finish != RUNNING:
                row, tokens = self.rows[i], host["tokens"][i, : host["length"][i]]
                if row is not None and self.sizes.prefixes:
                    past = past_jit(self._decoding, jnp.int32(i))
                    text = (*row.request.ids, *tokens.tolist())
                    self._keep(text, past, answered=True)
                self.rows[i] = None
                self._constrained.set(i, None)
        return updates

    def _keep(self, text: Sequence[int], past: Any, **marks: bool) -> None:
        """Caches the states of a row, unless they have read less than a prefill chunk:
        prefilling such a text again takes a single pass.

        Args:
          text: the row's text; the states have read all but its last token.
          past: the states.
          **marks: see `Prefixes.add`.
        """
        if self.sizes.prefixes and len(text) > PREFILL_CHUNK:
            self.prefixes.add(text, past, **marks)

    def _parts(self) -> tuple[Spec, Decoding]:
        """Chooses the decoding program for the current rows. Returns its configuration,
        and the batch with only the fields that the program needs."""
        assert self._decoding is not None  # set by `admit`
        requests = [row.request for row in self.rows if row is not None]
        lists = any(request.needs_all for request in requests)
        sampled = lists or any(r.sampling.temperature > 0 for r in requests)
        d = for_program(self._decoding, sampled, self._lists if lists else None)
        return self.specs[sampled], self._constrained.part_of(d)

    def _read(self, request: TextRequest, past: Any = None) -> Decoding:
        """Prefills a prompt. Returns a batch of one row whose buffers have the sizes of
        this batch.

        Args:
          request: the request with the prompt.
          past: cached states after a prefix of the prompt, or None.
        """
        width = next(w for w in self._layout.widths if len(request.ids) <= w)
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(request.ids)] = request.ids
        return init_decoding_jit(
            self.specs[False],
            jnp.asarray(padded),
            jnp.asarray([len(request.ids)], jnp.int32),
            requests_of(request, self._stops, self._key, self.model.config.num_tokens),
            max_new_tokens=self._layout.output_size,
            capacity=self._layout.capacity,
            past=past,
        )


def _sizes_of(d: Decoding) -> tuple[int, ...] | None:
    """Returns the sizes of the automata of a batch, or None without constraints."""
    found = d.requests.constraints
    return None if found is None else found.following.shape


def _row_update(host: dict[str, Any], i: int, row: Row) -> RowUpdate:
    """Returns the new tokens of row i, and updates the record `row`."""
    length, calls = int(host["length"][i]), int(host["used"][i].sum())
    new = slice(row.length, length)
    lists: tuple = (None, None, None)
    if row.request.logprobs:
        kept = host["logprobs"]
        lists = (kept.raw[i, new], kept.top_raw[i, new], kept.top_raw_tokens[i, new])
    update = RowUpdate(
        host["tokens"][i, new].tolist(),
        host["origin"][i, new],
        calls - row.calls,
        int(host["finish"][i]),
        *lists,
    )
    row.length, row.calls = length, calls
    return update
