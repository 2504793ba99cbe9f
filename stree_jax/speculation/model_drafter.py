"""Drafting a token tree with a model, level by level through the same tree scan.

The drafter is fed the tokens that became text since its last call (a chain), and then
guesses below them. It keeps nothing of its guesses: what was accepted comes back as
text at the next call, so a rejected branch cannot leave a trace in its state.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models import (
    Model,
    State,
    extend,
    forward_hidden,
    init_records,
    logits_of,
    param_dtype,
)
from stree_jax.sampling.distribution import DRAFT, NOISE, SamplingRows, gumbel, keys_at
from stree_jax.sampling.requests import with_path
from stree_jax.speculation.tree import Beam, Tree, below_root, tree_layout


@struct.dataclass
class Drafts:
    """A filled tree.

    Attributes:
      parents: [B, T] int32, -1 for the root.
      tokens: [B, T] int32.
      q: [B, T, V] float32, the probabilities that each inner node's children were
        drawn with, or None where the acceptance rule does not ask for them.
    """

    parents: jax.Array
    tokens: jax.Array
    q: jax.Array | None


Score = Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array]


def iid_draws(p: jax.Array, keys: jax.Array, count: int) -> jax.Array:
    """Independent draws [B, W, count] of p [B, W, V], by inverting its distribution."""

    def one(p: jax.Array, key: jax.Array) -> jax.Array:
        below = jnp.cumsum(p)
        u = jax.random.uniform(key, (count,)) * below[-1]
        u = jnp.minimum(u, jnp.nextafter(below[-1], 0.0))  # never past the last token
        return jnp.searchsorted(below, u, side="right")

    return jax.vmap(jax.vmap(one))(p, keys)


def draw_children(
    drafting: str,
    rows: SamplingRows | None,
    z: jax.Array,
    parents: jax.Array,
    start: jax.Array,
    depth: jax.Array,
    count: int,
) -> jax.Array:
    """Tokens [B, W, count] of the children of W nodes, in the order they are drawn.

    Args:
      drafting: "top_k", the most probable; "iid", independent draws;
        "without_replacement", draws by the largest Gumbel-perturbed log-probabilities;
        "coupled", the same with the noise that the target will choose by.
      z: [B, W, V] float32, log-probabilities (any logits if all rows are greedy).
      parents: [W] int32, the nodes' rows.
      start: [B] int32, output place of the token after the root.
      depth: of the children, at least 1.
    """
    if rows is None or drafting == "top_k":
        return lax.top_k(z, count)[1]
    if drafting == "coupled":
        keys = keys_at(rows, NOISE, start + depth - 1)
        return lax.top_k(z + gumbel(rows, keys, z.shape[-1])[:, None], count)[1]
    step = keys_at(rows, DRAFT, start)
    by_node = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = jax.vmap(by_node, in_axes=(0, None))(step, parents)  # [B, W]
    if drafting == "iid":
        drawn = iid_draws(jnp.exp(z), keys, count)
        return jnp.where(rows.greedy[:, None, None], lax.top_k(z, count)[1], drawn)
    return lax.top_k(z + gumbel(rows, keys, z.shape[-1]), count)[1]


def read_fresh(
    model: Model, state: State, fresh: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array, State]:
    """Feed new text to the drafter.

    Args:
      state: the drafter's, before the fresh tokens.
      fresh: [B, M + 1] int32, tokens new in the text; the last one is the tree's root.
      count: [B] int32, how many of them count; 0 for a finished row.

    Returns:
      the root [B, 1], its hidden state [B, 1, d], and the state after `fresh`.
    """
    last = jnp.maximum(count - 1, 0)[:, None]
    root = jnp.take_along_axis(fresh, last, axis=1)
    hidden, state = extend(model, state, fresh, count)
    return root, jnp.take_along_axis(hidden, last[..., None], axis=1), state


def propose(
    model: Model,
    state: State,
    fresh: jax.Array,
    count: jax.Array,
    tree: Tree,
    *,
    drafting: str,
    score: Score,
    rows: SamplingRows | None,
    start: jax.Array,
    seen: jax.Array | None,
    with_q: bool,
) -> tuple[Drafts, State]:
    """Fill a static tree with the drafter's guesses.

    Args:
      state, fresh, count: see `read_fresh`.
      tree: the tree.
      drafting, rows, start: see `draw_children`.
      score: makes log-probabilities [B, Q, V] of logits, their depth [Q] and the
        tokens seen [B, Q, V].
      seen: [B, V] bool, tokens in the text, the root included, or None.
      with_q: whether to keep the probabilities.

    Returns:
      the drafts, and the drafter's state after `fresh`.
    """
    batch, T = fresh.shape[0], tree.size
    layout = tree_layout(tree, tree.rows(1))  # all rows have this one
    all_parents, rank, paths = layout.parents[0], layout.rank[0], layout.paths[0]
    nodes = below_root(tree.rows(batch), model.config.conv_taps)

    def grow(
        drafts: Drafts, hidden: jax.Array, parents: jax.Array, depth: jax.Array
    ) -> Drafts:
        """Fill in the nodes at `depth`, children of `parents` [W]."""
        tokens, q = drafts.tokens, drafts.q
        before = None
        if seen is not None:
            above = paths[jnp.minimum(parents, T - 1)]
            before = with_path(seen, tokens[:, above])
        depths = jnp.broadcast_to(depth - 1, parents.shape)
        z = score(logits_of(model, hidden), depths, before)
        children = tree.children
        guess = draw_children(drafting, rows, z, parents, start, depth, children)
        guess = guess[:, layout.slot[all_parents], rank].astype(jnp.int32)
        if q is not None:
            q = q.at[:, parents].set(jnp.exp(z), mode="drop")
        tokens = jnp.where(layout.depth[None] == depth, guess, tokens)
        return replace(drafts, tokens=tokens, q=q)

    root, at_root, state = read_fresh(model, state, fresh, count)
    drafts = Drafts(
        parents=tree.rows(batch),
        tokens=jnp.broadcast_to(root, (batch, T)),
        q=jnp.zeros((batch, T, model.config.num_tokens)) if with_q else None,
    )
    drafts = grow(drafts, at_root, jnp.zeros((1,), jnp.int32), jnp.int32(1))

    def level(carry: tuple, inputs: tuple) -> tuple[tuple, None]:
        drafts, records = carry
        parents, depth = inputs
        hidden, records, _ = forward_hidden(
            model,
            state,
            drafts.tokens[:, parents],
            nodes,
            records=records,
            rows=parents,
        )
        return (grow(drafts, hidden, parents, depth + 1), records), None

    records = init_records(model.config, batch, T, param_dtype(model.params))
    depths = jnp.arange(1, tree.depth, dtype=jnp.int32)
    inner = (layout.levels[:-1], depths)
    (drafts, _), _ = lax.scan(level, (drafts, records), inner)
    return drafts, state


def propose_beam(
    model: Model,
    state: State,
    fresh: jax.Array,
    count: jax.Array,
    beam: Beam,
    *,
    score: Score,
    seen: jax.Array | None,
) -> tuple[Drafts, State]:
    """The tree of a beam search, every token of which is kept (STree, Table 1).

    Each layer holds the W continuations of the layer above that are most probable as
    whole paths, best first. Arguments and results are those of `propose`.
    """
    batch, T, W = fresh.shape[0], beam.size, beam.width
    root, at_root, state = read_fresh(model, state, fresh, count)
    tokens = jnp.broadcast_to(root, (batch, T))
    parents = jnp.full((batch, T), -1, jnp.int32)

    def grow(
        drafts: Drafts, hidden: jax.Array, above: jax.Array, total: jax.Array, depth
    ) -> tuple[Drafts, jax.Array]:
        """The layer at `depth` below nodes `above` [Q] of log-probability `total`."""
        before = None
        if seen is not None:
            paths = tree_layout(beam, drafts.parents).paths[:, above]
            path = jax.vmap(lambda tokens, rows: tokens[rows])(drafts.tokens, paths)
            before = with_path(seen, path)
        depths = jnp.broadcast_to(depth - 1, above.shape)
        z = score(logits_of(model, hidden), depths, before)
        best, guess = lax.top_k(jax.nn.log_softmax(z), W)  # [B, Q, W]
        total, chosen = lax.top_k((total[..., None] + best).reshape(batch, -1), W)
        rows = 1 + (depth - 1) * W + jnp.arange(W, dtype=jnp.int32)
        token = jnp.take_along_axis(guess.reshape(batch, -1), chosen, axis=1)
        return replace(
            drafts,
            parents=drafts.parents.at[:, rows].set(above[chosen // W]),
            tokens=drafts.tokens.at[:, rows].set(token.astype(jnp.int32)),
        ), total

    def level(carry: tuple, depth: jax.Array) -> tuple[tuple, None]:
        drafts, records, total = carry
        above = 1 + (depth - 2) * W + jnp.arange(W, dtype=jnp.int32)
        hidden, records, _ = forward_hidden(
            model,
            state,
            drafts.tokens[:, above],
            below_root(drafts.parents, model.config.conv_taps),
            records=records,
            rows=above,
        )
        drafts, total = grow(drafts, hidden, above, total, depth)
        return (drafts, records, total), None

    zero = jnp.zeros((batch, 1), jnp.float32)
    drafts = Drafts(parents, tokens, None)
    top = jnp.zeros((1,), jnp.int32)
    drafts, total = grow(drafts, at_root, top, zero, jnp.int32(1))
    records = init_records(model.config, batch, T, param_dtype(model.params))
    depths = jnp.arange(2, beam.depth + 1, dtype=jnp.int32)
    (drafts, _, _), _ = lax.scan(level, (drafts, records, total), depths)
    return drafts, state
