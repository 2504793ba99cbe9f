"""Test a custom drafter that taps two layers of its target, through all of
`generate`.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.generation.generate import begin
from stree_jax.models import chain_nodes, forward_hidden, forward_tapped, init_state
from stree_jax.speculation.loop import advance_jit
from tests.speculation.auto import times
from tests.support.toy_drafter import TAPS, TwoTaps, two_taps

NEW, AUTO = 20, "auto:1,4,8"
TREES = ["A", "E", AUTO]


@pytest.fixture(scope="module")
def plain(target, prompts):
    options = dict(max_new_tokens=NEW, stop_tokens=(), drafter=None)
    return stree_jax.generate(target, prompts, **options).tokens


@pytest.fixture(scope="module")
def toy(target, prompts, plain):
    texts = [ids + new for ids, new in zip(prompts, plain, strict=True)]
    return two_taps(target, texts)


@pytest.fixture(scope="module")
def options(toy):
    return dict(max_new_tokens=NEW, stop_tokens=(), drafter=toy)


def with_tree(tree):
    """Returns the options of a tree; for "auto", with times that make drafting
    faster."""
    return dict(tree=tree) | (dict(times=times()) if tree == AUTO else {})


def chain_pass(target, text):
    """Returns hidden states and tapped streams [S, d] of a text, read in one pass."""
    nodes = chain_nodes(1, len(text), target.config.conv_taps)
    state = init_state(target.config, 1, len(text), jnp.float32)
    tokens = jnp.asarray([text], jnp.int32)
    hidden, taps, *_ = forward_tapped(target, state, tokens, nodes, taps=TAPS)
    return hidden[0], np.stack([np.asarray(tap[0]) for tap in taps], axis=1)


def test_a_tap_is_the_residual_stream_after_a_layer(target, prompts):
    """For a model cut after that layer, the hidden state is the norm of the tapped
    stream."""
    text, c = prompts[-1], target.config
    hidden, streams = chain_pass(target, text)
    nodes, tokens = chain_nodes(1, len(text), c.conv_taps), jnp.asarray([text])
    for place, layer in enumerate(TAPS):
        shorter = replace(target, config=replace(c, layers=c.layers[: layer + 1]))
        state = init_state(shorter.config, 1, len(text), jnp.float32)
        ended = forward_hidden(shorter, state, tokens, nodes)[0][0]
        stream = streams[:, place]
        scale = np.asarray(target.params["norm"]["scale"])
        rms = np.sqrt((stream**2).mean(axis=1, keepdims=True) + c.norm_eps)
        np.testing.assert_allclose(stream / rms * scale, ended, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ended, hidden)  # the last tap is before the final norm


def check_streams(target, seen, texts):
    """Checks that the streams of all updates equal those of a single pass over the
    texts."""
    for b, text in enumerate(texts):
        count = int(seen.count[b])
        assert seen.tokens[b, :count].tolist() == text[1 : count + 1]
        _, streams = chain_pass(target, text)
        np.testing.assert_allclose(
            seen.streams[b, :count], streams[:count], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("tree", TREES)
def test_tapped_streams_match_a_single_pass(target, prompts, plain, options, tree):
    """For prompts, one of them longer than a chunk, and for accepted paths."""
    rng = np.random.default_rng(1)
    asked = [*prompts[:2], rng.integers(8, 47, 150).tolist()]
    d, plan = begin(target, asked, **options, **with_tree(tree))
    for steps in (0, 3):
        d = advance_jit(plan.spec, d, jnp.int32(steps))
        seen = getattr(d.drafting, "searching", d.drafting)
        made = zip(np.asarray(d.tokens), d.length.tolist(), strict=True)
        made = [row[:n].tolist() for row, n in made]
        texts = [ids + new for ids, new in zip(asked, made, strict=True)]
        assert seen.count.tolist() == [len(text) - 1 for text in texts]
        check_streams(target, seen, texts)
        if tree == AUTO:  # prompts enter the lookup history once, though also observed
            assert d.drafting.history.length.tolist() == [len(text) for text in texts]
    assert np.asarray(d.gained)[:, 2:].sum() > 0  # some draft tokens were accepted


@pytest.mark.parametrize("tree", TREES)
def test_text_is_identical_to_plain_decoding(target, prompts, plain, options, tree):
    result = stree_jax.generate(target, prompts, **options, **with_tree(tree))
    assert result.tokens == plain
    assert result.target_calls.max() < NEW


@pytest.mark.parametrize("tree", ["A", AUTO])
def test_streaming_and_continued_conversations(target, prompts, plain, options, tree):
    """Text arrives in parts, or a cached state continues."""
    *_, last = stree_jax.stream(target, prompts, steps=2, **options, **with_tree(tree))
    assert last.tokens == plain
    short = (
        options | with_tree(tree) | dict(max_new_tokens=7, keep_past=True, capacity=256)
    )
    first = stree_jax.generate(target, prompts, **short)
    more = [[9, 11, 12], [], [13] * 70]
    texts = [old + new for old, new in zip(first.past.tokens, more, strict=True)]
    d, _ = begin(target, more, past=first.past, **options, **with_tree(tree))
    seen = getattr(d.drafting, "searching", d.drafting)
    for b in (0, 2):  # rows with newly read tokens
        _, streams = chain_pass(target, texts[b])
        np.testing.assert_allclose(seen.last[b], streams[-2], rtol=1e-5, atol=1e-5)
    result = stree_jax.generate(
        target, more, past=first.past, **options, **with_tree(tree)
    )
    whole = stree_jax.generate(target, texts, **options | dict(drafter=None))
    assert result.tokens == whole.tokens


def test_drafter_memory_is_counted(target, prompts, plain, options, toy):
    result = stree_jax.generate(target, prompts, **options, memory="1GB")
    assert result.tokens == plain
    with pytest.raises(ValueError, match="^memory: "):
        stree_jax.generate(target, prompts, **options, memory="100kB")
    found = stree_jax.plan(target, "1GB", drafter=toy, context=256, max_new_tokens=NEW)
    mine = [choice for choice in found.choices if choice.drafter == "drafter"]
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(toy))
    assert mine and all(c.memory.drafter_weights == held for c in mine)


def test_sampled_text_is_identical_for_each_seed(target, prompts, options):
    sampling = stree_jax.Sampling(temperature=1.0, seed=3)
    asked = dict(sampling=sampling)
    plainly = options | dict(drafter=None)
    want = stree_jax.generate(target, prompts, **plainly, **asked).tokens
    for tree in ("E", AUTO):
        got = stree_jax.generate(target, prompts, **options, **asked, **with_tree(tree))
        assert got.tokens == want


def test_invalid_trees_and_taps_are_refused(target, toy):
    def refused(message, drafter=toy, **options):
        with pytest.raises(ValueError, match=message) as caught:
            stree_jax.generate(target, [[3]], drafter=drafter, **options)
        assert "\n" not in str(caught.value)

    refused("^tree: a custom drafter fills a fixed tree", tree="beam:2x2")
    refused("^taps: want a tuple of layers in 0..4", toy.replace(taps=(5,)))
    refused("^taps: want a tuple of layers in 0..4", toy.replace(taps=("a",)))
    assert TwoTaps.taps == TAPS


def test_without_taps_the_program_is_unchanged(target):
    nodes = chain_nodes(1, 3, target.config.conv_taps)
    state = init_state(target.config, 1, 8, jnp.float32)
    args = target, state, jnp.ones((1, 3), jnp.int32), nodes
    untapped = jax.make_jaxpr(lambda: forward_tapped(*args, taps=()))()
    assert str(untapped) == str(jax.make_jaxpr(lambda: forward_hidden(*args))())
    tapped = jax.make_jaxpr(lambda: forward_tapped(*args, taps=(0, 2)))()
    assert len(tapped.eqns) == len(untapped.eqns)  # taps only add outputs
