"""Constrained texts: they match, and are those of plain constrained decoding with every
drafter, tree and batch."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import stree_jax
from stree_jax import Constraint, Sampling
from stree_jax.constraints.rows import constraint_rows, vocabulary_of
from stree_jax.speculation.draft import FORCED
from tests.speculation.auto import TREE as AUTO
from tests.speculation.auto import times
from tests.support.pieces import piece_tokenizer
from tests.support.tiny import tiny

STRING = r'"(?:[^"\\\x00-\x1f\x7f]|\\["\\/bfnrt]){0,12}"'
PERSON = Constraint(
    r'\{"name":' + STRING + r',"age":(?:0|[1-9][0-9]{0,2}),"admin":(?:true|false)\}'
)
LIST = Constraint(r"\[(?:[0-9]{1,3}(?:, [0-9]{1,3}){2,4})\]")
PROMPTS = ["def person():\n    return ", "x = [1, 2, 3]\ny = "]
MOST = 64
WAYS = {
    "lookup": dict(drafter="lookup"),
    "lookup, a chain": dict(drafter="lookup", tree="chain:6"),
    # With measured times, no tree might pay, or the model might write forced tokens
    "auto": dict(drafter="model", tree=AUTO, times=times(draft=0.5, level=0.5)),
    "A": dict(drafter="model", tree="A"),
    "a chain": dict(drafter="model", tree=[-1, 0, 1, 2, 3, 4]),
    "a beam": dict(drafter="model", tree="beam:2x4"),
}
SAMPLED = [Sampling(0.8, top_p=0.9, seed=1), Sampling(1.2, seed=2)]


@pytest.fixture(scope="module")
def model():
    return stree_jax.load("demo", dtype="float32")


@pytest.fixture(scope="module")
def drafters(model):
    return {
        "model": stree_jax.load("demo-drafter", dtype="float32"),
        "lookup": "lookup",
    }


@pytest.fixture(scope="module")
def plain(model):
    """Returns the texts of plain decoding, greedy and sampled."""

    def of(sampling):
        return stree_jax.generate(
            *(model, PROMPTS),
            max_new_tokens=MOST,
            drafter=None,
            sampling=sampling,
            constraint=[PERSON, LIST],
        )

    return {False: of(None), True: of(SAMPLED)}


def test_texts_match_and_end_by_themselves(plain):
    for found in plain.values():
        for text, constraint in zip(found.texts, (PERSON, LIST), strict=True):
            assert re.fullmatch(constraint.regex, text), text
        assert found.finish_reasons == ["stop", "stop"]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_each_drafter_writes_the_text_of_plain_decoding(
    way, sampled, model, drafters, plain
):
    options = WAYS[way]
    found = stree_jax.generate(
        *(model, PROMPTS),
        max_new_tokens=MOST,
        **options | {"drafter": drafters[options["drafter"]]},
        sampling=SAMPLED if sampled else None,
        constraint=[PERSON, LIST],
    )
    assert found.tokens == plain[sampled].tokens
    assert any(FORCED in row for row in found.origins)
    assert found.target_calls.sum() < plain[sampled].target_calls.sum()


@pytest.mark.parametrize("rule", ["leviathan", "mss", "recursive", "typical", "naive"])
def test_texts_of_every_rule_match(rule, model, drafters):
    tree = [-1, 0, 1, 2] if rule == "leviathan" else "A"
    found = stree_jax.generate(
        *(model, PROMPTS[0]),
        max_new_tokens=MOST,
        drafter=drafters["model"],
        tree=tree,
        rule=rule,
        sampling=Sampling(1.0, seed=3),
        constraint=PERSON,
        n=3,
    )
    for text in found.texts:
        assert re.fullmatch(PERSON.regex, text), text


def test_rows_without_a_constraint_are_unchanged(model, drafters):
    options = dict(max_new_tokens=24, drafter=drafters["model"], tree="A")
    free = stree_jax.generate(model, PROMPTS, **options)
    found = stree_jax.generate(model, PROMPTS, constraint=[None, LIST], **options)
    assert found.tokens[0] == free.tokens[0] and found.tokens[1] != free.tokens[1]


def test_samples_stop_strings_and_limits(model, plain):
    options = dict(drafter="lookup", constraint=PERSON, max_new_tokens=MOST)
    found = stree_jax.generate(
        model, PROMPTS[0], n=3, sampling=SAMPLED[1], logprobs=1, **options
    )
    assert len({*found.texts}) > 1
    assert all(re.fullmatch(PERSON.regex, text) for text in found.texts)
    assert all((row.processed <= 0).all() for row in found.logprobs)
    stopped = stree_jax.generate(model, PROMPTS[0], stop_strings=['","'], **options)
    assert stopped.finish_reasons == ["stop"] and stopped.stop_reasons == ['","']
    assert plain[False].texts[0].startswith(stopped.texts[0] + '","')
    cut = stree_jax.generate(model, PROMPTS[0], **options | dict(max_new_tokens=5))
    assert cut.finish_reasons == ["length"]
    assert cut.tokens[0] == plain[False].tokens[0][:5]


def test_a_text_that_may_end_ends_with_a_stop_token(model):
    found = stree_jax.generate(
        *(model, PROMPTS),
        constraint=Constraint("[0-9]+"),
        max_new_tokens=200,
        sampling=Sampling(1.5),
    )
    stops = model.config.stop_tokens
    for text, tokens, why in zip(
        found.texts, found.tokens, found.finish_reasons, strict=True
    ):
        assert re.fullmatch("[0-9]+", text)
        assert (tokens[-1] in stops) == (why == "stop")
    least = stree_jax.generate(
        *(model, PROMPTS),
        constraint=Constraint("[0-9]{1,8}"),
        max_new_tokens=20,
        min_new_tokens=3,
    )
    for text, tokens in zip(least.texts, least.tokens, strict=True):
        assert re.fullmatch("[0-9]{1,8}", text) and (len(tokens) > 3 or len(text) == 8)


@pytest.mark.parametrize("sampling", [None, Sampling(1.0)])
def test_a_text_breaks_its_constraint_for_no_minimum(model, sampling):
    pieces = vocabulary_of(model).pieces
    stops = [i for i, piece in enumerate(pieces) if piece.startswith(b"q")]
    found = stree_jax.generate(
        *(model, PROMPTS[0]),
        constraint=Constraint("abq[0-9]{9}"),
        max_new_tokens=20,
        min_new_tokens=6,
        stop_tokens=stops,
        sampling=sampling,
    )
    assert found.finish_reasons == ["stop"]
    assert b"".join(pieces[token] for token in found.tokens[0]) == b"abq"


def test_a_later_call_goes_on_with_the_same_text(model, plain):
    first = stree_jax.generate(
        model, PROMPTS, max_new_tokens=6, constraint=[PERSON, LIST], keep_past=True
    )
    rest = [
        Constraint(one.regex, written=tuple(tokens))
        for one, tokens in zip((PERSON, LIST), first.tokens, strict=True)
    ]
    second = stree_jax.generate(
        model, ["", ""], max_new_tokens=MOST, constraint=rest, past=first.past
    )
    joined = [a + b for a, b in zip(first.tokens, second.tokens, strict=True)]
    assert joined == plain[False].tokens
    wrong = Constraint(LIST.regex, written=tuple(first.tokens[0]))
    with pytest.raises(ValueError, match="^regex: the text so far does not match it"):
        stree_jax.generate(model, PROMPTS[0], constraint=wrong)


def test_a_complete_text_is_not_continued(model, plain):
    whole = Constraint(PERSON.regex, written=tuple(plain[False].tokens[0]))
    with pytest.raises(ValueError, match="^regex: the text so far is complete"):
        stree_jax.generate(model, PROMPTS[0], constraint=whole)


def test_tokens_that_split_characters_spell_the_constraint():
    target = replace(tiny(1), tokenizer=piece_tokenizer())
    target = replace(target, config=replace(target.config, stop_tokens=(0,)))
    constraint = Constraint("(?:ab|ba c|é|€b){2,3}")
    found = stree_jax.generate(
        *(target, ["ab c", "b"]),
        max_new_tokens=40,
        constraint=constraint,
        sampling=Sampling(1.0),
        n=4,
    )
    for text, why in zip(found.texts, found.finish_reasons, strict=True):
        assert why == "stop" and re.fullmatch(constraint.regex, text), text


def test_constraints_are_data_of_a_program(model, drafters, plain):
    ids = [model.tokenizer.encode(text).ids for text in PROMPTS]
    width = max(map(len, ids))
    prompts = jnp.asarray([row + [0] * (width - len(row)) for row in ids], jnp.int32)
    lengths = jnp.asarray([len(row) for row in ids], jnp.int32)
    traces = []

    @jax.jit
    def run(model, drafter, constraints):
        traces.append(1)
        return stree_jax.generate_tokens(
            *(model, prompts, lengths),
            max_new_tokens=MOST,
            drafter=drafter,
            tree="A",
            constraint=constraints,
            n=2,
        )

    for constraints in ([PERSON, LIST], [LIST, PERSON], [None, PERSON]):
        rows = constraint_rows(model, constraints)
        rows = jax.tree.map(lambda x: jnp.resize(x, (2, *x.shape[1:])), rows)
        found = run(model, drafters["model"], rows)
        alone = stree_jax.generate(
            *(model, PROMPTS), max_new_tokens=MOST, drafter=None, constraint=constraints
        )
        for i, tokens in enumerate(found.tokens):
            assert tokens[: found.length[i]].tolist() == alone.tokens[i // 2]
    assert len(traces) == 1
    assert (found.finish[2:] == 4).all()
    with pytest.raises(ValueError, match="^constraint: want automata of 1 prompts"):
        stree_jax.generate_tokens(model, prompts[:1], max_new_tokens=4, constraint=rows)
