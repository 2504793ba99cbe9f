"""Test prompts that continue cached prefixes: same texts, fewer tokens to prefill."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import stree_jax
from stree_jax.default_tree import spec_for
from stree_jax.models.memory import size_of
from stree_jax.sampling.settings import Sampling
from stree_jax.server import batch as batches
from stree_jax.server import fitting
from stree_jax.server.batch import Batch, Sizes, TextRequest
from stree_jax.server.prefixes import Kept, Prefixes
from stree_jax.sizing import step_times
from stree_jax.sizing.fit import fastest
from stree_jax.sizing.memory import CompiledBytes
from stree_jax.speculation.decoding import RUNNING
from tests.server import served
from tests.support.tiny import REAL, tiny

SIZES = Sizes(rows=2, context=256, steps=4, top_logprobs=2, prefixes=2)
DRAWN = Sampling(0.9, top_p=0.9, seed=4)


@pytest.fixture(scope="module")
def model():
    return replace(served.tiny_model(), config=tiny_config())


def tiny_config():
    config = tiny(1, layers=("mamba", "attention", "mlp")).config
    return replace(config, stop_tokens=())


@pytest.fixture(scope="module")
def batch(model):
    with pytest.MonkeyPatch.context() as patch:  # times are assumed, not measured
        patch.setattr(step_times, "timed", lambda spec, *_: spec)
        spec = spec_for(model, tiny(2, layers=("mamba",)), "auto:1,4", None, None)
        batch = Batch(model, spec, SIZES)
        batch.warm(lambda _: None)
    return batch


def decoded_together(batch, *asked):
    """Returns the tokens of texts that are decoded together."""
    found = {i: [] for i in range(len(asked))}
    for i, one in enumerate(asked):
        batch.admit(i, one)
    running = set(found)
    while running:
        for i, news in batch.advance().items():
            found[i] += news.tokens
            running -= {i} if news.finish != RUNNING else set()
    return list(found.values())


def prompt_of(seed, n):
    return np.random.default_rng(seed).integers(8, REAL, n).tolist()


@pytest.mark.parametrize("sampling", [batches.GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_text_after_a_cached_prefix_is_unchanged(batch, sampling):
    """Beside another text that is not cached."""
    first, other = prompt_of(1, 71), prompt_of(2, 20)
    batch.clear()
    hits, spared = batch.prefixes.hits, batch.prefixes.tokens
    _, answer = decoded_together(
        batch, TextRequest(other, 9, sampling), TextRequest(first, 30, sampling)
    )
    assert len(batch.prefixes) == 1, "a text of 29 tokens is read in one pass anyway"
    turn = [*first, *answer, *prompt_of(3, 11)]
    asked = TextRequest(turn, 40, sampling), TextRequest(other, 25, sampling)
    found = decoded_together(batch, *asked)
    assert batch.prefixes.hits == hits + 1
    assert batch.prefixes.tokens == spared + 71 + 30 - 1, "all but the last token"
    batch.prefixes.clear()
    assert decoded_together(batch, *asked) == found
    assert batch.prefixes.hits == hits + 1


def test_greedy_text_after_a_cached_prefix_matches_generate(batch, model):
    first = prompt_of(5, 80)
    batch.clear()
    ((answer),) = decoded_together(batch, TextRequest(first, 20))
    turn = [*first, *answer, *prompt_of(6, 5)]
    (found,) = decoded_together(batch, TextRequest(turn, 30))
    assert batch.prefixes.hits
    wanted = stree_jax.generate(
        model, [turn], max_new_tokens=30, capacity=512, drafter=None
    )
    assert found == wanted.tokens[0]


def test_a_prompt_unlike_the_cached_text_is_prefilled(batch):
    first = prompt_of(7, 90)
    batch.clear()
    hits = batch.prefixes.hits
    ((answer),) = decoded_together(batch, TextRequest(first, 8))
    end = [*first, *answer][:-1]
    last = [*end[:-1], (end[-1] + 1) % REAL, 9, 9]
    for turn in ([*first[:-1], 1, *answer, 9], last, end, first):
        decoded_together(batch, TextRequest(turn, 4))
    assert batch.prefixes.hits == hits


def test_the_least_recently_used_prefix_is_dropped():
    kept = Prefixes(2)
    a, b, c = [1, 2], [3, 4], [1, 2, 5, 6]
    for ids in (a, b):
        kept.evict_for(ids)
        kept.add(Kept(tuple(ids), str(ids)))
    assert kept.take([1, 2]) is None and kept.take([9, 1, 2, 3]) is None
    assert kept.take([1, 2, 3]).past == str(a)
    kept.evict_for(c)
    kept.add(Kept(tuple(c), str(c)))
    assert kept.take([3, 4, 5]) is None, "it went"
    assert kept.take([*c, 7]).past == str(c), "the longest that fits"
    assert kept.take([*a, 7]).past == str(a)
    kept.evict_for(c)
    assert len(kept) == 1, "an equal text goes first"
    assert (kept.hits, kept.tokens) == (3, 2 + 4 + 2)


# --- memory limits --------------------------------------------------------------------


def test_counted_bytes_are_those_of_a_batch(batch, model, monkeypatch):
    """To the byte: rows, lists, and the largest number of cached prefixes."""
    batch.clear()
    for seed in range(3):
        decoded_together(batch, TextRequest(prompt_of(seed, 70), 2))
    spec = batch._specs[False]
    pasts = [kept.past for kept in batch.prefixes._kept]
    held = size_of((batch._decoding, batch._lists, pasts))
    assert len(pasts) == 2
    shapes = fitting.batch_shapes(model, spec, SIZES)
    assert shapes.held(SIZES) == held
    monkeypatch.setattr(fitting, "analysed", lambda _: CompiledBytes(1000, 5, 7))
    needs = list(fitting.needs(model, spec, SIZES))
    read = size_of(shapes.one)  # a single row, during its prefill
    reading = 2 * len(shapes.layout.widths)
    assert needs == [held + 12] * reading + [held + read + 12] + [held + 12] * 4


def test_only_unnamed_sizes_are_reduced():
    wish = Sizes(rows=4, context=512, prefixes=3)
    sizes = [(s.context, s.rows, s.prefixes) for s in fitting.smaller(wish, [])]
    assert sizes[:4] == [(512, 4, 3), (512, 4, 1), (512, 4, 0), (512, 2, 3)]
    assert sizes[-1] == (128, 1, 0) and len(sizes) == 3 * 3 * 3
    assert list(fitting.smaller(wish, ["rows", "context", "prefixes"])) == [wish]
    assert {s.rows for s in fitting.smaller(wish, ["rows"])} == {4}


@pytest.fixture
def fit(model, monkeypatch):
    """Returns `fitted`, with the compiler's sizes replaced by predictions."""
    monkeypatch.setattr(fitting.ServeTask, "compiled", lambda *_: ())

    def fit(limit, named=(), drafter="lookup", tree=None):
        wishes = fitting.smaller(SIZES, named)
        return fitted(limit, wishes, model, drafter, tree)

    return fit


def fitted(limit, wishes, model, drafter=None, tree=None):
    task = fitting.ServeTask(model, drafter, tree, None)
    (found,) = fastest(task, wishes, limit)
    return found


def test_the_limit_determines_sizes_and_tree(fit, model, monkeypatch):
    monkeypatch.setattr(fitting.ServeTask, "tolerance", 1.0)
    whole = fit(10**9)
    assert whole.request == SIZES and "auto" in whole.candidate.name
    less = fit(whole.size - 1)
    assert less.size < whole.size
    assert less.request == SIZES and less.candidate.name != whole.candidate.name
    named = fit(whole.size - 1, tree="auto")
    assert named.request == replace(SIZES, prefixes=1)
    assert "auto" in named.candidate.name
    plainly = fit(10**9, drafter=None)
    less = fit(plainly.size - 1, drafter=None).request
    assert less == replace(SIZES, prefixes=1)
    fewer = fit(plainly.size - 1, ["prefixes"], drafter=None).request
    assert fewer == replace(SIZES, rows=1)
    shorter = fit(plainly.size - 1, ["prefixes", "rows"], drafter=None).request
    assert shorter == replace(SIZES, context=128)
    for limit in (size_of(model.params) // 2, size_of(model.params) + 1000):
        with pytest.raises(ValueError, match="^memory: .* too few for ") as error:
            fit(limit)
        assert "\n" not in str(error.value)


def test_suggested_sizes_fit(model):
    """Each suggested number fits on its own, by the compiler's sizes."""
    whole = Sizes(rows=3, context=1024, top_logprobs=2, prefixes=3)
    limit = fitted(10**9, [whole], model).size * 6 // 10
    with pytest.raises(ValueError, match="it fits with context") as error:
        fitted(limit, [whole], model)
    for word in str(error.value).split("it fits with ")[1].split(", or "):
        name, value = word.split()
        less = replace(whole, **{name: int(value)})
        assert getattr(less, name) < getattr(whole, name)
        assert fitted(limit, [less], model).size <= limit


def test_the_compilers_sizes_decide(model):
    """For the programs of a batch without a drafter, exactly the needed bytes are
    enough."""
    sizes = [Sizes(rows=2, context=128, top_logprobs=1, prefixes=1)]
    fit = fitted(10**9, sizes, model)
    again = fitted(fit.size, sizes, model)
    assert (again.size, again.request) == (fit.size, fit.request)
    with pytest.raises(ValueError, match="2 rows, context 128, 1 prefixes, which take"):
        fitted(fit.size - 1, sizes, model)
    task = fitting.ServeTask(model, None, None, None)
    by_shapes = task.count(sizes[0], fit.candidate).predicted
    assert task.weights < by_shapes < 1.3 * fit.size


def test_a_batch_stays_within_the_predicted_bytes(model):
    """Measured by live arrays, whenever Python is in control."""
    (sizes,) = [Sizes(rows=2, context=128, top_logprobs=1, prefixes=1)]
    fit = fitted(10**9, [sizes], model)
    before = {id(x) for x in jax.live_arrays()}
    batch = Batch(model, fit.candidate.spec, sizes)
    batch.warm(lambda _: None)
    for seed in range(3):
        decoded_together(
            batch,
            TextRequest(prompt_of(seed, 70), 5),
            TextRequest(prompt_of(9, 30), 20),
        )
        alive = sum(x.nbytes for x in jax.live_arrays() if id(x) not in before)
        assert size_of(model.params) + alive <= fit.size
