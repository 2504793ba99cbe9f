"""Test prompts that continue cached prefixes: same texts, fewer tokens to prefill."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import stree_jax
from stree_jax.models.mixers.attention import AttentionState
from stree_jax.models.stack.memory import size_of
from stree_jax.sampling.settings import Sampling
from stree_jax.server import batch as batches
from stree_jax.server import fitting, programs
from stree_jax.server.batch import Batch, Sizes, TextRequest
from stree_jax.server.prefixes import Prefixes
from stree_jax.sizing import step_times
from stree_jax.sizing.fit import fastest
from stree_jax.sizing.memory import CompiledBytes
from stree_jax.speculation.decoding import RUNNING
from stree_jax.speculation.default_tree import spec_for
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
        patch.setattr(step_times, "all_known", lambda *_: True)
        spec = spec_for(model, tiny(2, layers=("mamba",)), "auto:1,4", None, None)
        batch = Batch(model, spec, SIZES)
        programs.warm(batch, lambda _: None)
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
    assert len(batch.prefixes) == 2, "a text of 29 tokens is read in one pass anyway"
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
    ((answer),) = decoded_together(batch, TextRequest(first, 8))
    hits = batch.prefixes.hits
    for turn in ([*first[:60], 1, *first], [1, *first], first[:89], first[:70]):
        assert decoded_together(batch, TextRequest(turn, 4))
    assert batch.prefixes.hits == hits


def test_an_answer_is_generated_again_from_the_end_of_its_prompt(batch):
    first = prompt_of(7, 90)
    batch.clear()
    found = decoded_together(batch, TextRequest(first, 12))
    assert batch.admit(0, TextRequest(first, 12)) == 89
    batch.cancel([0])
    assert decoded_together(batch, TextRequest(first, 12)) == found


def states_of(n, size=10, caches=False):
    """Returns states of n tokens: 1,000 bytes, and with `caches` 100 per token."""
    cache = np.arange(20, dtype=np.float32)[None, None, :, None] * np.ones(
        (1, 1, 1, 25)
    )
    cache = np.where(np.arange(20)[:, None] < n, cache, -1).astype(np.float32)
    kept = AttentionState(cache, cache + 100) if caches else None
    return (kept, np.full(250, n, np.float32)), None


def ids_of(*parts):
    return [*np.concatenate([np.asarray(part) for part in parts]).tolist(), 0]


def lengths(prefixes, text):
    """Returns the lengths of the cached prefixes of a text, by their states."""
    found = []
    while (kept := prefixes.take([*text, 0])) is not None:
        found.append(int(kept.past[0][1][0]))
        text = text[: found[-1] - 1]
    return found


def test_space_is_shared_by_conversations():
    """With space for six states, a long conversation takes three of them, and the last
    prompt and answer of the others stay. The system prompt stays as it is used."""
    prefixes, system = Prefixes(6), [9] * 3
    prefixes.add(ids_of(system), states_of(3), shared=True)
    texts = {user: [*system, user] for user in (1, 2)}
    for user, turns in ((1, 1), (2, 6)):
        for _ in range(turns):
            prefixes.take([*texts[user], 0])
            prefixes.add(ids_of(texts[user]), states_of(len(texts[user])))
            texts[user] += [user]
            prefixes.add(
                ids_of(texts[user]), states_of(len(texts[user])), answered=True
            )
            texts[user] += [user + 20]
    assert prefixes.bytes <= 6000
    assert lengths(prefixes, texts[1])[:2] == [5, 4] and len(prefixes) == 6
    assert lengths(prefixes, texts[2])[:2] == [15, 14]
    assert lengths(prefixes, system) == [3]


def test_the_least_recently_used_conversation_is_dropped_first():
    prefixes = Prefixes(4)
    for user in (1, 2, 3, 4):
        prefixes.add(ids_of([user] * 5), states_of(5))
    prefixes.take([1] * 6)
    prefixes.add(ids_of([5] * 5), states_of(5))
    held = [user for user in range(1, 6) if prefixes.take([user] * 6)]
    assert held == [1, 3, 4, 5]
    assert (prefixes.hits, prefixes.tokens) == (5, 25)


def test_caches_of_a_text_are_kept_once():
    """The rows of a text with 19 tokens are stored once for all of its prefixes, and
    restored with the unused rows zero."""
    prefixes, text = Prefixes(40), list(range(1, 20))
    for n in (5, 12, 19):
        prefixes.add([*text[:n], 0], states_of(n, caches=True))
    assert prefixes.bytes == 3 * 1000 + 19 * 2 * 100
    for n in (5, 12, 19):
        kept = prefixes.take([*text[:n], 0])
        (caches, state), _ = kept.restored()
        (wanted, _), _ = states_of(n, caches=True)
        rows = np.arange(20)[:, None] < n
        assert np.array_equal(caches.k, np.where(rows, wanted.k, 0))
        assert np.array_equal(caches.v, np.where(rows, wanted.v, 0))
        assert state[0] == n


# --- a trace of two users -------------------------------------------------------------


class Trace:
    """Two users of one system prompt, whose texts are compared with those of a batch
    without a cache.

    Attributes:
      prompts: tokens of all prompts.
      cached: tokens of them that the batch did not read.
      possible: tokens of them that are the beginning of an earlier text.
    """

    def __init__(self, batch):
        self.batch, self.system = batch, prompt_of(30, 90)
        self.seen, self.ends = [], []
        self.prompts = self.cached = self.possible = 0

    def ask(self, history, new):
        """Sends a history with a new message. Returns the history after the answer."""
        prompt = [*history, *new]
        request = TextRequest(prompt, 8, shared=len(self.system))
        cached = self.batch.admit(0, request)
        (answer,) = finished(self.batch)
        self._count(prompt, cached)
        self.seen.append((request, answer))
        text = [*prompt, *answer]
        self.ends += [self.system, prompt[:-1], text[:-1]]
        return text

    def _count(self, prompt, cached):
        """Checks the cached tokens against the ends of earlier texts."""
        before = [end for end in self.ends if prompt[: len(end)] == end != prompt]
        assert cached == max(map(len, before), default=0)
        longest = 0
        for request, answer in self.seen:
            pairs = zip(prompt[:-1], [*request.ids, *answer], strict=False)
            same = [a == b for a, b in pairs]
            longest = max(longest, same.index(False) if False in same else len(same))
        self.prompts += len(prompt)
        self.cached += cached
        self.possible += longest


def finished(batch):
    """Decodes the text of row 0 to its end."""
    tokens = []
    while True:
        update = batch.advance()[0]
        tokens += update.tokens
        if update.finish != RUNNING:
            return [tokens]


def test_two_users_of_one_system_prompt(batch):
    """Several turns each, an answer generated again, a branch and an edit: all states
    fit in the cache, and more than 90 % of the tokens that could be reused are."""
    batch.clear()
    batch.prefixes.limit = 16
    trace = Trace(batch)
    system = trace.system
    histories = {"a": system, "b": system}
    for turn in range(3):
        for i, user in enumerate("ab"):
            before, message = histories[user], prompt_of(100 + 10 * turn + i, 11)
            histories[user] = trace.ask(before, message)
    trace.ask(before, message)  # the last answer again
    early = histories["a"][: len(system) + 11 + 8]
    branch = trace.ask(early, prompt_of(200, 9))
    edited = prompt_of(120, 11)[:5] + prompt_of(201, 6)
    trace.ask(histories["a"][:-19], edited)
    trace.ask(branch, prompt_of(202, 12))
    trace.ask(histories["a"], prompt_of(203, 7))
    assert trace.cached > 0.9 * trace.possible > 0.6 * trace.prompts
    batch.prefixes.limit = SIZES.prefixes
    for request, answer in trace.seen:
        batch.prefixes.clear()
        assert decoded_together(batch, replace(request, shared=0)) == [answer]


def test_a_beginning_seen_twice_is_cached(batch):
    """Completions have no system prompt: the states after their common beginning are
    cached when it is seen for the second time."""
    batch.clear()
    common, found = prompt_of(40, 100), []
    for seed in range(3):
        request = TextRequest([*common, seed + 8, *prompt_of(seed, 9)], 4)
        found.append(batch.admit(0, request))
        finished(batch)
    assert found == [0, 0, 100]


# --- memory limits --------------------------------------------------------------------


def test_counted_bytes_are_those_of_a_batch(batch, model, monkeypatch):
    """To the byte: rows, lists, the space for cached prefixes, and one that is
    copied."""
    batch.clear()
    spec = batch.specs[False]
    shapes = fitting.batch_shapes(model, spec, SIZES)
    for seed in range(5):
        decoded_together(batch, TextRequest(prompt_of(seed, 200), 2))
        assert batch.prefixes.bytes <= SIZES.prefixes * size_of(shapes.past)
    held = size_of((batch._decoding, batch._lists))
    assert batch.prefixes.row_bytes == size_of(shapes.past)
    held += (SIZES.prefixes + 1) * size_of(shapes.past)
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
    programs.warm(batch, lambda _: None)
    for seed in range(3):
        decoded_together(
            batch,
            TextRequest(prompt_of(seed, 70), 5),
            TextRequest(prompt_of(9, 30), 20),
        )
        alive = sum(x.nbytes for x in jax.live_arrays() if id(x) not in before)
        assert size_of(model.params) + alive <= fit.size
