"""Acceptance rules: which path of a verified tree becomes text.

Every rule returns the accepted nodes (the root first: it is text already, but the
target had not read it) and the tokens that they gain: the accepted drafts and one more,
chosen by the target after the last of them.

p is the target's distribution after a node, q the drafter's, both processed.

- naive (SpecInfer's baseline, SpecExec): draw from p, go on while a child has that
  token. What it draws does not depend on the drafts, so that with equal seeds its text
  is that of plain decoding. Greedy decoding is its case of temperature 0.
- leviathan (Leviathan et al. 2023): the drafts are one draw from q a place. Accept x
  with probability min(1, p(x) / q(x)), else draw from norm(max(0, p - q)).
- mss, multi-step speculative sampling (SpecInfer): several independent draws from q a
  node; try them in turn, p <- norm(max(0, p - q)) after each rejection.
- recursive (recursive rejection sampling; Sequoia): draws without replacement; after
  each rejection p <- norm(max(0, p - q)) and q <- norm(q without the draft).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models import Nodes
from stree_jax.sampling.distribution import ACCEPT, NOISE, SamplingRows, gumbel, keys_at
from stree_jax.speculation.tree import Beam, Layout, Topology

# Drafting rules that leave a rule's output the target's, its own choice first.
UNBIASED = {
    "naive": ("top_k", "iid", "without_replacement", "coupled"),
    "leviathan": ("iid", "without_replacement"),
    "mss": ("iid",),
    "recursive": ("without_replacement",),
}
WHY_BIASED = {
    "top_k": "accepting with p/q wants drafts drawn from q, and the most probable "
    "tokens are no draws",
    "coupled": "accepting with p/q wants drafts independent of the target's noise",
    "without_replacement": "a second sibling is then no draw from q, but from q "
    "without the first; take 'recursive'",
    "iid": "it takes a rejected draft out of q, but independent draws can repeat; "
    "take 'mss'",
}


@dataclass(frozen=True)
class Rule:
    """How drafts are accepted and how they are drawn; see `resolve_rule`."""

    acceptance: str
    drafting: str


NAIVE = Rule("naive", "top_k")  # all there is to greedy decoding


def resolve_rule(rule: "Rule | str", tree: Topology) -> Rule:
    """A rule from "mss", or from "naive/coupled": acceptance and drafting.

    Raises:
      ValueError: unknown names, or a pair whose output would not be the target's.
    """
    if isinstance(rule, Rule):
        acceptance, drafting = rule.acceptance, rule.drafting
    else:
        acceptance, _, drafting = rule.partition("/")
    if acceptance not in UNBIASED:
        raise ValueError(
            f"rule: unknown acceptance {acceptance!r}; known: {', '.join(UNBIASED)}"
        )
    drafting = drafting or UNBIASED[acceptance][0]
    if drafting not in UNBIASED["naive"]:
        known = ", ".join(UNBIASED["naive"])
        raise ValueError(f"rule: unknown drafting {drafting!r}; known: {known}")
    if drafting not in UNBIASED[acceptance]:
        raise ValueError(
            f"rule: {acceptance}/{drafting} would bias the output: "
            + WHY_BIASED[drafting]
        )
    if isinstance(tree, Beam) and (acceptance, drafting) != ("naive", "top_k"):
        raise ValueError(
            f"rule: {acceptance}/{drafting} does not fit a beam, which holds the most "
            "probable paths; take 'naive'"
        )
    if acceptance == "leviathan" and tree.children > 1:
        raise ValueError(
            f"rule: leviathan is for chains, and this tree has up to {tree.children} "
            "children a node; take 'mss' or 'recursive'"
        )
    return Rule(acceptance, drafting)


@struct.dataclass
class Accepted:
    """What one pass gained.

    Attributes:
      path: [B, M + 1] int32, rows of the accepted nodes, root first, padded with 0.
      length: [B] int32, how many they are, at least 1.
      tokens: [B, M + 1] int32, the token after each of them, `length` of which count.
      margin: [B, M + 1] float32, by how much each token was chosen before the next
        best; infinity where it was not chosen by an argmax.
    """

    path: jax.Array
    length: jax.Array
    tokens: jax.Array
    margin: jax.Array


def top2_margin(logits: jax.Array, best: jax.Array) -> jax.Array:
    """Gap [...] between the largest logit of [..., V], at `best`, and the second."""
    place = lax.broadcasted_iota(best.dtype, logits.shape, logits.ndim - 1)
    others = jnp.where(place == best[..., None], -jnp.inf, logits)
    return logits.max(axis=-1) - others.max(axis=-1)


def greedy(
    layout: Layout, nodes: Nodes, tokens: jax.Array, logits: jax.Array
) -> Accepted:
    """The longest path along which every token is the target's most probable one.

    Args:
      layout, nodes: the tree of T nodes with longest path M.
      tokens: [B, T] int32, the tree's tokens.
      logits: [B, T, V] float32, the target's.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    root = layout.depth[None] == 0
    agrees = root | (tokens == jnp.take_along_axis(best, layout.parents, axis=1))
    accepted = (~nodes.mask | agrees[:, None, :]).all(axis=-1)
    depth = jnp.where(accepted, layout.depth[None], -1)
    chosen = jnp.argmax(depth, axis=1)
    path = layout.paths[jnp.arange(chosen.shape[0]), chosen]
    on_path = jnp.take_along_axis(logits, path[..., None], axis=1)
    following = jnp.take_along_axis(best, path, axis=1)
    margin = top2_margin(on_path, following)
    return Accepted(path, layout.depth[chosen] + 1, following, margin)


def accepts(u: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """Whether drafts of probabilities p and q pass, u uniform in [0, 1).

    u q < p is u < p / q without the division; never at p = 0, always at p >= q.
    """
    return u * q < p


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """norm(max(0, p - q)) over the last axis: what is left of p after a rejection."""
    rest = jnp.maximum(p - q, 0.0)
    total = rest.sum(axis=-1, keepdims=True)
    return jnp.where(total > 0, rest / total, p)  # p == q rejects only by rounding


def without(q: jax.Array, token: jax.Array) -> jax.Array:
    """q [B, V] without a token [B], normalised; all 0 once nothing is left."""
    vocabulary = jnp.arange(q.shape[-1], dtype=token.dtype)[None]
    rest = jnp.where(vocabulary == token[:, None], 0.0, q)
    total = rest.sum(axis=-1, keepdims=True)
    return jnp.where(total > 0, rest / total, 0.0)


def siblings(
    rule: Rule,
    p: jax.Array,
    q: jax.Array,
    drafts: jax.Array,
    real: jax.Array,
    u: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Try the children of one node in turn.

    Args:
      p, q: [B, V] float32.
      drafts: [B, C] int32, their tokens in the order they were drawn.
      real: [B, C] bool, which of them exist.
      u: [B, C] float32, uniform in [0, 1).

    Returns:
      the accepted child's rank [B], or -1, and what is left of p [B, V].
    """

    def attempt(r: jax.Array, carry: tuple) -> tuple:
        taken, p, q = carry
        x = lax.dynamic_index_in_dim(drafts, r, axis=1)  # [B, 1]
        p_x, q_x = (jnp.take_along_axis(z, x, axis=1)[:, 0] for z in (p, q))
        # Once q is used up there are no draws left, whatever stands in the tree.
        tried = (taken < 0) & real[:, r] & (q_x > 0)
        passed = tried & accepts(u[:, r], p_x, q_x)
        failed = (tried & ~passed)[:, None]
        p = jnp.where(failed, residual(p, q), p)
        if rule.acceptance == "recursive":
            q = jnp.where(failed, without(q, x[:, 0]), q)
        return jnp.where(passed, r, taken), p, q

    none = jnp.full(drafts.shape[:1], -1, jnp.int32)
    taken, p, _ = lax.fori_loop(0, drafts.shape[1], attempt, (none, p, q))
    return taken, p


def walk(
    rule: Rule,
    layout: Layout,
    tokens: jax.Array,
    logits: jax.Array,
    q: jax.Array | None,
    score: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array],
    rows: SamplingRows,
    start: jax.Array,
    seen: jax.Array | None,
) -> Accepted:
    """Go down from the root, one node a depth, as the rule says; greedy rows naively.

    Args:
      tokens: [B, T] int32, the tree's tokens.
      logits: [B, T, V] float32, the target's.
      q: [B, T, V] float32, the drafter's probabilities; None if the rule is naive.
      score: makes log-probabilities [B, Q, V] of logits, their depth [Q] and `seen`.
      rows: how rows are sampled.
      start: [B] int32, output place of the token after the root.
      seen: [B, V] bool, tokens in the text, the root included, or None.
    """
    batch, T = tokens.shape
    b = jnp.arange(batch, dtype=jnp.int32)
    by_choice = jnp.full((batch,), rule.acceptance == "naive") | rows.greedy

    def down(carry: tuple, depth: jax.Array) -> tuple[tuple, tuple]:
        node, alive, seen = carry
        before = None if seen is None else seen[:, None]
        z = score(logits[b, node][:, None], depth[None], before)[:, 0]
        kids = layout.kids[b, node]
        real = kids < T
        drafts = jnp.take_along_axis(tokens, jnp.minimum(kids, T - 1), axis=1)
        taken = jnp.full((batch,), -1, jnp.int32)
        if q is not None:
            keys = keys_at(rows, ACCEPT, start + depth)
            u = jax.vmap(lambda k: jax.random.uniform(k, kids.shape[1:]))(keys)
            tried = real & ~rows.greedy[:, None]
            taken, p = siblings(rule, jnp.exp(z), q[b, node], drafts, tried, u)
            z = jnp.where(rows.greedy[:, None], z, jnp.log(p))

        keys = keys_at(rows, NOISE, start + depth)
        z = z + gumbel(rows, keys, z.shape[-1])
        token = jnp.argmax(z, axis=-1).astype(jnp.int32)
        margin = jnp.where(by_choice, top2_margin(z, token), jnp.inf)
        hit = real & (drafts == token[:, None])
        match = jnp.where(hit.any(axis=1), jnp.argmax(hit, axis=1), -1)
        taken = jnp.where(by_choice, match.astype(jnp.int32), taken)

        child = jnp.maximum(taken, 0)[:, None]
        token = jnp.where(
            taken >= 0, jnp.take_along_axis(drafts, child, axis=1)[:, 0], token
        )
        out = (jnp.where(alive, node, 0), token, alive, margin)
        node = jnp.take_along_axis(kids, child, axis=1)[:, 0]
        if seen is not None:
            seen = seen.at[b, token].set(True)
        alive = alive & (taken >= 0)
        return (jnp.where(alive, node, 0), alive, seen), out

    carry = (jnp.zeros_like(start), jnp.ones((batch,), bool), seen)
    depths = jnp.arange(layout.paths.shape[2], dtype=jnp.int32)
    _, (path, following, alive, margin) = lax.scan(down, carry, depths)
    length = alive.sum(axis=0, dtype=jnp.int32)
    return Accepted(path.T, length, following.T, margin.T)
