"""Test rows of a server whose model has delta-rule layers and drafts with its MTP
layers: texts are those of plain decoding, also after a cached prefix."""

from dataclasses import replace

import numpy as np
import pytest

import stree_jax
from stree_jax.default_tree import spec_for
from stree_jax.server.batch import Batch, Sizes, TextRequest
from stree_jax.speculation.decoding import RUNNING
from tests.support.tiny import REAL, tiny_delta

SIZES = Sizes(rows=2, context=256, steps=4, prefixes=2)
CAPACITY = 512


@pytest.fixture(scope="module")
def model():
    model = tiny_delta(1)
    return replace(model, config=replace(model.config, stop_tokens=()))


@pytest.fixture(scope="module", params=["E", "auto:1,4"])
def batch(request, model):
    batch = Batch(model, spec_for(model, "auto", request.param, None, None), SIZES)
    batch.clear()
    return batch


def prompt_of(seed, n):
    return np.random.default_rng(seed).integers(8, REAL, n).tolist()


def decoded(batch, asked):
    """Returns the tokens of texts. A text gets a row as soon as one is free."""
    found, waiting, rows = [[] for _ in asked], list(range(len(asked))), {}
    while waiting or rows:
        for row in batch.free_rows()[: len(waiting)]:
            rows[row] = waiting.pop(0)
            batch.admit(row, TextRequest(*asked[rows[row]]))
        for row, update in batch.advance().items():
            found[rows[row]] += update.tokens
            if update.finish != RUNNING:
                del rows[row]
    return found


def plain(model, prompt, new):
    options = dict(max_new_tokens=new, capacity=CAPACITY, drafter=None)
    return stree_jax.generate(model, [prompt], **options).tokens[0]


def test_rows_are_plain_decoding(batch, model):
    """Rows start in the state of an earlier text's row."""
    asked = [(prompt_of(n, n), new) for n, new in ((5, 40), (1, 9), (70, 21), (33, 30))]
    assert decoded(batch, asked) == [plain(model, *one) for one in asked]


def test_a_turn_continues_a_cached_prefix(batch, model):
    """From the states of the target and of the MTP layers."""
    first, hits = prompt_of(80, 80), batch.prefixes.hits
    (answer,) = decoded(batch, [(first, 20)])
    turn = [*first, *answer, *prompt_of(6, 5)]
    other = prompt_of(7, 12)
    found = decoded(batch, [(turn, 30), (other, 25)])
    assert batch.prefixes.hits == hits + 1
    assert found == [plain(model, turn, 30), plain(model, other, 25)]
