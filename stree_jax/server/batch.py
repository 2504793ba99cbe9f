"""The device's side of a server: a batch of fixed sizes whose rows come and go.

Nothing is compiled after `warm`: prompts are read in a few widths, and three programs
decode, whatever the rows ask for: greedy rows alone; with drawn ones beside them; with
log-probabilities and repetition penalties. Rows pass from one program to another as
their neighbours change, which changes none of their tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.arguments import stop_token_table
from stree_jax.buckets import bucket
from stree_jax.checkpoints.load import Model
from stree_jax.models import PREFILL_CHUNK, ModelConfig, reading_chunk
from stree_jax.models.keys import key_of
from stree_jax.sampling import logprobs
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import Sampling, row_key, sampling_rows
from stree_jax.server.prefixes import Kept, Prefixes
from stree_jax.sizing import step_times
from stree_jax.speculation.adaptive.policy import AdaptivePolicy
from stree_jax.speculation.decoding import RUNNING, Decoding
from stree_jax.speculation.loop import (
    advance_jit,
    cache_capacity,
    deepest,
    init_decoding_jit,
)
from stree_jax.speculation.rows import (
    admit_jit,
    cancel_jit,
    past_jit,
    refilled,
    vacant_jit,
)
from stree_jax.speculation.step import Spec

GREEDY = Sampling(temperature=0)
NO_TOKEN = -1  # pads lists of stop tokens


@jax.jit
def seeded_key(
    key: jax.Array, low: jax.Array, high: jax.Array, sample: jax.Array
) -> jax.Array:
    """Returns the key [] of a row with a 64-bit seed. Where its upper half is 0, it is
    `row_key` of the lower one, so that small seeds have the texts of `generate`."""
    base = jnp.where(high == 0, key, jax.random.fold_in(key, high))
    return row_key(base, low, sample)


@dataclass(frozen=True)
class Sizes:
    """What the programs are compiled for.

    Attributes:
      rows: texts that are decoded together.
      context: most tokens of a prompt and its answer together.
      steps: target calls between two looks at who comes and goes.
      top_logprobs: most alternatives with a token's log-probability.
      prefixes: texts whose states are kept, see `prefixes`.
    """

    rows: int = 4
    context: int = 2048
    steps: int = 8
    top_logprobs: int = 5
    prefixes: int = 0


@dataclass(frozen=True)
class Asked:
    """One text to be made.

    Attributes:
      ids: the prompt, at least one token.
      max_new_tokens: as many as the context leaves, at most.
      sampling: with a seed; `GREEDY` for greedy text.
      sample: which of the samples of its prompt: they differ in their random numbers.
      seed_high: the upper 32 bits of a 64-bit seed, whose lower ones `sampling` has.
      ignore_eos: whether the model's stop tokens leave the text running.
      logprobs: whether the tokens' log-probabilities are wanted.
    """

    ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    sample: int = 0
    seed_high: int = 0
    ignore_eos: bool = False
    logprobs: bool = False


@dataclass(frozen=True)
class News:
    """What some steps added to a row.

    Attributes:
      tokens: the new ones.
      origins: [n] uint8, who drafted them, see `draft.ORIGINS`.
      calls: of the target.
      finish: as of `Decoding`.
      raw: [n] float32, the tokens' log-probabilities, if they were asked for.
      top, top_tokens: [n, k], those of the likeliest tokens, and whose they are.
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
    """What is known on the host of a row that was given away."""

    asked: Asked
    length: int = 0
    calls: int = 0


def reading_widths(config: ModelConfig, context: int) -> list[int]:
    """Widths that prompts are padded to: the largest for each size of pass, so that a
    prompt is read in the passes that `generate` would read it in."""
    texts = range(1, context + 1, PREFILL_CHUNK)
    widths = sorted({bucket(max(n - 1, 1)) + 1 for n in (*texts, context)})
    return sorted({reading_chunk(config, width): width for width in widths}.values())


@dataclass(frozen=True)
class Layout:
    """Sizes of the arrays.

    Attributes:
      widths: that prompts are padded to.
      room: O, of the output.
      capacity: rows of the attention caches.
    """

    widths: tuple[int, ...]
    room: int
    capacity: int

    @classmethod
    def of(cls, config: ModelConfig, spec: Spec, sizes: Sizes) -> "Layout":
        widths = reading_widths(config, sizes.context)
        depth, resumed = deepest(spec.policy), sizes.prefixes > 0
        capacity = cache_capacity(max(widths), 0, depth, resumed=resumed)
        return cls(tuple(widths), bucket(sizes.context), capacity)


def requests_of(asked: Asked, stops: jax.Array, key: jax.Array) -> Requests:
    """Returns the requests of one row.

    Args:
      stops: [1, n] stop tokens.
      key: of the base of the random numbers.
    """
    drawn = sampling_rows([asked.sampling], filters=True)  # others' may have some
    penalty = np.float32(asked.sampling.repetition_penalty)
    low, high = (
        jnp.asarray(np.uint32(word))
        for word in (asked.sampling.seed or 0, asked.seed_high)
    )
    own = seeded_key(key, low, high, jnp.int32(asked.sample))
    if asked.ignore_eos:
        stops = jnp.full_like(stops, NO_TOKEN)
    return Requests(
        max_new_tokens=jnp.asarray([asked.max_new_tokens], jnp.int32),
        min_new_tokens=None,
        stop_tokens=stops,
        stop_strings=None,
        sampling=replace(drawn, key=own[None], penalty=jnp.asarray([penalty])),
    )


def as_asked(d: Decoding, drawn: bool, lists: Any) -> Decoding:
    """Returns a decoding as the program for its rows takes it.

    Args:
      drawn: whether any row is.
      lists: of log-probabilities, if any row wants them or has a penalty: one program
        serves both.
    """
    if lists is None:
        own = d.requests.sampling if drawn else None
        sampling = None if own is None else replace(own, penalty=None)
        d = replace(d, requests=replace(d.requests, sampling=sampling), seen=None)
    return replace(d, logprobs=lists)


def with_parts(d: Decoding, whole: Decoding) -> Decoding:
    """Returns a decoding with the parts of `whole` that `as_asked` left out."""
    own, sampling = d.requests.sampling, whole.requests.sampling
    assert sampling is not None  # `requests_of` makes every part
    if own is not None and own.penalty is None:
        sampling = replace(own, penalty=sampling.penalty)
    elif own is not None:
        sampling = own
    requests = replace(d.requests, sampling=sampling)
    seen = whole.seen if d.seen is None else d.seen
    return replace(d, requests=requests, seen=seen, logprobs=None)


class Batch:
    """Rows that decode together; for one thread.

    After an exception of `admit` or `advance` nothing of it can be used but `clear`.
    """

    def __init__(
        self, model: Model, spec: Spec, sizes: Sizes, spare: int | None = None
    ) -> None:
        """Args:
        spare: bytes for copies to time steps on, see `step_times.timed`.
        """
        self.model, self.sizes, self.spare = model, sizes, spare
        self.rows: list[Row | None] = [None] * sizes.rows
        self.prefixes = Prefixes(sizes.prefixes)
        self._layout = Layout.of(model.config, spec, sizes)
        spec = refilled(spec)
        self._specs = {False: spec, True: spec}  # by whether any row is drawn
        self._stops = jnp.asarray(stop_token_table(model, None, 1))
        self._key = key_of(0)  # as of `sampling_rows`
        self._decoding: Decoding | None = None
        self._lists: logprobs.LogProbs | None = None

    def warm(self, say: Callable[[str], None]) -> None:
        """Compile every program, time the steps of tree "auto", and be ready."""
        widths = self._layout.widths
        for i, text in enumerate(texts := self._texts()):
            say(f"compiling: reading prompts ({i + 1} of {len(widths)})")
            self._read(Asked(text, 1))
        self.clear()
        for i, asked in enumerate(_KINDS):
            say(f"compiling: decoding {asked[0]} ({i + 1} of {len(_KINDS)})")
            for row in range(self.sizes.rows):
                new = min(PREFILL_CHUNK, self.sizes.context - 1)
                self.admit(row, replace(asked[1], max_new_tokens=new))
            self._time_steps()
            self.advance()
            self.cancel(range(self.sizes.rows))
        if self.sizes.prefixes:
            past = past_jit(self._decoding, jnp.int32(0))
            for i, text in enumerate(texts):
                say(f"compiling: reading on ({i + 1} of {len(widths)})")
                self._read(Asked(text, 1), past)
        self.clear()

    def _texts(self) -> list[list[int]]:
        """One for each width."""
        V, most = self.model.config.num_tokens, self.sizes.context
        lengths = (min(width, most) - 1 for width in self._layout.widths)
        return [[i % V for i in range(length)] or [0] for length in lengths]

    def clear(self) -> None:
        """All rows free, whatever has been."""
        self._decoding = self._lists = None  # what there was is freed first
        self.prefixes.clear()
        self.rows = [None] * self.sizes.rows
        one = self._read(Asked([0], 1))
        self._decoding = vacant_jit(self._specs[False], one, self.sizes.rows)
        lists = logprobs.empty(
            self.sizes.rows, self._layout.room, self.sizes.top_logprobs
        )
        self._lists = jax.tree.map(jnp.copy, lists)  # each its own, to be donated
        jax.block_until_ready(self._decoding.root)

    def free_rows(self) -> list[int]:
        return [i for i, row in enumerate(self.rows) if row is None]

    def admit(self, row: int, asked: Asked) -> None:
        """Read a prompt, or what of it no kept text has, and give it a row."""
        kept = self.prefixes.take(asked.ids)
        spec, one = self._specs[False], self._read(asked, kept and kept.past)
        self._decoding = admit_jit(spec, self._decoding, jnp.int32(row), one)
        self.rows[row] = Row(asked)

    def cancel(self, rows: Sequence[int]) -> None:
        """Free rows whose texts nobody wants any more."""
        marks = np.zeros(self.sizes.rows, bool)
        marks[list(rows)] = True
        self._decoding = cancel_jit(self._decoding, jnp.asarray(marks))
        for row in rows:
            self.rows[row] = None

    def advance(self) -> dict[int, News]:
        """Some steps of all rows; what they added, by row. Finished rows are free."""
        spec, d = self._parts()
        d = advance_jit(spec, d, jnp.int32(self.sizes.steps))
        wanted = {
            name: getattr(d, name)
            for name in ("tokens", "length", "finish", "origin", "used", "logprobs")
        }
        host = jax.device_get(wanted)
        if d.logprobs is not None:
            self._lists = d.logprobs
        assert self._decoding is not None  # `_parts` took parts of it
        self._decoding = with_parts(d, self._decoding)
        news = {i: _news(host, i, row) for i, row in enumerate(self.rows) if row}
        for i, new in news.items():
            if new.finish != RUNNING:
                self._keep(i, host["tokens"][i, : host["length"][i]].tolist())
                self.rows[i] = None
        return news

    def _keep(self, i: int, tokens: list[int]) -> None:
        """Keep the states of a row that has ended; reading what is shorter than a pass
        takes a pass anyway."""
        row = self.rows[i]
        assert row is not None  # it has ended just now
        ids = (*row.asked.ids, *tokens)[:-1]  # the last token was not read
        if self.sizes.prefixes and len(ids) >= PREFILL_CHUNK:
            self.prefixes.make_room(ids)
            past = past_jit(self._decoding, jnp.int32(i))
            self.prefixes.add(Kept(ids, past))

    def _parts(self) -> tuple[Spec, Decoding]:
        """Returns how to decode, and the decoding as the rows need it."""
        assert self._decoding is not None  # `clear` was called
        asked = [row.asked for row in self.rows if row is not None]
        lists = any(a.logprobs or a.sampling.repetition_penalty != 1 for a in asked)
        drawn = lists or any(a.sampling.temperature > 0 for a in asked)
        d = as_asked(self._decoding, drawn, self._lists if lists else None)
        return self._specs[drawn], d

    def _time_steps(self) -> None:
        """Let tree "auto" know what steps of the running rows' kind take."""
        spec, d = self._parts()
        if isinstance(spec.policy, AdaptivePolicy) and d.logprobs is None:
            drawn = d.requests.sampling is not None
            self._specs[drawn] = step_times.timed(spec, d, self.spare)

    def _read(self, asked: Asked, past: Any = None) -> Decoding:
        """A row by itself, with the sizes of the batch.

        Args:
          past: states that have read a beginning of it.
        """
        width = next(w for w in self._layout.widths if len(asked.ids) <= w)
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(asked.ids)] = asked.ids
        return init_decoding_jit(
            self._specs[False],
            jnp.asarray(padded),
            jnp.asarray([len(asked.ids)], jnp.int32),
            requests_of(asked, self._stops, self._key),
            max_new_tokens=self._layout.room,
            capacity=self._layout.capacity,
            past=past,
        )


_DRAWN = Sampling(temperature=1.0, seed=0)
_KINDS = [
    ("greedy texts", Asked([0], 1)),
    ("drawn texts", Asked([0], 1, _DRAWN)),
    ("with log-probabilities and penalties", Asked([0], 1, _DRAWN, logprobs=True)),
]


def _news(host: dict[str, Any], i: int, row: Row) -> News:
    """Returns the new tokens of row i, and records them in `row`."""
    length, calls = int(host["length"][i]), int(host["used"][i].sum())
    new = slice(row.length, length)
    lists: tuple = (None, None, None)
    if row.asked.logprobs:
        kept = host["logprobs"]
        lists = (kept.raw[i, new], kept.top_raw[i, new], kept.top_raw_tokens[i, new])
    news = News(
        host["tokens"][i, new].tolist(),
        host["origin"][i, new],
        calls - row.calls,
        int(host["finish"][i]),
        *lists,
    )
    row.length, row.calls = length, calls
    return news
