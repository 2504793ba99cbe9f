"""Test prompts that continue cached prefixes: same texts, fewer tokens to prefill."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import stree_jax
from stree_jax.models.stack.memory import size_of
from stree_jax.sampling.settings import Sampling
from stree_jax.server import batch as batches
from stree_jax.server import fitting, programs
from stree_jax.server.batch import Batch
from stree_jax.server.prefixes import LEAST, common_length
from stree_jax.server.rows import Sizes, TextRequest
from stree_jax.sizing import step_times
from stree_jax.sizing.fit import fastest
from stree_jax.sizing.memory import CompiledBytes
from stree_jax.speculation.decoding import RUNNING
from stree_jax.speculation.default_tree import spec_for
from tests.server import served
from tests.support.prefix_states import cache_of, check_restored, past_of
from tests.support.tiny import REAL, tiny

SIZES = Sizes(rows=2, context=256, steps=4, top_logprobs=2, prefix_memory=2**20)
ATTENTION = "attention", "mlp"
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


def test_a_private_text_is_neither_kept_nor_continued(batch):
    prompt = prompt_of(8, 90)
    batch.clear()
    private = TextRequest(prompt, 5, private=True)
    _, first = decoded_together(batch, TextRequest(prompt_of(9, 5), 3), private)
    batch.prefixes.clear()
    (text,) = decoded_together(batch, private)
    assert len(batch.prefixes) == 0 and text == first
    decoded_together(batch, TextRequest(prompt, 5))
    assert batch.admit(0, private) == 0 and batch.admit(1, TextRequest(prompt, 5)) > 0
    batch.cancel([0, 1])


@pytest.mark.parametrize("sampling", [batches.GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_text_after_a_cached_prefix_is_unchanged(batch, sampling):
    """Beside another text that is not cached."""
    first, other = prompt_of(1, 71), prompt_of(2, 12)
    batch.clear()
    hits, spared = batch.prefixes.hits, batch.prefixes.tokens
    _, answer = decoded_together(
        batch, TextRequest(other, 9, sampling), TextRequest(first, 30, sampling)
    )
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
    first = prompt_of(7, 60)
    batch.clear()
    ((answer),) = decoded_together(batch, TextRequest(first, 8))
    hits = batch.prefixes.hits
    for turn in ([*first[:40], 1, *first], [1, *first], first[:59], first[:10]):
        assert decoded_together(batch, TextRequest(turn, 4))
        batch.prefixes.clear()
        decoded_together(batch, TextRequest(first, 8))
    assert batch.prefixes.hits == hits


def test_an_answer_is_generated_again_from_the_end_of_its_prompt(batch):
    first = prompt_of(7, 90)
    batch.clear()
    found = decoded_together(batch, TextRequest(first, 12))
    assert batch.admit(0, TextRequest(first, 12)) == 89
    batch.cancel([0])
    assert decoded_together(batch, TextRequest(first, 12)) == found


@pytest.mark.parametrize("layers", [("mamba", *ATTENTION), ATTENTION])
def test_bits_do_not_depend_on_the_cache(layers):
    """Log-probabilities are equal without a cache, with space for all states, and with
    space for a few, for branches, edits and repeated prompts."""
    model = replace(tiny(1, layers=layers), tokenizer=served.tiny_model().tokenizer)
    spec = spec_for(model, tiny(2, layers=ATTENTION), "E", None, None)
    cached, found = [], []
    for memory in (0, 40_000, 2**22):
        batch = Batch(model, spec, replace(SIZES, prefix_memory=memory))
        for list_, value in zip((cached, found), branched(batch), strict=True):
            list_.append(value)
        assert batch.prefixes.bytes <= memory
    assert 0 == cached[0] < cached[1] < cached[2]
    cold, *others = found
    for other in others:
        for (tokens, raw), (wanted, bits) in zip(other, cold, strict=True):
            assert tokens == wanted and np.array_equal(raw, bits)


def branched(batch):
    """Decodes a conversation and edits of it. Returns the number of cached tokens, and
    the tokens and log-probabilities of each answer."""
    history, cached, found = prompt_of(50, 120), 0, []
    for turn, place in enumerate((40, 90, 100, 64, 119)):
        sampling = DRAWN if turn % 2 else batches.GREEDY
        for prompt in (history, [*history[:place], *prompt_of(60 + turn, 30)]):
            request = TextRequest(prompt, 6, sampling, logprobs=True)
            cached += batch.admit(0, request)
            found.append(finished(batch, bits=True))
        history = [*history, *found[-2][0]]
    return cached, found


# --- a tree of made-up states ---------------------------------------------------------


@pytest.mark.parametrize("limit", [10**7, 30_000, 2_000])
@pytest.mark.parametrize("recurrent", [False, True])
def test_random_texts_are_restored(recurrent, limit):
    rng = np.random.default_rng(7)
    prefixes, lags, kept = cache_of(limit, recurrent), {}, set()
    lags = dict.fromkeys(range(65), 0)
    texts = [rng.integers(0, 3, 60).tolist()]
    for turn in range(120):
        old = texts[rng.integers(len(texts))]
        text = [*old[: rng.integers(10, 60)], *rng.integers(0, 3, 60).tolist()][:60]
        texts.append(text)
        found, n = prefixes.find(text), int(rng.integers(17, 60))
        beginnings = {len(k) for k in kept if list(k) == text[: len(k)]} - {60}
        if limit == 10**7:
            same = [common_length(np.asarray(text[:-1]), np.asarray(k)) for k in kept]
            wanted = max(beginnings if recurrent else same, default=0)
            assert found.length == (wanted if wanted >= LEAST else 0), turn
        if found.length:
            check_restored(found, text, recurrent, lags)
        lags[n] = lag = n % 5  # the same for every text of this length
        prefixes.add(text[: n + 1], past_of(text[:n], recurrent, lag))
        kept.add(tuple(text[:n]))
        check_tree(prefixes)
    assert prefixes.hits > (3 if limit == 2_000 else 50)
    prefixes.clear()
    assert prefixes.bytes == len(prefixes) == 0


def check_tree(prefixes):
    assert prefixes.bytes <= prefixes.limit
    nodes = list(prefixes.nodes())
    assert prefixes.bytes == sum(n.run_bytes + n.kept_bytes for n in nodes)
    assert len(prefixes) == sum(n.kept is not None for n in nodes)
    assert all(n.kept is not None for n in nodes if not n.children)
    for node in nodes:
        assert len(node.tokens) and node.parent.end == node.start
        assert node.parent.children[int(node.tokens[0])] is node


def test_rows_of_a_text_are_kept_once():
    prefixes, text = cache_of(10**6, True), list(range(1, 61))
    for n in (20, 33, 59):
        prefixes.add(text[: n + 1], past_of(text[:n], True))
    form = prefixes.form
    assert prefixes.bytes == 3 * form.state_bytes + 59 * (form.token_bytes + 4)


def test_rows_of_an_evicted_text_are_freed():
    """Not those that another text shares."""
    prefixes, common = cache_of(10**6, False), [5] * 30
    for first in (1, 2):
        text = [*common, first, *[first] * 28]
        prefixes.find(text)
        prefixes.add(text, past_of(text[:-1], False))
    one = prefixes.form.token_bytes + 4
    shared = prefixes.bytes
    prefixes.limit = shared - 1
    prefixes.evict()
    assert prefixes.bytes == shared - 28 * one - prefixes.form.state_bytes
    assert prefixes.find([*common, 2, *[2] * 30]).length == 58
    assert prefixes.find([*common, 1, *[1] * 30]).length == 30


def test_rows_that_a_draft_model_reads_later_are_filled_in():
    prefixes, text = cache_of(10**6, True), list(range(1, 61))
    prefixes.add(text[:31], past_of(text[:30], True, 12))
    assert prefixes.find(text).restored()[1].length.tolist() == [18]
    prefixes.add(text, past_of(text[:59], True, 0))
    lags = {30: 12, 59: 0}
    check_restored(prefixes.find([*text, 0]), text, True, lags)
    check_restored(prefixes.find(text[:40]), text, True, lags)


def test_the_least_recently_used_text_is_evicted_first():
    prefixes = cache_of(10**6, True)
    texts = {user: [user] * 40 for user in (1, 2, 3, 4)}
    for text in texts.values():
        prefixes.add(text, past_of(text[:-1], True))
        prefixes.find([9])  # time passes
    prefixes.find([*texts[1], 0])
    prefixes.limit = prefixes.bytes
    prefixes.add([5] * 40, past_of([5] * 39, True))
    held = {user for user in texts if prefixes.find(texts[user]).length}
    assert held == {1, 3, 4}


def test_a_state_that_saves_little_is_evicted_before_one_that_saves_much():
    prefixes, text = cache_of(10**6, True), list(range(1, 61))
    for n in (20, 50, 54):
        prefixes.add(text[: n + 1], past_of(text[:n], True))
    prefixes.limit = prefixes.bytes - 1
    prefixes.evict()
    assert {n.end for n in prefixes.nodes() if n.kept is not None} == {20, 50}


def test_states_are_as_dense_as_the_limit_allows():
    prefixes = cache_of(10**6, True)
    steps = []
    for limit in (2_000, 40_000, 400_000, 10**7):
        prefixes.limit = limit
        steps.append(prefixes.spacing(1024))
    assert steps[0] is None and steps[1:] == sorted(steps[1:], reverse=True)
    assert steps[-1] == 64 < steps[1]
    assert 1024 / steps[2] * prefixes.form.state_bytes <= 400_000 / 4
    assert cache_of(10**7, False).spacing(1024) is None, "any token will do"


# --- a trace of two users -------------------------------------------------------------


class Trace:
    """Two users of one system prompt, whose texts are compared with those of a batch
    without a cache.

    Attributes:
      cached: tokens of the prompts that the batch did not read.
      possible: tokens of them that are the beginning of an earlier text.
    """

    def __init__(self, batch):
        self.batch, self.system = batch, prompt_of(30, 90)
        self.seen = []
        self.cached = self.possible = 0

    def ask(self, history, new):
        """Sends a history with a new message. Returns the history after the answer."""
        prompt = [*history, *new]
        request = TextRequest(prompt, 8, shared=len(self.system))
        self.cached += self.batch.admit(0, request)
        answer, _ = finished(self.batch)
        longest = 0
        for before, text in self.seen:
            pairs = zip(prompt[:-1], [*before.ids, *text][:-1], strict=False)
            same = [a == b for a, b in pairs]
            longest = max(longest, same.index(False) if False in same else len(same))
        self.possible += longest
        self.seen.append((request, answer))
        return [*prompt, *answer]


def finished(batch, bits=False):
    """Decodes the text of row 0 to its end. Returns its tokens, and with `bits` their
    log-probabilities."""
    tokens, raw = [], []
    while True:
        update = batch.advance()[0]
        tokens += update.tokens
        raw += [update.raw] * bits
        if update.finish != RUNNING:
            return tokens, np.concatenate(raw) if bits else None


def test_two_users_of_one_system_prompt(batch):
    """Several turns each, an answer generated again, a branch and an edit: nearly all
    tokens that could be reused are."""
    batch.clear()
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
    assert trace.cached > 0.97 * trace.possible
    for request, answer in trace.seen:
        batch.prefixes.clear()
        assert decoded_together(batch, replace(request, shared=0)) == [answer]


def test_an_edited_history_continues_from_the_states_within_it(batch):
    """From the last one before the edit, and the second time from the edit itself."""
    batch.clear()
    common, found = prompt_of(40, 180), []
    for seed in range(3):
        request = TextRequest([*common[:150], seed + 8, *prompt_of(seed, 9)], 4)
        found.append(batch.admit(0, request if seed else TextRequest(common, 4)))
        finished(batch)
    assert found == [0, 128, 150]


def test_states_within_a_prompt_are_kept_at_ends_of_turns(model):
    config = replace(model.config, stop_tokens=(30,))
    spec = spec_for(replace(model, config=config), None, None, None, None)
    batch = Batch(replace(model, config=config), spec, SIZES)
    prompt = [x if x != 30 else 31 for x in prompt_of(70, 200)]
    prompt[49] = prompt[69] = prompt[99] = 30
    batch.admit(0, TextRequest(prompt, 1))
    ends = sorted(n.end for n in batch.prefixes.nodes() if n.kept is not None)
    assert ends == [50, 100, 192, 199]


def test_a_cancelled_answer_is_kept(batch):
    batch.clear()
    first = prompt_of(75, 90)
    batch.admit(0, TextRequest(first, 30))
    tokens = [*batch.advance()[0].tokens, *batch.advance()[0].tokens]
    batch.cancel([0])
    turn = [*first, *tokens, 9, 10]
    assert batch.admit(0, TextRequest(turn, 4)) == len(first) + len(tokens) - 1
    batch.cancel([0])


# --- memory limits --------------------------------------------------------------------


def test_counted_bytes_are_those_of_a_batch(batch, model, monkeypatch):
    """To the byte: rows, lists, the space for cached prefixes, one that is copied, and
    one of the prompt that is read."""
    batch.clear()
    spec = batch.specs[False]
    shapes = fitting.batch_shapes(model, spec, SIZES)
    for seed in range(5):
        decoded_together(batch, TextRequest(prompt_of(seed, 200), 2))
    assert 0 < batch.prefixes.bytes <= SIZES.prefix_memory
    held = size_of((batch._decoding, batch._lists))
    held += SIZES.prefix_memory + 2 * size_of(shapes.past)
    assert shapes.held(SIZES) == held
    monkeypatch.setattr(fitting, "analysed", lambda _: CompiledBytes(1000, 5, 7))
    needs = list(fitting.needs(model, spec, SIZES))
    read = size_of(shapes.one)  # a single row, during its prefill
    reading = 2 * len(shapes.layout.widths)
    assert needs == [held + 12] * reading + [held + read + 12] + [held + 12] * 4


def test_only_unnamed_sizes_are_reduced():
    wish = Sizes(rows=4, context=512, prefix_memory=1600)
    sizes = [(s.context, s.rows, s.prefix_memory) for s in fitting.smaller(wish, [])]
    assert sizes[:4] == [(512, 4, 1600), (512, 4, 400), (512, 4, 100), (512, 4, 0)]
    assert sizes[-1] == (128, 1, 0) and len(sizes) == 3 * 3 * 4
    assert list(fitting.smaller(wish, ["rows", "context", "prefix_memory"])) == [wish]
    assert {s.rows for s in fitting.smaller(wish, ["rows"])} == {4}
    six = replace(wish, rows=6)
    assert {s.rows for s in fitting.smaller(six, [], 2)} == {6}
    assert {s.rows for s in fitting.smaller(wish, [], 2)} == {4, 2}
    off = Sizes(rows=1, context=128)
    assert list(fitting.smaller(off, [])) == [off]


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
    assert named.request == replace(SIZES, prefix_memory=SIZES.prefix_memory // 4)
    assert "auto" in named.candidate.name
    plainly = fit(10**9, drafter=None)
    less = fit(plainly.size - 1, drafter=None).request
    assert less == replace(SIZES, prefix_memory=SIZES.prefix_memory // 4)
    fewer = fit(plainly.size - 1, ["prefix_memory"], drafter=None).request
    assert fewer == replace(SIZES, rows=1)
    shorter = fit(plainly.size - 1, ["prefix_memory", "rows"], drafter=None).request
    assert shorter == replace(SIZES, context=128)
    for limit in (size_of(model.params) // 2, size_of(model.params) + 1000):
        with pytest.raises(ValueError, match="^memory: .* too few for ") as error:
            fit(limit)
        assert "\n" not in str(error.value)


def test_suggested_sizes_fit(model):
    """Each suggested number fits on its own, by the compiler's sizes."""
    whole = Sizes(rows=3, context=1024, top_logprobs=2, prefix_memory=2**17)
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
    sizes = [Sizes(rows=2, context=128, top_logprobs=1, prefix_memory=2**18)]
    fit = fitted(10**9, sizes, model)
    again = fitted(fit.size, sizes, model)
    assert (again.size, again.request) == (fit.size, fit.request)
    with pytest.raises(
        ValueError, match="2 rows, context 128, 0.26 MB of prefixes, which take"
    ):
        fitted(fit.size - 1, sizes, model)
    task = fitting.ServeTask(model, None, None, None)
    by_shapes = task.count(sizes[0], fit.candidate).predicted
    assert task.weights < by_shapes < 1.3 * fit.size


def test_a_batch_stays_within_the_predicted_bytes(model):
    """Measured by live arrays, whenever Python is in control."""
    (sizes,) = [Sizes(rows=2, context=128, top_logprobs=1, prefix_memory=2**18)]
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
