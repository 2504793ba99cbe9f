"""Test rows of a server with a block drafter: texts are those of plain decoding, also
after a cached prefix, and the drafter still drafts after it."""

from dataclasses import replace

import numpy as np
import pytest

import stree_jax
from stree_jax.server.batch import Batch
from stree_jax.server.rows import TextRequest
from stree_jax.speculation.default_tree import spec_for
from tests.speculation.auto import times
from tests.support.dflash import KINDS, random_dflash, with_bigrams
from tests.support.heads import random_heads
from tests.support.served_rows import SIZES, decoded, plain, prompt_of
from tests.support.tiny import tiny

FIRST = prompt_of(80, 80)
ATTENTION = ("attention", "mlp", "attention", "mlp")
AUTO, SELDOM = "auto:1,8,16", times([1.0, 1e4, 1e4], 1e4, 1e4)  # drafts never pay


@pytest.fixture(scope="module")
def model():
    model = tiny(1)
    return replace(model, config=replace(model.config, stop_tokens=()))


@pytest.fixture(scope="module")
def batch(model):
    """With a drafter that knows the pairs of tokens of the texts below."""
    text = [*FIRST, *plain(model, FIRST, 20), *prompt_of(6, 5)]
    texts = [text + plain(model, text, 30)]
    drafter = with_bigrams(random_dflash(model, pairs="vanilla", rank=8), texts)
    batch = Batch(model, spec_for(model, drafter, "A", None, None), SIZES)
    batch.clear()
    return batch


def test_a_turn_continues_a_cached_prefix(batch, model):
    (answer,) = decoded(batch, [(FIRST, 20)])
    assert answer == plain(model, FIRST, 20)
    turn, hits = [*FIRST, *answer, *prompt_of(6, 5)], batch.prefixes.hits
    other = prompt_of(7, 12)
    found = decoded(batch, [(turn, 30), (other, 25)])
    assert batch.prefixes.hits == hits + 1
    assert found == [plain(model, turn, 30), plain(model, other, 25)]
    assert int(batch._decoding.drafting.passes.max()) < 28  # drafts were accepted


@pytest.mark.parametrize("kind", ["block", "heads"])
def test_an_edited_text_continues_from_any_token_of_attention(kind):
    """The states of target and drafter are cut back to where a text was edited."""
    model = tiny(1, layers=ATTENTION)
    model = replace(model, config=replace(model.config, stop_tokens=()))
    edited = [*FIRST[:60], *prompt_of(9, 6)]
    texts = [edited + plain(model, edited, 30)]
    drafter, tree = random_heads(model), "chain:2"
    if kind == "block":
        drafter = with_bigrams(random_dflash(model, pairs="vanilla", rank=8), texts)
        tree = "A"
    spec = spec_for(model, drafter, tree, None, None)
    passes, found = [], []
    for memory in (SIZES.prefix_memory, 0):
        batch = Batch(model, spec, replace(SIZES, prefix_memory=memory))
        batch.admit(0, TextRequest(FIRST, 3))
        batch.cancel([0])
        cached = batch.admit(0, TextRequest(edited, 30))
        assert cached == (59 if memory else 0), "the last token comes from the next"
        batch.cancel([0])
        found.append(decoded(batch, [(edited, 30)]))
        passes.append(int(batch._decoding.drafting.passes.max()))
    assert found == [[plain(model, edited, 30)]] * 2
    assert passes[0] == passes[1], "drafts are as good as without a cache"


def check_context(batch, drafter, text):
    """Checks that the drafter's cached rows of the start of a text are those of its
    tokens, in order. Returns the number of tokens of that start."""
    _, own = (found := batch.prefixes.find(text)).restored()
    options = dict(max_new_tokens=1, drafter=drafter, tree="chain:2", keep_past=True)
    wanted = stree_jax.generate(batch.model, [text], **options).past.drafter
    (n,) = own.state.length.tolist()
    for layer, like in zip(own.state.layers, wanted.state.layers, strict=True):
        x, y = (np.asarray(part["attention"].v)[:, :, :n] for part in (layer, like))
        np.testing.assert_allclose(x, y, atol=1e-4)
    assert (n, own.unread.shape[1]) == (found.length, 0)
    return n


def test_cached_texts_have_the_context_rows_of_their_tokens():
    """With tree "auto", whose steps without drafts leave tokens without rows, over
    turns that each replace the last tokens of an answer, and then two branches."""
    model = tiny(1, layers=ATTENTION)
    model = replace(model, config=replace(model.config, stop_tokens=()))
    drafter = random_dflash(model, **KINDS["dspark"])
    sizes = replace(SIZES, context=320, prefix_memory=2**24)
    batch = Batch(model, spec_for(model, drafter, AUTO, None, SELDOM), sizes)
    text = FIRST
    for turn in range(3):
        (answer,) = decoded(batch, [(text, 48)])
        old, text = len(text), [*text, *answer[:-2], *prompt_of(turn, 8)]
        assert check_context(batch, drafter, text) > old
    for seed in (91, 92):
        (answer,) = decoded(batch, [([*text, *prompt_of(seed, 20)], 8)])
        check_context(batch, drafter, [*text, *prompt_of(92, 30)])


@pytest.mark.parametrize("tree, known", [("chain:2", None), (AUTO, SELDOM)])
def test_branches_of_a_cached_text_have_their_own_context_rows(tree, known, model):
    """With recurrent layers, whose states are kept at the ends of texts."""
    drafter = random_dflash(model, **KINDS["dspark"])
    sizes = replace(SIZES, prefix_memory=2**24)
    batch = Batch(model, spec_for(model, drafter, tree, None, known), sizes)
    (answer,) = decoded(batch, [(FIRST, 24)])
    for seed in (91, 92):
        branch = [*FIRST, *answer, *prompt_of(seed, 40)]
        (more,) = decoded(batch, [(branch, 8)])
        n = check_context(batch, drafter, [*branch, *more, *prompt_of(5, 3)])
        assert n == len(branch) + 7
