"""Test rows of a server whose model has delta-rule layers and drafts with its MTP
layers: texts are those of plain decoding, also after a cached prefix."""

from dataclasses import replace

import pytest

from stree_jax.server.batch import Batch
from stree_jax.speculation.default_tree import spec_for
from tests.support.served_rows import SIZES, decoded, plain, prompt_of
from tests.support.tiny import tiny_delta


@pytest.fixture(scope="module")
def model():
    model = tiny_delta(1)
    return replace(model, config=replace(model.config, stop_tokens=()))


@pytest.fixture(scope="module", params=["E", "auto:1,4"])
def batch(request, model):
    batch = Batch(model, spec_for(model, "auto", request.param, None, None), SIZES)
    batch.clear()
    return batch


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
