"""A long prompt is read in pieces, between which other texts go on."""

import threading
import time

import numpy as np
import pytest

import stree_jax
from stree_jax.server import batch as batches
from stree_jax.server.engine import Engine, Job, QueueFull
from stree_jax.server.rows import TextRequest
from stree_jax.server.texts import Writer
from tests.server.served import SIZES, Paused
from tests.support.tiny import REAL

SHORT, LONG = 3, 100  # tokens of prompts
PIECE = 2 * SIZES.steps


@pytest.fixture
def pieces(monkeypatch, batch):
    """Makes pieces so short that a prompt has many."""
    monkeypatch.setattr(batches, "PIECE_PER_STEP", 2)
    assert batch.piece == PIECE
    yield
    batch.clear()


def prompt(size, seed):
    return np.random.default_rng(seed).integers(8, REAL, size).tolist()


def text_of(model, ids, new):
    plain = dict(max_new_tokens=new, capacity=256, drafter=None)
    return stree_jax.generate(model, [ids], **plain).tokens[0]


def test_a_prompt_in_pieces_is_the_same_text(model, batch, pieces):
    ids = prompt(LONG, 1)
    admission, sizes = batch.admission(0, TextRequest(ids, 12, ignore_eos=True)), []
    while True:
        try:
            sizes.append(next(admission))
            assert not batch.decoding
        except StopIteration as end:
            assert end.value == 0
            break
    assert sizes == [PIECE] * ((LONG - 2) // PIECE) and batch.decoding
    found = []
    while batch.rows[0] is not None:
        found += batch.advance()[0].tokens
    plain = dict(max_new_tokens=12, capacity=256, drafter=None, stop_tokens=())
    assert found == stree_jax.generate(model, [ids], **plain).tokens[0]


class Client:
    """A text, and the time of each of its pieces."""

    def __init__(self, service, ids, new, owner=0):
        self.pieces, self.done = [], threading.Event()
        request = TextRequest(ids, new, ignore_eos=True, owner=owner)
        self.job = Job(request, Writer(service.reader), self.send)

    def send(self, piece):
        self.pieces.append(piece)
        if piece.finish_reason is not None:
            self.done.set()


def test_other_texts_go_on_while_a_prompt_is_read(service, batch, pieces):
    """With the planted mistake below, none of their pieces comes in between."""
    engine = service.engine
    assert between(engine, service) >= 5


def test_a_prompt_that_is_read_at_once_stops_the_others(
    service, batch, pieces, monkeypatch
):
    def whole(self):
        while self._reading is not None or self._begin():
            row, admission = self._reading
            for _ in admission:
                pass
            self._held[row].prefilled, self._reading = time.monotonic(), None

    monkeypatch.setattr(Engine, "_admit", whole)
    assert between(service.engine, service) <= 1


def between(engine, service):
    """Returns the number of segments that ran while a long prompt was prefilled."""
    first = Client(service, prompt(SHORT, 2), 60)
    engine.submit([first.job])
    while not first.pieces:
        time.sleep(0.001)
    segments, ids = [], prompt(LONG, 3)
    second = Client(service, ids, 4)
    turn = engine.batch.advance

    def advance():
        if second.job.began is not None and not second.job.prefilled:
            segments.append(1)
        return turn()

    engine.batch.advance = advance
    try:
        engine.submit([second.job])
        assert second.done.wait(60) and first.done.wait(60)
    finally:
        del engine.batch.advance
    return len(segments)


def test_a_prompt_whose_client_left_is_not_read_to_its_end(service, batch, pieces):
    first = Client(service, prompt(SHORT, 4), 60)
    second, third = (Client(service, prompt(LONG, n), 4) for n in (5, 6))
    service.engine.submit([first.job, second.job])
    while second.job.began is None:
        time.sleep(0.001)
    service.engine.cancel([second.job])
    service.engine.submit([third.job])
    assert third.done.wait(60) and first.done.wait(60)
    assert not second.pieces and not second.job.prefilled
    assert batch.free_rows() == [0, 1, 2]


def test_a_key_with_many_requests_does_not_delay_another(service, batch):
    """The texts of the first key wait; that of the second takes the next free row."""
    many = [Client(service, prompt(SHORT, n), 20) for n in range(8)]
    other = Client(service, prompt(SHORT, 9), 20, owner=1)
    service.engine.submit([client.job for client in many])
    service.engine.submit([other.job])
    assert other.done.wait(60) and all(client.done.wait(60) for client in many)
    began = sorted(client.job.began for client in many)
    assert other.job.began < began[4]  # three of the first key had rows before it


def test_each_key_has_a_queue(service, batch):
    engine = service.engine
    with Paused(service):
        full = [Client(service, prompt(SHORT, n), 2) for n in range(engine.max_waiting)]
        engine.submit([client.job for client in full])
        with pytest.raises(QueueFull):
            engine.submit([Client(service, prompt(SHORT, 1), 2).job for _ in range(4)])
        others = [Client(service, prompt(SHORT, n), 2, owner=1) for n in range(4)]
        engine.submit([client.job for client in others])
    assert all(client.done.wait(60) for client in (*full, *others))


def test_an_idle_server_does_not_read_on_for_a_client_that_left(
    service, batch, pieces, monkeypatch
):
    client = Client(service, prompt(LONG, 7), 4)
    whole, read = batch._read, []

    def cancelling(*args):
        read.append(args)
        if len(read) == 2:
            service.engine.cancel([client.job])
        return whole(*args)

    monkeypatch.setattr(batch, "_read", cancelling)
    service.engine.submit([client.job])
    other = Client(service, prompt(SHORT, 8), 4)
    service.engine.submit([other.job])
    assert other.done.wait(60)
    assert not client.pieces and not client.job.prefilled
    assert len(read) < LONG // PIECE
