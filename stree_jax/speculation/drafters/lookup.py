"""Prompt lookup: drafts from earlier occurrences of the text's last tokens.

The text so far is on the device, after the earlier texts (`EarlierTexts`) if there are
any. Both are compared with the text, shifted, to find occurrences of its last tokens.
The longest match comes first, then the most recent. The tokens that followed there are
drafted, with several continuations merged into one tree.

Letters: B rows, E size of the earlier texts, S size of the buffer with both, W matches,
M tokens of a continuation.
"""

from dataclasses import replace

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
from stree_jax.speculation.drafters.earlier import SEPARATOR
from stree_jax.speculation.forced import with_forced_candidates
from stree_jax.speculation.tree import Budget, Topology

PLACES = 3  # W, the number of matches that are continued
# Match lengths up to this number of tokens are compared, to find the longest match.
LONGEST_MATCH = 32


@struct.dataclass
class History:
    """The text of each row, after earlier texts.

    Attributes:
      tokens: [B, S] int32. The last valid token is the root of the next tree.
      length: [B] int32. Number of valid tokens, earlier texts included.
      earlier: E, static. The first E tokens are earlier texts, with -1 between texts.
    """

    tokens: jax.Array
    length: jax.Array
    earlier: int = struct.field(pytree_node=False, default=0)

    def own(self) -> "History":
        """Returns the text without earlier texts."""
        if not self.earlier:
            return self
        return History(self.tokens[:, self.earlier :], self.length - self.earlier)

    def kept(self) -> None:
        """Returns None, because a continuation needs no state: it gets the whole text
        again."""


def begin_history(prompts: Prompts) -> History:
    """Returns the history that contains the prompts, with space for the output."""
    width, earlier = prompts.token_ids.shape[1], prompts.earlier
    space = max(prompts.capacity - width, 0)
    text = jnp.pad(prompts.token_ids, ((0, 0), (0, space)))
    if earlier is None:
        return History(text, prompts.lengths)
    E = earlier.shape[1]
    return History(jnp.concatenate([earlier, text], axis=1), prompts.lengths + E, E)


def add_to_history(history: History, update: Update) -> History:
    """Returns the history with an update's tokens appended."""

    def write(text: jax.Array, place: jax.Array, new: jax.Array) -> jax.Array:
        return text.at[place].set(new, mode="drop")  # per row, which keeps the sharding

    index = jnp.arange(update.tokens.shape[1], dtype=jnp.int32)[None]
    place = history.length[:, None] + index
    place = jnp.where(index < update.length[:, None], place, history.tokens.shape[1])
    return replace(
        history,
        tokens=jax.vmap(write)(history.tokens, place, update.tokens),
        length=history.length + update.length,
    )


def matched_tokens(history: History) -> jax.Array:
    """Returns the match length at each position, [B, S] int32: how many tokens up to
    and including it are equal to the last tokens of the text.

    Lengths are at most `LONGEST_MATCH`. The last position of each text gets 0, because
    its next token is unknown. Matches end at the beginnings of texts.
    """
    text, S = history.tokens, history.tokens.shape[1]
    steps = jnp.arange(LONGEST_MATCH, dtype=jnp.int32)[None]
    back = history.length[:, None] - 1 - steps
    end = jnp.take_along_axis(text, jnp.maximum(back, 0), axis=1)
    place = jnp.arange(S, dtype=jnp.int32)[None]
    same = place < history.length[:, None] - 1
    same &= jnp.pad(text[:, 1:], ((0, 0), (0, 1))) != SEPARATOR
    length = jnp.zeros(text.shape, jnp.int32)
    for j in range(LONGEST_MATCH):  # one fused loop over the text
        shifted = jnp.pad(text, ((0, 0), (j, 0)), constant_values=SEPARATOR)[:, :S]
        same &= (shifted == end[:, j : j + 1]) & (shifted != SEPARATOR)
        length += same.astype(jnp.int32)
    return length


def best_places(history: History, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the positions and lengths of W matches, [B, W] int32 each. Missing
    matches have length 0.

    They are the best match, the best match that continues with another token than the
    first, and the best of the rest.

    Args:
      history: the text.
      length: [B, S] int32. Result of `matched_tokens`.
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
        chosen.append(jnp.where(found, at, S - 1))  # a position that never matches
        score = jnp.where(place == chosen[-1], 0, score)
    places = jnp.concatenate(chosen, axis=1)
    return places, jnp.take_along_axis(length, places, axis=1)


def look_up(
    history: History, probability: jax.Array, depth: int, extra: int = 0
) -> Pool:
    """Returns W * `depth` candidates: the continuations of the best matches.

    A continuation that reaches the end of the text starts again from its first token,
    as if the text were periodic. In an earlier text it ends with the text.

    Args:
      history: the text.
      probability: [Z] float32. Acceptance probability of nodes by kind.
      depth: M.
      extra: number of padding entries to append, for other candidates.
    """
    tokens, parents, value, kind, path = _found(
        (history.tokens, history.length),
        probability,
        depth=depth,
        extra=extra,
        earlier=history.earlier,
    )
    guessed = jnp.zeros(tokens.shape, bool)
    return Pool(tokens, parents, value, kind, path, guessed)


Text = tuple[jax.Array, jax.Array]  # the arrays of a `History`


def _found_shapes(
    text: Text, _: jax.Array, *, depth: int, extra: int, earlier: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = text[0].shape[0], PLACES * depth + extra
    path = jax.ShapeDtypeStruct(shape, jnp.uint32)
    return ints(*shape), ints(*shape), floats(*shape), ints(*shape), path


@cpu_kernel(
    "stree_look_up",
    outputs=_found_shapes,
    shared=("probability",),
    attributes=lambda depth, extra, earlier: dict(
        earlier=earlier,
        places=PLACES,
        depth=depth,
        longest=LONGEST,
        longest_match=LONGEST_MATCH,
        prime=PRIME,
        first_kind=MODEL_KINDS,
    ),
)
def _found(
    text: Text, probability: jax.Array, *, depth: int, extra: int, earlier: int
) -> tuple[jax.Array, ...]:
    """Returns tokens, parents, value, kind and path [B, W * M + extra] of the pool."""
    pool = _candidates(History(*text, earlier), probability, depth)
    return tuple(jnp.pad(z, ((0, 0), (0, extra))) for z in pool)


def _candidates(
    history: History, probability: jax.Array, depth: int
) -> tuple[jax.Array, ...]:
    """Returns the pool of `look_up` as a tuple without `guessed` and padding."""
    places, matched = best_places(history, matched_tokens(history))
    batch, W, M = *places.shape, depth
    step = jnp.arange(M, dtype=jnp.int32)[None, None]
    period = jnp.maximum(history.length[:, None] - 1 - places, 1)[..., None]
    at = (places + 1)[..., None] + step % period  # [B, W, M]
    tokens = jax.vmap(lambda text, at: text[at])(history.tokens, at)
    goes_on = jnp.cumprod(tokens != SEPARATOR, axis=2) > 0
    numbers = (tokens + 1).astype(jnp.uint32) * path_powers(M)[None, None]
    path = jnp.cumsum(numbers, axis=2, dtype=jnp.uint32)

    exists = (matched > 0)[..., None]
    same = (path[:, :, None] == path[:, None]) & exists[:, None]  # [B, W, W, M]
    owner = jnp.argmax(same, axis=2).astype(jnp.int32)  # the best match with a path
    index = jnp.arange(W, dtype=jnp.int32)[None, :, None]
    own = exists & goes_on & (owner == index)
    above = jnp.pad(owner[..., :-1], ((0, 0), (0, 0), (1, 0)))
    # Candidate (w, j) is token j = `step` of the M tokens after match w; its index is
    # w M + j. Its parent is token j - 1 of the same continuation. If several matches
    # continue with the same tokens, these are stored only under the first such match
    # w' = `above`: the parent's index is w' M + j - 1. Parents are stored plus 1,
    # because 0 is the root.
    parent = jnp.where(step > 0, above * M + step, 0)
    earlier = (places < history.earlier)[..., None]
    kind = lookup_kind(matched[..., None] + step, above == index, earlier)

    def of_owner(table: jax.Array) -> jax.Array:
        return jnp.take_along_axis(table, owner, axis=1)

    value = jnp.cumprod(probability[of_owner(kind)], axis=2)

    def flat(table: jax.Array) -> jax.Array:
        return jnp.broadcast_to(table, (batch, W, M)).reshape(batch, W * M)

    worth = jnp.where(own, value, 0.0)
    return flat(tokens), flat(parent), flat(worth), flat(kind), flat(path)


@struct.dataclass
class LookupDrafter(DrafterBase):
    """Prompt lookup without another drafter, for trees with a fixed number of nodes."""

    looks_up = True
    cuts_back = True

    def init(self, prompts: Prompts, past: DraftState | None) -> History:
        return begin_history(prompts)  # the prompts contain the whole text

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
        assert isinstance(tree, Budget)  # made by `LookupSource.filled`
        probability = jnp.asarray(PRIOR)
        found = look_up(state, probability, tree.depth)
        found = with_forced_candidates(found, dist, probability, tree.depth)
        return best_tree(found, root, tree)[0], state

    def commit(self, state: History, update: Update) -> History:
        return add_to_history(state, update)
