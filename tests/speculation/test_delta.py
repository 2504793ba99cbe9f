"""Test models with the gated delta rule (Qwen3-Next, Qwen3.5) everywhere in the
decoder: the output of every drafter and tree equals plain decoding."""

import jax
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.models.mixers import delta
from tests.speculation.auto import times
from tests.support.drafting import drafters_of, random_prompts
from tests.support.tiny import REAL, tiny, tiny_delta

NEW = 24
LENGTHS = [1, 5, 70, 33]  # prompt lengths; the longest takes two chunks
AUTO, WIDE = "auto:1,4,8", "parents:0,0,1,1,2,3"
ROWS = 8  # of the large batch


@pytest.fixture(scope="module")
def target():
    return tiny_delta(1)


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def drafters(target, plain, prompts):
    texts = [a + b for a, b in zip(prompts, plain.tokens, strict=True)]
    others = {"mtp": "mtp", "mamba": tiny(2, layers=("mamba", "mamba"))}
    return drafters_of(target, texts, noise=0.03) | others


SHORT = [
    ("mtp", "E"),
    ("mtp", AUTO),
    ("model", "A"),
    ("model", "beam:2x3"),
    ("lookup", AUTO),
]
LONG = [
    ("lookup", "chain:4"),
    ("mtp", "chain:3"),
    ("mtp", WIDE),
    ("model", "chain:3"),
    ("model", AUTO),
    ("mamba", "A"),
    ("heads", "chain:2"),
    ("heads", AUTO),
    ("ngrams", "A"),
    ("staged", "A"),
    ("staged", AUTO),
]


def with_times(tree):
    """Returns options of a tree. Times of "auto" make draft tokens worth their cost."""
    fast = dict(times=times()) if tree == AUTO else {}
    return dict(tree=tree) | fast


@pytest.mark.parametrize(("name", "tree"), SHORT)
def test_text_is_identical_to_plain_decoding(write, drafters, plain, name, tree):
    """Greedy. Draft tokens are accepted."""
    result = write(drafter=drafters[name], **with_times(tree))
    assert result.tokens == plain.tokens
    assert result.target_calls.sum() < plain.target_calls.sum()


@pytest.mark.parametrize(("name", "tree"), LONG)
def test_text_of_more_drafters_is_identical(write, drafters, plain, name, tree):
    """Greedy, and sampled with the default rule."""
    drafting = dict(drafter=drafters[name], **with_times(tree))
    result = write(**drafting)
    assert result.tokens == plain.tokens
    if name != "mamba":
        assert result.target_calls.sum() < plain.target_calls.sum()
    sampling = [Sampling(t, seed=4) for t in (0, 0.5, 1.0, 1.5)]
    want = write(sampling=sampling).tokens
    assert write(sampling=sampling, **drafting).tokens == want


@pytest.mark.parametrize("name", ["mtp", "model"])
def test_rules_that_test_probabilities_run(write, drafters, plain, name):
    """Greedy rows are identical to plain decoding under every rule."""
    for rule in ("leviathan", "mss", "recursive"):
        tree = "chain:3" if rule == "leviathan" else "A"
        sampling = [Sampling(0.0), *(Sampling(0.8, seed=seed) for seed in (1, 2, 3))]
        result = write(drafter=drafters[name], tree=tree, rule=rule, sampling=sampling)
        assert result.tokens[0] == plain.tokens[0]
        assert result.lengths.tolist() == [NEW] * len(LENGTHS)


def test_a_delta_model_drafts_for_mamba(prompts):
    """Its levels are computed one by one, from the records of the levels above."""
    target = tiny(1)
    options = dict(max_new_tokens=NEW, stop_tokens=())
    want = stree_jax.generate(target, prompts, drafter=None, **options)
    for tree in ("A", AUTO):
        drafting = dict(drafter=tiny_delta(1), **with_times(tree))
        assert stree_jax.generate(target, prompts, **drafting, **options).tokens == (
            want.tokens
        )


def test_levels_one_by_one_draft_the_likeliest_chain(target, prompts):
    """If the target drafts for itself, a whole path of every tree is accepted. A
    mistake in the passes over single levels would cost draft tokens, not exactness."""
    options = dict(max_new_tokens=NEW, stop_tokens=(), drafter=target, tree="A")
    result = stree_jax.generate(target, prompts, **options)
    assert result.target_calls.tolist() == [-(-NEW // 5)] * len(LENGTHS)


@pytest.mark.parametrize(
    ("name", "tree"), [("mtp", "E"), ("mtp", AUTO), ("lookup", AUTO)]
)
def test_rows_of_a_large_batch_are_independent(target, drafters, name, tree):
    rng = np.random.default_rng(5)
    asked = [rng.integers(8, REAL, 1 + 4 * row).tolist() for row in range(ROWS)]
    limits = [NEW - row for row in range(ROWS)]
    options = dict(stop_tokens=(), capacity=256)
    drafting = dict(drafter=drafters[name], **with_times(tree))
    together = stree_jax.generate(
        target, asked, max_new_tokens=limits, **drafting, **options
    )
    plain = stree_jax.generate(
        target, asked, max_new_tokens=limits, drafter=None, **options
    )
    assert together.tokens == plain.tokens
    alone = stree_jax.generate(
        target, asked[-1:], max_new_tokens=limits[-1], **drafting, **options
    )
    assert alone.tokens == together.tokens[-1:]


def test_texts_end_at_stops_in_the_middle_of_a_path(write, plain):
    places = 3, 6, 9, 12
    stops = [[row[i]] for row, i in zip(plain.tokens, places, strict=True)]
    want = write(stop_tokens=stops)
    assert min(want.lengths) < NEW
    for tree in ("E", AUTO):
        result = write(stop_tokens=stops, drafter="mtp", **with_times(tree))
        assert result.tokens == want.tokens
        assert result.finish_reasons == want.finish_reasons


@pytest.mark.parametrize("first", ["mtp", "lookup", None])
def test_a_conversation_can_continue(target, prompts, first):
    """From a state that the MTP layers have observed, and from others."""
    shape = {} if first is None else with_times(AUTO)
    options = dict(max_new_tokens=9, stop_tokens=(), keep_past=True)
    one = stree_jax.generate(target, prompts, drafter=first, **shape, **options)
    more = [[5, 6], [], list(range(30)), [3]]
    whole = [a + b + c for a, b, c in zip(prompts, one.tokens, more, strict=True)]
    want = stree_jax.generate(target, whole, drafter=None, **options).tokens
    for drafter, tree in (("mtp", "E"), ("mtp", AUTO), ("lookup", AUTO)):
        drafting = dict(drafter=drafter, **with_times(tree))
        two = stree_jax.generate(target, more, past=one.past, **drafting, **options)
        assert two.tokens == want


def test_several_samples_share_a_prompt(write):
    options = dict(n=2, sampling=Sampling(temperature=0.8, top_p=0.9, seed=3))
    assert write(drafter="mtp", tree="E", **options).tokens == write(**options).tokens


def test_a_long_history_and_steps_without_drafts_between(target):
    """After 2,000 tokens. Trees of several sizes and single tokens take turns: each
    step replays the path that the one before it accepted."""
    rng = np.random.default_rng(8)
    prompt = np.tile(rng.integers(8, REAL, 100), 20).tolist()
    options = dict(stop_tokens=(), max_new_tokens=100)
    want = stree_jax.generate(target, [prompt], drafter=None, **options).tokens
    uneven = times([1.0, 1.5, 1.8], 0.05, 0.05)
    drafting = dict(drafter="mtp", tree=AUTO, times=uneven)
    result = stree_jax.generate(target, [prompt], **drafting, **options)
    print(result.calls_by_size, result.tree_sizes)
    assert result.tokens == want
    assert (result.calls_by_size > 0).all()


def test_a_lost_replay_changes_the_text(write, plain, monkeypatch):
    """If the last token of each accepted path were missing in the delta states, the
    tests above would fail."""
    right = delta.replayed

    def short(pending):
        past = right(pending)
        return past._replace(length=past.length - 1)

    monkeypatch.setattr(delta, "replayed", short)
    jax.clear_caches()
    result = write(drafter="mtp", tree="E")
    monkeypatch.undo()
    jax.clear_caches()
    assert result.tokens != plain.tokens
