"""A drafter for the drafter: speculation within speculation (Spector and Re 2023).

A model fills a tree level by level, a pass each. With a guesser below it, the levels to
come are guessed first and read in one pass of the model's own tree scan; those that are
what the model would have drafted need no pass any more. What it hands to the target is,
token for token and with the same probabilities, what it would have drafted alone, so
that every acceptance rule keeps its promise; only the number of its passes falls.

Letters: B rows, T nodes, M depth of the tree, I most inner nodes of a level, U room for
unread tokens, A levels read in a pass, V tokens of the vocabulary.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models import (
    Model,
    Nodes,
    Records,
    State,
    commit,
    forward_hidden,
    init_records,
    logits_of,
    param_dtype,
    tree_nodes,
)
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.draft import DRAFTER, STAGE, Draft, only_root
from stree_jax.speculation.drafter import DraftState, News, Prompts
from stree_jax.speculation.layout import below_root
from stree_jax.speculation.model_drafter import (
    Reading,
    add_news,
    all_read,
    begin_reading,
)
from stree_jax.speculation.stage import Opened, Stage, Task, make_task
from stree_jax.speculation.tree import Topology

NOT_READ = -1


@struct.dataclass
class StagedState:
    """Attributes:
    reading: how far the model has read.
    inner: the guesser's state; None without one.
    """

    reading: Reading
    inner: DraftState


@struct.dataclass
class Open:
    """A model's state while a tree is filled.

    Attributes:
      before: its reading before the tree.
      state: after the root.
      records: of the T nodes, those that were read.
      read: [B, T] int32, the tokens that were read, or `NOT_READ`.
      passes: [] int32, for this tree.
      inner: the guesser's.
    """

    before: Reading
    state: State
    records: Records
    read: jax.Array
    passes: jax.Array
    inner: Opened


@struct.dataclass
class Staged:
    """A model that drafts, and who guesses for it what it is going to draft.

    Attributes:
      model: its drafts are the ones the target sees.
      guesser: `NGrams`, or another `Staged`; None: levels are read one by one.
      ahead: levels that are guessed below each level, A - 1.
    """

    model: Model
    guesser: Stage | None = None
    ahead: int = struct.field(pytree_node=False, default=2)

    @property
    def levels_read(self) -> int:
        """A."""
        return 1 + (0 if self.guesser is None else self.ahead)

    def init(self, prompts: Prompts, past: DraftState | None) -> StagedState:
        inner = past.inner if isinstance(past, StagedState) else None
        if self.guesser is not None:
            inner = self.guesser.init(prompts, inner)
        reading = begin_reading(self.model, prompts, staged_past(past))
        return StagedState(reading, inner)

    def propose(
        self,
        state: StagedState,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, StagedState]:
        if tree.size == 1:
            return only_root(root), state
        task = make_task(tree, dist, rule)
        draft, opened = self.begin(state, task.empty(root), task, task.tree.depth)
        return draft, self.end(opened)

    def commit(self, state: StagedState, news: News) -> StagedState:
        inner = state.inner
        if self.guesser is not None:
            inner = self.guesser.commit(inner, news)
        return StagedState(add_news(self.model, state.reading, news), inner)

    def begin(
        self, state: StagedState, draft: Draft, task: Task, ahead: int
    ) -> tuple[Draft, Open]:
        inner = state.inner
        if self.guesser is not None:
            guess, inner = self.guesser.begin(
                inner, _for_guesser(draft), _inside(task), self.levels_read - 1
            )
            draft = _guessed(draft, guess)
        opened, logits = self._read_text(state.reading, inner, draft, task)
        draft = task.draw(draft, logits[:, :1], jnp.int32(0))
        draft = _signed(draft, opened.read, jnp.int32(0), task)
        until = jnp.int32(min(ahead, task.tree.depth))
        first, known = jnp.int32(1), jnp.int32(0)
        draft, level = _kept(opened, draft, logits[:, 1:], first, known, until, task)
        return self._go_on(opened, draft, level, known, until, task)

    def fill(
        self, opened: Open, draft: Draft, known: jax.Array, task: Task, ahead: int
    ) -> tuple[Draft, Open]:
        inner_node = jnp.zeros((task.tree.size + 1,), bool)
        inner_node = inner_node.at[task.levels.inner].set(True)[None, :-1]
        wrong = _differs(opened, draft) & inner_node & (draft.layout.depth < known)
        level = jnp.where(wrong, draft.layout.depth, known).min()
        until = jnp.minimum(known + ahead, task.tree.depth)
        return self._go_on(opened, draft, level, known, until, task)

    def end(self, opened: Open) -> StagedState:
        inner = opened.inner
        if self.guesser is not None:
            inner = self.guesser.end(inner)
        return StagedState(all_read(opened.before, opened.state, opened.passes), inner)

    def _read_text(
        self, reading: Reading, inner: Opened, draft: Draft, task: Task
    ) -> tuple[Open, jax.Array]:
        """One pass over the unread text and the first A - 1 levels below its end.

        Returns:
          what is known then, and logits [B, 1 + (A - 1) I, V] after the root and after
          the inner nodes of those levels.
        """
        model, tree = self.model, task.tree
        (batch, U), T = reading.unread.shape, tree.size
        last = jnp.maximum(reading.unread_length - 1, 0)[:, None]
        nodes = _text_and_tree(reading, draft, model.config.conv_taps)
        guessed = _inner(task, 1, self.levels_read - 1)
        text = jnp.arange(U, dtype=jnp.int32)
        rows = jnp.concatenate([text, U + guessed])
        tokens = jnp.concatenate([reading.unread, draft.tokens], axis=1)
        hidden, records, _ = forward_hidden(
            model,
            reading.state,
            tokens[:, jnp.minimum(rows, U + T - 1)],
            nodes,
            records=init_records(model.config, batch, U + T, param_dtype(model.params)),
            rows=rows,
        )
        at_root = jnp.take_along_axis(hidden, last[..., None], axis=1)
        logits = logits_of(model, jnp.concatenate([at_root, hidden[:, U:]], axis=1))
        path = jnp.broadcast_to(text[None], (batch, U))
        opened = Open(
            before=reading,
            state=commit(reading.state, records, path, reading.unread_length),
            records=jax.tree.map(lambda x: x[:, U:], records),
            read=_with_read(jnp.full((batch, T), NOT_READ, jnp.int32), draft, guessed),
            passes=jnp.int32(1),
            inner=inner,
        )
        return opened, logits

    def _go_on(
        self,
        opened: Open,
        draft: Draft,
        level: jax.Array,
        known: jax.Array,
        until: jax.Array,
        task: Task,
    ) -> tuple[Draft, Open]:
        """Guess, read and keep until the level `until` [] is filled.

        Args:
          level: [] int32, the first one that has to be read.
          known: [] int32, the last one whose tokens are not to be drawn.
        """
        A, nodes = (
            self.levels_read,
            below_root(draft.layout.parents, self.model.config.conv_taps),
        )

        def more(carry: tuple) -> jax.Array:
            return carry[2] < until

        def read(carry: tuple) -> tuple:
            draft, opened, level = carry
            if self.guesser is not None:
                guess, inner = self.guesser.fill(
                    opened.inner,
                    _for_guesser(draft),
                    jnp.maximum(level, known),
                    _inside(task),
                    self.ahead,
                )
                draft, opened = _guessed(draft, guess), replace(opened, inner=inner)
            rows = _inner(task, level, A)
            hidden, records, _ = forward_hidden(
                self.model,
                opened.state,
                draft.tokens[:, jnp.minimum(rows, task.tree.size - 1)],
                nodes,
                records=opened.records,
                rows=rows,
            )
            deeper = draft.layout.depth >= level + A  # read below what may be no more
            now_read = jnp.where(deeper, NOT_READ, opened.read)
            opened = replace(
                opened,
                records=records,
                read=_with_read(now_read, draft, rows),
                passes=opened.passes + 1,
            )
            logits = logits_of(self.model, hidden)
            kept = _kept(opened, draft, logits, level, known, until, task)
            return kept[0], opened, kept[1]

        draft, opened, _ = lax.while_loop(more, read, (draft, opened, level))
        return draft, opened


def _text_and_tree(reading: Reading, draft: Draft, conv_taps: int) -> Nodes:
    """The unread text [U], and behind its last token the tree [T] without its root."""
    batch, U = reading.unread.shape
    place = jnp.arange(U, dtype=jnp.int32)[None]
    text = jnp.where(place < reading.unread_length[:, None], place - 1, -1)
    last = jnp.maximum(reading.unread_length - 1, 0)[:, None]
    parents = draft.layout.parents
    below = jnp.where(parents > 0, U + parents, jnp.where(parents < 0, -1, last))
    return tree_nodes(jnp.concatenate([text, below], axis=1), conv_taps)


def _inside(task: Task) -> Task:
    return replace(task, outermost=False)


def _for_guesser(draft: Draft) -> Draft:
    """A draft that a guesser may fill; the probabilities are the drafter's alone."""
    return replace(draft, q=None)


def _guessed(draft: Draft, guess: Draft) -> Draft:
    return replace(draft, tokens=guess.tokens, origin=guess.origin)


def _inner(task: Task, level: jax.Array | int, count: int) -> jax.Array:
    """The inner nodes [count * I] of so many levels, padded with T."""
    inner = task.levels.inner
    inner = jnp.pad(inner, ((0, count), (0, 0)), constant_values=task.tree.size)
    return lax.dynamic_slice_in_dim(inner, level, count).reshape(-1)


def _with_read(read: jax.Array, draft: Draft, rows: jax.Array) -> jax.Array:
    """`read` [B, T] once the nodes `rows` are, too."""
    tokens = draft.tokens[:, jnp.minimum(rows, read.shape[1] - 1)]
    return read.at[:, rows].set(tokens, mode="drop")


def _differs(opened: Open, draft: Draft) -> jax.Array:
    """Nodes [B, T] that were not read as what they are; finished rows do not count."""
    running = opened.before.unread_length > 0
    return (opened.read != draft.tokens) & running[:, None]


def _kept(
    opened: Open,
    draft: Draft,
    logits: jax.Array,
    first: jax.Array,
    known: jax.Array,
    until: jax.Array,
    task: Task,
) -> tuple[Draft, jax.Array]:
    """Draw level after level, for as long as what was read is what is there.

    Args:
      logits: [B, A I, >= V] float32, after the inner nodes of the levels from `first`.
      known, until: see `Staged._go_on`.

    Returns:
      the draft, and the first level [] int32 that has to be read again, or `until`.
    """
    width, inner = task.tree.inner, task.levels.inner
    end = jnp.minimum(first + logits.shape[1] // width, until)

    def right(carry: tuple[Draft, jax.Array]) -> jax.Array:
        draft, level = carry
        differs = _differs(opened, draft)
        rows = inner[jnp.minimum(level, inner.shape[0] - 1)]
        here = jnp.take(differs, rows, axis=1, mode="fill", fill_value=False)
        return (level < end) & ~here.any()

    def draw(carry: tuple[Draft, jax.Array]) -> tuple[Draft, jax.Array]:
        draft, level = carry
        own = lax.dynamic_slice_in_dim(logits, (level - first) * width, width, axis=1)
        drawn = _signed(task.draw(draft, own, level), opened.read, level, task)
        if not task.outermost:  # who asked has drawn some
            drawn = jax.tree.map(
                lambda a, b: jnp.where(level >= known, a, b), drawn, draft
            )
        return drawn, level + 1

    if logits.shape[1] == 0:  # nothing was guessed
        return draft, jnp.asarray(first, jnp.int32)
    return lax.while_loop(right, draw, (draft, first))


def _signed(draft: Draft, read: jax.Array, depth: jax.Array, task: Task) -> Draft:
    """The draft whose nodes below a depth were drawn by this stage, but for those that
    had been guessed and read: they stay the guesser's."""
    assert draft.origin is not None  # of `Task.empty`
    own = jnp.uint8(DRAFTER if task.outermost else STAGE)
    below = (draft.layout.depth == depth + 1) & (read != draft.tokens)
    return replace(draft, origin=jnp.where(below, own, draft.origin))


def staged_past(past: DraftState) -> DraftState:
    """What of a past is the outermost model's."""
    return past.reading if isinstance(past, StagedState) else past
