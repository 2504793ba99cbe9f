"""Test when block drafters compute the context rows of new text with tree "auto": only
before they draft, or when no more tokens fit in the buffer of unread ones."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.models.drafters.dflash import DFlashLayer, add_context, empty_context
from stree_jax.speculation.accept import NAIVE
from stree_jax.speculation.adaptive.search import Query
from stree_jax.speculation.drafter import Prompts, Update
from stree_jax.speculation.drafters import dflash
from stree_jax.speculation.drafters.dflash import DFlashSource
from stree_jax.speculation.drafters.lookup import History
from stree_jax.speculation.tree import resolve_tree
from stree_jax.verify.agreement import text_distribution
from tests.speculation.auto import times
from tests.support.dflash import KINDS, random_dflash

AUTO, SIZE, STEPS = "auto:1,4,8", 4, 11
SELDOM = times([1.0, 1e4, 1e4], 1e4, 1e4)  # drafts never pay
OPTIONS = {
    "plain steps": dict(tree=AUTO, times=SELDOM),
    "chain": dict(tree="chain:2"),
}


@pytest.fixture(scope="module")
def drafter(target):
    return random_dflash(target, **KINDS["dspark"])


def test_steps_without_drafts_seldom_compute_context_rows(target, drafter, monkeypatch):
    """One of two rows gets no token at every third step."""
    calls = []

    def counted(*args):
        jax.debug.callback(lambda: calls.append(1))
        return add_context(*args)

    bound = DFlashSource(drafter).bind(target, resolve_tree(AUTO))
    rng, width = np.random.default_rng(0), target.config.d_model
    taps = tuple(
        jnp.asarray(rng.normal(size=(STEPS, 2, 1, width)), jnp.float32)
        for _ in bound.taps
    )
    has_token = np.arange(STEPS)[:, None] % [1000, 3] > 0
    has_token[0, 0] = True

    def commit(state, part):
        own, length = part
        return bound.commit(state, Update(ones[:, None], length, own[0], own)), None

    ones = jnp.ones((2,), jnp.int32)
    monkeypatch.setattr(dflash, "add_context", counted)
    start = bound.init(Prompts(ones[:, None], ones, 32, SIZE), None)
    parts = taps, jnp.asarray(has_token, jnp.int32)
    state, _ = jax.jit(lambda state: jax.lax.scan(commit, state, parts))(start)
    jax.effects_barrier()
    assert len(calls) == (STEPS - 1) // SIZE

    found = bound.read(state).state
    assert found.length.tolist() == [STEPS, 7]
    for b, length in enumerate([STEPS, 7]):
        own = tuple(jnp.moveaxis(z[has_token[:, b], b], 0, 1) for z in taps)
        alone = empty_context(drafter, 1, 32, jnp.float32)
        alone = add_context(drafter, alone, own, jnp.asarray([length], jnp.int32))
        leaves = map(jax.tree.leaves, (found.layers, alone.layers))
        for x, y in zip(*leaves, strict=True):
            np.testing.assert_allclose(x[b, :, :length], y[0, :, :length], atol=1e-5)


def test_a_search_reads_all_tokens_before(target, drafter):
    """Its candidates are those after the same tokens as a part of the prompts."""
    bound = DFlashSource(drafter).bind(target, resolve_tree(AUTO))
    rng, width = np.random.default_rng(1), target.config.d_model
    shape, zeros = (1, SIZE, width), jnp.zeros((1,), jnp.int32)
    taps = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in bound.taps)
    ids = jnp.asarray([[3, 9, 4, 7]], jnp.int32)
    prompts = Prompts(ids[:, :1], zeros + 1, 32, SIZE)
    update = Update(ids, zeros + 3, taps[0], taps)
    dist = text_distribution(None, zeros, target.config.num_tokens)
    text = History(ids, zeros + 4)
    query = Query(text, dist, NAIVE, 4, 3, SIZE, lambda *_: jnp.bool_(True))
    found = []
    for add in (bound.commit, bound.observe):
        state = add(bound.init(prompts, None), update)
        after, search = bound.search(state, query)
        assert (after.state.length.tolist(), after.unread_length.tolist()) == ([3], [0])
        found.append(search.at_root.best)
    np.testing.assert_array_equal(*found)
    _, empty = bound.search(bound.init(prompts, None), query)
    assert jnp.abs(empty.at_root.best - found[0]).max() > 1e-3


@pytest.mark.parametrize("sampling", [None, Sampling(1.0, seed=4)])
@pytest.mark.parametrize("name", OPTIONS)
def test_continued_texts_have_all_context_rows(
    name, sampling, target, drafter, prompts
):
    """Three turns, whose texts are those of plain decoding."""

    def turns(**options):
        new, past = prompts, None
        for _ in range(3):
            run = stree_jax.generate(
                *(target, new),
                **dict(max_new_tokens=9, stop_tokens=(), keep_past=True, past=past),
                **({} if sampling is None else dict(sampling=sampling)),
                **options,
            )
            new, past = [[]] * len(prompts), run.past
        return past

    past, plain = turns(drafter=drafter, **OPTIONS[name]), turns(drafter=None)
    assert past.tokens == plain.tokens
    own = past.drafter
    assert (own.unread_length.max() > 0) == (name == "plain steps")
    rows = own.state.length + own.unread_length
    assert rows.tolist() == [len(row) - 1 for row in past.tokens]


@pytest.mark.parametrize(
    "options", [dict(boundaries=(0, 1)), dict(layers=(DFlashLayer(),))]
)
def test_a_past_of_another_block_drafter_is_refused(options, target, drafter, prompts):
    write = partial(stree_jax.generate, target, max_new_tokens=2)
    past = write(prompts, drafter=drafter, keep_past=True).past
    other = random_dflash(target, **KINDS["dspark"] | options)
    with pytest.raises(ValueError, match="past: of another block drafter"):
        write([[]] * len(prompts), drafter=other, past=past)
