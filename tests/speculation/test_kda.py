"""Test models with Kimi Delta Attention and latent attention (Kimi-Linear, Ling-3)
everywhere in the decoder: the output of every drafter and tree equals plain
decoding."""

import jax
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.models.mixers import delta, mla
from tests.speculation.auto import times
from tests.support.drafting import drafters_of, random_prompts
from tests.support.tiny import tiny, tiny_kda

NEW = 24
LENGTHS = [1, 70, 33]  # prompt lengths; the longest takes two chunks
AUTO = "auto:1,4,8"


@pytest.fixture(scope="module")
def target():
    return tiny_kda(1)


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def drafters(target, plain, prompts):
    texts = [a + b for a, b in zip(prompts, plain.tokens, strict=True)]
    others = {"mamba": tiny(2, layers=("mamba", "mamba"))}
    return drafters_of(target, texts, noise=0.02) | others


PAIRS = [
    ("model", "A"),
    ("model", "beam:2x3"),
    ("model", AUTO),
    ("ngrams", "A"),
    ("lookup", AUTO),
    ("lookup", "chain:4"),
    ("mamba", "A"),
    ("heads", AUTO),
    ("staged", AUTO),
]


@pytest.mark.parametrize(("name", "tree"), PAIRS)
def test_text_is_identical_to_plain_decoding(write, drafters, plain, name, tree):
    """Greedy, and sampled with the default rule."""
    fast = dict(times=times()) if tree == AUTO else {}
    drafting = dict(drafter=drafters[name], tree=tree, **fast)
    result = write(**drafting)
    assert result.tokens == plain.tokens
    if name in ("model", "ngrams", "staged"):
        assert result.target_calls.sum() < plain.target_calls.sum()
    sampling = [Sampling(t, seed=4) for t in (0, 0.7, 1.5)]
    want = write(sampling=sampling).tokens
    assert write(sampling=sampling, **drafting).tokens == want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_levels_one_by_one_draft_the_likeliest_chain(target, prompts, dtype):
    """If the target drafts for itself, a whole path of every tree is accepted. A
    mistake in the passes over single levels would cost draft tokens, not exactness."""
    cast = lambda x: x.astype(dtype) if x.ndim > 1 else x  # noqa: E731
    own = target.replace(params=jax.tree.map(cast, target.params))
    options = dict(max_new_tokens=NEW, stop_tokens=(), drafter=own, tree="A")
    result = stree_jax.generate(own, prompts, **options)
    assert result.target_calls.tolist() == [-(-NEW // 5)] * len(LENGTHS)


def test_a_conversation_can_continue(target, prompts, drafters):
    options = dict(max_new_tokens=9, stop_tokens=(), keep_past=True)
    drafting = dict(drafter=drafters["model"], tree="A")
    one = stree_jax.generate(target, prompts, **drafting, **options)
    more = [[5, 6], [], list(range(30))]
    whole = [a + b + c for a, b, c in zip(prompts, one.tokens, more, strict=True)]
    want = stree_jax.generate(target, whole, drafter=None, **options).tokens
    two = stree_jax.generate(target, more, past=one.past, **drafting, **options)
    assert two.tokens == want


@pytest.mark.parametrize("mixer", ["delta", "latent"])
def test_a_lost_replay_changes_the_text(write, drafters, plain, monkeypatch, mixer):
    """If the last token of each accepted path were missing in the states, or another
    one in the cache, the tests above would fail."""
    right, append = delta.replayed, mla.append_rows

    def short(pending):
        past = right(pending)
        return past._replace(length=past.length - 1)

    def wrong_rows(cache, rows, path, start):
        return append(cache, rows, path * 0, start)

    if mixer == "delta":
        monkeypatch.setattr(delta, "replayed", short)
        monkeypatch.setenv("STREE_JAX_CPU_KERNELS", "off")
    else:
        monkeypatch.setattr(mla, "append_rows", wrong_rows)
    jax.clear_caches()
    result = write(drafter=drafters["model"], tree="A")
    monkeypatch.undo()
    jax.clear_caches()
    assert result.tokens != plain.tokens
