"""A draft model for tree "auto", which reads the text only when it drafts.

Letters: B rows.
"""

from typing import Any

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
from stree_jax.models.stack.memory import weights_read
from stree_jax.speculation.adaptive.best_first import by_model, catch_up, nothing_grown
from stree_jax.speculation.adaptive.search import Query, Search, Searcher, any_level
from stree_jax.speculation.drafter import (
    DraftState,
    Prompts,
    Reads,
    Update,
    model_key,
)
from stree_jax.speculation.drafters.progress import model_state

READ_CHUNK = 8  # tokens of text per forward pass of the draft model


@struct.dataclass
class ModelLevels(Searcher):
    """A searcher with a draft model. Its state is a `State`, which may lag behind the
    text."""

    model: Model
    cuts_back = True

    def init(self, prompts: Prompts, past: DraftState | None) -> State:
        """Returns the state after the prompts. If `prompts.read` is False, the prompts
        are not read yet."""
        model, read = self.model, model_state(past)
        text, capacity = (prompts.token_ids, prompts.lengths), prompts.capacity
        if prompts.read is None:
            return read_text(model, *text, capacity, read)
        if read is None:
            batch, dtype = prompts.lengths.shape[0], param_dtype(model.params)
            read = init_state(model.config, batch, capacity, dtype)

        def once(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
            return jnp.bool_(False), read_text(model, *text, capacity, carry[1])

        start = prompts.read, grow(read, capacity)
        # A loop that runs at most once, because a conditional would copy the state.
        return lax.while_loop(lambda carry: carry[0], once, start)[1]

    def commit(self, state: State, update: Update) -> State:
        return state

    def unread(self, state: State, length: jax.Array) -> jax.Array:
        return length - state.length

    def search(self, state: State, query: Query) -> tuple[State, Search]:
        chunk = min(READ_CHUNK, query.spare)
        hidden, state, passes = catch_up(self.model, state, query.text, chunk)
        begun = logits_of(self.model, hidden), *self._levels(state, query), passes
        return state, Search(*begun)

    def _levels(self, state: State, query: Query) -> tuple[Any, Any, Any]:
        """Returns `guesser`, `start` and `go_on` of a `Search`."""
        size = query.text.length.shape[0], query.width, query.depth
        start = nothing_grown(self.model, *size)
        return by_model(self.model, state), start, any_level(query)

    def search_reads(
        self, state: State, passes: Any, guessing: Any, size: tuple[int, int]
    ) -> list[Reads]:
        return [Reads("drafter", passes, weights_read(self.model), state=state)]

    def key(self) -> str:
        return model_key(self.model)
