"""The server's batch on the device, with continuous batching and fixed sizes.

Prompts are padded to a few widths. There are three decoding programs: for batches with
greedy rows only, for batches with sampled rows, too, and for batches with rows that
have log-probabilities, penalties, biases or a minimum length; and as many for batches
with constrained rows. The rows of the batch decide which program runs, but a row's
tokens do not depend on the program. The module `programs` compiles those without
constraints in advance.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.generation.arguments import stop_token_table
from stree_jax.models import PREFILL_CHUNK, Model, reading_chunk
from stree_jax.models.base.keys import key_of
from stree_jax.sampling import logprobs
from stree_jax.sampling.settings import (
    Sampling,
)
from stree_jax.server.constrained import ConstrainedRows
from stree_jax.server.earlier import PastAnswers
from stree_jax.server.host_states import Form
from stree_jax.server.prefixes import LEAST, NOTHING, Found, Prefixes
from stree_jax.server.rows import (
    GREEDY,
    Layout,
    Row,
    RowUpdate,
    Sizes,
    TextRequest,
    for_program,
    requests_of,
    with_parts,
)
from stree_jax.sizing import step_times
from stree_jax.speculation.adaptive.policy import AdaptivePolicy
from stree_jax.speculation.batch_rows import (
    admit_jit,
    cancel_jit,
    past_jit,
    past_of_prompts,
    refilled,
    vacant_jit,
)
from stree_jax.speculation.decoding import RUNNING, Decoding
from stree_jax.speculation.loop import (
    advance_jit,
    init_decoding_jit,
    resume_decoding_jit,
)
from stree_jax.speculation.on_mesh import everywhere, past_laid_out
from stree_jax.speculation.step import Spec

_SAMPLED = Sampling(temperature=1.0, seed=0)
NOBODY = -1  # an owner without past answers
PIECE_PER_STEP = 32  # see `Batch.piece`


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
        self.prefixes = Prefixes(sizes.prefix_memory, spec.drafter.cuts_back)
        self._layout = Layout.of(model.config, spec, sizes)
        self._answers = PastAnswers(self._layout.earlier)
        if model.mesh is not None:
            spec = everywhere(model.mesh, spec)
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
        self.prefixes.form = Form.of(past_of_prompts(one))
        self._decoding = vacant_jit(self.specs[False], one, rows=self.sizes.rows)
        lists = logprobs.empty(
            self.sizes.rows, self._layout.output_size, self.sizes.top_logprobs
        )
        # Separate buffers, because they are donated.
        self._lists = jax.tree.map(jnp.copy, lists)

    @property
    def decoding(self) -> bool:
        """True if any row is assigned to a text."""
        return any(row is not None for row in self.rows)

    def free_rows(self) -> list[int]:
        """Returns the indices of the free rows."""
        return [i for i, row in enumerate(self.rows) if row is None]

    def admit(self, row: int, request: TextRequest) -> int:
        """Prefills the part of a prompt that has no cached state, and assigns a row to
        the text. Returns the number of tokens of the cached prefix."""
        pieces = self.admission(row, request)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                return end.value

    def admission(self, row: int, request: TextRequest) -> Generator[int, None, int]:
        """Does what `admit` does, in pieces of at most `piece` tokens, between which
        other rows may be decoded. Caches the states at `_positions` and at the end.

        Yields:
          The number of tokens of each piece but the last, after it was prefilled.

        Returns:
          The number of tokens of the cached prefix.
        """
        if self._decoding is None:
            self._allocate()
        ids, found = request.ids, NOTHING
        keeps = self.sizes.prefix_memory > 0 and not request.private
        if keeps:
            found = self.prefixes.find(ids)
        past = None
        if found.restored is not None:
            past = past_laid_out(self.model, found.restored())
        kept = self._positions(request, found) if keeps else []
        before = found.length
        for end in self._ends(before, [*kept, len(ids) - 1]):
            one = self._read(request, past, end)
            past = past_of_prompts(one)
            if keeps and (end in kept or end == len(ids) - 1):
                self._keep(ids[: end + 1], past)
            jax.block_until_ready(one.root)  # the caller measures the prefill
            if end < len(ids) - 1:
                yield end - before
            before = end
        spec = self.specs[False]
        self._decoding = admit_jit(spec, self._decoding, jnp.int32(row), one)
        self._constrained.set(row, request.constraint)
        self.rows[row] = Row(request)
        return found.length

    @property
    def piece(self) -> int:
        """Tokens of prompts that are prefilled between two segments, if rows are being
        decoded: it takes about as long as a segment."""
        return PIECE_PER_STEP * self.sizes.steps

    def _ends(self, start: int, places: Sequence[int]) -> list[int]:
        """Returns the ends of the pieces of a prompt, from `start` on: all `places`,
        and others between them, so that no piece is too long."""
        ends = []
        for place in places:
            ends += [*range(start + self.piece, place, self.piece), place]
            start = place
        return ends

    def _positions(self, request: TextRequest, found: Found) -> list[int]:
        """Returns the numbers of tokens within a prompt after which states are cached,
        in ascending order.

        They are the place where the prompt departs from cached texts, the end of its
        shared beginning, and places at the distance of `Prefixes.spacing`: the last end
        of a turn before each of them, if there is one.
        """
        if self.prefixes.cuts:
            return []  # every token is such a place
        places = {found.common, request.shared}
        chunk = reading_chunk(self.model.config, self.sizes.context)
        step = self.prefixes.spacing(self.sizes.context, chunk)
        if step is not None:
            turns = np.flatnonzero(np.isin(request.ids, np.asarray(self._stops))) + 1
            for place in range(step, len(request.ids), step):
                before = turns[(turns > place - step) & (turns <= place)]
                places.add(int(before[-1]) if len(before) else place)
        kept: list[int] = []
        for place in sorted(places):
            last = kept[-1] if kept else found.length
            if last + LEAST <= place < len(request.ids) - 1:
                kept.append(place)
        return kept

    def cancel(self, rows: Sequence[int]) -> None:
        """Frees rows before their texts are finished, and caches their states."""
        marks = np.zeros(self.sizes.rows, bool)
        marks[list(rows)] = True
        self._decoding = cancel_jit(self._decoding, jnp.asarray(marks))
        for row in rows:
            if self.sizes.prefix_memory:
                self._keep_row(row, *jax.device_get(self._text_of(row)))
            self._free(row)

    def _free(self, index: int) -> None:
        """Frees a row, and keeps its answer for drafts of later ones."""
        row, self.rows[index] = self.rows[index], None
        self._constrained.set(index, None)
        if row is not None and not row.request.private:
            self._answers.add(row.request.owner, row.request.ids, row.tokens)

    def advance(self) -> dict[int, RowUpdate]:
        """Runs a segment: `Sizes.steps` decoding steps of all rows, or one if a row has
        no tokens yet, so that its first ones are sent soon. Frees finished rows.
        Returns the new tokens by row."""
        spec, d = self._parts()
        begins = any(row is not None and not row.length for row in self.rows)
        steps = jnp.int32(1 if begins else self.sizes.steps)
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
                if self.sizes.prefix_memory:
                    self._keep_row(i, host["tokens"][i], host["length"][i])
                self._free(i)
        return updates

    def _text_of(self, row: int) -> tuple[jax.Array, jax.Array]:
        """Returns the output buffer [O] of a row, and the number [] of its tokens."""
        assert self._decoding is not None  # the row is running
        return self._decoding.tokens[row], self._decoding.length[row]

    def _keep_row(self, i: int, tokens: np.ndarray, length: np.ndarray) -> None:
        """Caches the states after the text of a row that has ended.

        Args:
          i: the row.
          tokens: [O] int32. Its output buffer.
          length: [] int32. The number of its tokens.
        """
        row = self.rows[i]
        if row is not None and length > 0 and not row.request.private:
            past = past_jit(self.specs[False], self._decoding, jnp.int32(i))
            text = *row.request.ids, *tokens[:length].tolist()
            # Tokens that closed a text without a pass have not been read.
            self._keep(text[: int(past[0].length[0]) + 1], past)

    def _keep(self, text: Sequence[int], past: Any) -> None:
        """Caches the states of a row, unless they have read very few tokens.

        Args:
          text: the row's text; the states have read all but its last token.
          past: the states.
        """
        if len(text) > LEAST:
            self.prefixes.add(text, past)

    def _parts(self) -> tuple[Spec, Decoding]:
        """Chooses the decoding program for the current rows. Returns its configuration,
        and the batch with only the fields that the program needs."""
        assert self._decoding is not None  # set by `admit`
        requests = [row.request for row in self.rows if row is not None]
        lists = any(request.needs_all for request in requests)
        sampled = lists or any(r.sampling.temperature > 0 for r in requests)
        d = for_program(self._decoding, sampled, self._lists if lists else None)
        return self.specs[sampled], self._constrained.part_of(d)

    def _read(
        self, request: TextRequest, past: Any = None, end: int | None = None
    ) -> Decoding:
        """Prefills a prompt. Returns a batch of one row whose buffers have the sizes of
        this batch.

        Args:
          request: the request with the prompt.
          past: cached states after a prefix of the prompt, or None. Their arrays are
            reused.
          end: number of tokens after which to stop; the next one is the root. If None,
            all but the last one are read.
        """
        ids = request.ids if end is None else request.ids[: end + 1]
        width = next(w for w in self._layout.widths if len(request.ids) <= w)
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(ids)] = ids
        read = init_decoding_jit if past is None else resume_decoding_jit
        return read(
            self.specs[False],
            jnp.asarray(padded),
            jnp.asarray([len(ids)], jnp.int32),
            requests_of(request, self._stops, self._key, self.model.config.num_tokens),
            max_new_tokens=self._layout.output_size,
            capacity=self._layout.capacity,
            past=past,
            earlier=self._answers.row(NOBODY if request.private else request.owner),
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
    row.tokens += update.tokens
    return update
