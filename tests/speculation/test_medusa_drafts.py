"""Test the draft tokens of Medusa heads against float64.

The expected guesses follow from the state that chose the root.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import stree_jax
from stree_jax import Sampling
from stree_jax.generation.generate import begin
from stree_jax.speculation import loop, step
from stree_jax.speculation.accept import resolve_rule
from stree_jax.speculation.decoding import RUNNING
from stree_jax.speculation.draft import only_root
from stree_jax.speculation.drafter import DrafterBase
from stree_jax.speculation.drafters import medusa
from stree_jax.speculation.drafters.medusa import MedusaDrafter
from stree_jax.speculation.tree import resolve_tree
from stree_jax.training.hidden_state_files import hidden_states
from tests.distribution import processed
from tests.support.heads import random_heads, reference_logits, repeating
from tests.support.reference import depth_of, path_to
from tests.support.tiny import REAL

NEW, WIDTH, K = 16, 192, 4
TREE = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6]  # three levels, irregular
LENGTHS = [1, 2, 64, 65, 66, 130]  # prompt lengths; prefill takes 64 tokens at a time


@pytest.fixture(scope="module")
def target():
    return repeating()


@pytest.fixture(scope="module")
def heads(target):
    """Returns heads close to the model's own head, so that repeated tokens are
    right."""
    return random_heads(target, scale=0.03, heads=K)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(8, REAL, n).tolist() for n in LENGTHS]


def states_of(target, texts):
    """Returns [B, d]: the target's hidden state (after its final norm) that chose the
    last token of each text, from one pass over the text."""
    padded = np.zeros((len(texts), WIDTH), np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    bare = stree_jax.models.Model(target.params, target.config)
    hidden = np.asarray(hidden_states(bare, jnp.asarray(padded)))
    last = np.array([len(text) - 2 for text in texts])
    return np.where(last[:, None] < 0, 0, hidden[np.arange(len(texts)), last])


def drafts_along(target, heads, prompts, tree, count, **options):
    """Decodes step by step. Returns for each step: texts, draft tokens, noise by depth,
    and running rows.

    The program is traced again, so that it contains a planted mistake.
    """
    options = dict(max_new_tokens=NEW, stop_tokens=(), **options)
    d, plan = begin(target, prompts, drafter=heads, tree=tree, **options)
    (tree,), found = plan.spec.policy.menu, []

    @jax.jit
    def one(spec, d):
        dist = d.distribution(REAL)
        draft, _ = spec.drafter.propose(d.drafting, d.root, tree, dist, spec.rule)
        depths = range(tree.depth)
        noise = jnp.zeros((tree.depth, 1, 1), jnp.float32)
        if dist.sampling is not None:
            noise = jnp.stack([dist.noise(jnp.int32(k)) for k in depths])
        return draft.tokens, noise, loop.advance(spec, d, jnp.int32(1))

    while len(found) < count and (np.asarray(d.finish) == RUNNING).any():
        said = zip(prompts, np.asarray(d.tokens), np.asarray(d.length), strict=True)
        texts = [prompt + row[:n].tolist() for prompt, row, n in said]
        running = np.flatnonzero(np.asarray(d.finish) == RUNNING)
        tokens, noise, d = one(plan.spec, d)
        found.append((texts, np.asarray(tokens), np.asarray(noise), running))
    return found


def penalised(logits, tokens, penalty):
    """Returns logits [V] with a repetition penalty on `tokens`."""
    there = np.isin(np.arange(len(logits)), tokens)
    punished = np.where(logits > 0, logits / penalty, logits * penalty)
    return np.where(there, punished, logits)


def wrong_drafts(target, heads, steps, parents, temperature=1.0, penalty=1.0):
    """Counts trees, and trees whose tokens are not the likeliest guesses."""
    depth, wrong, count = depth_of(parents), 0, 0
    for texts, tokens, noise, running in steps:
        logits = reference_logits(heads, target, states_of(target, texts))[..., :REAL]
        for b in running:
            if len(texts[b]) == 1:
                continue  # there is no state yet
            assert tokens[b, 0] == texts[b][-1]
            right = True
            for node in set(parents) - {-1}:
                k = depth[node]
                path = tokens[b, path_to(parents, node)].tolist()
                z = penalised(logits[b, k], texts[b] + path, penalty)
                worth = z / temperature + noise[k][b % len(noise[k])]
                children = tokens[b, [t for t, p in enumerate(parents) if p == node]]
                best = -np.sort(-worth)[: len(children)]
                right &= np.allclose(worth[children], best, rtol=0, atol=1e-4)
                right &= len(set(children.tolist())) == len(children)
            wrong, count = wrong + (not right), count + 1
    return count, wrong


SETTINGS = {
    "greedy": {},
    "coupled": dict(sampling=Sampling(0.4)),
    "top_k": dict(sampling=Sampling(0.4), rule="naive"),
    # The penalty depends on the tokens of the path, and nodes of a level differ.
    "penalty": dict(sampling=Sampling(0.4, repetition_penalty=1.2)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_match_the_heads_at_every_step(target, heads, prompts, name):
    """With the target's noise if tokens are sampled with it."""
    options = SETTINGS[name]
    steps = drafts_along(target, heads, prompts, TREE, NEW, **options)
    if name == "top_k":
        steps = [(texts, t, 0 * noise, rows) for texts, t, noise, rows in steps]
    temperature = 0.4 if options else 1.0
    penalty = 1.2 if name == "penalty" else 1.0
    count, wrong = wrong_drafts(target, heads, steps, TREE, temperature, penalty)
    assert wrong == 0 and count > 5 * len(prompts)
    if name == "penalty":
        assert wrong_drafts(target, heads, steps, TREE, temperature)[1] > 5
    gained = [len(b) - len(a) for a, b in zip(steps[2][0], steps[3][0], strict=True)]
    assert len(set(gained)) > 1, "else all that was accepted is alike"


def roots_state(accepted, finish, hidden, taps=()):
    told = step_update(accepted, finish, hidden)
    return replace(told, hidden=jnp.broadcast_to(hidden[:, :1], told.hidden.shape))


def first_rows(accepted, finish, hidden, taps=()):
    """The nodes of the path are not the first rows of the tree."""
    told = step_update(accepted, finish, hidden)
    return replace(told, hidden=hidden[:, : told.hidden.shape[1]])


def one_before(accepted, finish, hidden, taps=()):
    told = step_update(accepted, finish, hidden)
    return replace(told, hidden=jnp.roll(told.hidden, 1, axis=1))


def before_the_weight(scale, accepted, finish, hidden, taps=()):
    """As states from before the norm, except for one factor per state."""
    told = step_update(accepted, finish, hidden)
    return replace(told, hidden=told.hidden / scale)


def next_heads(heads, model, hidden, count):
    return medusa_logits(heads, model, hidden, count + 1)[:, 1:]


def paths_end(drafter, state, update):
    """Uses the last place of the path, accepted or not."""
    full = jnp.where(update.length > 0, update.tokens.shape[1], 0)
    return medusa_commit(drafter, state, replace(update, length=full))


step_update, medusa_logits = step.update_of, medusa.head_logits
medusa_commit = MedusaDrafter.commit
MISTAKES = {
    "the root's state": (step, "update_of", roots_state),
    "states by row, not by path": (step, "update_of", first_rows),
    "the state before": (step, "update_of", one_before),
    "head k at depth k + 1": (medusa, "head_logits", next_heads),
    "the end of the path": (MedusaDrafter, "commit", paths_end),
    "before the norm": (step, "update_of", before_the_weight),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistakes_are_found(target, heads, prompts, name, monkeypatch):
    where, attribute, wrong = MISTAKES[name]
    if wrong is before_the_weight:
        scale = np.asarray(target.params["norm"]["scale"])
        wrong = partial(wrong, jnp.asarray(scale)[None, None])
    monkeypatch.setattr(where, attribute, wrong)
    steps = drafts_along(target, heads, prompts[:3], TREE, 8)
    assert wrong_drafts(target, heads, steps, TREE)[1] > 2


# --- prompts are observed -------------------------------------------------------------


def state_after_prompts(spec, begun, prompts):
    """Returns the state [B, d] after prefilling the prompts. Traced again on each
    call."""
    padded = np.full((len(prompts), max(LENGTHS)), 9, np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    lengths = jnp.asarray([len(ids) for ids in prompts], jnp.int32)

    @jax.jit
    def read(spec, padded):
        d = loop.init_decoding(
            spec, padded, lengths, begun.requests, max_new_tokens=NEW, samples=1
        )
        return d.drafting.hidden

    return np.asarray(read(spec, jnp.asarray(padded)))


def test_the_first_drafts_come_from_the_prompt(target, heads, prompts):
    """It is the state at the last token but one, for any chunk, and for several
    samples."""
    want = states_of(target, prompts)
    assert not want[0].any() and np.abs(want[1:]).max(axis=1).min() > 0.1
    for n in (1, 2):
        options = dict(max_new_tokens=NEW, drafter=heads, tree="chain:2", n=n)
        d, _ = begin(target, prompts, **options)
        expected = np.repeat(want, n, axis=0)
        np.testing.assert_allclose(d.drafting.hidden, expected, rtol=0, atol=1e-5)
        assert d.drafting.passes.tolist() == [0] * len(expected)


def observe_nothing(drafter, drafting, update):
    return drafting


def observe_last_token(drafter, drafting, update):
    """Observes the last token, too."""
    length, width = update.length, update.hidden.shape[1]
    more = jnp.where(length > 0, jnp.minimum(length + 1, width), 0)
    return drafter.commit(drafting, replace(update, length=more))


def observe_padding(drafter, drafting, update):
    """Rows whose prompt is complete observe the padding of later chunks."""
    length = jnp.maximum(update.length, 1)
    return drafter.commit(drafting, replace(update, length=length))


@pytest.mark.parametrize(
    "wrong", [observe_nothing, observe_last_token, observe_padding]
)
def test_prompts_observed_wrongly_are_found(target, heads, prompts, wrong, monkeypatch):
    begun, plan = begin(
        target, prompts, max_new_tokens=NEW, drafter=heads, tree="chain:2"
    )
    want = states_of(target, prompts)
    np.testing.assert_allclose(
        state_after_prompts(plan.spec, begun, prompts), want, atol=1e-5
    )
    monkeypatch.setattr(MedusaDrafter, "observe", wrong)
    found = state_after_prompts(plan.spec, begun, prompts)
    assert np.abs(found - want).max(axis=1).max() > 0.1


def test_a_continued_state_is_observed(target, heads, prompts):
    """From the last token of the old text, in another chunk than before, or in several
    chunks.

    A row that continues without new text starts from an older state, because drafters
    do not observe the last step of a finished row. Its text is still exact.
    """
    options = dict(max_new_tokens=8, stop_tokens=(), drafter=heads, tree=TREE)
    first = stree_jax.generate(target, prompts[1:5], keep_past=True, **options)
    rng = np.random.default_rng(3)
    more = [rng.integers(8, REAL, n).tolist() for n in (1, 70, 64, 2)]
    texts = [old + new for old, new in zip(first.past.tokens, more, strict=True)]
    d, _ = begin(target, more, past=first.past, **options)
    np.testing.assert_allclose(d.drafting.hidden, states_of(target, texts), atol=1e-5)


@struct.dataclass
class Recorder(DrafterBase):
    """A drafter that records all updates and drafts nothing."""

    model: stree_jax.models.Model
    observes_prompts = True

    def init(self, prompts, past):
        batch = prompts.lengths.shape[0]
        room = jnp.zeros((batch, WIDTH), jnp.int32)
        return past or (room, room[:, 0], jnp.zeros((batch, WIDTH, 32), jnp.float32))

    def commit(self, state, update):
        tokens, length, hidden = state
        index = jnp.arange(update.tokens.shape[1], dtype=jnp.int32)[None]
        place = jnp.where(
            index < update.length[:, None], length[:, None] + index, WIDTH
        )
        row = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
        return (
            tokens.at[row, place].set(update.tokens, mode="drop"),
            length + update.length,
            hidden.at[row, place].set(update.hidden, mode="drop"),
        )

    def propose(self, state, root, tree, dist, rule):
        return only_root(root), state


def test_updates_pair_each_token_with_the_state_before_it(target, prompts):
    """For prompts, in chunks, and for generated text, except for the last token of a
    row."""
    recorder = Recorder(stree_jax.models.Model(target.params, target.config))
    options = dict(drafter=recorder, tree="chain:0", stop_tokens=(), keep_past=True)
    result = stree_jax.generate(target, prompts, max_new_tokens=5, **options)
    tokens, length, hidden = map(np.asarray, result.past.drafter)
    for b, text in enumerate(result.past.tokens):
        told = text[1:-1]
        assert tokens[b, : length[b]].tolist() == told
        for n in {1, 60, 64, 65, len(told)}:
            if n <= len(told):
                want = states_of(target, [text[: n + 1]])[0]
                np.testing.assert_allclose(hidden[b, n - 1], want, atol=1e-5)


# --- rules that need draft probabilities ----------------------------------------------

DRAWN = [("mss", TREE), ("recursive", TREE), ("leviathan", "chain:3")]
TEXTS = [Sampling(0.5), Sampling(1.5, top_k=6), Sampling(1.0, top_p=0.8), Sampling(0.0)]


@pytest.mark.parametrize(("name", "tree"), DRAWN)
def test_draft_probabilities_match_the_sampled_drafts(
    target, heads, prompts, name, tree
):
    """They are filtered like the target's, and only tokens that pass the filters are
    drawn."""
    tree, prompts = resolve_tree(tree), prompts[1:5]
    rule, parents = resolve_rule(name, tree), np.asarray(tree.parents)
    d, plan = begin(
        target,
        prompts,
        max_new_tokens=NEW,
        drafter=heads,
        tree=TREE,
        sampling=TEXTS,
        n=8,
    )
    propose = jax.jit(MedusaDrafter.propose, static_argnames="rule")
    dist = d.distribution(REAL)
    draft, _ = propose(plan.spec.drafter, d.drafting, d.root, tree, dist, rule=rule)
    tokens, q = np.asarray(draft.tokens), np.asarray(draft.q)
    logits = reference_logits(heads, target, states_of(target, prompts))[..., :REAL]
    depth, drawn = depth_of(parents), []
    for b in range(len(tokens)):
        s = TEXTS[b // 8]
        for node in set(parents.tolist()) - {-1}:
            children = tokens[b, parents == node]
            if s.temperature == 0:
                best = np.argsort(-logits[b // 8, depth[node]])[: len(children)]
                assert children.tolist() == best.tolist()
                continue
            p = processed(logits[b // 8, depth[node]], s)
            np.testing.assert_allclose(q[b, node], p, rtol=0, atol=1e-5)
            assert (p[children[: (p > 0).sum()]] > 0).all()
            if name == "recursive":
                assert len(set(children.tolist())) == len(children)
        drawn.append(tokens[b].tolist())
    for s in range(3):  # samples of one prompt differ
        assert len({tuple(row) for row in drawn[8 * s : 8 * s + 8]}) > 1
