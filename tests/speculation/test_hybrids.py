"""Test models of newer hybrids everywhere in the decoder: the output of
every drafter and tree equals plain decoding."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from tests.speculation.auto import times
from tests.support.drafting import drafters_of, random_prompts
from tests.support.tiny import (
    tiny_attention,
    tiny_gemma4,
    tiny_hybrid,
    tiny_lara,
    tiny_mamba1,
    tiny_zaya,
)

NEW, LENGTHS = 24, [1, 5, 70, 33]
AUTO = "auto:1,4,8"
CONVS = ("short_conv", "mlp", "attention", "moe", "short_conv", "mlp")
AFTER = ("delta", "mlp", "after:attention", "after:mlp", "both:delta", "mlp")
LIGHTNING = (*("stream:lightning", "stream:moe") * 2, "stream:attention", "stream:moe")
WINDOWS = ("short_conv", "mlp", "both:near", "both:mlp", "both:attention", "mlp")
NOPE = ("attention", "mlp", "nope", "mlp", "near", "moe")
WHOLE = ("after:near_whole", "after:mlp", "after:far", "after:mlp")
GROWN = ("grown", "moe", "grown", "mlp")
MODELS = {
    "lfm2": partial(tiny_hybrid, 1, CONVS),
    "lfm3": partial(tiny_hybrid, 1, WINDOWS),
    "olmo": partial(tiny_hybrid, 1, AFTER, qk_norm_whole=True),
    "minimax": partial(tiny_hybrid, 1, LIGHTNING),
    "mamba1": partial(tiny_mamba1, 1),
    "smollm3": partial(tiny_attention, 1, NOPE),
    "olmo3": partial(tiny_attention, 1, WHOLE),
    "ministral3": partial(tiny_attention, 1, GROWN),
    "lara": partial(tiny_lara, 1),
    "gemma4": partial(tiny_gemma4, 1),
    "zaya": partial(tiny_zaya, 1),
}
CASES = [
    ("model", "A"),
    ("model", AUTO),
    ("model", "beam:2x3"),
    ("lookup", "chain:4"),
    ("lookup", AUTO),
    ("heads", AUTO),
    ("staged", "A"),
]


@pytest.fixture(scope="module", params=MODELS)
def target(request):
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def drafters(target, plain, prompts):
    texts = [a + b for a, b in zip(prompts, plain.tokens, strict=True)]
    return drafters_of(target, texts, noise=0.03)


@pytest.mark.parametrize(("name", "tree"), CASES)
def test_text_is_identical_to_plain_decoding(write, drafters, plain, name, tree):
    """Greedy, and sampled with the default rule."""
    fast = dict(times=times()) if tree == AUTO else {}
    drafting = dict(drafter=drafters[name], tree=tree) | fast
    assert write(**drafting).tokens == plain.tokens
    sampling = [Sampling(t, seed=4) for t in (0, 0.5, 1.0, 1.5)]
    want = write(sampling=sampling).tokens
    assert write(sampling=sampling, **drafting).tokens == want


def test_a_whole_path_is_accepted_of_the_target_itself(target, prompts):
    options = dict(max_new_tokens=NEW, stop_tokens=(), drafter=target, tree="A")
    result = stree_jax.generate(target, prompts, **options)
    assert result.target_calls.tolist() == [-(-NEW // 5)] * len(LENGTHS)


def test_scores_do_not_depend_on_how_the_text_is_read(target, prompts):
    """Chunks, and a tree below a text."""
    text = np.asarray(prompts[2], np.int32)
    whole = stree_jax.score(target, text[None])[0]
    chain = [-1, *range(len(text) - 61)]
    tree = stree_jax.score_tree(target, text[:60], text[60:], chain)
    np.testing.assert_allclose(tree, whole[60:], rtol=0, atol=1e-4)
    assert np.isfinite(whole).all() and whole.dtype == jnp.float32
