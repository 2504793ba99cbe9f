"""Test block drafters in the decoder: the output of every tree equals plain
decoding, and drafts follow the scores of pairs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.models.drafters.dflash import add_context, empty_context, run_block
from stree_jax.models.drafters.dflash_pairs import no_memory, pair_scores
from stree_jax.models.drafters.heads import head_of
from stree_jax.speculation.accept import NAIVE
from stree_jax.speculation.adaptive.best_first import best_first
from stree_jax.speculation.adaptive.calibration import PRIOR, model_kind
from stree_jax.speculation.adaptive.search import Query
from stree_jax.speculation.drafter import Prompts, Update
from stree_jax.speculation.drafters.dflash import ByPairs, DFlashSource
from stree_jax.speculation.drafters.lookup import History
from stree_jax.speculation.tree import chain
from stree_jax.verify.agreement import text_distribution
from tests.speculation.auto import times
from tests.support.dflash import KINDS, follower, random_dflash, with_bigrams
from tests.support.drafting import random_prompts
from tests.support.tiny import tiny

NEW, LENGTHS = 24, [1, 5, 70, 33]
AUTO = "auto:1,4,8"
TREES = ["chain:3", "A", AUTO]
RULES = [("chain:3", "leviathan"), ("A", "mss"), ("A", "recursive")]


@pytest.fixture(scope="module")
def target():
    return tiny(1)


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(LENGTHS)


def drafting(drafter, tree):
    return dict(drafter=drafter, tree=tree) | (
        dict(times=times()) if tree == AUTO else {}
    )


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_text_equals_plain_decoding(kind, tree, target, write, plain):
    """Greedy, and sampled with the default rule."""
    options = drafting(random_dflash(target, **KINDS[kind]), tree)
    assert write(**options).tokens == plain.tokens
    sampling = [Sampling(t, seed=4) for t in (0, 0.5, 1.0, 1.5)]
    assert write(sampling=sampling, **options).tokens == write(sampling=sampling).tokens


@pytest.mark.parametrize("tree", ["chain:4", "A", AUTO])
def test_known_pairs_are_accepted(tree, target, prompts, write, plain):
    texts = [a + b for a, b in zip(prompts, plain.tokens, strict=True)]
    drafter = random_dflash(target, pairs="vanilla", rank=8)
    out = write(**drafting(with_bigrams(drafter, texts), tree))
    assert out.tokens == plain.tokens
    assert out.acceptance_length.mean() > 1.3


@pytest.mark.parametrize("from_root", [False, True])
def test_a_follower_accepts_whole_blocks(from_root):
    """In a language in which each token is followed by the next larger one. A draft one
    slot off would never be accepted."""
    model, drafter = follower(from_root)
    drafts = 4 + from_root
    out = stree_jax.generate(
        *(model, [[2, 3, 4]]),
        **dict(max_new_tokens=2 * drafts + 2, stop_tokens=()),
        **drafting(drafter, f"chain:{drafts}"),
    )
    assert out.tokens == [list(range(5, 7 + 2 * drafts))]
    assert out.target_calls.tolist() == [2]


@pytest.mark.parametrize("kind", KINDS)
def test_context_in_parts_equals_context_at_once(kind, target):
    drafter = random_dflash(target, **KINDS[kind])
    width, count = target.config.d_model, len(drafter.config.boundaries)
    rng = np.random.default_rng(0)
    taps = jnp.asarray(rng.normal(size=(count, 2, 11, width)), jnp.float32)
    root, output = jnp.asarray([3, 9], jnp.int32), head_of(target)

    def after(parts):
        state, done = empty_context(drafter, 2, 32, jnp.float32), np.zeros(2, int)
        for part in parts:  # tokens of each row
            most = max(part)
            own = [
                jnp.stack([jnp.roll(z[b], -int(done[b]), axis=0) for b in range(2)])
                for z in taps
            ]
            counted = jnp.asarray(part, jnp.int32)
            state = add_context(
                drafter, state, tuple(z[:, :most] for z in own), counted
            )
            done += part
        return run_block(drafter, output, state, root, drafter.config.slots)

    whole = after([(11, 7)])
    parts = after([(3, 1), (0, 2), (5, 4), (3, 0)])
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-5)
    assert np.abs(np.asarray(after([(10, 7)]) - whole)[0]).max() > 1e-3


@pytest.mark.parametrize(("tree", "rule"), RULES)
def test_other_rules_run_and_repeat(tree, rule, target, write):
    """Their distribution is tested with all other drafters."""
    options = drafting(random_dflash(target, **KINDS["dspark"]), tree)
    sampling = Sampling(1.0, seed=3)
    one, other = (write(sampling=sampling, rule=rule, **options) for _ in range(2))
    assert one.tokens == other.tokens
    greedy = write(rule=rule, **options)
    assert greedy.tokens == write().tokens


def test_reduced_vocabularies_draft_only_their_tokens(target, write, plain):
    drafter = random_dflash(target, **KINDS["dspark"], head_rows=12)
    allowed = set(np.asarray(drafter.ids).tolist())
    out = write(**drafting(drafter, "A"))
    assert out.tokens == plain.tokens
    drafted = {
        token
        for row, origin in zip(out.tokens, out.origins, strict=True)
        for token, source in zip(row, origin, strict=True)
        if source == 1
    }
    assert drafted <= allowed


def test_a_continued_text_equals_one_that_is_written_at_once(target, prompts):
    drafter = random_dflash(target, **KINDS["dspark"])
    options = dict(stop_tokens=(), **drafting(drafter, "A"))
    first = stree_jax.generate(
        target, prompts, max_new_tokens=9, keep_past=True, **options
    )
    more = stree_jax.generate(
        target, [[]] * len(prompts), max_new_tokens=9, past=first.past, **options
    )
    plain = stree_jax.generate(
        target, prompts, max_new_tokens=18, stop_tokens=(), drafter=None
    )
    whole = [a + b for a, b in zip(first.tokens, more.tokens, strict=True)]
    assert whole == plain.tokens


BAD = {
    "taps": (dict(boundaries=(0, 9)), "after layer 9, but the target has"),
    "width": (dict(target_width=16), "states 16 wide, but the target's are 32"),
    "narrow": (dict(d_model=16), "is 16 wide and has no embedding"),
    "vocabulary": (dict(vocab_size=40, mask_token=3), "has 40 tokens, but the target"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_drafter_of_another_target_is_refused(name, target, prompts):
    options, message = BAD[name]
    drafter = random_dflash(target, **options)
    with pytest.raises(ValueError, match=message):
        stree_jax.generate(target, prompts, max_new_tokens=2, drafter=drafter)


def test_trees_that_do_not_fit_are_refused(target, prompts):
    drafter = random_dflash(target)
    write = partial(
        stree_jax.generate, target, prompts, max_new_tokens=2, drafter=drafter
    )
    with pytest.raises(ValueError, match="7 levels, but the drafter's block has 4"):
        write(tree="chain:7")
    with pytest.raises(ValueError, match="beams need a draft model"):
        write(tree="beam:2x3")
    with pytest.raises(ValueError, match="20 children"):
        write(tree=[-1] + [0] * 20)


def test_memories_follow_the_path(target):
    """The recurrent Markov head, path by path."""
    drafter = random_dflash(target, **KINDS["dspark-rnn"])
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(1, target.config.d_model)), jnp.float32)
    following = jnp.asarray([[1, 2, 3]], jnp.int32)
    both = jnp.asarray([[4, 5]], jnp.int32)
    start = no_memory(drafter, (1, 2))
    together, after = pair_scores(drafter, hidden, both, following, start)
    for i in range(2):
        alone, own = pair_scores(
            drafter, hidden, both[:, i : i + 1], following, start[:, :1]
        )
        np.testing.assert_allclose(alone[:, 0], together[:, i], atol=1e-6)
        np.testing.assert_allclose(own[:, 0], after[:, i], atol=1e-6)
    again, _ = pair_scores(drafter, hidden, both, following, after)
    assert jnp.abs(again - together).max() > 1e-3
    assert jax.tree.leaves(after)[0].shape == (1, 2, 8)


@pytest.mark.parametrize("kind", ["dspark", "dspark-rnn", "dspark-gated", "dflash2"])
def test_trees_are_the_best_of_all_paths(kind, target):
    """The value of the best tree, level by level, equals that of all paths of
    candidates one by one: a level of 8 nodes holds all of the 8 best."""
    bound = DFlashSource(random_dflash(target, **KINDS[kind])).bind(target, chain(3))
    rng, width = np.random.default_rng(2), target.config.d_model
    taps = tuple(
        jnp.asarray(rng.normal(size=(1, 9, width)), jnp.float32) for _ in "123"
    )
    prompts = Prompts(jnp.ones((1, 10), jnp.int32), jnp.asarray([10]), 64, 4)
    update = Update(prompts.token_ids[:, 1:], jnp.asarray([9]), taps[0], taps)
    state = bound.commit(bound.init(prompts, None), update)
    history = History(prompts.token_ids, prompts.lengths)
    dist = text_distribution(None, jnp.zeros((1,), jnp.int32), target.config.num_tokens)
    query = Query(history, dist, NAIVE, 8, 3, 8, lambda *_: jnp.bool_(True))
    _, search = bound.search(state, query)
    asked = search.at_root, search.guesser, prompts.token_ids[:, -1], dist, NAIVE
    prior = jnp.asarray(PRIOR)
    grown = best_first(*asked, prior, search.start, search.go_on)
    found = np.sort(np.asarray(grown.pool.value)[0])[::-1][:8]

    one = ByPairs(bound.drafter, search.guesser.found, query._replace(width=16))
    values = []

    def walk(token, memory, depth, value):
        scored, own = one.scored(token, memory, jnp.int32(depth))
        kind = model_kind(jnp.exp(scored.best - scored.total))
        for rank, share in enumerate(np.asarray(prior[kind])[0, 0]):
            values.append(value * share)
            if depth < 2 and value * share > found[-1] / 2:
                walk(scored.guess[:, :, rank], own, depth + 1, value * share)

    walk(prompts.token_ids[:, -1:], no_memory(bound.drafter, (1, 1)), 0, 1.0)
    np.testing.assert_allclose(found, np.sort(values)[::-1][:8], rtol=1e-5)
