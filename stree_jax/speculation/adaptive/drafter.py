"""A drafter that looks ahead: candidates from the text and from a model, in one pool.

It drafts before the tree's size is known: `AdaptivePolicy.choose` has it look up
continuations and, where that pays, lets a model add levels. `propose` takes as many of
the best as are asked for.

Letters: B rows, W nodes of a model's level, M its most levels.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models import (
    Model,
    State,
    grow,
    init_state,
    logits_of,
    param_dtype,
    read_text,
)
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.best_first import (
    Grown,
    Guesser,
    Worth,
    best_first,
    by_depth,
    by_model,
    catch_up,
    nothing_grown,
)
from stree_jax.speculation.adaptive.guessed_levels import (
    Stage,
    by_stage,
    goes_on,
    room_ahead,
)
from stree_jax.speculation.adaptive.pool import (
    Pool,
    first_nodes,
    merged,
    no_tree,
)
from stree_jax.speculation.draft import Draft, only_root
from stree_jax.speculation.drafter import DraftState, News, Prompts
from stree_jax.speculation.drafters.lookup import (
    History,
    add_to_history,
    begin_history,
    look_up,
)
from stree_jax.speculation.drafters.medusa import LastHidden, MedusaDrafter, drawn_alike
from stree_jax.speculation.drafters.model import model_state
from stree_jax.speculation.drafters.staged import staged_past
from stree_jax.speculation.tree import Budget, Topology

READ_CHUNK = 8  # tokens of text that a drafting model reads in a pass


@struct.dataclass
class Looking:
    """The state of an `AdaptiveDrafter`.

    Attributes:
      history: the text.
      reading: the model's state, behind the text or after all of it; the heads'; None:
        lookup alone.
      passes: [B] int32, of the model or the heads since the prompts were read.
      guessing: [B] int32, those of them that read guesses of a stage, too.
      draft: the largest tree; the next one is its first nodes.
    """

    history: History
    reading: State | LastHidden | None
    passes: jax.Array
    guessing: jax.Array
    draft: Draft


@struct.dataclass
class AdaptiveDrafter:
    """Lookup, with or without a model or heads beside it.

    Attributes:
      model: drafts where the text does not repeat itself; None: lookup alone. Heads are
        one whose levels cost nothing after the first.
      width, depth: W and M, of the model's levels.
      largest: tree that is asked for; a looked-up continuation is as deep.
      stage: guesses the model's levels, so that some need no pass; None: nobody does.
    """

    model: Model | MedusaDrafter | None
    width: int = struct.field(pytree_node=False, default=3)
    depth: int = struct.field(pytree_node=False, default=8)
    largest: Budget = struct.field(pytree_node=False, default=Budget(16, 15))
    stage: Stage | None = None

    def init(self, prompts: Prompts, past: DraftState | None) -> Looking:
        reading: State | LastHidden | None = None
        match self.model:
            case MedusaDrafter():
                reading = self.model.init(prompts, past)
            case Model():
                reading = _read(self.model, prompts, model_state(staged_past(past)))
        return Looking(
            history=begin_history(prompts),
            reading=reading,
            passes=jnp.zeros_like(prompts.lengths),
            guessing=jnp.zeros_like(prompts.lengths),
            draft=no_tree(prompts.lengths.shape[0], self.largest),
        )

    @property
    def hears_prompts(self) -> bool:
        """Whether the target's hidden states are asked for."""
        return isinstance(self.model, MedusaDrafter)

    def unread(self, state: Looking) -> jax.Array:
        """Tokens [B] int32 that the model must read before it drafts; of heads 0."""
        if isinstance(self.model, Model):
            assert isinstance(state.reading, State)
            return state.history.length - state.reading.length
        return jnp.zeros_like(state.history.length)

    def look(self, state: Looking, probability: jax.Array) -> Pool:
        """Candidates from the text, and room for the model's behind them."""
        room = 0 if self.model is None else self.width * self.depth
        return look_up(state.history, probability, self.largest.depth, room)

    def add_levels(
        self,
        state: Looking,
        pool: Pool,
        root: jax.Array,
        dist: Distribution,
        rule: Rule,
        probability: jax.Array,
        worth: Worth,
        least: jax.Array,
    ) -> tuple[Looking, Pool, jax.Array, jax.Array]:
        """The model's candidates, in the room that `look` left.

        Args:
          least: as of `best_first`.

        Returns:
          the state; the pool; how many passes the model's levels took, [] int32, that
          which read the text included; their nodes' values [B, M, W].
        """
        batch, shape = root.shape[0], (self.width, self.depth)
        reading = state.reading

        def go_on(grown: Grown) -> jax.Array:
            return worth(grown.levels, grown.frontier.value)

        if isinstance(self.model, MedusaDrafter):
            assert isinstance(reading, LastHidden)
            logits, passes = self.model.logits(reading, self.depth), jnp.int32(1)
            guesser = by_depth(logits, drawn_alike(dist, rule))
            at_root = logits[:, :1]
            start = nothing_grown(None, batch, *shape)
        else:
            assert self.model is not None and isinstance(reading, State)
            chunk = min(READ_CHUNK, self.largest.depth + 1)  # what caches have room for
            asked = self.model, reading, state.history, chunk
            hidden, reading, passes = catch_up(*asked)
            at_root = logits_of(self.model, hidden)
            guesser = by_model(self.model, reading)
            start = nothing_grown(self.model, batch, *shape)
            if self.stage is not None:
                go_on = partial(goes_on, worth)
                guesser, start = self._through_stage(state, reading, dist, rule, worth)
        given = root, dist, rule, probability
        grown = best_first(at_root, guesser, *given, start, go_on, least)
        own, more = grown.pool, jnp.int32(0)
        if isinstance(self.model, Model):
            more = grown.passes - 1  # the root was read with the text
        values = own.value.reshape(-1, self.depth, self.width)
        state = replace(state, reading=reading, passes=state.passes + passes + more)
        if self.stage is not None:
            state = replace(state, guessing=state.guessing + more)
        return state, merged(pool, own), grown.passes, values

    def _through_stage(
        self,
        state: Looking,
        reading: State,
        dist: Distribution,
        rule: Rule,
        worth: Worth,
    ) -> tuple[Guesser, Grown]:
        """The model with its stage, and where both begin; `reading` is its state."""
        assert isinstance(self.model, Model) and self.stage is not None
        text = state.history.tokens, state.history.length
        asked = self.stage, text, dist, rule, worth
        guesser = by_stage(self.model, reading, *asked)
        batch, room = reading.length.shape[0], self.stage.room
        start = nothing_grown(self.model, batch, self.width, self.depth, room)
        return guesser, replace(start, ahead=room_ahead(self.model, batch, self.stage))

    def propose(
        self,
        state: Looking,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, Looking]:
        if tree.size == 1:
            return only_root(root), state
        # A draft that stayed as it is would be the same throughout the loop over steps
        # of one size. XLA would take the work on it, such as the first layer's product,
        # out of every size's loop, to be done at each step whatever its size.
        draft = state.draft
        parents = jnp.zeros_like(draft.layout.parents)
        layout = replace(draft.layout, parents=parents)
        used_up = replace(draft, tokens=jnp.zeros_like(draft.tokens), layout=layout)
        assert isinstance(tree, Budget)  # the menu of an `AdaptivePolicy`
        return first_nodes(draft, tree), replace(state, draft=used_up)

    def commit(self, state: Looking, news: News) -> Looking:
        if isinstance(self.model, MedusaDrafter):
            assert isinstance(state.reading, LastHidden)
            state = replace(state, reading=self.model.commit(state.reading, news))
        return replace(state, history=add_to_history(state.history, news))


def _read(model: Model, prompts: Prompts, past: State | None) -> State:
    """After the prompts, or before them if they are not to be read now."""
    text, capacity = (prompts.token_ids, prompts.lengths), prompts.capacity
    if prompts.read is None:
        return read_text(model, *text, capacity, past)
    if past is None:
        batch, dtype = prompts.lengths.shape[0], param_dtype(model.params)
        past = init_state(model.config, batch, capacity, dtype)

    def once(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        return jnp.bool_(False), read_text(model, *text, capacity, carry[1])

    start = prompts.read, grow(past, capacity)
    # A loop that runs once, if at all: a conditional would copy the state.
    return lax.while_loop(lambda carry: carry[0], once, start)[1]


def to_keep(drafting: DraftState) -> DraftState:
    """What of a drafter's state a continuation needs; it has the text itself."""
    match drafting:
        case Looking():
            return drafting.reading
        case History():
            return None
        case _:
            return drafting
