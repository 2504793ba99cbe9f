"""Test rows of a server with a block drafter: texts are those of plain decoding, also
after a cached prefix, and the drafter still drafts after it."""

from dataclasses import replace

import pytest

from stree_jax.server.batch import Batch
from stree_jax.speculation.default_tree import spec_for
from tests.support.dflash import random_dflash, with_bigrams
from tests.support.served_rows import SIZES, decoded, plain, prompt_of
from tests.support.tiny import tiny

FIRST = prompt_of(80, 80)


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
