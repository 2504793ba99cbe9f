"""Test texts that are free until an opening, and constrained behind it."""

import random
import re

import numpy as np
import pytest

import stree_jax
from stree_jax.constraints.constraint import Constraint
from stree_jax.constraints.expression import byte_automaton
from stree_jax.constraints.free_text import FreeText, with_free_text
from stree_jax.constraints.rows import Vocabulary
from stree_jax.constraints.token_tables import token_tables
from stree_jax.sampling.constraints import NONE
from stree_jax.sampling.stop_strings import token_bytes

OPENING, PART = "<a<b>", "[0-9]{1,2};|x"
THINK = "<t>", "</t>"
LETTERS = "<ab>/t0; x"
PIECES = [
    *(bytes([b]) for b in range(256)),
    *(b"", b"<a<b>", b"<a", b"<b>0", b"b>;", b"b>x<a<b>", b"x<", b"/t", b"", b"t><a"),
]
CASES = {
    "no reasoning": FreeText(OPENING),
    "reasoning": FreeText(OPENING, THINK),
    "opened": FreeText(OPENING, THINK, opened=True),
}


def reference(text, free):
    """Returns whether a text may begin an answer, and whether it may end there."""
    begin, end = free.reasoning or ("", "")
    inside = free.opened
    if free.reasoning and not free.opened:
        stripped = text.lstrip(" \t\r\n")
        if stripped.startswith(begin):
            text, inside = stripped[len(begin) :], True
    if inside:
        _, found, text = text.partition(end)
        if not found:
            return True, True
    while True:
        _, found, text = text.partition(free.opening)
        if not found:
            return True, True
        match = re.match(PART, text)
        if match is None:
            return bool(re.fullmatch("[0-9]{0,2}", text)), False
        text = text[match.end() :]


def state_after(steps, data):
    state = 0
    for byte in data:
        state = steps[state, byte] if state >= 0 else NONE
    return int(state)


def texts(count):
    """Yields random texts that often have openings and parts."""
    choose = random.Random(5)
    pieces = [*LETTERS, OPENING, *THINK, OPENING + "0;", OPENING + "12", "é"]
    for _ in range(count):
        yield "".join(choose.choices(pieces, k=choose.randrange(12)))


@pytest.mark.parametrize("name", CASES)
def test_the_automaton_is_that_of_a_walk_over_the_text(name):
    free = CASES[name]
    automaton, is_free = with_free_text(byte_automaton(PART), free)
    assert (automaton.may_end == is_free).all()
    seen = set()
    for text in texts(4000):
        state = state_after(automaton.steps, text.encode())
        allowed, may_end = reference(text, free)
        assert (state >= 0) == allowed, text
        if allowed:
            assert automaton.may_end[state] == may_end, text
        seen.add((allowed, may_end))
    assert seen == {(True, True), (True, False), (False, False)}


def test_planted_mistakes_are_found():
    """An automaton that forgets the opening's first bytes, or the free text behind a
    part, differs from the walk."""
    for change in ("short", "last"):
        automaton, _ = with_free_text(byte_automaton(PART), CASES["no reasoning"])
        steps = automaton.steps.copy()
        if change == "short":
            steps[2, ord("<")] = 0
        else:
            steps[automaton.may_end.nonzero()[0][-1]] = NONE
        wrong = [
            text
            for text in texts(4000)
            if (state_after(steps, text.encode()) >= 0)
            != reference(text, CASES["no reasoning"])[0]
        ]
        assert wrong


@pytest.mark.parametrize("name", CASES)
def test_tokens_follow_their_bytes_and_others_are_free_outside_of_parts(name):
    automaton, free = with_free_text(byte_automaton(PART), CASES[name])
    num_tokens = len(PIECES) + 3
    tables = token_tables(automaton, PIECES, num_tokens, list, "regex", free)
    pieces = [*PIECES, b"", b"", b""]
    for state in range(len(free)):
        found = tables.following[state, tables.classes]
        for token, piece in enumerate(pieces):
            wanted = state
            for byte in piece:
                wanted = automaton.steps[wanted, byte] if wanted >= 0 else NONE
            if not piece and not free[state]:
                wanted = NONE
            assert found[token] == wanted, (state, piece)


def test_special_tokens_open_parts():
    model = stree_jax.load("demo")
    vocabulary = Vocabulary(model.tokenizer, model.config.num_tokens)
    pieces = token_bytes(model.tokenizer)
    special = next(i for i, piece in enumerate(pieces) if not piece)
    name = model.tokenizer.id_to_token(special)
    char = chr(0x10FFF0)
    free = FreeText(char)
    tables = vocabulary.tables(Constraint("yes", special=(name,), behind=free))

    def after(state, token):
        return int(tables.following[state, tables.classes[token]])

    assert {after(0, token) for token in range(len(pieces)) if token != special} == {0}
    opened = after(0, special)
    assert opened != 0 and not tables.may_end[opened] and tables.may_end[0]
    (yes,) = model.tokenizer.encode("y", add_special_tokens=False).ids[-1:]
    (no,) = model.tokenizer.encode("n", add_special_tokens=False).ids[-1:]
    assert after(opened, yes) > 0 and after(opened, no) == NONE
    assert tables.forced[0, 0] == NONE and tables.forced[opened, 0] >= 0


def test_greedy_text_without_an_opening_is_unchanged():
    target = stree_jax.load("demo")
    prompt = "def mean(values):\n"
    plain = stree_jax.generate(target, prompt, max_new_tokens=48)
    free = Constraint("[0-9]+;", behind=FreeText("\x01\x02"))
    same = stree_jax.generate(target, prompt, max_new_tokens=48, constraint=free)
    assert same.texts == plain.texts and np.array_equal(same.tokens, plain.tokens)
    opening = target.tokenizer.decode(plain.tokens[0][4:7])
    opened = Constraint("[0-9]{3};", behind=FreeText(opening))
    text = stree_jax.generate(target, prompt, max_new_tokens=48, constraint=opened)
    before, found, behind = plain.texts[0].partition(opening)
    assert text.texts[0].startswith(before + found)
    assert re.match("[0-9]{3};", text.texts[0][len(before + found) :])
    assert not re.match("[0-9]{3};", behind)


@pytest.mark.parametrize("opening", ["", None, 7])
def test_wrong_openings_are_refused(opening):
    with pytest.raises(ValueError, match="behind"):
        FreeText(opening)
    with pytest.raises(ValueError, match="behind"):
        Constraint("a", behind="x")
