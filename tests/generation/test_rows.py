"""`generate`: rows, rules, log-probabilities, turns and samples."""

import dataclasses

import jax
import numpy as np
import pytest

import stree_jax
from stree_jax import Past, Sampling
from stree_jax.speculation import loop
from stree_jax.speculation.tree import NAMED_TREES, from_child_counts
from tests.generation.batch import (
    CAPACITY,
    LENGTHS,
    NEW,
    SAMPLING,
    TREE,
    assert_same,
    assert_same_row,
    with_quiet,
)
from tests.support.tiny import REAL

RULES = ["naive", "naive/coupled", "mss", "recursive"]


# Mixed batches


MIXED = dict(
    max_new_tokens=[24, NEW, 20, 33],
    min_new_tokens=[0, 3, 2, 1],
    stop_tokens=[[2, 3], [4, 29, 12, 31], [], [6]],
    stop_strings=with_quiet([[], ["zz"], ["€", "é"], ["ab", "fé", "b€"]]),
)


def reordered(order, options):
    """Options and prompts of a batch's rows in another order, or of some of them."""
    return {name: [values[row] for row in order] for name, values in options.items()}


@pytest.fixture(scope="module")
def mixed(ask):
    return ask(**MIXED)


def test_the_mixed_batch_is_varied(mixed):
    """Or else the next test would show little."""
    kinds = {type(reason) for reason in mixed.stop_reasons}
    assert kinds == {int, str, type(None)}
    assert len(set(mixed.lengths.tolist())) > 2 and min(mixed.lengths) > 3


def test_the_greedy_row_is_greedy_decoding(target, prompts, mixed):
    alone = stree_jax.generate(
        target,
        prompts[:1],
        max_new_tokens=24,
        stop_tokens=[2, 3],
        capacity=CAPACITY,
        drafter=None,
    )
    assert alone.tokens == mixed.tokens[:1]
    assert alone.texts == mixed.texts[:1]
    assert alone.stop_reasons == mixed.stop_reasons[:1]


@pytest.mark.parametrize("rule", RULES)
def test_rows_are_their_own(ask, drafter, prompts, mixed, rule):
    """In a batch, in another place of it and alone; naive rules draw plain text."""
    speculate = dict(drafter=drafter, rule=rule)
    rows = dict(MIXED, prompts=prompts, sampling=SAMPLING)
    result = ask(**MIXED, **speculate)
    assert_same_row(result, 0, mixed, 0)
    for row in (1, 2, 3):
        alone = ask(**reordered([row], rows), **speculate)
        assert_same_row(alone, 0, result, row)
    order = [2, 0, 3, 1]
    moved = ask(**reordered(order, rows), **speculate)
    for place, row in enumerate(order):
        assert_same_row(moved, place, result, row)
    assert result.acceptance_length.max() > 1.5
    if rule.startswith("naive"):
        assert_same(result, mixed)
    else:
        assert result.tokens[1:] != mixed.tokens[1:]


def test_without_a_drafter_every_rule_is_plain_sampling(ask, mixed):
    result = ask(**MIXED, rule="mss")
    assert_same(result, mixed)
    assert result.target_calls.tolist() == result.lengths.tolist()


def test_another_seed_or_key_is_another_text(ask, free):
    others = [dataclasses.replace(s, seed=100 + i) for i, s in enumerate(SAMPLING)]
    for options in (dict(sampling=others), dict(key=jax.random.key(1))):
        result = ask(**options)
        assert result.tokens[0] == free.tokens[0]
        for row in (1, 2, 3):
            assert result.tokens[row] != free.tokens[row]
    same = ask(key=jax.random.key(0))
    assert same.tokens == free.tokens


# Log-probabilities


def normalised(z):
    with np.errstate(divide="ignore"):
        shifted = z - z.max()
        return shifted - np.log(np.exp(shifted).sum())


def processed(sampling, logits, seen, banned):
    """Log-probabilities by sorting, in float64."""
    z = np.asarray(logits, np.float64).copy()
    z[banned] = -np.inf
    penalty = sampling.repetition_penalty
    for token in seen:
        z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
    z = z / (sampling.temperature or 1.0)
    if sampling.top_k:
        z[z < np.sort(z)[-sampling.top_k]] = -np.inf
    if sampling.top_p < 1:
        order = np.argsort(-z)
        p = np.exp(normalised(z))[order]
        z[order[np.cumsum(p) - p >= sampling.top_p]] = -np.inf
    p = np.exp(normalised(z))
    z[p < sampling.min_p * p.max()] = -np.inf
    return normalised(z)


def check_logprobs(model, prompts, result, top, settings, least, stops):
    width = 256
    texts = [a + b for a, b in zip(prompts, result.tokens, strict=True)]
    padded = [text + [0] * (width - len(text)) for text in texts]
    logits = np.asarray(stree_jax.score(model, padded))[..., :REAL]
    close = dict(rtol=0, atol=1e-4)
    for row, prompt in enumerate(prompts):
        lists, tokens = result.logprobs[row], result.tokens[row]
        assert lists.raw.shape == lists.processed.shape == (len(tokens),)
        for name in ("top", "top_raw", "top_tokens", "top_raw_tokens"):
            assert getattr(lists, name).shape == (len(tokens), top)
        for i, token in enumerate(tokens):
            here = logits[row, len(prompt) + i - 1].astype(np.float64)
            banned = stops[row] if i < least[row] else []
            seen = set(texts[row][: len(prompt) + i])
            raw, by = normalised(here), processed(settings[row], here, seen, banned)
            for z, chosen, best, ids in (
                (raw, lists.raw, lists.top_raw, lists.top_raw_tokens),
                (by, lists.processed, lists.top, lists.top_tokens),
            ):
                np.testing.assert_allclose(chosen[i], z[token], **close)
                np.testing.assert_allclose(best[i], np.sort(z)[::-1][:top], **close)
                np.testing.assert_allclose(best[i], z[ids[i]], **close)
                assert len(set(ids[i].tolist())) == top


@pytest.mark.parametrize("top", [0, 3])
def test_logprobs_are_those_of_the_scores(target, prompts, ask, drafter, top):
    least = [0, 9, 1, 6]
    stops = [[], [4, 29, 15, 42], [], [3, 6, 11, 31, 20]]
    options = dict(min_new_tokens=least, stop_tokens=stops, logprobs=top)
    plain = ask(**options)
    check_logprobs(target, prompts, plain, top, SAMPLING, least, stops)
    assert plain.lengths.min() < NEW, "no row was trimmed"
    if top:
        assert_same(ask(drafter=drafter, **options), plain)


def test_logprobs_of_a_greedy_batch(target, prompts, greedily, drafter):
    plain = greedily(max_new_tokens=8)
    options = dict(
        max_new_tokens=[8, 5, 8, 8],
        stop_tokens=[[row[0]] for row in plain.tokens],
        min_new_tokens=[4, 2, 3, 0],
    )
    greedy = [Sampling(0)] * 4
    for arm in ({}, {"drafter": drafter}):
        result = greedily(**options, **arm)
        least, stops = options["min_new_tokens"], options["stop_tokens"]
        check_logprobs(target, prompts, result, 2, greedy, least, stops)


# Turns


STOPS = [[], [15, 28, 25, 11], [], [6, 22, 12, 3]]
TURNS = [  # new tokens by row
    LENGTHS,
    [1, 0, 70, 3],
    [0, 70, 1, 0],
]


@pytest.fixture(scope="module")
def turns(prompts):
    rng = np.random.default_rng(5)
    later = [[rng.integers(1, REAL, n).tolist() for n in row] for row in TURNS[1:]]
    return [prompts, *later]


@pytest.mark.parametrize(
    ("present", "rule"),
    [
        ([0, 0, 0], None),
        ([1, 1, 1], None),
        ([1, 1, 1], "recursive"),
        ([0, 1, 1], None),
        ([1, 0, 1], None),
    ],
    ids=["plain", "tree", "recursive", "from turn 2", "not in turn 2"],
)
def test_turns_are_one_history(ask, drafter, turns, present, rule):
    """Continuing is starting anew with all the text; greedy (row 0) and sampled.

    The drafts are the same as well, so that not even the drafter's state differs.
    """
    past, history = None, [[] for _ in turns[0]]
    for turn, (new, drafts) in enumerate(zip(turns, present, strict=True)):
        arm = dict(drafter=drafter, rule=rule) if drafts else {}
        options = dict(max_new_tokens=[20, 16, 9, 16], stop_tokens=STOPS, **arm)
        history = [a + b for a, b in zip(history, new, strict=True)]
        result = ask(prompts=new, past=past, keep_past=True, **options)
        fresh = ask(prompts=history, **options)
        assert_same(result, fresh)
        assert result.gained.tolist() == fresh.gained.tolist()
        assert fresh.past is None
        if turn == 0:  # one row ends first, by a stop, and others run on
            stopped = result.finish_reasons.index("stop")
            assert result.lengths[stopped] < result.lengths.max()
        history = [a + b for a, b in zip(history, result.tokens, strict=True)]
        past = result.past
        assert past.tokens == history
        assert past.target.length.tolist() == [len(row) - 1 for row in history]
        assert (past.drafter is not None) == bool(drafts)
        if drafts:
            assert (past.drafter.state.length < past.target.length + 1).all()


def test_a_past_is_not_read_again_and_not_used_up(ask, turns):
    """What was read may change (here: its order, which penalties do not see)."""
    begun = ask(prompts=turns[0], keep_past=True, max_new_tokens=16)
    past = begun.past
    result = ask(prompts=turns[1], past=past)
    shuffled = [row[:-1][::-1] + row[-1:] for row in past.tokens]
    assert shuffled != past.tokens
    changed = Past(past.target, past.drafter, shuffled)
    assert_same(ask(prompts=turns[1], past=changed), result)
    anew = [a + b for a, b in zip(shuffled, turns[1], strict=True)]
    assert ask(prompts=anew).tokens != result.tokens
    assert_same(ask(prompts=turns[1], past=past), result)


def test_text_continues_a_past(ask, target, tokenizer):
    """Of a text prompt; later ones get no special tokens."""
    texts = ["abc", "fed. ", "a", "b c"]
    ids = [tokenizer.encode(text).ids for text in texts]
    begun = ask(prompts=texts, keep_past=True, max_new_tokens=3)
    assert [row[:-3] for row in begun.past.tokens] == ids
    more = ask(prompts=["", "ba", "f", ""], past=begun.past, keep_past=True)
    for row, text in enumerate(["", "ba", "f", ""]):
        whole = begun.past.tokens[row] + tokenizer.encode(text).ids
        assert more.past.tokens[row] == whole + more.tokens[row]


# Several samples per prompt


def test_samples_of_a_prompt(target, prompts, drafter):
    """Prompt by prompt; the j-th is the same however many there are."""
    common = dict(
        max_new_tokens=[20, 15],  # of all rows of a prompt
        stop_tokens=[[], [3, 6, 20]],
        sampling=[Sampling(0), Sampling(1.0, top_k=30)],  # seeds: 0 and 1
        capacity=CAPACITY,
    )
    pair = [prompts[3], prompts[2]]
    few = stree_jax.generate(target, pair, n=3, drafter=drafter, tree=TREE, **common)
    many = stree_jax.generate(target, pair, n=5, **common, drafter=None)
    assert len(few.tokens) == 6 and len(many.tokens) == 10
    assert len(set(map(tuple, many.tokens[:5]))) == 1
    assert len(set(map(tuple, many.tokens[5:]))) == 5
    assert few.tokens[:3] == many.tokens[:3]
    assert few.tokens[3:] == many.tokens[5:8]
    assert many.lengths[:5].tolist() == [20] * 5
    for tokens, reason in zip(many.tokens[5:], many.finish_reasons[5:], strict=True):
        ends = [i for i, token in enumerate(tokens) if token in (3, 6, 20)]
        assert ends == ([len(tokens) - 1] if reason == "stop" else [])
        assert reason == "stop" or len(tokens) == 15
    assert {"stop", "length"} == set(many.finish_reasons[5:])


# Programs


def test_data_compiles_nothing(ask, drafter, prompts):
    """Only options that come or go, and sizes, make a new program."""

    def programs():
        return loop.init_decoding_jit._cache_size(), loop.advance_jit._cache_size()

    ask(drafter=drafter)
    before = programs()
    warm = [dataclasses.replace(s, temperature=1.7, top_p=0.5) for s in SAMPLING]
    calm = [dataclasses.replace(s, top_k=3, min_p=0.1, seed=77) for s in SAMPLING]
    parents = from_child_counts([[3], [0, 1, 2], [2, 0, 1], [1, 2, 0]])
    sizes = {
        (tree.size, tree.depth, tree.width, tree.inner, tree.children)
        for tree in (NAMED_TREES[TREE], parents)
    }
    assert len(sizes) == 1
    changes = [
        dict(sampling=warm),
        dict(sampling=calm, key=jax.random.key(9)),
        dict(prompts=[row + [9, 10] for row in prompts[::-1]]),
        dict(max_new_tokens=[1, 64, 30, 2]),
        dict(stop_tokens=[[1], [], list(range(8)), [3, 4]]),
        dict(stop_tokens=None, min_new_tokens=[30, 0, 2, 9]),
        dict(stop_strings=with_quiet([["a"], ["b", "é€"], [], ["c"]])),
        dict(tree=parents),
        dict(keep_past=True),
    ]
    for change in changes:
        ask(drafter=drafter, **change)
        assert programs() == before, change
    list(ask(call=stree_jax.stream, drafter=drafter, steps=3))
    assert programs() == before
