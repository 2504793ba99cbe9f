"""Acceptance rules: which path of a verified tree becomes text.

Every rule returns the accepted nodes and the tokens that follow them. The first
accepted node is the root: it is part of the text already, but the target reads it in
this step. The tokens are the accepted draft tokens and one more (the bonus token),
which the target chooses after the last accepted node.

Below, p is the target's distribution after a node and q the drafter's, both after
temperature and filters.

- naive (SpecInfer's baseline, SpecExec): draw a token from p and continue while a child
  has that token. The draws do not depend on the draft, so with equal seeds the output
  is identical to plain decoding. Greedy decoding is the special case of temperature 0.
- leviathan (Leviathan et al. 2023): the draft has one draw from q at each position.
  Accept x with probability min(1, p(x) / q(x)), else draw from norm(max(0, p - q)).
- mss, multi-step speculative sampling (SpecInfer): several independent draws from q at
  each node. Try them in turn, with p <- norm(max(0, p - q)) after each rejection.
- recursive (recursive rejection sampling; Sequoia): draws without replacement. After
  each rejection p <- norm(max(0, p - q)) and q <- norm(q without the rejected token).

One rule changes the output distribution and must be requested by name:

- typical (Medusa, section 2.3.1): accept every draft token that is not too unlikely,
  p(x) > min(epsilon, delta exp(-H(p))). Of the longest such paths take the likeliest,
  followed by the most probable token.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.common.checks import as_real, class_with_hints, shown, with_hints
from stree_jax.cpu_kernels import cpu_kernel, floats, ints
from stree_jax.models.base.argmax import argmax
from stree_jax.sampling.distribution import (
    ACCEPT,
    Distribution,
    top2_margin,
)
from stree_jax.sampling.threefry import uniform
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.layout import Layout
from stree_jax.speculation.tree import Auto, Beam, Budget, Topology, resolve_tree

Drafting = Literal["top_k", "iid", "without_replacement", "coupled"]
Promise = Literal["tokens", "distribution", "nothing"]


@dataclass(frozen=True)
class Acceptance:
    """Properties of an acceptance method.

    Attributes:
      unbiased: drafting methods under which the method keeps its `promise`, the default
        first.
      promise: the property that sampled output shares with plain decoding: the same
        "tokens" (with equal seeds), the same "distribution", or "nothing".
      needs_q: True if it needs q, the probabilities with which draft tokens were drawn.
      uses_up: True if a rejected token is removed from q before the next sibling is
        tested, because siblings were drawn without replacement.
      chains_only: True if it supports only one draft token per position.
    """

    unbiased: tuple[Drafting, ...]
    promise: Promise = "distribution"
    needs_q: bool = True
    uses_up: bool = False
    chains_only: bool = False


ACCEPTANCES = {
    "naive": Acceptance(
        ("top_k", "iid", "without_replacement", "coupled"), "tokens", needs_q=False
    ),
    "leviathan": Acceptance(("iid", "without_replacement"), chains_only=True),
    "mss": Acceptance(("iid",)),
    "recursive": Acceptance(("without_replacement",), uses_up=True),
    "typical": Acceptance(("top_k",), "nothing", needs_q=False),
}
DRAFTINGS = ACCEPTANCES["naive"].unbiased  # "naive" supports all drafting methods
BEAM_RULE = "naive", "top_k"
WHY_BIASED = {
    "top_k": "accepting with p/q needs draft tokens drawn from q, and the most "
    "probable tokens are not random draws",
    "coupled": "accepting with p/q needs draft tokens that are independent of the "
    "target's noise",
    "without_replacement": "a second sibling is drawn not from q, but from q without "
    "the first token; use 'recursive'",
    "iid": "it removes a rejected token from q, but independent draws can repeat; "
    "use 'mss'",
}


@dataclass(frozen=True)
class Typical:
    """Thresholds of typical acceptance: accept if p > min(epsilon, delta
    exp(-entropy)). The defaults are those of the Medusa paper.

    Example:
      >>> thresholds = stree_jax.trees.Typical(epsilon=0.2)
      >>> stree_jax.trees.Rule("typical", "top_k", thresholds).typical.delta
      0.3
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            number = as_real(getattr(self, name))
            if number is None or not 0 <= number <= 1:
                got = shown(getattr(self, name))
                raise ValueError(f"{name}: want 0..1, got {got}")
            object.__setattr__(self, name, number)


@class_with_hints
@dataclass(frozen=True)
class Rule:
    """An acceptance rule: how draft tokens are accepted and how they are drawn.

    Attributes:
      acceptance: a key of `ACCEPTANCES`.
      drafting: how the drafter chooses tokens: the most probable ones ("top_k"),
        independent draws ("iid"), draws "without_replacement", or the top tokens under
        the target's sampling noise ("coupled").
      typical: thresholds of the acceptance "typical"; unused by others.

    Example:
      >>> rule = stree_jax.trees.Rule("mss", "iid")  # the same as rule="mss"
      >>> rule.acceptance
      'mss'
    """

    acceptance: str
    drafting: Drafting
    typical: Typical = Typical()

    def __post_init__(self) -> None:
        acceptance, drafting = self.acceptance, self.drafting
        if not isinstance(acceptance, str) or acceptance not in ACCEPTANCES:
            raise ValueError(
                f"rule: unknown acceptance {shown(acceptance)}; "
                f"{_known(acceptance, ACCEPTANCES)}"
            )
        if not isinstance(drafting, str) or drafting not in DRAFTINGS:
            raise ValueError(
                f"rule: unknown drafting {shown(drafting)}; "
                f"{_known(drafting, DRAFTINGS)}"
            )
        if not isinstance(self.typical, Typical):
            raise ValueError(f"typical: want Typical(...), got {shown(self.typical)}")

    @property
    def promise(self) -> Promise:
        """The property that sampled output shares with plain decoding, see
        `Acceptance`. Greedy output is always identical."""
        return ACCEPTANCES[self.acceptance].promise

    @property
    def needs_q(self) -> bool:
        """True if sampled drafts must come with their probabilities (`Draft.q`)."""
        return ACCEPTANCES[self.acceptance].needs_q

    @property
    def uses_up(self) -> bool:
        """True if a rejected token is removed from q."""
        return ACCEPTANCES[self.acceptance].uses_up

    def accept(self, draft: Draft, logits: jax.Array, dist: Distribution) -> "Accepted":
        """Chooses the path of a verified tree that becomes text.

        Args:
          draft: the tree of T nodes.
          logits: [B, T, >= V] float32. The target's logits after each node.
          dist: the distribution of the tokens below the root.
        """
        if dist.sampling is None:
            return accept_greedy(draft, logits, dist)
        if self.acceptance == "typical":
            return accept_typical(self.typical, draft, logits, dist)
        return accept_path(self, draft, logits, dist)


NAIVE = Rule("naive", "top_k")  # greedy decoding needs no other rule


@with_hints
def resolve_rule(rule: "Rule | str", tree: Topology) -> Rule:
    """Returns the rule for a name and checks that it fits the tree.

    Args:
      rule: a `Rule`, the name of an acceptance method ("mss") with its default drafting
        method, or both names ("naive/coupled").
      tree: the tree that is drafted.

    Raises:
      ValueError: a name is unknown, the pair would bias the output, or the rule does
        not fit the tree.
    """
    typical = rule.typical if isinstance(rule, Rule) else Typical()
    if isinstance(rule, Rule):
        rule = f"{rule.acceptance}/{rule.drafting}"
    if not isinstance(rule, str):
        raise ValueError(
            f"rule: want a name such as 'mss' or a Rule, got {shown(rule)}"
        )
    tree = resolve_tree(tree)
    acceptance, slash, named = rule.partition("/")
    unbiased = DRAFTINGS
    if acceptance in ACCEPTANCES:
        unbiased = ACCEPTANCES[acceptance].unbiased
    found: Any = named if slash else unbiased[0]
    drafting = Rule(acceptance, found).drafting  # checks the names
    if drafting not in unbiased:
        if acceptance == "typical":
            raise ValueError(f"rule: typical takes drafts by top_k, not {drafting}")
        raise ValueError(
            f"rule: {acceptance}/{drafting} would bias the output: "
            + WHY_BIASED[drafting]
        )
    exact = acceptance != "typical"
    if isinstance(tree, Beam) and exact and (acceptance, drafting) != BEAM_RULE:
        raise ValueError(
            f"rule: {acceptance}/{drafting} does not fit a beam, which drafts the most "
            "probable paths; use 'naive'"
        )
    if isinstance(tree, Auto | Budget) and exact:
        _check_choosing(acceptance, drafting)
    if ACCEPTANCES[acceptance].chains_only and tree.children > 1:
        raise ValueError(
            f"rule: {acceptance} supports chains only, and this tree has up to "
            f"{tree.children} children per node; use 'mss' or 'recursive'"
        )
    return Rule(acceptance, drafting, typical)


def _known(name: Any, names: Iterable[str]) -> str:
    """Returns a hint for an unknown name: the known names and the closest one."""
    known = f"known: {', '.join(names)}"
    close = difflib.get_close_matches(str(name).strip().casefold(), names, 1)
    return f"{known}; did you mean {close[0]!r}?" if close else known


def _check_choosing(acceptance: str, drafting: Drafting) -> None:
    """Raises ValueError for rules that do not allow choosing nodes by value (expected
    gain)."""
    name = f"rule: {acceptance}/{drafting}"
    if ACCEPTANCES[acceptance].promise != "tokens":
        raise ValueError(
            f"{name} would bias the output, as 'auto', 'lookup' and n-grams choose "
            "draft tokens by value instead of drawing them; use 'naive/coupled', or a "
            "draft model with a fixed tree such as 'A'"
        )
    if drafting not in ("top_k", "coupled"):
        raise ValueError(
            f"{name} does not fit 'auto', 'lookup' and n-grams, which draft the "
            "likeliest tokens; use 'naive/coupled' or 'naive'"
        )


@struct.dataclass
class Accepted:
    """The accepted path of one verification pass.

    Attributes:
      path: [B, M + 1] int32. Accepted nodes, the root first, padded with 0.
      length: [B] int32. Number of accepted nodes, at least 1.
      tokens: [B, M + 1] int32. The token after each accepted node; the first `length`
        are valid.
      margin: [B, M + 1] float32. How much scores would have to change for another token
        to be chosen. Infinity if the token was not chosen by an argmax, NaN if logits
        were NaN.
    """

    path: jax.Array
    length: jax.Array
    tokens: jax.Array
    margin: jax.Array


def accept_greedy(draft: Draft, logits: jax.Array, dist: Distribution) -> Accepted:
    """Accepts the longest path on which every token is the target's most probable one.
    Arguments and result are those of `Rule.accept`."""
    layout, V = draft.layout, dist.num_tokens
    scores, requests = logits, dist.requests
    if requests.min_new_tokens is not None or requests.constraints is not None:
        above = along(draft.tokens, layout.paths)
        scores = dist.scores(logits, layout.depth, above)
    return likeliest_path(scores, draft.tokens, layout, num_tokens=V)


def along(table: jax.Array, index: jax.Array) -> jax.Array:
    """Returns table[b, index[b]] for each row b."""
    return jax.vmap(lambda table, index: table[index])(table, index)


def _accepted_shapes(
    scores: jax.Array, tokens: jax.Array, layout: Layout, *, num_tokens: int
) -> Accepted:
    B, _, most = layout.paths.shape
    return Accepted(ints(B, most), ints(B), ints(B, most), floats(B, most))


@cpu_kernel(
    "stree_accept_greedy",
    outputs=_accepted_shapes,
    attributes=lambda num_tokens: {"vocabulary": num_tokens},
    prepare=lambda scores, tokens, layout, *, num_tokens: (
        *(scores, tokens),
        *(layout.parents, layout.depth, layout.paths),
    ),
)
def likeliest_path(
    scores: jax.Array, tokens: jax.Array, layout: Layout, *, num_tokens: int
) -> Accepted:
    """Accepts the longest path of tokens with the highest scores.

    Args:
      scores: [B, T, >= V] float32. Scores of the next token after each node.
      tokens: [B, T] int32. Tokens of the tree.
      num_tokens: V.
    """
    parents, depth, paths = layout.parents, layout.depth, layout.paths
    scores = scores[..., :num_tokens]
    best = argmax(scores)
    above = jnp.take_along_axis(best, jnp.maximum(parents, 0), axis=1)
    agrees = (parents == -1) | ((parents >= 0) & (tokens == above))
    accepted = jax.vmap(lambda agrees, paths: agrees[paths])(agrees, paths)
    reached = jnp.where(accepted.all(axis=-1), depth, -1)
    last = jnp.argmax(reached, axis=1).astype(jnp.int32)[:, None]
    path = jnp.take_along_axis(paths, last[..., None], axis=1)[:, 0]
    length = jnp.take_along_axis(depth, last, axis=1)[:, 0] + 1
    on_path = jnp.take_along_axis(scores, path[..., None], axis=1)
    following = jnp.take_along_axis(best, path, axis=1)
    return Accepted(path, length, following, top2_margin(on_path, following))


def accept_typical(
    typical: Typical, draft: Draft, logits: jax.Array, dist: Distribution
) -> Accepted:
    """Accepts the longest path of draft tokens that are not too unlikely; of several
    such paths, the likeliest.

    Greedy rows accept only the most probable tokens. Arguments and result are those of
    `Rule.accept`.
    """
    assert dist.sampling is not None  # checked by `Rule.accept`
    layout = draft.layout
    above = jnp.maximum(layout.parents, 0)

    above_each = along(draft.tokens, layout.paths)
    z, edges = dist.scores_and_edges(logits, layout.depth, above_each)
    p = jnp.exp(z)
    entropy = -jnp.where(p > 0, p * z, 0.0).sum(axis=-1)
    least = jnp.minimum(typical.epsilon, typical.delta * jnp.exp(-entropy))
    best = argmax(z)
    own = jax.vmap(lambda z, above, token: z[above, token])(z, above, draft.tokens)
    greedy = dist.sampling.greedy[:, None]
    likely = jnp.exp(own) > along(least, above)
    likely = jnp.where(greedy, draft.tokens == along(best, above), likely)
    root = layout.parents == -1
    likely &= layout.parents >= 0
    depth = jnp.where(along(likely | root, layout.paths).all(axis=-1), layout.depth, -1)
    # Paths are padded with the root, whose log-probability counts as 0.
    likelihood = along(jnp.where(root, 0.0, own), layout.paths).sum(axis=-1)
    longest = depth == depth.max(axis=1, keepdims=True)
    last = jnp.argmax(jnp.where(longest, likelihood, -jnp.inf), axis=1)[:, None]

    path = along(layout.paths, last)[:, 0]
    length = along(layout.depth, last)[:, 0] + 1
    place = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    drafted = jnp.pad(along(draft.tokens, path)[:, 1:], ((0, 0), (0, 1)))
    tokens = jnp.where(place < length[:, None] - 1, drafted, along(best, path))
    # Filters do not apply to greedy rows, so they must not hide the second best token.
    margin = top2_margin(along(edges.unfiltered, path), along(best, path))
    # Sampled rows were not decided by argmaxes alone. Keep NaN, so that it is noticed.
    margin = jnp.where(greedy | jnp.isnan(margin), margin, jnp.inf)
    return Accepted(path, length, tokens, margin)


def accepts(u: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """True where draft tokens are accepted with probability min(1, p / q).

    `u * q < p` means u < p / q, without the division. It never holds at p = 0 and
    always at p >= q > 0.

    Args:
      u: uniform in [0, 1).
      p, q: probabilities of the tokens under the target and the drafter.
    """
    return u * q < p


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """Returns norm(max(0, p - q)) over the last axis: p after a rejection."""
    rest = jnp.maximum(p - q, 0.0)
    total = rest.sum(axis=-1, keepdims=True)
    return jnp.where(total > 0, rest / total, p)  # p == q rejects only by rounding


def remove_token(q: jax.Array, token: jax.Array) -> jax.Array:
    """Returns q [B, V] without a token [B], normalised; all 0 if no mass remains."""
    vocabulary = jnp.arange(q.shape[-1], dtype=token.dtype)[None]
    rest = jnp.where(vocabulary == token[:, None], 0.0, q)
    total = rest.sum(axis=-1, keepdims=True)
    return jnp.where(total > 0, rest / total, 0.0)


def try_siblings(
    rule: Rule,
    p: jax.Array,
    q: jax.Array,
    drafts: jax.Array,
    exists: jax.Array,
    u: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Tries the children of one node in turn.

    Args:
      p, q: [B, V] float32. Distributions of the target and the drafter.
      drafts: [B, C] int32. Tokens of the children, in the order in which they were
        drawn.
      exists: [B, C] bool. False for padding.
      u: [B, C] float32, uniform in [0, 1).

    Returns:
      The accepted child's rank [B], or -1, and p after the rejections [B, V].
    """

    def attempt(r: jax.Array, carry: tuple) -> tuple:
        taken, p, q = carry
        x = lax.dynamic_index_in_dim(drafts, r, axis=1)  # [B, 1]
        p_x, q_x = (jnp.take_along_axis(z, x, axis=1)[:, 0] for z in (p, q))
        # Once the mass of q is used up, the remaining children are not draws from q.
        tried = (taken < 0) & exists[:, r] & (q_x > 0)
        passed = tried & accepts(u[:, r], p_x, q_x)
        failed = (tried & ~passed)[:, None]
        p = jnp.where(failed, residual(p, q), p)
        if rule.uses_up:
            q = jnp.where(failed, remove_token(q, x[:, 0]), q)
        return jnp.where(passed, r, taken), p, q

    none = jnp.full(drafts.shape[:1], -1, jnp.int32)
    taken, p, _ = lax.fori_loop(0, drafts.shape[1], attempt, (none, p, q))
    return taken, p


def by_probability(
    rule: Rule,
    dist: Distribution,
    logits: jax.Array,
    q: jax.Array,
    drafts: jax.Array,
    exists: jax.Array,
    depth: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Accepts or rejects a node's children by their probabilities.

    Args:
      logits: [B, >= V] float32. The target's logits after the node.
      q: [B, V] float32. The distribution from which the children were drawn.
      drafts, exists: as in `try_siblings`.
      depth: [] int32. Depth of the node.

    Returns:
      The rank of the accepted child [B], or -1, and a token [B] drawn from p after the
      rejections.
    """
    z = dist.scores(logits[:, None], depth[None, None])[:, 0]
    keys = dist.keys(ACCEPT, depth)
    (count,) = drafts.shape[1:]
    u = jax.vmap(lambda key: uniform(key, count))(keys)
    taken, p = try_siblings(rule, jnp.exp(z), q, drafts, exists, u)
    return taken, argmax(jnp.log(p) + dist.noise(depth))


def accept_path(
    rule: Rule, draft: Draft, logits: jax.Array, dist: Distribution
) -> Accepted:
    """Descends from the root, one accepted node per depth; greedy rows use "naive".
    Arguments and result are those of `Rule.accept`."""
    assert dist.sampling is not None  # checked by `Rule.accept`
    layout, q, (batch, T) = draft.layout, draft.q, draft.tokens.shape
    if rule.needs_q and q is None and T > 1:
        raise ValueError(
            f"rule: {rule.acceptance} tests drafts by the probabilities of their "
            "draws, and this drafter does not return them (Draft.q); use 'naive', or "
            "return them"
        )
    b = jnp.arange(batch, dtype=jnp.int32)
    greedy = dist.sampling.greedy

    def is_walking(carry: tuple) -> jax.Array:
        depth, _, walking, _, _ = carry
        return (depth < layout.paths.shape[2]) & walking.any()

    def down(carry: tuple) -> tuple:
        depth, node, walking, dist, out = carry
        here = logits[b, node]
        children = layout.children[b, node]
        exists = children < T
        clipped = jnp.minimum(children, T - 1)
        drafts = jnp.take_along_axis(draft.tokens, clipped, axis=1)
        token, margin = dist.draw(here, depth)
        hit = exists & (drafts == token[:, None])
        match = jnp.where(hit.any(axis=1), jnp.argmax(hit, axis=1), -1)
        taken = match.astype(jnp.int32)
        if q is not None:
            tried = drafts, exists & ~greedy[:, None]
            passed, left = by_probability(rule, dist, here, q[b, node], *tried, depth)
            taken = jnp.where(greedy, taken, passed)
            token = jnp.where(greedy, token, left)
            margin = jnp.where(greedy | jnp.isnan(margin), margin, jnp.inf)

        child = jnp.maximum(taken, 0)[:, None]
        drafted = jnp.take_along_axis(drafts, child, axis=1)[:, 0]
        token = jnp.where(taken >= 0, drafted, token)
        found = Accepted(node, walking.astype(jnp.int32), token, margin)
        write = partial(lax.dynamic_update_index_in_dim, index=depth, axis=1)
        out = jax.tree.map(write, out, found)
        walking = walking & (taken >= 0)
        node = jnp.take_along_axis(children, child, axis=1)[:, 0]
        node = jnp.where(walking, node, 0)
        return depth + 1, node, walking, dist.after(token), out

    none = jnp.zeros((batch, layout.paths.shape[2]), jnp.int32)
    out = Accepted(none, none, none, jnp.full(none.shape, jnp.inf, jnp.float32))
    start = (none[:, 0], jnp.ones((batch,), bool), dist, out)
    *_, out = lax.while_loop(is_walking, down, (jnp.int32(0), *start))
    return replace(out, length=out.length.sum(axis=1, dtype=jnp.int32))
