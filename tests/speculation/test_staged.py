"""A drafter's drafter: what the target sees is what the drafter would draft alone."""

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
from stree_jax import Sampling, Staged
from stree_jax.models import Model
from stree_jax.models.memory import state_bytes
from stree_jax.sampling.distribution import Distribution
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import sampling_rows
from stree_jax.speculation.accept import NAIVE, resolve_rule
from stree_jax.speculation.draft import DRAFTER, NGRAM, STAGE, TARGET
from stree_jax.speculation.drafter import News, Prompts
from stree_jax.speculation.model_drafter import (
    ModelDrafter,
    fill_tree,
)
from stree_jax.speculation.ngrams import WAYS
from stree_jax.speculation.stage import first_unknown, make_task
from stree_jax.speculation.tree import make_tree, resolve_tree
from stree_jax.traffic import weights_read
from stree_jax.training.ngrams import count_grams, katz
from tests.support.reference import depth_of
from tests.support.tiny import REAL, perturbed, tiny

UNEVEN = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7]  # inner nodes by level: 1, 2, 2, 1
DEEP = [-1, 0, 0, 1, 1, 2, 3, 4, 5, 6, 6, 8, 9, 11]
KINDS = {
    "ssm": ("mamba", "mamba"),
    "hybrid": ("mamba", "attention"),
    "attention": ("attention", "mlp"),
}


@struct.dataclass
class Oracle:
    """Guesses `tokens` [steps, B, T], tree after tree."""

    tokens: jax.Array

    def init(self, prompts, past):
        return jnp.int32(0)

    def commit(self, state, news):
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


def prompts_of(texts, M):
    width = max(map(len, texts))
    padded = np.full((len(texts), width), 9, np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    lengths = jnp.asarray([len(text) for text in texts], jnp.int32)
    return Prompts(jnp.asarray(padded), lengths, 64 + 32 * (M + 1), M + 1)


def distribution(sampling, place):
    """What the tokens below the root are chosen by, at a place [B] of the output."""
    unused = jnp.zeros((place.shape[0], 1), jnp.int32)
    requests = Requests(unused[:, 0], None, unused, None, sampling)
    return Distribution(requests, place, None, REAL)


STEPS, ROWS = 4, 3


def texts_and_news(M):
    """Three texts, and what becomes text step by step; row 2 finishes, 1 gains most."""
    rng = np.random.default_rng(M)
    texts = [rng.integers(8, REAL, n).tolist() for n in (1, 9, 5)]
    tokens = rng.integers(8, REAL, (STEPS, ROWS, M + 1), np.int32)
    lengths = rng.integers(1, M + 2, (STEPS, ROWS), np.int32)
    lengths[:, 1] = M + 1
    lengths[1:, 2] = 0
    return texts, tokens, lengths


@jax.jit(static_argnames=("rule", "width"))
def drafted(drafter, token_ids, lengths, news, gained, tree, sampling, rule, width):
    """Drafts, and the drafter's passes, of one step after the other."""
    prompts = Prompts(token_ids, lengths, 64 + 32 * width, width)
    root = jnp.take_along_axis(token_ids, lengths[:, None] - 1, axis=1)[:, 0]

    def step(carry, told):
        state, root, place = carry
        tokens, length = told
        dist = distribution(sampling, place)
        draft, state = drafter.propose(state, root, tree, dist, rule)
        news = News(tokens, length, jnp.zeros((*tokens.shape, 1)))
        state = drafter.commit(state, news)
        last = jnp.take_along_axis(tokens, jnp.maximum(length - 1, 0)[:, None], axis=1)
        root = jnp.where(length > 0, last[:, 0], root)
        reading = getattr(state, "reading", state)
        return (state, root, place + length), (draft, reading.passes)

    begun = drafter.init(prompts, None), root, jnp.zeros_like(lengths)
    return lax.scan(step, begun, (news, gained))[1]


def drafts_of(drafter, tree, sampling, rule):
    """NumPy: see `drafted`; passes [STEPS] of each step."""
    texts, news, gained = texts_and_news(tree.depth)
    prompts = prompts_of(texts, tree.depth)
    told = jnp.asarray(news), jnp.asarray(gained)
    asked = prompts.token_ids, prompts.lengths, *told, tree, sampling, rule
    draft, passes = jax.device_get(drafted(drafter, *asked, tree.depth + 1))
    assert (passes == passes[:, :1]).all()
    return draft, np.diff(passes[:, 0], prepend=0)


def running():
    """[STEPS, ROWS]: which rows have not finished when a step drafts."""
    _, _, gained = texts_and_news(1)
    return np.concatenate([np.ones((1, ROWS), bool), gained[:-1] > 0])


def most_passes(parents, spoiled, ahead):
    """Passes of rows whose guesses are wrong where `spoiled` [B, T], level by level.

    A pass reads a level and `ahead` below it, and what it draws counts as far down as
    all was read as what it is.
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
    """Which guesses are wrong: none, all, one row's, a node's, and any."""
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
def test_drafts_are_the_models_own(kind, tree, ahead, rule):
    """Tokens, probabilities and layout; and as few passes as guesses allow.

    Catches a guess that is kept although it, or its parent, was wrong; records of the
    tree that are shifted by the unread text; a text whose last token is forgotten; and
    a pass that is not counted, or too many.
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
            most = most_passes(parents, spoiled[here], ahead)
            assert -(-tree.depth // (ahead + 1)) <= passes[step] <= most, (name, step)
            guessed = mine.origin == NGRAM
            assert (mine.origin[:, 0] == TARGET).all()
            assert (guessed | (mine.origin == DRAFTER))[:, 1:].all()
            assert not (guessed & (spoiled[here] | ~inner)).any()
            if name == "none":  # what is drawn at the end of a pass was not yet read
                read = inner & (depth % (ahead + 1) > 0)
                assert (guessed == read).all()
        if name == "all":
            assert (passes == tree.depth).all()


AHEAD = (2, 3, 3)  # levels that are asked for, tree by tree


@jax.jit
def asked_for_guesses(stage, token_ids, lengths, tree, known, edits):
    """Drafts of a stage, between which another has its own way: before and after each.

    Args:
      known: [len(AHEAD), B, T] bool, what is to stay; edits: tokens that it is.
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
    """[len(AHEAD), B, T] bool: more and more; children are known where their parent is.

    A node's children are when it was read as what it is, and all above it were.
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
    texts, _, _ = texts_and_news(7)
    prompts = prompts_of(texts, 7)
    told = jnp.asarray(known), jnp.asarray(edits)
    asked = prompts.token_ids, prompts.lengths, make_tree(DEEP), *told
    return texts, *jax.device_get(asked_for_guesses(stage, *asked))


def guessed_as_alone(model, text, before, draft, known, deepest):
    """Known tokens stay; others down to a level are the best below their parents."""
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
    """A model that guesses for another, and has a guesser: itself, unless edited."""
    model = tiny(4, layers=KINDS["hybrid"])
    tree, texts = make_tree(DEEP), texts_and_news(7)[0]
    prompts = prompts_of(texts, 7)
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
def test_an_inner_model_guesses_below_what_was_kept(inner, name):
    """Catches a level that was read below other tokens and is not read again."""
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
                guessed_as_alone(stage.model, text, *rows, deepest)


@pytest.mark.parametrize(("name", "most"), [("none", [2, 5, 5]), ("one", [1, 3, 3])])
def test_an_inner_model_reads_what_has_changed_alone(inner, name, most):
    """All it guessed being kept, it goes on where it was: a level a pass, or two."""
    known = np.array([depth_of(DEEP) <= kept for kept in (0, 2, 4)])
    known = np.repeat(known[:, None], ROWS, axis=1)
    *_, passes, _ = guesses_of(inner[name], known, NO_EDITS)
    assert passes.tolist() == most


NEW, CAPACITY = 24, 512


@pytest.fixture(scope="module")
def target():
    return tiny(1, layers=("mamba", "attention"))


@pytest.fixture(scope="module")
def drafter(target):
    """Right now and then."""
    return target.replace(params=perturbed(target.params, 0.05, 3))


@pytest.fixture(scope="module")
def ngrams(drafter, prompts):
    """Counted in the drafter's own texts, and so right now and then."""
    texts = stree_jax.generate(drafter, prompts, max_new_tokens=NEW, stop_tokens=())
    grams = count_grams(np.array(texts.tokens), 3, REAL)
    return katz(grams, REAL, slots=512, keep=4)


SAMPLED = [Sampling(0.6), Sampling(1.0, top_p=0.9, seed=5), Sampling(0.0)]
PUNISHED = [Sampling(0.6, repetition_penalty=1.2), *SAMPLED[1:]]
RUNS = {  # tree, ahead, options
    "greedy": (
        "A",
        2,
        dict(max_new_tokens=[NEW, 3, 11], capacity=CAPACITY, keep_past=True),
    ),
    "mss": (UNEVEN, 1, dict(rule="mss", sampling=SAMPLED, n=2)),
    "recursive": ("A", 3, dict(rule="recursive", sampling=PUNISHED)),
    "leviathan": ("chain:4", 2, dict(rule="leviathan", sampling=SAMPLED)),
}


@pytest.fixture(scope="module")
def runs(target, drafter, ngrams, prompts):
    """By name: what a model drafts alone, and what it drafts with a guesser."""

    def both(name):
        if name not in found:
            tree, ahead, options = RUNS[name]
            options = dict(max_new_tokens=NEW, tree=tree) | options
            staged = Staged(drafter, ngrams, ahead)
            found[name] = [
                stree_jax.generate(target, prompts, drafter=who, **options)
                for who in (drafter, staged)
            ]
        return found[name]

    found = {}
    return both


@pytest.mark.parametrize("name", RUNS)
def test_the_text_is_that_of_the_model_alone(runs, name):
    """Rules that ask how drafts were drawn see the same draws, and so gain the same."""
    alone, staged = runs(name)
    assert staged.tokens == alone.tokens
    assert staged.finish_reasons == alone.finish_reasons
    assert staged.target_calls.tolist() == alone.target_calls.tolist()
    assert staged.gained.tolist() == alone.gained.tolist()
    assert {"mss": 6}.get(name, 3) == len(staged.tokens)
    own, inner = staged.traffic[1], alone.traffic[1]
    assert own.stage == inner.stage == "drafter" and own.passes <= inner.passes


def test_tokens_say_who_they_come_from(runs):
    """Of each call the last token is the target's, unless the text ends before it."""
    for name in RUNS:
        for result, drafting in zip(runs(name), ({1}, {1, 3}), strict=True):
            rows = zip(result.origins, result.target_calls, result.tokens, strict=True)
            for origins, calls, tokens in rows:
                assert len(origins) == len(tokens)
                assert (origins == TARGET).sum() == calls - (origins[-1] != TARGET)
            found = set(np.concatenate(result.origins).tolist())
            assert found <= {TARGET} | drafting, name
            if name == "greedy":
                assert found == {TARGET} | drafting
    assert (DRAFTER, NGRAM) == (1, 3)


def test_a_text_without_an_end_within_a_draft_tells_tau(target, ngrams, prompts):
    """The target's share of the tokens is one in tau."""
    right = Staged(target, ngrams, 2)  # every draft is accepted whole
    options = dict(max_new_tokens=20, tree="chain:4", stop_tokens=())
    result = stree_jax.generate(target, prompts, drafter=right, **options)
    assert result.target_calls.tolist() == [4] * 3
    assert result.acceptance_length.tolist() == [5.0] * 3
    for origins in result.origins:
        assert np.flatnonzero(origins == TARGET).tolist() == [4, 9, 14, 19]


def test_a_static_trees_passes_are_its_levels(runs):
    """The text and the root in one, and each level but the last."""
    for name in RUNS:
        alone, staged = runs(name)
        tree, ahead, _ = RUNS[name]
        M, calls = resolve_tree(tree).depth, int(alone.target_calls.max())
        assert alone.traffic[0].passes == staged.traffic[0].passes == calls
        assert alone.traffic[1].passes == M * calls
        least = -(-M // (ahead + 1))
        assert least * calls <= staged.traffic[1].passes <= M * calls


def bytes_of(config, batch):
    """State without caches, and caches."""
    dtype = jnp.float32
    state = state_bytes(config, batch, 0, dtype)
    return state, state_bytes(config, batch, CAPACITY, dtype) - state


def weights_of(model):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))


def test_traffic_is_what_passes_read(runs, target, drafter, ngrams):
    alone, staged = runs("greedy")
    for result in (alone, staged):
        calls = int(result.target_calls.max())
        state, caches = bytes_of(target.config, 3)
        first, second, *more = result.traffic
        assert (first.stage, first.passes) == ("target", calls)
        assert first.weights == calls * weights_of(target)
        assert first.state == 2 * calls * state and first.caches == calls * caches
        assert first.total() == first.weights + first.state + first.caches
        assert first.total(caches=False) == first.weights + first.state
        state, caches = bytes_of(drafter.config, 3)
        passes = second.passes
        assert second.weights == passes * weights_of(drafter)
        assert second.state == (passes + calls) * state
        assert second.caches == passes * caches
        assert len(more) == (result is staged)
    (table,) = more
    inner = resolve_tree("A").inner
    assert table.stage == "n-gram" and table.passes == 2 * inner * passes
    assert table.state == table.caches == 0
    slots = [4 * (WAYS * c + 2 * 4 + 1) for c in (1, 2)]  # contexts, tokens, P, alpha
    assert table.weights == table.passes * sum(slots)


def test_a_tied_embedding_is_read_with_the_head(target):
    """One that is not is looked up by row, and does not count."""
    assert weights_read(target) == weights_of(target)
    embedding = target.params["embedding"]
    params = {**target.params, "lm_head": embedding[::-1]}
    config = replace(target.config, tie_embeddings=False)
    untied = target.replace(params=params, config=config)
    assert weights_read(untied) == weights_of(target)


def test_traffic_of_others(target, drafter, prompts):
    """Plain decoding and lookup read the target alone; auto may draft with a model."""
    short = dict(max_new_tokens=6)
    plain = stree_jax.generate(target, prompts, **short)
    lookup = stree_jax.generate(
        target, prompts, drafter="lookup", tree="chain:4", **short
    )
    for result in (plain, lookup):
        (only,) = result.traffic
        assert (only.stage, only.passes) == ("target", result.target_calls.max())
        assert only.weights == only.passes * weights_of(target)


def continued(target, past, drafter, more, **options):
    options = dict(max_new_tokens=NEW, tree="A") | options
    return stree_jax.generate(target, more, past=past, drafter=drafter, **options)


def test_a_past_goes_on(runs, target, drafter, ngrams, prompts):
    """A model's own, and one with its guesser: as if all were read anew."""
    alone, staged = runs("greedy")
    more, who = [[11, 12], [], [13]], Staged(drafter, ngrams, 2)
    text = [p + t + m for p, t, m in zip(prompts, alone.tokens, more, strict=True)]
    anew = continued(target, None, drafter, text)
    for result in (alone, staged):
        later = continued(target, result.past, who, more)
        assert later.tokens == anew.tokens
        assert later.gained.tolist() == anew.gained.tolist()


def test_a_model_alone_refuses_a_past_with_a_guesser(runs, target, drafter):
    _, staged = runs("greedy")
    with pytest.raises(ValueError, match="past: of another drafter") as caught:
        continued(target, staged.past, drafter, [[], [], []])
    assert "\n" not in str(caught.value)


def test_another_models_past_is_refused(runs, target, ngrams):
    _, staged = runs("greedy")
    other = Staged(tiny(2, layers=("mamba", "mlp")), ngrams, 2)
    with pytest.raises(ValueError, match="past: of another drafter"):
        continued(target, staged.past, other, [[], [], []])


@pytest.fixture(scope="module")
def three(drafter, ngrams):
    """A drafter, a smaller one that drafts for it, and n-grams that do for that."""
    small = tiny(2, layers=("mamba",))
    return Staged(drafter, Staged(small, ngrams, 2), 2)


def test_three_stages_draft_as_the_outermost_alone(
    runs, target, drafter, three, prompts
):
    alone, staged = runs("greedy")
    tree, _, options = RUNS["greedy"]
    result = stree_jax.generate(target, prompts, drafter=three, tree=tree, **options)
    assert result.tokens == alone.tokens
    assert result.gained.tolist() == alone.gained.tolist()
    names = [stage.stage for stage in result.traffic]
    assert names == ["target", "drafter", "inner drafter", "n-gram"]
    assert set(np.concatenate(result.origins).tolist()) <= {0, DRAFTER, NGRAM, STAGE}
    assert result.traffic[1].passes <= alone.traffic[1].passes
    more = [[11, 12], [], [13]]
    text = [p + t + m for p, t, m in zip(prompts, alone.tokens, more, strict=True)]
    anew = continued(target, None, drafter, text)
    later = continued(target, result.past, three, more)
    assert later.tokens == anew.tokens
    assert later.gained.tolist() == anew.gained.tolist()


def test_a_model_may_guess_for_a_model(target, drafter, three, prompts):
    """Without a guesser of its own; a past with it goes on, too."""
    small = Model(three.guesser.model.params, three.guesser.model.config)
    who, options = Staged(drafter, small, 1), dict(max_new_tokens=9, tree="chain:2")
    alone = stree_jax.generate(target, prompts, drafter=drafter, **options)
    first = stree_jax.generate(target, prompts, drafter=who, keep_past=True, **options)
    assert first.tokens == alone.tokens
    assert first.gained.tolist() == alone.gained.tolist()
    assert [stage.stage for stage in first.traffic][1:] == ["drafter", "inner drafter"]
    later = continued(target, first.past, who, [[], [], []], **options)
    text = [p + t for p, t in zip(prompts, first.tokens, strict=True)]
    assert later.tokens == stree_jax.generate(target, text, max_new_tokens=9).tokens


def test_beams_are_refused(target, drafter, ngrams):
    with pytest.raises(ValueError, match="tree: .*fixed tree") as caught:
        continued(target, None, Staged(drafter, ngrams), [[3]], tree="beam:2x2")
    assert "\n" not in str(caught.value)


def test_parts_that_do_not_fit_are_refused(target, drafter, ngrams):
    """Each part's vocabulary, and how many levels are guessed."""
    config = replace(drafter.config, num_tokens=REAL - 1)
    other = drafter.replace(config=config)
    few = ngrams.replace(unigram=ngrams.unigram[:-1])
    for who, match in [
        (Staged(other, ngrams), "drafter: its vocabulary"),
        (Staged(drafter, few), "n-grams: its vocabulary"),
        (Staged(drafter, Staged(other, ngrams)), "drafter: its vocabulary"),
        (Staged(drafter, ngrams, 0), "ahead: want 1..15"),
        (Staged(drafter, ngrams, 16), "ahead: want 1..15"),
        (Staged("somewhere", ngrams), "drafter: got a string"),
    ]:
        with pytest.raises(ValueError, match=match):
            continued(target, None, who, [[3]])


def test_one_node_is_plain_decoding(target, drafter, ngrams, prompts):
    plain = stree_jax.generate(target, prompts, max_new_tokens=6)
    who = Staged(drafter, ngrams, 2)
    result = continued(target, None, who, prompts, max_new_tokens=6, tree="chain:0")
    assert result.tokens == plain.tokens
    assert result.target_calls.tolist() == plain.target_calls.tolist()
    assert (np.concatenate(result.origins) == TARGET).all()
