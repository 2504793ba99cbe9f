"""Test drafts from past answers: faster for the same API key, unknown to others."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from stree_jax.sampling.settings import Sampling
from stree_jax.server import programs
from stree_jax.server.batch import Batch
from stree_jax.server.earlier import CONTEXT, PastAnswers
from stree_jax.server.rows import Sizes, TextRequest
from stree_jax.speculation.default_tree import spec_for
from stree_jax.speculation.draft import EARLIER
from tests.server.served import FINE, client_of, service_of, tiny_model

SIZES = Sizes(rows=2, context=128, steps=3, earlier=256)
PROMPT = [9, 12, 13, 14]
NEW = 24


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def batch_of(model, tree="chain:4", sizes=SIZES):
    return Batch(model, spec_for(model, "lookup", tree, None, None), sizes)


def run(batch, *requests):
    """Decodes texts together. Returns their tokens, passes and origins."""
    for row, request in enumerate(requests):
        batch.admit(row, request)
    found = [([], 0, []) for _ in requests]
    while any(batch.rows):
        for row, update in batch.advance().items():
            tokens, calls, origins = found[row]
            origins = [*origins, *update.origins]
            found[row] = tokens + update.tokens, calls + update.calls, origins
    return found


def request(owner=0, seed=None):
    sampling = Sampling(temperature=0 if seed is None else 0.9, seed=seed)
    return TextRequest(PROMPT, NEW, sampling, ignore_eos=True, owner=owner)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_key_drafts_from_its_own_answers_only(model, seed):
    batch = batch_of(model)
    ((tokens, calls, origins),) = run(batch, request(7, seed))
    assert EARLIER not in origins
    other, own = run(batch, request(8, seed), request(7, seed))
    assert other[0] == own[0] == tokens
    assert EARLIER in own[2] and own[1] < calls
    assert other[1:] == (calls, origins)  # as if the other key did not exist
    ((_, again, _),) = run(batch, request(8, seed))
    assert again == own[1]


def test_cancelled_answers_are_kept(model):
    batch = batch_of(model)
    batch.admit(0, request())
    batch.advance()
    batch.cancel([0])
    ((_, _, origins),) = run(batch, request())
    assert EARLIER in origins


def test_private_answers_are_neither_kept_nor_drafted(model):
    batch, private = batch_of(model), replace(request(), private=True)
    for asked in (private, request(), private):
        ((_, _, origins),) = run(batch, asked)
        assert EARLIER not in origins
    ((_, _, origins),) = run(batch, request())
    assert EARLIER in origins


def test_answers_can_be_left_out(model):
    batch = batch_of(model, sizes=Sizes(rows=2, context=128, steps=3))
    first, again = (run(batch, request())[0] for _ in range(2))
    assert first == again and EARLIER not in again[2]
    plain = Batch(model, spec_for(model, None, None, None, None), SIZES)
    ((tokens, _, _),) = run(plain, request())
    assert tokens == first[0]


def test_the_size_is_fixed():
    answers = PastAnswers(100)
    shapes = {answers.row(0).shape}
    for n in range(9):
        answers.add(n % 2, range(200), range(1000 + 50 * n, 1050 + 50 * n))
        shapes |= {answers.row(owner).shape for owner in (0, 1, 2)}
    assert shapes == {(1, 100)}
    last = [*range(200 - CONTEXT, 200), *range(1400, 1450), -1]
    assert answers.row(0)[0].tolist() == last[-100:]
    assert (np.asarray(answers.row(2)) == -1).all()
    answers.add(2, [1, 2], [])  # nothing was written
    assert (np.asarray(answers.row(2)) == -1).all()


def test_keys_of_requests_reach_the_batch(model):
    """Two keys send the same request in turn, over HTTP."""
    batch = batch_of(model, "auto:1,4")
    programs.warm(batch, lambda line: None)
    service = service_of(batch, keys=(b"first", b"second"))
    owners, admission = [], batch.admission

    def noted(row, request):
        owners.append(request.owner)
        return admission(row, request)

    batch.admission = noted

    async def ask(key):
        async with client_of(service, key) as client:
            return (await client.completions.create(**FINE)).choices[0].text

    try:
        texts = {asyncio.run(ask(key)) for key in ("first", "second", "second")}
    finally:
        service.engine.stop()
    assert owners == [0, 1, 1] and len(texts) == 1
