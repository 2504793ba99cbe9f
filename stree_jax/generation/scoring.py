"""Computes logits for known tokens: along a sequence, or over a tree after a prefix."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stree_jax.common.checks import check_not_forked, with_hints
from stree_jax.cpu_kernels import symbolic_size
from stree_jax.generation.arguments import checked_tokens
from stree_jax.models import (
    PREFILL_CHUNK,
    Model,
    check_model,
    experts_of,
    extend,
    forward_tree,
    init_state,
    logits_of,
    param_dtype,
    prefill,
)
from stree_jax.models.stack.by_layer import (
    chunks,
    float_state,
    residual_stream,
    whole,
)
from stree_jax.models.stack.model import normed
from stree_jax.sampling.ranks import rank_of
from stree_jax.speculation.on_mesh import rows_on, whole_on
from stree_jax.speculation.tree import Tree, make_tree

TEXTS_AT_ONCE = 16  # rows of a pass; each row is a chunk of one text


@jax.jit
def _score(model: Model, tokens: jax.Array) -> jax.Array:
    """Returns logits [B, T, V] float32 of tokens [B, T], T a multiple of the chunk."""
    return rows_on(model, _score_chunks, tokens)


def _score_chunks(model: Model, tokens: jax.Array) -> jax.Array:
    def logits(
        model: Model, _: None, __: None, hidden: jax.Array, ___: None
    ) -> tuple[None, jax.Array]:
        return None, logits_of(model, hidden)

    return read_chunks(logits, model, None, tokens, None, None)


def read_chunks(
    read: Callable[..., tuple[Any, jax.Array]],
    model: Model,
    tables: Any,
    tokens: jax.Array,
    carry: Any,
    extra: Any,
    routing: jax.Array | None = None,
) -> jax.Array:
    """Reads texts chunk by chunk, and returns what a function makes of each chunk.

    Many texts are read in groups, to limit memory.

    Args:
      read: a function (model, tables, carry, hidden states [B, chunk, d], chunk of each
        array of `extra`) -> (next carry, result [B, chunk, ...]). It must not refer to
        other arrays.
      model: the model.
      tables: a pytree of arrays that all texts share.
      tokens: [B, T] int32, T a multiple of the chunk.
      carry: the first carry, a pytree of arrays [B, ...].
      extra: a pytree of arrays [B, T, ...].
      routing: [B, T, L, k] int32. The experts that the tokens have to use, see
        `models.stack.routing`; or None.

    Returns:
      The results [B, T, ...].
    """
    batch, rows = tokens.shape[0], TEXTS_AT_ONCE
    of_group = jax.custom_jvp(partial(_by_chunk, read))
    of_group.defjvp(partial(jax.jvp, partial(_by_layer, read)))
    if symbolic_size(batch) or batch <= rows:
        return of_group(model, tables, tokens, carry, extra, routing)

    def groups(z: jax.Array) -> jax.Array:
        # Rows of zeros would have settings without a gradient, such as a penalty of 0.
        padded = jnp.concatenate([z, z[: -batch % rows]])
        return padded.reshape(-1, rows, *z.shape[1:])

    by_row = jax.tree.map(groups, (tokens, carry, extra, routing))
    found = lax.map(lambda group: of_group(model, tables, *group), by_row)
    return found.reshape(-1, *found.shape[2:])[:batch]


def _by_chunk(
    read: Callable[..., tuple[Any, jax.Array]],
    model: Model,
    tables: Any,
    tokens: jax.Array,
    carry: Any,
    extra: Any,
    routing: jax.Array | None,
) -> jax.Array:
    """Runs all layers on a chunk, then `read`, before the next chunk; see
    `read_chunks`."""
    size, T = tokens.shape
    full = jnp.full((size,), PREFILL_CHUNK, jnp.int32)

    # In the backward pass, recompute each chunk instead of storing its intermediates.
    # Kernels have no derivatives: these come from the mixers' plain-JAX definitions. A
    # forward pass that stores intermediates would have to compile the definitions, too.
    @jax.checkpoint
    def one_chunk(both: Any, parts: Any) -> tuple[Any, jax.Array]:
        (state, carry), (part, extra, routing) = both, parts
        given = None if routing is None else experts_of(model.config, routing)
        hidden, state = extend(model, state, part, full, experts=given)
        carry, found = read(model, tables, carry, hidden, extra)
        return (state, carry), found

    empty = float_state(model.config, size, T, param_dtype(model.params))
    parts = jax.tree.map(chunks, (tokens, extra, routing))
    return whole(lax.scan(one_chunk, (empty, carry), parts)[1])


def _by_layer(
    read: Callable[..., tuple[Any, jax.Array]],
    model: Model,
    tables: Any,
    tokens: jax.Array,
    carry: Any,
    extra: Any,
    routing: jax.Array | None,
) -> jax.Array:
    """Returns what `_by_chunk` returns, but every layer runs on all chunks before the
    next layer. Its gradient takes less memory and compiles faster."""

    @jax.checkpoint
    def one_chunk(carry: Any, parts: Any) -> tuple[Any, jax.Array]:
        h, extra = parts
        return read(model, tables, carry, normed(model, h), extra)

    h = residual_stream(model, tokens, routing)
    return whole(lax.scan(one_chunk, carry, jax.tree.map(chunks, (h, extra)))[1])


@with_hints
def score(model: Model, tokens: Any) -> jax.Array:
    """Returns the logits after every token of each sequence.

    Args:
      model: the model.
      tokens: [B, T] ints below the vocabulary size; T >= 1.

    Returns:
      [B, T, V] float32. Row t predicts token t + 1.

    Raises:
      ValueError: the shape of the tokens is wrong, or ids are outside the vocabulary.

    Example:
      >>> model = stree_jax.load("demo")
      >>> stree_jax.score(model, [[60, 61, 62]]).shape
      (1, 3, 2048)
    """
    check_not_forked()
    check_model("model", model)
    tokens = jnp.asarray(checked_tokens("tokens", tokens, model.config, 2))
    T = tokens.shape[1]
    if tokens.size == 0:
        raise ValueError(f"tokens: want at least one token, got shape {tokens.shape}")
    padded = jnp.pad(tokens, ((0, 0), (0, -T % PREFILL_CHUNK)))
    return _score(model, padded)[:, :T]


@with_hints
def first_difference(
    model: Model, prompt: Sequence[int], tokens: Sequence[int], others: Sequence[int]
) -> tuple[int, float] | None:
    """Finds the first difference of two continuations, and the gap of the logits there.

    A gap within rounding (about 1e-5 in float32) means that the two tokens tie: which
    one is the argmax depends on the order of additions. A larger gap means a defect.

    Args:
      model: the model that wrote both.
      prompt: [S] token ids, S >= 1.
      tokens, others: token ids of the two continuations.

    Returns:
      None if the continuations are equal. Otherwise the position of the first
      difference, and the gap between the logits of the two tokens there. The gap is
      infinite if one continuation begins with the whole other one.

    Raises:
      ValueError: the prompt is empty, or ids are outside the vocabulary or have more
        axes.
    """
    check_model("model", model)
    read, ours, theirs = (
        np.asarray(checked_tokens(name, ids, model.config, 1)).tolist()
        for name, ids in (("prompt", prompt), ("tokens", tokens), ("others", others))
    )
    if not read:
        raise ValueError("prompt: want at least one token, got none")
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:  # one is a prefix of the other
        return min(len(ours), len(theirs)), float("inf")
    text = [*read, *ours[:place]]
    logits = np.asarray(score(model, [text]))[0, -1]
    return place, float(abs(logits[ours[place]] - logits[theirs[place]]))


@jax.jit
def _score_tree(
    model: Model,
    prefix: jax.Array,
    length: jax.Array,
    tokens: jax.Array,
    tree: Tree,
) -> jax.Array:
    return whole_on(model, _score_nodes, prefix, length, tokens, tree)


def _score_nodes(
    model: Model,
    prefix: jax.Array,
    length: jax.Array,
    tokens: jax.Array,
    tree: Tree,
) -> jax.Array:
    state = init_state(model.config, 1, prefix.shape[1], param_dtype(model.params))
    state, _ = prefill(model, state, prefix, length, PREFILL_CHUNK)
    nodes = tree.nodes(1, model.config.conv_taps)
    return forward_tree(model, state, tokens, nodes)[0][0]


@with_hints
def score_tree(
    model: Model, prefix: Any, tokens: Any, parents: Sequence[int]
) -> jax.Array:
    """Returns the logits after every node of a token tree that continues a prefix.

    Args:
      model: the model.
      prefix: [S] ints, the tokens before the tree; S may be 0.
      tokens: [T] ints, the tree's tokens.
      parents: [T] ints, the parent of each node. It is -1 for the root, and comes
        before its children.

    Returns:
      [T, V] float32. Row t equals the last row of `score` for the prefix followed by
      the path from the root to node t.

    Raises:
      ValueError: the tree is invalid, shapes disagree, or ids are outside the
        vocabulary.

    Example:
      >>> model = stree_jax.load("demo")
      >>> # Two tokens that may follow the root, 62:
      >>> stree_jax.score_tree(model, [60, 61], [62, 63, 64], [-1, 0, 0]).shape
      (3, 2048)
    """
    check_not_forked()
    check_model("model", model)
    prefix = jnp.asarray(checked_tokens("prefix", prefix, model.config, 1))
    tokens = jnp.asarray(checked_tokens("tokens", tokens, model.config, 1))
    tree = make_tree(parents)
    if tokens.shape[0] != tree.size:
        raise ValueError(
            f"parents: {tree.size} nodes, but {tokens.shape[0]} tokens were given"
        )
    S = prefix.shape[0]
    width = max(S + -S % PREFILL_CHUNK, PREFILL_CHUNK)
    padded = jnp.pad(prefix, (0, width - S))[None]
    length = jnp.full((1,), S, jnp.int32)
    return _score_tree(model, padded, length, tokens[None], tree)


_rank_of_jit = jax.jit(rank_of)


def drafter_ranks(
    drafter: Model, prompt: Sequence[int], text: Sequence[int]
) -> np.ndarray:
    """Returns the rank of each token of a text in the draft model's predictions.

    Args:
      drafter: the draft model.
      prompt: [S] token ids, S >= 1.
      text: [n] token ids that the target generated after the prompt.

    Returns:
      [n] int32. Entry i is the rank of text[i] (0 is the best) after the draft model
      has read prompt + text[:i].

    Raises:
      ValueError: the prompt is empty, or ids are outside the vocabulary.
    """
    read = np.asarray(checked_tokens("prompt", prompt, drafter.config, 1))
    tokens = np.asarray(checked_tokens("text", text, drafter.config, 1))
    if read.size == 0:
        raise ValueError("prompt: want at least one token, got none")
    size = read.size + tokens.size
    # Pad to whole chunks, so that texts of similar length share compiled programs.
    both = np.pad(
        np.concatenate([read, tokens]), (0, -size % PREFILL_CHUNK), mode="edge"
    )
    guesses = score(drafter, both[None])[0, :, : drafter.config.num_tokens]
    ranks = _rank_of_jit(guesses, jnp.asarray(np.roll(both, -1)))
    return np.asarray(ranks)[read.size - 1 : size - 1]
