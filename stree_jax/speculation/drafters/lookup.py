"""Drafts without a model: what came after the last tokens when they were there before.

The text so far lies on the device. Places whose tokens are those at its end are found
by comparing it with itself, shifted; the longest match comes first, then the most
recent. What followed there is drafted, several such continuations merged into one tree.

Letters: B rows, S room for text, W places, M tokens of a continuation.
"""

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.cpu_kernels import cpu_kernel, floats, ints
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.adaptive.calibration import LONGEST, PRIOR, lookup_kind
from stree_jax.speculation.adaptive.pool import (
    MODEL_KINDS,
    PRIME,
    Pool,
    best_tree,
    path_powers,
)
from stree_jax.speculation.draft import Draft, only_root
from stree_jax.speculation.drafter import DrafterBase, DraftState, Prompts, Update
from stree_jax.speculation.tree import Budget, Topology

LOOKUP = "lookup"
PLACES = 3  # W


@struct.dataclass
class History:
    """The text of each row.

    Attributes:
      tokens: [B, S] int32, the root of the next tree the last that counts.
      length: [B] int32.
    """

    tokens: jax.Array
    length: jax.Array

    def kept(self) -> None:
        """Returns nothing: a continuation has the text itself."""


def begin_history(prompts: Prompts) -> History:
    """Returns the prompts, with space for what follows."""
    room = max(prompts.capacity - prompts.token_ids.shape[1], 0)
    return History(jnp.pad(prompts.token_ids, ((0, 0), (0, room))), prompts.lengths)


def add_to_history(history: History, update: Update) -> History:
    """Returns the history with an update's tokens behind it."""

    def write(text: jax.Array, place: jax.Array, new: jax.Array) -> jax.Array:
        return text.at[place].set(new, mode="drop")  # by row: shardings stay

    index = jnp.arange(update.tokens.shape[1], dtype=jnp.int32)[None]
    place = history.length[:, None] + index
    place = jnp.where(index < update.length[:, None], place, history.tokens.shape[1])
    return History(
        tokens=jax.vmap(write)(history.tokens, place, update.tokens),
        length=history.length + update.length,
    )


def matched_tokens(history: History) -> jax.Array:
    """Returns how many tokens up to each place are those at the text's end, int32 [B,
    S].

    At most `LONGEST`. The end itself does not count, as nothing is known to follow it.
    """
    text, S = history.tokens, history.tokens.shape[1]
    back = history.length[:, None] - 1 - jnp.arange(LONGEST, dtype=jnp.int32)[None]
    end = jnp.take_along_axis(text, jnp.maximum(back, 0), axis=1)
    place = jnp.arange(S, dtype=jnp.int32)[None]
    same = place < history.length[:, None] - 1
    length = jnp.zeros(text.shape, jnp.int32)
    for j in range(LONGEST):  # one fused loop over the text
        shifted = jnp.pad(text, ((0, 0), (j, 0)))[:, :S]
        same &= (shifted == end[:, j : j + 1]) & (place >= j)
        length += same.astype(jnp.int32)
    return length


def best_places(history: History, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the W best matches: places and lengths [B, W] int32, 0 long where there
    is none.

    The best; the best that goes on with another token; the best of all others.
    """
    S = length.shape[1]
    place = jnp.arange(S, dtype=jnp.int32)[None]
    following = jnp.pad(history.tokens[:, 1:], ((0, 0), (0, 1)))
    score = jnp.where(length > 0, length * S + place, 0)
    chosen: list[jax.Array] = []
    for w in range(PLACES):
        allowed = score
        if w == 1:
            token = jnp.take_along_axis(following, chosen[0], axis=1)
            allowed = jnp.where(following == token, 0, score)
        at = jnp.argmax(allowed, axis=1).astype(jnp.int32)[:, None]
        found = jnp.take_along_axis(allowed, at, axis=1) > 0
        chosen.append(jnp.where(found, at, S - 1))  # where no match can be
        score = jnp.where(place == chosen[-1], 0, score)
    places = jnp.concatenate(chosen, axis=1)
    return places, jnp.take_along_axis(length, places, axis=1)


def look_up(
    history: History, probability: jax.Array, depth: int, room: int = 0
) -> Pool:
    """Returns continuations of the text as candidates, W * `depth` of them.

    A continuation that reaches the text's end goes on from its own begin, as a text
    that repeats itself would.

    Args:
      probability: [Z] float32, of nodes by kind.
      depth: M.
      room: for so many candidates behind them, which are none yet.
    """
    tokens, parents, value, kind, path = _found(
        history, probability, depth=depth, room=room
    )
    nobody = jnp.zeros(tokens.shape, bool)
    return Pool(tokens, parents, value, kind, path, nobody)


def _found_shapes(
    history: History, _: jax.Array, *, depth: int, room: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = history.tokens.shape[0], PLACES * depth + room
    path = jax.ShapeDtypeStruct(shape, jnp.uint32)
    return ints(*shape), ints(*shape), floats(*shape), ints(*shape), path


@cpu_kernel(
    "stree_look_up",
    outputs=_found_shapes,
    shared=("probability",),
    attributes=lambda depth, room: dict(
        places=PLACES,
        depth=depth,
        longest=LONGEST,
        prime=PRIME,
        first_kind=MODEL_KINDS,
    ),
)
def _found(
    history: History, probability: jax.Array, *, depth: int, room: int
) -> tuple[jax.Array, ...]:
    """Returns tokens, parents, value, kind and path [B, W * M + room] of the pool."""
    pool = _candidates(history, probability, depth)
    return tuple(jnp.pad(z, ((0, 0), (0, room))) for z in pool)


def _candidates(
    history: History, probability: jax.Array, depth: int
) -> tuple[jax.Array, ...]:
    """Returns the pool of `look_up` without `guessed`."""
    places, matched = best_places(history, matched_tokens(history))
    batch, W, M = *places.shape, depth
    step = jnp.arange(M, dtype=jnp.int32)[None, None]
    period = jnp.maximum(history.length[:, None] - 1 - places, 1)[..., None]
    at = (places + 1)[..., None] + step % period  # [B, W, M]
    tokens = jax.vmap(lambda text, at: text[at])(history.tokens, at)
    numbers = (tokens + 1).astype(jnp.uint32) * path_powers(M)[None, None]
    path = jnp.cumsum(numbers, axis=2, dtype=jnp.uint32)

    exists = (matched > 0)[..., None]
    same = (path[:, :, None] == path[:, None]) & exists[:, None]  # [B, W, W, M]
    owner = jnp.argmax(same, axis=2).astype(jnp.int32)  # of a path, the best place
    index = jnp.arange(W, dtype=jnp.int32)[None, :, None]
    own = exists & (owner == index)
    above = jnp.pad(owner[..., :-1], ((0, 0), (0, 0), (1, 0)))
    parent = jnp.where(step > 0, above * M + step, 0)  # candidate (w, j - 1) and 1 more
    kind = lookup_kind(matched[..., None] + step, above == index)

    def of_owner(table: jax.Array) -> jax.Array:
        return jnp.take_along_axis(table, owner, axis=1)

    value = jnp.cumprod(probability[of_owner(kind)], axis=2)

    def flat(table: jax.Array) -> jax.Array:
        return jnp.broadcast_to(table, (batch, W, M)).reshape(batch, W * M)

    worth = jnp.where(own, value, 0.0)
    return flat(tokens), flat(parent), flat(worth), flat(kind), flat(path)


@struct.dataclass
class LookupDrafter(DrafterBase):
    """Prompt lookup alone, in trees of a fixed number of nodes."""

    def init(self, prompts: Prompts, past: DraftState | None) -> History:
        return begin_history(prompts)  # the whole text is in them

    def propose(
        self,
        state: History,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, History]:
        if tree.size == 1:
            return only_root(root), state
        assert isinstance(tree, Budget)  # of `LookupSource.filled`
        found = look_up(state, jnp.asarray(PRIOR), tree.depth)
        return best_tree(found, root, tree)[0], state

    def commit(self, state: History, update: Update) -> History:
        return add_to_history(state, update)
