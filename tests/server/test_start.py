"""Test what a server does before its first request, and when it has none for long."""

import asyncio
import logging

import jax
import pytest

from stree_jax.models.stack.memory import size_of
from stree_jax.server import batch as batches
from stree_jax.server import engine as engines
from stree_jax.server import programs
from stree_jax.server.batch import Batch
from stree_jax.server.rows import Sizes
from stree_jax.sizing import step_times
from stree_jax.speculation.default_tree import spec_for
from tests.server.served import FINE, ask, service_of, tiny_model, until

# No other test has these sizes, and so these programs.
SIZES = Sizes(rows=2, context=104, steps=3, top_logprobs=1, prefix_memory=2**20)
PROGRAMS = "init_decoding", "admit", "advance", "past", "vacant", "cancel"


@pytest.fixture(scope="module")
def fresh():
    """Returns a batch without compiled programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_times, "timed", lambda spec, *_: spec)
        patch.setattr(step_times, "all_known", lambda *_: True)
        model = tiny_model()
        yield Batch(model, spec_for(model, "lookup", "auto:1,4", None, None), SIZES)


@pytest.fixture(scope="module")
def batch(fresh):
    """Returns the batch after `warm`, during which it must not run a program."""

    def runs(*args, **options):
        raise AssertionError("a program runs during the start")

    before = {id(x) for x in jax.live_arrays()}
    with pytest.MonkeyPatch.context() as patch:
        for name in PROGRAMS:
            patch.setattr(batches, f"{name}_jit", runs)
        said = []
        later = programs.warm(fresh, said.append)
        assert said and all(line.startswith("compiling: ") for line in said)
        for program in later:
            program.compile()
    fresh.allocated = sum(x.nbytes for x in jax.live_arrays() if id(x) not in before)
    return fresh


@pytest.fixture
def service(batch):
    service = service_of(batch)
    yield service
    assert service.engine.stop()
    batch.clear()


class Compiled:
    """Records the names of the programs that are traced and compiled."""

    NAMES = "jax._src.interpreters.pxla", "jax._src.dispatch"

    def __enter__(self):
        self.lines, self.handler = [], logging.Handler()
        self.handler.emit = lambda record: self.lines.append(record.getMessage())
        jax.config.update("jax_log_compiles", True)  # also for the engine's thread
        for name in self.NAMES:
            logging.getLogger(name).addHandler(self.handler)
        return self

    def __exit__(self, *error):
        jax.config.update("jax_log_compiles", False)
        for name in self.NAMES:
            logging.getLogger(name).removeHandler(self.handler)

    @property
    def names(self):
        lines = [line for line in self.lines if line.startswith("Compiling ")]
        found = [line.split("jit(")[1].split(")")[0] for line in lines]
        return [name for name in found if name in PROGRAMS]


def test_the_start_runs_no_program_and_allocates_no_rows(batch):
    """The fixture raises if one runs."""
    shapes = programs.batch_shapes(batch.model, batch.specs[False], SIZES)
    assert batch.allocated < size_of(shapes.one)


def test_the_first_requests_find_their_programs_compiled(service):
    """Greedy, sampled, with a long prompt and after a cached prefix."""
    with Compiled() as compiled:
        for change in (
            dict(temperature=0),
            dict(temperature=0.7, n=3, prompt=[9] * 43),
            dict(stop=["ab", "x"], prompt=[11] * 23),
            dict(prompt=[10] * 88, ignore_eos=True),
            dict(prompt=[10] * 99),
        ):
            assert ask(service, "/v1/completions", FINE | change)[0] == 200
    assert compiled.names == ["vacant"], "only the rows are allocated"
    assert len(service.engine.batch.prefixes) > 0


def test_the_first_log_probabilities_compile_one_program(service):
    assert ask(service, "/v1/completions", FINE)[0] == 200
    with Compiled() as compiled:
        for _ in range(2):
            assert ask(service, "/v1/completions", FINE | dict(logprobs=1))[0] == 200
    assert compiled.names == ["advance"]


def test_rows_are_freed_without_requests_and_allocated_again(batch, monkeypatch):
    """A text is the same afterwards, and cached states stay."""
    trims = []
    monkeypatch.setattr(engines, "REST_S", 0.05)
    monkeypatch.setattr(engines, "return_free_memory", lambda: trims.append(1))
    service, texts = service_of(batch), []
    body = FINE | dict(prompt=[9] * 70)
    try:
        for i in range(2):
            _, _, answer = ask(service, "/v1/completions", body)
            texts.append(answer["choices"][0]["text"])
            asyncio.run(until(lambda count=i + 1: len(trims) >= count))
            assert batch._decoding is None and batch._lists is None
            assert len(batch.prefixes) > 0
    finally:
        assert service.engine.stop()
    assert texts[0] == texts[1] != ""
