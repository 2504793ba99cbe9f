"""Staged drafting: speculative decoding of the draft model (Spector and Re 2023).

A draft model fills a tree level by level, with one forward pass per level. With a
guesser, a cheaper drafter first guesses several levels, and one pass of the draft model
reads them all with its tree scan. Levels that the guesser got right need no further
pass. The tree has the same tokens and probabilities as without the guesser, so all
acceptance rules keep their guarantees. Only the number of passes of the draft model is
lower.

There may be m guesses per node. The first is in the tree itself and may have guesses
below it. The others, called alternatives, have extra slots: slot j T + t is alternative
j of node t. If the draft model draws an alternative, it replaces the first guess.

Letters: B rows, T nodes, M depth of the tree, I maximum number of inner nodes (nodes
with children) per level, U size of the buffer of unread tokens, A levels read in a
pass, m guesses per node, N = m T slots, Q nodes of a pass, V tokens of the vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.common.checks import integer
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
    without_mtp,
)
from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.stack.memory import weights_read
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.guessed_levels import GuessedLevels
from stree_jax.speculation.adaptive.guessed_levels import Stage as GuessedStage
from stree_jax.speculation.adaptive.model_levels import ModelLevels
from stree_jax.speculation.draft import DRAFTER, STAGE, TARGET, Draft, only_root
from stree_jax.speculation.drafter import (
    DrafterBase,
    DraftState,
    Prompts,
    Reads,
    Update,
)
from stree_jax.speculation.drafters.model import ModelSource, by_slot
from stree_jax.speculation.drafters.ngrams import NGrams, check_fixed
from stree_jax.speculation.drafters.progress import (
    Reading,
    add_update,
    all_read,
    begin_reading,
)
from stree_jax.speculation.drafters.stage import (
    Opened,
    Several,
    Stage,
    Task,
    first_unknown,
    make_task,
)
from stree_jax.speculation.layout import below_root
from stree_jax.speculation.source import Source, Vocabulary, not_a_source
from stree_jax.speculation.tree import DEEPEST, Auto, Topology

NOT_READ = -1  # token of a slot that was not read
AHEAD = 2  # default number of levels that are guessed
WIDTH = 1  # default number of guesses per node
MIN_GUESSES = 2  # minimum guesses per level with tree "auto"


@register_for_export
@struct.dataclass
class StagedState:
    """The state of a `Staged` drafter.

    Attributes:
      reading: the draft model's state, and the part of the text that it has not read.
      inner: the guesser's state, or None without a guesser.
    """

    reading: Reading
    inner: DraftState


@struct.dataclass
class Open:
    """The state of a `Staged` drafter while it fills a tree.

    Attributes:
      before: what the draft model had read before this tree.
      state: the draft model's state after the root.
      records: the draft model's records of the N slots; valid for slots that were read.
      read: [B, N] int32. The token that was read in each slot, or `NOT_READ`.
      passes: [] int32. Passes of the draft model for this tree.
      inner: the guesser's state.
    """

    before: Reading
    state: State
    records: Records
    read: jax.Array
    passes: jax.Array
    inner: Opened


@register_for_export
@struct.dataclass
class Staged(DrafterBase):
    """A draft model with a guesser that predicts its draft.

    The draft is the same as without the guesser; the guesser reduces the number of
    forward passes of the draft model.

    Attributes:
      model: the draft model.
      guesser: `NGrams`, a model, or another `Staged`. If None, the draft model runs one
        pass per level.
      ahead: A - 1, the number of levels that are guessed below each level.
      width: m, the number of guesses per node. More than 1 requires `NGrams`.
    """

    model: Model
    guesser: Stage | None = None
    ahead: int = struct.field(pytree_node=False, default=AHEAD)
    width: int = struct.field(pytree_node=False, default=WIDTH)
    cuts_back = True

    @property
    def levels_read(self) -> int:
        """A, the number of levels that one pass of the draft model reads."""
        return 1 + (0 if self.guesser is None else self.ahead)

    def init(self, prompts: Prompts, past: DraftState | None) -> StagedState:
        inner = past.inner if isinstance(past, StagedState) else None
        if self.guesser is not None:
            inner = self.guesser.init(prompts, inner)
        reading = begin_reading(self.model, prompts, past)
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

    def commit(self, state: StagedState, update: Update) -> StagedState:
        inner = state.inner
        if self.guesser is not None:
            inner = self.guesser.commit(inner, update)
        return StagedState(add_update(self.model, state.reading, update), inner)

    def reads(self, state: StagedState, menu: Sequence[Topology]) -> list[Reads]:
        reading = state.reading
        weights = weights_read(self.model)
        own = Reads("drafter", reading.passes, weights, state=reading.state)
        if isinstance(self.guesser, NGrams):
            (tree,) = menu
            # Alternatives take another lookup per level.
            levels = self.ahead * (1 if self.width == 1 else 2)
            each = levels * getattr(tree, "inner", 1)
            table = self.guesser.lookup_bytes
            return [own, Reads("n-gram", own.passes, table, each)]
        inner = [] if self.guesser is None else self.guesser.reads(state.inner, menu)
        models = (r for r in inner if r.state is not None)
        tables = (r for r in inner if r.state is None)
        return [own, *(replace(r, stage=f"inner {r.stage}") for r in models), *tables]

    def begin(
        self, state: StagedState, draft: Draft, task: Task, ahead: int
    ) -> tuple[Draft, Open]:
        inner = state.inner
        if self.guesser is not None:
            guess, inner = self.guesser.begin(
                inner, _for_guesser(draft), _inside(task), self.ahead
            )
            draft = _guessed(draft, guess)
        opened, logits, nodes = self._read_text(state.reading, inner, draft, task)
        root = jnp.zeros(draft.tokens.shape, bool).at[:, 0].set(True)
        right = jnp.zeros_like(root)
        opened, draft, right = _kept(opened, draft, logits, nodes, root, right, task)
        until = jnp.int32(min(ahead, task.tree.depth))
        return self._go_on(opened, draft, root, right, until, task)

    def fill(
        self, opened: Open, draft: Draft, known: jax.Array, task: Task, ahead: int
    ) -> tuple[Draft, Open]:
        right = _rightly_read(opened.read, draft.tokens, task)
        first, M = first_unknown(task, known), task.tree.depth
        until = jnp.where(first < M, first - 1 + ahead, 0)  # 0: no pass is needed
        return self._go_on(opened, draft, known, right, until, task)

    def end(self, opened: Open) -> StagedState:
        inner = opened.inner
        if self.guesser is not None:
            inner = self.guesser.end(inner)
        return StagedState(all_read(opened.before, opened.state, opened.passes), inner)

    def _read_text(
        self, reading: Reading, inner: Opened, draft: Draft, task: Task
    ) -> tuple[Open, jax.Array, jax.Array]:
        """Runs one pass of the draft model over the unread text and the guesses below
        its last token.

        Args:
          reading: the draft model's state, and the part of the text that it has not
            read.
          inner: the guesser's state.
          draft: the tree, with guesses.
          task: the task of filling the tree.

        Returns:
          The state after the pass, logits [B, Q, V] after the root and the guesses, and
          their slots [Q].
        """
        model, N = self.model, self.width * task.tree.size
        batch, U = reading.unread.shape
        last = jnp.maximum(reading.unread_length - 1, 0)[:, None]
        unread_nodes = jnp.broadcast_to(task.inner, draft.tokens.shape)
        unread_nodes = unread_nodes.at[:, 0].set(False)
        guessed = _first_rows(unread_nodes, self.ahead_rows(task), task)
        slots, tokens = self._with_others(inner, draft, guessed, guessed, task)
        text = jnp.arange(U, dtype=jnp.int32)
        hidden, records, state = forward_hidden(
            model,
            reading.state,
            jnp.concatenate([reading.unread, tokens], axis=1),
            _text_and_tree(reading, self._parents(draft), model.config.conv_taps),
            records=init_records(model.config, batch, U + N, param_dtype(model.params)),
            rows=jnp.concatenate([text, U + slots]),
        )
        at_root = jnp.take_along_axis(hidden, last[..., None], axis=1)
        logits = logits_of(model, jnp.concatenate([at_root, hidden[:, U:]], axis=1))
        path = jnp.broadcast_to(text[None], (batch, U))
        root = jnp.zeros((1,), jnp.int32)
        slots = jnp.concatenate([root, slots])
        tokens = jnp.concatenate([draft.tokens[:, :1], tokens], axis=1)
        read = jnp.full((batch, N), NOT_READ, jnp.int32)
        opened = Open(
            before=reading,
            state=commit(state, records, path, reading.unread_length),
            records=_by_node(lambda x: x[:, U:], records),
            read=read.at[:, slots].set(tokens, mode="drop"),
            passes=jnp.int32(1),
            inner=inner,
        )
        return opened, logits, slots

    def ahead_rows(self, task: Task) -> int:
        """Returns (A - 1) I, the maximum number of guessed nodes per pass."""
        return (self.levels_read - 1) * task.tree.inner

    def _parents(self, draft: Draft) -> jax.Array:
        """Returns the parents of all slots [B, N] int32. An alternative has the parent
        of its node, and no children."""
        return jnp.tile(draft.layout.parents, (1, self.width))

    def _with_others(
        self,
        inner: Opened,
        draft: Draft,
        nodes: jax.Array,
        guessed: jax.Array,
        task: Task,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the slots [Q] to be read (N for padding), and their tokens [B, Q].

        Args:
          inner: the guesser's state.
          draft: the tree.
          nodes: int32. Nodes to be read; T for padding.
          guessed: int32. Nodes whose alternatives are read, too; T for padding.
          task: the task of filling the tree.
        """
        T = task.tree.size
        slots = [jnp.where(nodes < T, nodes, self.width * T)]
        tokens = [draft.tokens[:, jnp.minimum(nodes, T - 1)]]
        if self.width > 1:
            assert self.guesser is not None  # checked by `StagedSource.check`
            args = inner, draft, guessed, task, self.width - 1
            others = cast(Several, self.guesser).others(*args)
            for j in range(1, self.width):
                slots.append(jnp.where(guessed < T, j * T + guessed, self.width * T))
                tokens.append(others[..., j - 1])
        return jnp.concatenate(slots), jnp.concatenate(tokens, axis=1)

    def _go_on(
        self,
        opened: Open,
        draft: Draft,
        known: jax.Array,
        right: jax.Array,
        until: jax.Array,
        task: Task,
    ) -> tuple[Draft, Open]:
        """Repeats guessing, reading and drawing until all levels down to a depth are
        drawn.

        Args:
          opened: the drafter's state.
          draft: the tree.
          known: [B, T] bool. Nodes whose tokens are fixed.
          right: [B, T] bool. Nodes that were read with their final tokens.
          until: [] int32. The depth.
          task: the task of filling the tree.
        """
        nodes = below_root(self._parents(draft), self.model.config.conv_taps)
        running = (opened.before.unread_length > 0)[:, None]

        def needed(right: jax.Array) -> jax.Array:
            """Returns the nodes [B, T] that must be read; none in finished rows."""
            return (task.inner & (task.depth < until))[None] & ~right & running

        def more(carry: tuple) -> jax.Array:
            return needed(carry[2]).any()

        def read(carry: tuple) -> tuple:
            draft, opened, right = carry
            drawn = known | right[:, task.parents] | ~running
            if self.guesser is not None:
                guess, inner = self.guesser.fill(
                    opened.inner, _for_guesser(draft), drawn, _inside(task), self.ahead
                )
                draft, opened = _guessed(draft, guess), replace(opened, inner=inner)
            unread, most = needed(right), self.levels_read * task.tree.inner
            guessed = _first_rows(unread & ~drawn, self.ahead_rows(task), task)
            args = _first_rows(unread, most, task), guessed, task
            slots, tokens = self._with_others(opened.inner, draft, *args)
            hidden, records, _ = forward_hidden(
                self.model,
                opened.state,
                tokens,
                nodes,
                records=opened.records,
                rows=slots,
            )
            # Forget what was read below wrong nodes, and all alternatives.
            all_right = jnp.pad(right, ((0, 0), (0, (self.width - 1) * task.tree.size)))
            kept = jnp.where(all_right, opened.read, NOT_READ)
            opened = replace(
                opened,
                records=records,
                read=kept.at[:, slots].set(tokens, mode="drop"),
                passes=opened.passes + 1,
            )
            logits = logits_of(self.model, hidden)
            opened, draft, right = _kept(
                opened, draft, logits, slots, known, right, task
            )
            return draft, opened, right

        draft, opened, _ = lax.while_loop(more, read, (draft, opened, right))
        return draft, opened


def _text_and_tree(reading: Reading, parents: jax.Array, conv_taps: int) -> Nodes:
    """Returns the topology of a pass over the unread text and a tree.

    The first U nodes are the unread text, a chain whose last token is the tree's root.
    The slots of the tree without its root follow.

    Args:
      reading: the draft model's state, and the unread text.
      parents: [B, N] int32. Parents of the slots; -1 for the root.
      conv_taps: number of taps of the model's convolutions.
    """
    batch, U = reading.unread.shape
    place = jnp.arange(U, dtype=jnp.int32)[None]
    text = jnp.where(place < reading.unread_length[:, None], place - 1, -1)
    last = jnp.maximum(reading.unread_length - 1, 0)[:, None]
    below = jnp.where(parents > 0, U + parents, jnp.where(parents < 0, -1, last))
    return tree_nodes(jnp.concatenate([text, below], axis=1), conv_taps)


def _inside(task: Task) -> Task:
    """Returns the task as a guesser gets it, whose draft is not for the target."""
    return replace(task, outermost=False)


def _for_guesser(draft: Draft) -> Draft:
    """Returns a draft that a guesser may fill, without the drafter's probabilities."""
    return replace(draft, q=None)


def _guessed(draft: Draft, guess: Draft) -> Draft:
    """Returns a draft with the tokens and origins of a guess."""
    return replace(draft, tokens=guess.tokens, origin=guess.origin)


def _first_rows(needed: jax.Array, count: int, task: Task) -> jax.Array:
    """Returns the `count` nodes nearest to the root, [count] int32, among those that
    any row needs ([B, T] bool); padded with T."""
    T = task.tree.size
    node = jnp.arange(T, dtype=jnp.int32)
    far = jnp.where(needed.any(axis=0), task.depth * T + node, T * T)
    order = jnp.argsort(far).astype(jnp.int32)
    rows = jnp.where(far[order] < T * T, order, T)
    return jnp.pad(rows, (0, max(count - T, 0)), constant_values=T)[:count]


def _rightly_read(read: jax.Array, tokens: jax.Array, task: Task) -> jax.Array:
    """Returns [B, T] bool, True for nodes that the draft model has read, together with
    all their ancestors, with the tokens that they have now.

    Args:
      read: [B, N] int32. The token that was read in each slot.
      tokens: [B, T] int32. Tokens that the nodes have now.
      task: the task of filling the tree.
    """
    wrong = read[:, : task.tree.size] != tokens
    return ~(wrong[:, None] & task.lineage[None]).any(axis=2)


def _kept(
    opened: Open,
    draft: Draft,
    logits: jax.Array,
    slots: jax.Array,
    known: jax.Array,
    before: jax.Array,
    task: Task,
) -> tuple[Open, Draft, jax.Array]:
    """Draws the children of nodes that were read, and finds which guesses were right.

    Args:
      opened: the drafter's state after the pass.
      draft: the tree.
      logits: [B, Q, >= V] float32. Logits after the slots that were read.
      slots: [Q] int32. These slots.
      known: [B, T] bool. Nodes whose tokens are fixed.
      before: [B, T] bool. Nodes that had been read with their final tokens before.
      task: the task of filling the tree.

    Returns:
      The drafter's state, the draft, and [B, T] bool, True for nodes that have now been
      read with their final tokens.
    """
    tree, T, N = task.tree, task.tree.size, opened.read.shape[1]
    own = jnp.where(slots < T, draft.tokens[:, slots % T], opened.read[:, slots % N])
    drawn, z = task.draw(draft, logits, jnp.where(slots < N, slots % T, T), own)
    nodes = jnp.where(slots < T, slots, T)
    children, is_child = by_slot(drawn, nodes, tree, task.levels)
    fixed = known | before[:, task.parents]
    tokens = jnp.where(is_child[None] & ~fixed, children, draft.tokens)
    q = draft.q
    if q is not None:
        new = jnp.where(before[:, slots % T, None], q[:, slots % T], jnp.exp(z))
        q = q.at[:, nodes].set(new, mode="drop")
    right = _rightly_read(opened.read, tokens, task)
    for first in range(T, N, T):
        nodes = jnp.where((slots >= first) & (slots < first + T), slots - first, T)
        hit = (opened.read[:, first : first + T] == tokens) & ~fixed & ~right
        hit = hit & right[:, task.parents]
        opened = _in_place(opened, hit, tokens, first, task)
        children, is_child = by_slot(drawn, nodes, tree, task.levels)
        below = hit[:, task.parents] & is_child[None] & ~known
        tokens = jnp.where(below, children, tokens)
        if q is not None:
            new = jnp.zeros_like(q).at[:, nodes].set(jnp.exp(z), mode="drop")
            q = jnp.where(hit[..., None], new, q)
    right = _rightly_read(opened.read, tokens, task)
    # Right guesses keep the guesser as their origin.
    assert draft.origin is not None  # set by `Task.empty`
    guessed = (opened.read[:, :T] == tokens) & (draft.origin != TARGET)
    drafted = right[:, task.parents] & ~fixed & ~guessed
    origin = jnp.uint8(DRAFTER if task.outermost else STAGE)
    origins = jnp.where(drafted, origin, draft.origin)
    return opened, replace(draft, tokens=tokens, q=q, origin=origins), right


def _by_node(function: Callable[[jax.Array], jax.Array], records: Records) -> Records:
    """Applies a function to the arrays of records that have a row for each of several
    nodes. Mamba-1's decays have one row for all nodes."""
    return jax.tree.map(lambda x: x if x.shape[1] == 1 else function(x), records)


def _in_place(
    opened: Open, hit: jax.Array, tokens: jax.Array, first: int, task: Task
) -> Open:
    """Returns the drafter's state after alternatives have replaced first guesses.

    For each node whose alternative the draft model has drawn, the alternative's record
    is copied to the node's own slot, and the node counts as read with that token. Nodes
    below it were read after the wrong token and are marked `NOT_READ`. The module's
    docstring explains slots and alternatives.

    Args:
      opened: the drafter's state while it fills the tree.
      hit: [B, T] bool. Nodes whose alternative was drawn.
      tokens: [B, T] int32. Tokens of the nodes, including the new draws.
      first: offset of the group of slots with these alternatives: the alternative of
        node t is in slot `first` + t.
      task: the task of filling the tree.
    """
    T = task.tree.size

    def moved(table: jax.Array) -> jax.Array:
        here = hit.reshape(*hit.shape, *[1] * (table.ndim - 2))
        new = jnp.where(here, table[:, first : first + T], table[:, :T])
        return table.at[:, :T].set(new)

    below = task.lineage & ~jnp.eye(T, dtype=bool)
    below_hit = (hit[:, None] & below[None]).any(axis=2)
    read = jnp.where(hit, tokens, opened.read[:, :T])
    read = opened.read.at[:, :T].set(jnp.where(below_hit, NOT_READ, read))
    return replace(opened, records=_by_node(moved, opened.records), read=read)


@struct.dataclass
class StagedSource(Source):
    """A `Staged` drafter, as created by users."""

    value: Staged

    @property
    def prefers_auto(self) -> bool:  # only n-grams can guess for tree "auto"
        return isinstance(self.value.guesser, NGrams)

    def check(self, target: Model) -> None:
        staged, guesser = self.value, self.value.guesser
        integer("ahead", staged.ahead, 1, DEEPEST, f"1..{DEEPEST} guessed levels")
        integer("width", staged.width, 1, 16, "1..16 guesses per node")
        if not isinstance(staged.model, Model):
            raise not_a_source("drafter", staged.model)
        if not isinstance(guesser, Model | NGrams | Staged | None):
            raise ValueError(
                f"guesser: want NGrams, a model or a Staged, got {type(guesser)}"
            )
        if isinstance(guesser, Staged):
            StagedSource(guesser).check(target)
        if guesser is not None and staged.width > 1 and not isinstance(guesser, NGrams):
            raise ValueError("width: only n-grams guess more than one token per node")

    def check_tree(self, tree: Topology) -> None:
        if not isinstance(tree, Auto):
            check_fixed(tree)

    def check_past(self, target: Model, past: DraftState, batch: int) -> None:
        reading = getattr(past, "reading", past)
        ModelSource(self.value.model).check_past(target, reading, batch)
        inner, guesser = getattr(past, "inner", None), as_stages(self.value.guesser)
        if isinstance(guesser, Staged):
            StagedSource(guesser).check_past(target, inner, batch)

    def vocabularies(self, name: str) -> Iterator[Vocabulary]:
        model, guesser = self.value.model, self.value.guesser
        yield from ModelSource(model).vocabularies(name)
        if isinstance(guesser, NGrams):
            if guesser.num_tokens != model.config.num_tokens:
                yield Vocabulary("n-grams", guesser.num_tokens, None)
        elif isinstance(guesser, Model):
            yield from ModelSource(guesser).vocabularies("guesser")
        elif isinstance(guesser, Staged):
            yield from StagedSource(guesser).vocabularies("guesser")

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.value.model,)

    def bind(self, target: Model, tree: Topology) -> DrafterBase:
        staged = self.value
        if not isinstance(tree, Auto):
            return as_stages(staged)
        model = without_mtp(staged.model)
        if not isinstance(staged.guesser, NGrams):
            return ModelLevels(model)
        ahead = min(staged.ahead, tree.depth)
        stage = GuessedStage(staged.guesser, ahead, max(staged.width, MIN_GUESSES))
        return GuessedLevels(model, stage)


def as_stages(stage: Any) -> Any:
    """Returns a stage with each model in it as a `Staged`. Other stages are returned
    unchanged."""
    match stage:
        case Staged():
            return replace(stage, guesser=as_stages(stage.guesser))
        case Model():
            return Staged(stage)
        case _:
            return stage
