"""Test staged drafters: guesses change the number of passes, not the drafts."""

from dataclasses import replace
from operator import itemgetter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax import lax

import stree_jax
from stree_jax import Sampling
from stree_jax.drafters import Staged
from stree_jax.sampling.distribution import Distribution
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import sampling_rows
from stree_jax.speculation.accept import NAIVE, resolve_rule
from stree_jax.speculation.draft import DRAFTER, NGRAM, TARGET
from stree_jax.speculation.drafter import Prompts, Update
from stree_jax.speculation.drafters.model import (
    ModelDrafter,
    fill_tree,
)
from stree_jax.speculation.drafters.stage import first_unknown, make_task
from stree_jax.speculation.tree import make_tree, resolve_tree
from tests.speculation.steps import prompts_of
from tests.support.reference import depth_of
from tests.support.tiny import REAL, tiny

UNEVEN = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7]  # inner nodes by level: 1, 2, 2, 1
DEEP = [-1, 0, 0, 1, 1, 2, 3, 4, 5, 6, 6, 8, 9, 11]
KINDS = {
    "ssm": ("mamba", "mamba"),
    "hybrid": ("mamba", "attention"),
    "attention": ("attention", "mlp"),
}


@struct.dataclass
class Oracle:
    """A guesser that returns given tokens [steps, B, T], one tree after the other."""

    tokens: jax.Array
    beside: jax.Array | None = None  # [steps, B, T], alternative guesses

    def init(self, prompts, past):
        return jnp.int32(0)

    def others(self, opened, draft, nodes, task, count):
        """Puts the alternative first for odd nodes and last for even nodes; other
        entries are wrong tokens."""
        here = self.beside[opened][:, jnp.minimum(nodes, draft.tokens.shape[1] - 1)]
        place = jnp.where(nodes % 2 == 1, 0, count - 1)[None, :, None]
        there = jnp.arange(count, dtype=jnp.int32)[None, None] == place
        return jnp.where(there, here[..., None], 0)

    def commit(self, state, update):
        return state + 1

    def begin(self, state, draft, task, ahead):
        root = jnp.zeros(draft.tokens.shape, bool).at[:, 0].set(True)
        return self.fill(state, draft, root, task, ahead)

    def fill(self, opened, draft, known, task, ahead):
        first = jnp.maximum(first_unknown(task, known), 1)
        own = ~known & (draft.layout.depth < first + ahead)
        tokens = jnp.where(own, self.tokens[opened], draft.tokens)
        origin = jnp.where(own, jnp.uint8(NGRAM), draft.origin)
        return replace(draft, tokens=tokens, origin=origin), opened

    def end(self, opened):
        return opened


def distribution(sampling, place):
    """Returns the distribution of tokens below the root, at a place [B] of the
    output."""
    unused = jnp.zeros((place.shape[0], 1), jnp.int32)
    requests = Requests(unused[:, 0], None, unused, None, sampling)
    return Distribution(requests, place, None, REAL)


STEPS, ROWS = 4, 3


def texts_and_updates(M):
    """Returns three texts, and tokens accepted at each step. Row 2 finishes, row 1
    accepts all."""
    rng = np.random.default_rng(M)
    texts = [rng.integers(8, REAL, n).tolist() for n in (1, 9, 5)]
    tokens = rng.integers(8, REAL, (STEPS, ROWS, M + 1), np.int32)
    lengths = rng.integers(1, M + 2, (STEPS, ROWS), np.int32)
    lengths[:, 1] = M + 1
    lengths[1:, 2] = 0
    return texts, tokens, lengths


@jax.jit(static_argnames=("rule", "width"))
def drafted(drafter, token_ids, lengths, update, gained, tree, sampling, rule, width):
    """Drafts step by step. Returns the drafts and the drafter's total passes."""
    prompts = Prompts(token_ids, lengths, 64 + 32 * width, width)
    root = jnp.take_along_axis(token_ids, lengths[:, None] - 1, axis=1)[:, 0]

    def step(carry, told):
        state, root, place = carry
        tokens, length = told
        dist = distribution(sampling, place)
        draft, state = drafter.propose(state, root, tree, dist, rule)
        update = Update(tokens, length, jnp.zeros((*tokens.shape, 1)))
        state = drafter.commit(state, update)
        last = jnp.take_along_axis(tokens, jnp.maximum(length - 1, 0)[:, None], axis=1)
        root = jnp.where(length > 0, last[:, 0], root)
        reading = getattr(state, "reading", state)
        return (state, root, place + length), (draft, reading.passes)

    begun = drafter.init(prompts, None), root, jnp.zeros_like(lengths)
    return lax.scan(step, begun, (update, gained))[1]


def drafts_of(drafter, tree, sampling, rule):
    """Returns drafts and passes [STEPS] per step, as NumPy arrays. See `drafted`."""
    texts, update, gained = texts_and_updates(tree.depth)
    width = tree.depth + 1
    prompts = prompts_of(texts, width, 64 + 32 * width)
    told = jnp.asarray(update), jnp.asarray(gained)
    asked = prompts.token_ids, prompts.lengths, *told, tree, sampling, rule
    draft, passes = jax.device_get(drafted(drafter, *asked, tree.depth + 1))
    assert (passes == passes[:, :1]).all()
    return draft, np.diff(passes[:, 0], prepend=0)


def running():
    """Returns [STEPS, ROWS] bool: rows that are not finished when a step drafts."""
    _, _, gained = texts_and_updates(1)
    return np.concatenate([np.ones((1, ROWS), bool), gained[:-1] > 0])


def max_passes(parents, spoiled, ahead):
    """Counts passes, level by level, if guesses are wrong where `spoiled` [B, T].

    A pass reads a level and `ahead` levels below it. What it draws is valid down to the
    first level with a wrong guess.
    """
    depth, inner = depth_of(parents), np.isin(np.arange(len(parents)), parents)
    level = passes = 0
    while level < depth.max():
        end, passes = min(level + 1 + ahead, depth.max()), passes + 1
        level += 1
        while level < end and not spoiled[:, (depth == level) & inner].any():
            level += 1
    return passes


DRAFTS = [  # kind, tree, ahead, rule
    ("ssm", UNEVEN, 1, None),
    ("hybrid", "A", 2, "mss"),
    ("hybrid", DEEP, 3, "recursive"),
    ("attention", "chain:4", 1, "leviathan"),
    ("attention", "chain:1", 2, "naive/coupled"),
]


def patterns(T):
    """Returns patterns of wrong guesses: none, all, one row's, one node's, and
    random."""
    rng = np.random.default_rng(T)
    none = np.zeros((ROWS, T), bool)
    found = {
        "none": none,
        "all": ~none,
        "a row's": none.copy(),
        "a node's": none.copy(),
    }
    found["a row's"][1] = True
    found["a node's"][0, 1] = True
    for k in range(4):
        found[f"any {k}"] = rng.random((ROWS, T)) < 0.15 * (k + 1)
    found["of a finished row"] = none.copy()
    found["of a finished row"][2] = True
    return found


@pytest.mark.parametrize(("kind", "tree", "ahead", "rule"), DRAFTS)
def test_drafts_match_the_draft_model_alone(kind, tree, ahead, rule):
    """Tokens, probabilities and layout are equal, with as few passes as the guesses
    allow.

    Fails if a guess is kept although it or its parent was wrong, if records of the tree
    are shifted by the unread text, if the last token of a text is forgotten, or if
    passes are counted wrongly.
    """
    model, tree = tiny(4, layers=KINDS[kind]), resolve_tree(tree)
    rows = None if rule is None else sampling_rows([Sampling(t) for t in (1, 0.7, 2)])
    rule = NAIVE if rule is None else resolve_rule(rule, tree)
    alone, passes = drafts_of(ModelDrafter(model, fill_tree), tree, rows, rule)
    assert (passes == tree.depth).all()
    assert (alone.q is not None) == rule.needs_q
    parents = np.asarray(tree.parents).tolist()
    depth, inner = depth_of(parents), np.isin(np.arange(tree.size), parents)
    for name, spoiled in patterns(tree.size).items():
        guesses = np.where(spoiled, (alone.tokens + 1) % REAL, alone.tokens)
        oracle = Oracle(jnp.asarray(guesses))
        draft, passes = drafts_of(Staged(model, oracle, ahead), tree, rows, rule)
        for step, here in enumerate(running()):
            at = (step, np.flatnonzero(here))
            mine, own = (jax.tree.map(itemgetter(at), d) for d in (draft, alone))
            chex.assert_trees_all_equal(mine.layout, own.layout)
            assert mine.tokens.tolist() == own.tokens.tolist(), name
            if rule.needs_q:
                np.testing.assert_allclose(mine.q, own.q, rtol=0, atol=1e-6)
            most = max_passes(parents, spoiled[here], ahead)
            assert -(-tree.depth // (ahead + 1)) <= passes[step] <= most, (name, step)
            guessed = mine.origin == NGRAM
            assert (mine.origin[:, 0] == TARGET).all()
            assert (guessed | (mine.origin == DRAFTER))[:, 1:].all()
            assert not (guessed & (spoiled[here] | ~inner)).any()
            if name == "none":  # tokens drawn at the end of a pass were not yet read
                read = inner & (depth % (ahead + 1) > 0)
                assert (guessed == read).all()
        if name == "all":
            assert (passes == tree.depth).all()


def passes_of_chains(spoiled, ahead):
    """Counts passes of a chain whose first guesses are wrong where `spoiled` [B, M],
    and whose alternative guesses are right."""
    M, level, passes = spoiled.shape[1], 0, 0
    while level < M:
        passes, level = passes + 1, level + 1
        for _ in range(ahead):
            if level >= M:
                break
            stops, level = spoiled[:, level - 1].any(), level + 1
            if stops:
                break
    return passes


@pytest.mark.parametrize(
    ("kind", "tree", "ahead", "rule"),
    [("hybrid", "chain:6", 2, "leviathan"), ("ssm", UNEVEN, 2, "recursive")],
)
def test_alternative_guesses_replace_wrong_first_guesses(kind, tree, ahead, rule):
    """The drafts are the same, with one more valid level if an alternative was right.

    Fails if an alternative has the record, token, children or probabilities of the
    first guess, if it stays below a wrong parent, or if nodes read below the first
    guess stay below an alternative.
    """
    model, tree = tiny(4, layers=KINDS[kind]), resolve_tree(tree)
    rows = sampling_rows([Sampling(t) for t in (1, 0.7, 2)])
    rule = resolve_rule(rule, tree)
    alone, _ = drafts_of(ModelDrafter(model, fill_tree), tree, rows, rule)
    for name, spoiled in patterns(tree.size).items():
        guesses = np.where(spoiled, (alone.tokens + 1) % REAL, alone.tokens)
        oracle = Oracle(jnp.asarray(guesses), jnp.asarray(alone.tokens))
        who = Staged(model, oracle, ahead, 3)
        draft, passes = drafts_of(who, tree, rows, rule)
        for step, here in enumerate(running()):
            at = (step, np.flatnonzero(here))
            mine, own = (jax.tree.map(itemgetter(at), d) for d in (draft, alone))
            assert mine.tokens.tolist() == own.tokens.tolist(), name
            np.testing.assert_allclose(mine.q, own.q, rtol=0, atol=1e-6)
            parents = np.asarray(tree.parents).tolist()
            most = max_passes(parents, spoiled[here], ahead)
            assert passes[step] <= most, (name, step)
            if tree.inner == 1 and spoiled[here][:, 1:-1].all(axis=0).tolist() == (
                spoiled[here][:, 1:-1].any(axis=0).tolist()
            ):  # all rows have the same wrong guesses
                chains = passes_of_chains(spoiled[here][:, 1:], ahead)
                assert passes[step] == chains, (name, step)
        if name == "all":
            assert (passes < tree.depth).all()


AHEAD = (2, 3, 3)  # levels to guess, for each call


@jax.jit
def guess_repeatedly(stage, token_ids, lengths, tree, known, edits):
    """Calls a stage several times on one tree, and edits the tree between the calls.

    Args:
      known: [len(AHEAD), B, T] bool. Nodes whose tokens must stay.
      edits: [len(AHEAD), B, T] int32. New tokens of nodes, or -1.

    Returns:
      Drafts before and after each call, passes after each call, and the state.
    """
    state = stage.init(Prompts(token_ids, lengths, 256, 8), None)
    root = jnp.take_along_axis(token_ids, lengths[:, None] - 1, axis=1)[:, 0]
    dist = distribution(None, jnp.zeros_like(lengths))
    task = replace(make_task(tree, dist, NAIVE), outermost=False)
    draft, drafts, passes = task.empty(root), [], []
    for k, ahead in enumerate(AHEAD):
        tokens = jnp.where(edits[k] < 0, draft.tokens, edits[k])
        before = replace(draft, tokens=tokens)
        if k == 0:
            draft, opened = stage.begin(state, before, task, ahead)
        else:
            draft, opened = stage.fill(opened, before, known[k], task, ahead)
        drafts.append((before, draft))
        passes.append(opened.passes)
    return drafts, jnp.stack(passes), stage.end(opened).reading


def known_by(rng):
    """Returns [len(AHEAD), B, T] bool, growing: nodes known before each call.

    The children of a node are known if it was read with its own token, and so were all
    its ancestors.
    """
    known = np.zeros((len(AHEAD), ROWS, len(DEEP)), bool)
    read = known.copy()
    known[..., 0] = True
    for k in range(1, len(AHEAD)):
        for t, parent in enumerate(DEEP):
            above = read[k, :, parent] | (t == 0)
            more = rng.random(ROWS) < (0.3 if k == 1 else 0.8)
            read[k, :, t] = above & (read[k - 1, :, t] | more)
            known[k, :, t] |= read[k, :, parent]
    return known


def guesses_of(stage, known, edits):
    texts, _, _ = texts_and_updates(7)
    prompts = prompts_of(texts, 8, 64 + 32 * 8)
    told = jnp.asarray(known), jnp.asarray(edits)
    asked = prompts.token_ids, prompts.lengths, make_tree(DEEP), *told
    return texts, *jax.device_get(guess_repeatedly(stage, *asked))


def check_guesses(model, text, before, draft, known, deepest):
    """Checks that known tokens stay, and that others above level `deepest` + 1 are the
    best below their parents."""
    depth = depth_of(DEEP)
    assert draft[known].tolist() == before[known].tolist()
    logits = stree_jax.score_tree(model, text[:-1], draft, DEEP)
    for t in np.flatnonzero(depth < deepest):
        children = np.flatnonzero(np.asarray(DEEP) == t)
        best = np.asarray(lax.top_k(logits[t, :REAL], len(children))[1])
        stay = known[children]
        assert draft[children][~stay].tolist() == best[~stay].tolist()


NO_EDITS = np.full((len(AHEAD), ROWS, len(DEEP)), -1, np.int32)


@pytest.fixture(scope="module")
def inner():
    """Returns models that guess for another model, without and with their own
    guesser."""
    model = tiny(4, layers=KINDS["hybrid"])
    tree, texts = make_tree(DEEP), texts_and_updates(7)[0]
    prompts = prompts_of(texts, 8, 64 + 32 * 8)
    drafter, dist = ModelDrafter(model, fill_tree), distribution(None, prompts.lengths)
    root = jnp.asarray([text[-1] for text in texts], jnp.int32)
    state = drafter.init(prompts, None)
    right, _ = jax.jit(drafter.propose, static_argnums=4)(
        state, root, tree, dist, NAIVE
    )
    return {
        "none": Staged(model),
        "one": Staged(model, Oracle(right.tokens[None]), 1),
    }


@pytest.mark.parametrize("name", ["none", "one"])
def test_an_inner_model_guesses_below_known_tokens(inner, name):
    """Fails if a level that was read below other tokens is not read again."""
    rng, stage = np.random.default_rng(6), inner[name]
    depth, above = depth_of(DEEP), np.isin(np.arange(len(DEEP)), DEEP)
    for share in (0, 0.1, 0.1, 0.3, 0.3, 0.3, 0.6, 1):
        known = known_by(rng)
        new = known & ~np.concatenate([known[:1], known[:-1]])
        edits = rng.integers(8, REAL, NO_EDITS.shape, np.int32)
        edits = np.where(new & (rng.random(new.shape) < share), edits, NO_EDITS)
        texts, drafts, _, reading = guesses_of(stage, known, edits)
        assert reading.state.length.tolist() == [len(text) for text in texts]
        for k, (before, draft) in enumerate(drafts):
            first = depth[(~known[k] & above).any(axis=0)].min(initial=depth.max())
            for b, text in enumerate(texts):
                rows = before.tokens[b], draft.tokens[b], known[k, b]
                deepest = min(first - 1 + AHEAD[k], depth.max())
                check_guesses(stage.model, text, *rows, deepest)


@pytest.mark.parametrize(("name", "most"), [("none", [2, 5, 5]), ("one", [1, 3, 3])])
def test_an_inner_model_reads_only_changed_levels(inner, name, most):
    """If all its guesses were kept, it continues with one or two levels per pass."""
    known = np.array([depth_of(DEEP) <= kept for kept in (0, 2, 4)])
    known = np.repeat(known[:, None], ROWS, axis=1)
    *_, passes, _ = guesses_of(inner[name], known, NO_EDITS)
    assert passes.tolist() == most
