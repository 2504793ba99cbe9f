"""Prompt lookup: drafts from earlier occurrences of the text's last tokens.

The text so far is on the device. It is compared with itself, shifted, to find earlier
occurrences of its last tokens. The longest match comes first, then the most recent. The
tokens that followed there are drafted, with several continuations merged into one tree.

Letters: B rows, S size of the text buffer, W matches, M tokens of a continuation.
"""

import jax
import jax.numpy as jnp
import numpy as np
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
from stree_jax.speculation.forced import with_forced_candidates
from stree_jax.speculation.tree import Budget, Topology

LOOKUP = "lookup"
PLACES = 3  # W, the number of matches that are continued


@struct.dataclass
class History:
    """The text of each row.

    Attributes:
      tokens: [B, S] int32. The last valid token is the root of the next tree.
      length: [B] int32. Number of valid tokens.
    """

    tokens: jax.Array
    length: jax.Array

    def kept(self) -> None:
        """Returns None, because a continuation needs no state: it gets the whole text
        again."""


@struct.dataclass
class LookupIn:
    """A drafter: prompt lookup that also searches other texts, such as what the model
    wrote in an earlier epoch. It is a pytree, so that texts are arguments of `jax.jit`.

    Matches in the text itself come first, then those near the end of `texts`.

    Attributes:
      texts: [R] ints for all prompts, or [B, R] ints, texts for each prompt. Several
        texts follow each other, and padding may be any id: a draft is only a guess.

    Example:
      >>> model = stree_jax.load("demo")
      >>> ids = jnp.asarray(model.tokenizer.encode("def area(r):\n").ids)
      >>> run = stree_jax.generate_tokens
      >>> first = run(model, ids[None], max_new_tokens=32)
      >>> again = run(
      ...     model,
      ...     ids[None],
      ...     max_new_tokens=32,
      ...     drafter=LookupIn(first.joined(ids[None]).tokens),
      ... )
      >>> bool(again.calls[0] < first.calls[0])
      True
    """

    texts: jax.Array

    def check(self) -> None:
        """Raises ValueError if `texts` are not integers with one or two axes."""
        shape, dtype = np.shape(self.texts), getattr(self.texts, "dtype", None)
        whole = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
        if len(shape) not in (1, 2) or not whole or 0 in shape:
            raise ValueError(
                "drafter: want texts as an array of integers [R] or [B, R], got "
                f"{dtype or type(self.texts).__name__} {shape}"
            )


def begin_history(prompts: Prompts, texts: jax.Array | None = None) -> History:
    """Returns the history that contains the prompts, with space for the output.

    Args:
      prompts: the prompts.
      texts: `LookupIn.texts`, which come before the prompts; or None.
    """
    batch, width = prompts.token_ids.shape
    space = max(prompts.capacity - width, 0)
    text = jnp.pad(prompts.token_ids, ((0, 0), (0, space)))
    if texts is None:
        return History(text, prompts.lengths)
    if texts.ndim == 2 and texts.shape[0] != batch:
        raise ValueError(
            f"drafter: texts of {texts.shape[0]} prompts, but {batch} prompts"
        )
    R = texts.shape[-1]
    before = jnp.broadcast_to(texts.astype(jnp.int32).reshape(-1, R), (batch, R))
    return History(jnp.concatenate([before, text], axis=1), prompts.lengths + R)


def add_to_history(history: History, update: Update) -> History:
    """Returns the history with an update's tokens appended."""

    def write(text: jax.Array, place: jax.Array, new: jax.Array) -> jax.Array:
        return text.at[place].set(new, mode="drop")  # per row, which keeps the sharding

    index = jnp.arange(update.tokens.shape[1], dtype=jnp.int32)[None]
    place = history.length[:, None] + index
    place = jnp.where(index < update.length[:, None], place, history.tokens.shape[1])
    return History(
        tokens=jax.vmap(write)(history.tokens, place, update.tokens),
        length=history.length + update.length,
    )


def matched_tokens(history: History) -> jax.Array:
    """Returns the match length at each position, [B, S] int32: how many tokens up to
    and including it are equal to the last tokens of the text.

    Lengths are at most `LONGEST`. The last position gets 0, because its next token is
    unknown.
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
    as if the text were periodic.

    Args:
      history: the text.
      probability: [Z] float32. Acceptance probability of nodes by kind.
      depth: M.
      extra: number of padding entries to append, for other candidates.
    """
    tokens, parents, value, kind, path = _found(
        history, probability, depth=depth, extra=extra
    )
    guessed = jnp.zeros(tokens.shape, bool)
    return Pool(tokens, parents, value, kind, path, guessed)


def _found_shapes(
    history: History, _: jax.Array, *, depth: int, extra: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = history.tokens.shape[0], PLACES * depth + extra
    path = jax.ShapeDtypeStruct(shape, jnp.uint32)
    return ints(*shape), ints(*shape), floats(*shape), ints(*shape), path


@cpu_kernel(
    "stree_look_up",
    outputs=_found_shapes,
    shared=("probability",),
    attributes=lambda depth, extra: dict(
        places=PLACES,
        depth=depth,
        longest=LONGEST,
        prime=PRIME,
        first_kind=MODEL_KINDS,
    ),
)
def _found(
    history: History, probability: jax.Array, *, depth: int, extra: int
) -> tuple[jax.Array, ...]:
    """Returns tokens, parents, value, kind and path [B, W * M + extra] of the pool."""
    pool = _candidates(history, probability, depth)
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
    numbers = (tokens + 1).astype(jnp.uint32) * path_powers(M)[None, None]
    path = jnp.cumsum(numbers, axis=2, dtype=jnp.uint32)

    exists = (matched > 0)[..., None]
    same = (path[:, :, None] == path[:, None]) & exists[:, None]  # [B, W, W, M]
    owner = jnp.argmax(same, axis=2).astype(jnp.int32)  # the best match with a path
    index = jnp.arange(W, dtype=jnp.int32)[None, :, None]
    own = exists & (owner == index)
    above = jnp.pad(owner[..., :-1], ((0, 0), (0, 0), (1, 0)))
    # Candidate (w, j) is token j = `step` of the M tokens after match w; its index is
    # w M + j. Its parent is token j - 1 of the same continuation. If several matches
    # continue with the same tokens, these are stored only under the first such match
    # w' = `above`: the parent's index is w' M + j - 1. Parents are stored plus 1,
    # because 0 is the root.
    parent = jnp.where(step > 0, above * M + step, 0)
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
    """Prompt lookup without another drafter, for trees with a fixed number of nodes.

    Attributes:
      texts: `LookupIn.texts`, or None.
    """

    texts: jax.Array | None = None
    cuts_back = True

    def init(self, prompts: Prompts, past: DraftState | None) -> History:
        # The prompts contain the whole text.
        return begin_history(prompts, self.texts)

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
