"""Test texts that can end in one way only: they end without a target pass, as plain
decoding would end them."""

import numpy as np
import pytest

import stree_jax
from stree_jax import Constraint, Sampling
from stree_jax.constraints.rows import constraint_rows, vocabulary_of
from stree_jax.sampling.constraints import MOST_CLOSING, NONE
from stree_jax.server.batch import Batch
from stree_jax.server.rows import Sizes, TextRequest
from stree_jax.sizing import step_times
from stree_jax.speculation.decoding import COMPLETE, RUNNING
from stree_jax.speculation.default_tree import spec_for
from stree_jax.speculation.draft import FORCED

PERSON = Constraint(r'\{"name":"[a-z]{0,9}","age":[0-9]{1,3},"admin":(?:true|false)\}')
COLOURS = Constraint.choice(["red;@", "yellow;@", "green;;"])
PROMPTS = ["def person():\n    return ", "colour = "]
EACH = [PERSON, COLOURS]
WAYS = {
    "lookup": dict(drafter="lookup"),
    "a chain": dict(drafter="lookup", tree="chain:3"),
    "a tree": dict(drafter="model", tree="A"),
}
SAMPLED = [Sampling(0.8, top_p=0.9, seed=1), Sampling(1.2, seed=2, min_p=0.01)]


@pytest.fixture(scope="module")
def model():
    return stree_jax.load("demo", dtype="float32")


@pytest.fixture(scope="module")
def run(model):
    drafters = {
        "model": stree_jax.load("demo-drafter", dtype="float32"),
        "lookup": "lookup",
        None: None,
    }

    def run(drafter=None, prompts=PROMPTS, **options):
        options = dict(max_new_tokens=40, constraint=EACH) | options
        return stree_jax.generate(model, prompts, drafter=drafters[drafter], **options)

    return run


def allowed_tokens(tables, state):
    """Returns the tokens that may follow a state, and whether the text may end."""
    row = tables.following[state]
    return np.flatnonzero(row[tables.classes] >= 0), bool(tables.may_end[state])


def only_way(tables, state):
    """Returns the tokens of the only way from a state to the end; None if there are
    others, or if it is long."""
    found = []
    while len(found) <= MOST_CLOSING:
        tokens, may_end = allowed_tokens(tables, state)
        if may_end and not len(tokens):
            return found
        if may_end or len(tokens) != 1:
            return None
        found.append(int(tokens[0]))
        state = tables.following[state, tables.classes[tokens[0]]]
    return None


@pytest.mark.parametrize(
    "regex",
    [
        PERSON.regex,
        COLOURS.regex,
        "[0-9]{3}~",
        "a~@~@~@~@",
        "(?:~@){1,3}",
        "[a-z]*",
        "q",
    ],
)
def test_closing_tokens_are_the_only_way_to_the_end(model, regex):
    tables = vocabulary_of(model).tables(Constraint(regex))
    for state in range(len(tables.following)):
        way = only_way(tables, state)
        expected = way[0] if way else NONE
        assert tables.closing[state] == expected, state
    rows = constraint_rows(model, [Constraint(regex), None])
    for state in range(len(tables.following)):
        states = np.array([state, NONE], np.int32)
        own, other = np.asarray(rows.closing_after(states)).tolist()
        way = only_way(tables, state) or []
        assert own == way + [NONE] * (MOST_CLOSING - len(way))
        assert other == [NONE] * MOST_CLOSING
    assert (np.asarray(rows.by_passes().closing) == NONE).all()


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_closed_texts_are_those_of_plain_decoding(way, sampled, run):
    settings = dict(sampling=SAMPLED, n=4) if sampled else {}
    options, plain = WAYS[way] | settings, run(**settings)
    assert plain.target_calls.tolist() == plain.lengths.tolist()
    found, whole = run(**options), run(**options, keep_past=True)
    assert found.tokens == whole.tokens == plain.tokens
    assert found.texts == plain.texts and {*found.finish_reasons} == {"stop"}
    if "tree" in options:  # tree "auto" may choose other trees, by measured times
        assert (found.target_calls < whole.target_calls).any()
        assert (found.target_calls <= whole.target_calls).all()
    closed = found.lengths - found.gained @ np.arange(found.gained.shape[1])
    assert closed.max() > 1, "no text of several closing tokens"
    for origins, count in zip(found.origins, closed, strict=True):
        assert (origins[len(origins) - count :] == FORCED).all()
    assert (found.min_margin >= plain.min_margin - 1e-3).all()


@pytest.mark.parametrize(
    "stop",
    [(), ["}", ";"], ["e}", "@"], [";@"]],
    ids=["no stop", "the first", "the last", "both"],
)
def test_limits_and_stop_strings_cut_closing_tokens(run, stop):
    """Each limit is a row of its own."""
    (longest, *_) = run().lengths
    prompts = [text for text in PROMPTS for _ in range(longest)]
    limits = [*range(1, longest + 1)] * 2
    each = [one for one in EACH for _ in range(longest)]
    options = dict(max_new_tokens=limits, stop_strings=stop, constraint=each)
    plain = run(None, prompts, **options)
    found = run("lookup", prompts, tree="chain:3", **options)
    assert found.tokens == plain.tokens and found.texts == plain.texts
    assert found.finish_reasons == plain.finish_reasons
    assert found.stop_reasons == plain.stop_reasons
    assert found.target_calls.sum() < plain.target_calls.sum()


def test_stop_tokens_cut_closing_tokens(model, run):
    (at,) = model.tokenizer.encode("@", add_special_tokens=False).ids
    (semicolon,) = model.tokenizer.encode(";", add_special_tokens=False).ids
    for stops in ([at], [semicolon], [at, semicolon]):
        for least in (0, 39):
            options = dict(stop_tokens=stops, min_new_tokens=least)
            plain, found = run(**options), run("lookup", tree="chain:3", **options)
            assert found.tokens == plain.tokens
            assert found.stop_reasons == plain.stop_reasons


def test_log_probabilities_need_every_pass(run):
    plain, found = run(logprobs=1), run("lookup", tree="chain:3", logprobs=1)
    whole = run("lookup", tree="chain:3", keep_past=True)
    assert found.tokens == plain.tokens
    assert found.target_calls.tolist() == whole.target_calls.tolist()
    for ours, wanted in zip(found.logprobs, plain.logprobs, strict=True):
        assert np.array_equal(ours.raw, wanted.raw)
        assert np.array_equal(ours.processed, wanted.processed)


def test_samples_and_free_rows_beside(run):
    options = dict(constraint=[COLOURS, None], n=3, sampling=SAMPLED)
    plain = run(**options)
    found = run("model", tree="A", **options)
    assert found.tokens == plain.tokens
    assert found.finish_reasons == plain.finish_reasons
    free = run("model", tree="A", **options | dict(constraint=None))
    assert found.tokens[3:] == free.tokens[3:]


def test_a_stream_has_all_tokens(model, run):
    options = dict(max_new_tokens=40, constraint=EACH, drafter="lookup", steps=1)
    parts = list(stree_jax.stream(model, PROMPTS, **options))
    for b, text in enumerate(run().texts):
        assert "".join(part.new_texts[b] for part in parts) == text


def test_a_past_has_read_all_but_the_last_token(model, run):
    first = run("lookup", tree="chain:3", keep_past=True)
    ends = [len(row) - 1 for row in first.past.tokens]
    assert first.past.target.length.tolist() == ends
    options = dict(constraint=None, max_new_tokens=9)
    later = run("lookup", [" + 1", "\n"], past=first.past, **options)
    texts = [
        ids + model.tokenizer.encode(text, add_special_tokens=False).ids
        for ids, text in zip(first.past.tokens, [" + 1", "\n"], strict=True)
    ]
    anew = run(prompts=texts, **options)
    assert later.tokens == anew.tokens


def test_arrays_are_closed_unless_their_past_is_kept(model, run):
    ids = [model.tokenizer.encode(PROMPTS[1]).ids]
    options = dict(max_new_tokens=40, constraint=Constraint("[0-9]{3}~@"))
    options |= dict(drafter="lookup", tree="chain:3")
    found = stree_jax.generate_tokens(model, ids, **options)
    whole = stree_jax.generate_tokens(model, ids, keep_past=True, **options)
    assert found.tokens.tolist() == whole.tokens.tolist()
    assert found.finish.tolist() == whole.finish.tolist() == [COMPLETE]
    assert found.calls[0] < whole.calls[0]
    ends = len(ids[0]) + whole.length - 1
    assert whole.past.target.length.tolist() == ends.tolist()


@pytest.fixture(scope="module")
def batch(model):
    with pytest.MonkeyPatch.context() as patch:  # times are assumed, not measured
        patch.setattr(step_times, "timed", lambda spec, *_: spec)
        patch.setattr(step_times, "all_known", lambda *_: True)
        sizes = Sizes(rows=2, context=128, steps=4, top_logprobs=2, prefix_memory=2**26)
        batch = Batch(model, spec_for(model, "lookup", "auto:1,4", None, None), sizes)
    return batch


def answered(batch, request):
    batch.admit(0, request)
    tokens, calls, finish = [], 0, RUNNING
    while finish == RUNNING:
        news = batch.advance()[0]
        tokens, calls = tokens + news.tokens, calls + news.calls
        finish = news.finish
    return tokens, calls


def test_a_server_continues_closed_answers(model, run, batch):
    """The last digits are no draft, and two closing tokens follow them."""
    constraint = Constraint("[0-9]{3}~@")
    prompt = model.tokenizer.encode(PROMPTS[1] * 6).ids
    alone = run(prompts=[prompt], constraint=constraint)
    tables = vocabulary_of(model).tables(constraint)
    tokens, calls = answered(batch, TextRequest(prompt, 40, constraint=tables))
    assert tokens == alone.tokens[0] and calls <= len(tokens) - 2
    turn = [*prompt, *tokens, *model.tokenizer.encode("\nx = ").ids]
    continued = TextRequest(turn, 12)
    cached = batch.admit(1, continued)
    batch.cancel([1])
    assert cached == len(prompt) + len(tokens) - 1 - 2
    found, _ = answered(batch, continued)
    batch.clear()
    assert found == answered(batch, continued)[0]
    wanted = run(prompts=[turn], constraint=None, max_new_tokens=12)
    assert found == wanted.tokens[0]
