"""Test n-gram tables: their probabilities, whole trees, and texts that they draft
for.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.drafters import NGrams
from stree_jax.sampling.distribution import Distribution
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import sampling_rows
from stree_jax.speculation.accept import resolve_rule
from stree_jax.speculation.draft import NGRAM
from stree_jax.speculation.drafter import Update
from stree_jax.speculation.drafters.ngrams import (
    EMPTY,
    candidates,
    likeliest,
    log_prob,
)
from stree_jax.speculation.tree import resolve_tree
from stree_jax.training.ngrams import count_grams, katz
from tests.speculation.steps import prompts_of
from tests.support.reference import depth_of, path_to
from tests.support.tiny import REAL, perturbed, tiny

V, ORDER = 24, 3
UNEVEN = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7]


def table(num_tokens, keep):
    """Returns n-grams of random text, in which some tokens and pairs are more
    frequent."""
    rng = np.random.default_rng(1)
    p = 1 / np.arange(1, num_tokens + 1)
    text = rng.choice(num_tokens, (4, 300), p=p / p.sum())
    text[:, 1::2] = (5 * text[:, ::2] + text[:, 1::2] // 4) % num_tokens
    grams = count_grams(text.astype(np.int32), ORDER, num_tokens)
    return katz(grams, num_tokens, slots=512, keep=keep)


@pytest.fixture(scope="module")
def whole():
    """Returns n-grams that keep all tokens of each context."""
    return table(V, V)


def contexts(count=200, begin=True):
    """Returns random contexts [H, 2], some of which begin before the text."""
    rng = np.random.default_rng(2)
    found = rng.integers(0, V, (count, 2), np.int32)
    if begin:
        found[::5, 0] = EMPTY
        found[0] = EMPTY
    return jnp.asarray(found)


def all_log_probs(ngrams, contexts):
    """Returns log probabilities [..., V] after contexts [..., n - 1]."""
    tokens = np.arange(ngrams.num_tokens, dtype=np.int32)
    asked = jnp.repeat(contexts[..., None, :], len(tokens), axis=-2)
    tokens = jnp.broadcast_to(jnp.asarray(tokens), asked.shape[:-1])
    return np.asarray(jax.jit(log_prob)(ngrams, asked, tokens))


@pytest.mark.parametrize("keep", [2, V])
def test_candidates_have_the_probabilities_of_the_table(whole, keep):
    ngrams = whole if keep == V else table(V, keep)
    tokens, values = map(np.asarray, jax.jit(candidates)(ngrams, contexts()))
    assert tokens.shape == values.shape == (200, ORDER * keep)
    everything = all_log_probs(ngrams, contexts())
    counted = 0
    for h in range(len(tokens)):
        there = values[h] > -np.inf
        own = tokens[h, there]
        assert len(set(own.tolist())) == len(own) and (own >= 0).all()
        np.testing.assert_allclose(values[h, there], everything[h, own], rtol=1e-6)
        assert set(np.asarray(ngrams.common).tolist()) <= set(tokens[h].tolist())
        if keep == V:
            assert sorted(own) == sorted(np.flatnonzero(everything[h] > -np.inf))
            best = everything[h].max()
            assert everything[h, tokens[h, values[h].argmax()]] == best
        counted += not there.all()
    assert counted, "no token stood twice, and nothing is proved of those"


def test_contexts_before_the_text_are_shortened(whole):
    """A context that begins before the text equals the shorter context."""
    asked = contexts()
    bigrams = whole.replace(tables=whole.tables[:1])
    begun = np.flatnonzero(np.asarray(asked[:, 0]) == EMPTY)[1:]
    found = all_log_probs(whole, asked[begun])
    np.testing.assert_array_equal(found, all_log_probs(bigrams, asked[begun, 1:]))
    nothing = all_log_probs(whole, asked[:1])
    np.testing.assert_array_equal(nothing[0], np.asarray(whole.unigram))
    assert not np.array_equal(found[0], nothing[0])


def test_the_likeliest_tokens_match_a_full_search(whole):
    """Also with the target's noise and another temperature."""
    asked = contexts(60).reshape(3, 20, 2)
    noise = jax.random.gumbel(jax.random.key(1), (3, 1, V), jnp.float32)
    scale = jnp.asarray([1.0, 0.5, 2.0], jnp.float32)[:, None, None]
    everything = all_log_probs(whole, asked)
    four = jax.jit(lambda *args: likeliest(*args[:2], 4, *args[2:]))
    for drawn in (None, noise):
        worth = everything * np.asarray(scale)
        worth = worth if drawn is None else worth + np.asarray(drawn)
        tokens = np.asarray(four(whole, asked, scale, drawn))
        assert tokens.shape == (3, 20, 4)
        found = np.take_along_axis(worth, tokens, axis=-1)
        best = np.sort(worth, axis=-1)[..., :-5:-1]
        np.testing.assert_allclose(found, best, rtol=1e-5, atol=1e-5)
        assert all(len(set(t)) == 4 for t in tokens.reshape(-1, 4).tolist())


def test_more_children_than_candidates(whole):
    """The result still has valid tokens."""
    few = NGrams.of(whole.unigram, (), keep=2)
    scale = jnp.ones((1, 1, 1), jnp.float32)
    tokens = likeliest(few, jnp.zeros((1, 9, 0), jnp.int32), 7, scale, None)
    assert tokens.shape == (1, 9, 7)
    assert tokens[..., :2].tolist() == [[few.common.tolist()] * 9]
    assert int(tokens.min()) >= 0 and int(tokens.max()) < V


@pytest.mark.parametrize("order", [2, 3, 5])
def test_the_kept_tokens_are_the_end_of_the_text(order):
    """Fails if the state misses the last accepted token, or tokens before it."""
    tables = (None,) * (order - 1)  # unused here
    ngrams = NGrams(jnp.zeros((V,)), jnp.zeros((1,), jnp.int32), tables)
    c, commit = order - 1, jax.jit(ngrams.commit)
    texts = [[1], [2, 3], [4, 5, 6, 7, 8], [10, 11, 12, 13]]
    state = ngrams.init(prompts_of(texts, 4), None)
    rng = np.random.default_rng(3)
    for lengths in ([0, 0, 0, 0], [1, 4, 0, 2], [3, 0, 1, 4], [4, 1, 2, 0]):
        for text, tail in zip(texts, np.asarray(state.tokens).tolist(), strict=True):
            assert tail == ([EMPTY] * c + text)[-c:]
        update = rng.integers(0, V, (4, 4), np.int32)
        texts = [
            text + row[:n].tolist()
            for text, row, n in zip(texts, update, lengths, strict=True)
        ]
        told = Update(
            jnp.asarray(update), jnp.asarray(lengths, jnp.int32), jnp.zeros(())
        )
        state = commit(state, told)


def distribution(rows, sampling=None):
    """Returns the distribution from which tokens below the root are chosen."""
    unused = jnp.zeros((rows, 1), jnp.int32)
    requests = Requests(unused[:, 0], None, unused, None, sampling)
    return Distribution(requests, 3 + unused[:, 0], None, V)


TREES = [UNEVEN, "chain:1"]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("tree", TREES)
def test_trees_hold_the_likeliest_tokens(whole, tree, sampled):
    """Each node's children are the best after its path, also with noise."""
    tree, texts = resolve_tree(tree), [[5], [1, 2], [3, 4, 5, 6]]
    whole = whole.replace(temperature=0.7)
    rows = sampling_rows([Sampling(t) for t in (0.5, 2.0, 0.0)]) if sampled else None
    dist, rule = distribution(3, rows), resolve_rule("naive/coupled", tree)
    root = jnp.asarray([text[-1] for text in texts], jnp.int32)
    state = whole.init(prompts_of(texts, tree.depth + 1), None)
    draft, after = jax.jit(NGrams.propose, static_argnames="rule")(
        whole, state, root, tree, dist, rule=rule
    )
    chex.assert_trees_all_equal(after, state)
    tokens, parents = np.asarray(draft.tokens), np.asarray(tree.parents).tolist()
    assert draft.q is None and tokens[:, 0].tolist() == root.tolist()
    assert draft.layout.parents.tolist() == [parents] * 3
    assert draft.origin.tolist() == [[0] + [NGRAM] * (tree.size - 1)] * 3
    depth = depth_of(parents)
    scale = (0.7 / 0.5, 0.7 / 2.0, 1.0) if sampled else (1.0,) * 3
    for b, text in enumerate(texts):
        for t in set(parents) - {-1}:
            above = text[:-1] + [int(tokens[b, s]) for s in path_to(parents, t)]
            context = jnp.asarray([([EMPTY] * ORDER + above)[1 - ORDER :]], jnp.int32)
            worth = all_log_probs(whole, context)[0] * scale[b]
            if sampled:
                worth = worth + np.asarray(dist.noise(jnp.int32(depth[t])))[b]
            children = tokens[b, [s for s in range(tree.size) if parents[s] == t]]
            best = np.sort(worth)[::-1][: len(children)]
            np.testing.assert_allclose(worth[children], best, rtol=1e-5, atol=1e-5)
            assert len(set(children.tolist())) == len(children)


NEW = 24


@pytest.fixture(scope="module")
def target():
    """Returns a model that soon repeats itself, as small models do."""
    model = tiny(1, layers=("mamba", "attention"))
    return model.replace(params=perturbed(model.params, 0.3, 3))


@pytest.fixture(scope="module")
def drafter(target, prompts):
    """Returns n-grams counted in the target's texts, which are right now and then."""
    texts = stree_jax.generate(
        target, prompts, max_new_tokens=60, stop_tokens=(), drafter=None
    )
    return katz(count_grams(np.array(texts.tokens), 3, REAL), REAL, slots=512, keep=8)


SETTINGS = {
    "greedy": dict(),
    "sampled": dict(
        sampling=[Sampling(0.5), Sampling(1.0, top_p=0.9), Sampling(0.0)], n=2
    ),
    "top_k": dict(sampling=Sampling(0.7, repetition_penalty=1.1), rule="naive"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_text_is_identical_to_plain_decoding(target, drafter, prompts, name):
    """Also with the default rule, and with ends in the middle of an accepted path."""
    options = dict(max_new_tokens=[NEW, 5, NEW], **SETTINGS[name])
    plain = stree_jax.generate(
        target,
        prompts,
        **{k: v for k, v in options.items() if k != "rule"},
        drafter=None,
    )
    result = stree_jax.generate(target, prompts, drafter=drafter, tree="A", **options)
    assert result.tokens == plain.tokens
    assert result.finish_reasons == plain.finish_reasons
    assert [stage.stage for stage in result.traffic] == ["target"]
    origins = np.concatenate(result.origins)
    assert set(origins.tolist()) == {0, NGRAM}
    if name == "greedy":
        assert result.target_calls.sum() < 0.7 * plain.target_calls.sum()


def test_the_default_tree_has_a_fixed_shape(target, drafter, prompts):
    plain = stree_jax.generate(target, prompts, max_new_tokens=9, drafter=None)
    result = stree_jax.generate(target, prompts, max_new_tokens=9, drafter=drafter)
    assert result.tokens == plain.tokens and result.tree_sizes == (16,)


def test_one_node_is_plain_decoding(target, drafter, prompts):
    plain = stree_jax.generate(target, prompts, max_new_tokens=9, drafter=None)
    result = stree_jax.generate(
        target, prompts, max_new_tokens=9, drafter=drafter, tree="chain:0"
    )
    assert result.tokens == plain.tokens
    assert result.target_calls.tolist() == plain.target_calls.tolist()


def test_a_conversation_can_continue(target, drafter, prompts):
    """The n-grams use tokens from before the continuation, with any cached state."""
    options = dict(max_new_tokens=9, drafter=drafter, tree="A", stop_tokens=())
    first = stree_jax.generate(target, prompts, keep_past=True, **options)
    more = [[11, 12], [], [13]]
    later = stree_jax.generate(target, more, past=first.past, **options)
    text = [p + t + m for p, t, m in zip(prompts, first.tokens, more, strict=True)]
    anew = stree_jax.generate(target, text, **options)
    assert later.tokens == anew.tokens
    assert later.gained.tolist() == anew.gained.tolist()


def refused(target, drafter, prompts, match, **options):
    with pytest.raises(ValueError, match=match) as caught:
        stree_jax.generate(
            target, prompts, max_new_tokens=2, drafter=drafter, **options
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rule", ["mss", "recursive", "leviathan", "naive/iid"])
def test_rules_that_need_draft_probabilities_are_refused(
    target, drafter, prompts, rule
):
    for sampling in (None, Sampling(1.0)):
        options = dict(tree="chain:3", rule=rule, sampling=sampling)
        refused(target, drafter, prompts, "rule: .*naive/coupled", **options)


@pytest.mark.parametrize("tree", ["auto", "auto:1,6", "beam:2x2"])
def test_trees_that_are_not_fixed_are_refused(target, drafter, prompts, tree):
    refused(target, drafter, prompts, "tree: .*fixed tree", tree=tree)


@pytest.mark.parametrize("num_tokens", [V, REAL + 1])
def test_another_vocabulary_causes_a_warning(target, prompts, num_tokens):
    """The text is still that of plain decoding."""
    other = NGrams.of(jnp.zeros((num_tokens,)), (), keep=2)
    message = f"n-grams: its vocabulary has {num_tokens} tokens, the target's {REAL}"
    with pytest.warns(UserWarning, match=message):
        result = stree_jax.generate(
            target, prompts, max_new_tokens=6, drafter=other, tree="A"
        )
    plain = stree_jax.generate(target, prompts, max_new_tokens=6, drafter=None)
    assert result.tokens == plain.tokens
