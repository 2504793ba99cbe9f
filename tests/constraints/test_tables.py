"""Automata of tokens against a walk over the bytes of each token."""

import os
import re

import numpy as np
import pytest

import stree_jax
from stree_jax.constraints import expression, kept, rows
from stree_jax.constraints.constraint import Constraint, escaped
from stree_jax.constraints.expression import byte_automaton
from stree_jax.constraints.rows import Vocabulary, constraint_rows, vocabulary_of
from stree_jax.constraints.token_tables import token_tables
from stree_jax.sampling.constraints import NONE
from stree_jax.sampling.stop_strings import token_bytes

STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])*"'
REGEXES = [
    r"yes|no",
    r"-?(?:0|[1-9][0-9]*)",
    r'\{"name":'
    + STRING
    + r',"tags":\[(?:'
    + STRING
    + r"(?:,"
    + STRING
    + r"){0,2})?\]\}",
    r"é+|日本|[\x{1F600}-\x{1F602}]{2}",
    r"(?:a|ab|abc){1,3}",
]
PIECES = [
    *(bytes([b]) for b in range(256)),
    *(b"", b"yes", b"no", b"ye", b"sno", b'{"', b'":"', b'","', b"name", b'"name":"'),
    *("é".encode(), "日".encode()[:2], "本".encode()[1:], b"abc", b"bca", b"00", b"-1"),
]


def spelled(data):
    """Returns one token a byte."""
    return list(data)


def walked(automaton, data, state=0):
    for byte in data:
        state = automaton.steps[state, byte]
        if state < 0:
            return NONE
    return int(state)


@pytest.mark.parametrize("regex", REGEXES)
def test_tables_are_the_walk_over_bytes(regex):
    automaton = byte_automaton(regex)
    tables = token_tables(automaton, PIECES, len(PIECES) + 3, spelled)
    assert tables.classes.shape == (len(PIECES) + 3,)
    for state in range(len(tables.may_end)):
        found = tables.following[state, tables.classes]
        wanted = [
            walked(automaton, piece, state) if piece else NONE for piece in PIECES
        ]
        assert found[: len(PIECES)].tolist() == wanted
        assert (found[len(PIECES) :] == NONE).all()
        forced = bytes(token for token in tables.forced[state] if token != NONE)
        for size in range(len(forced)):
            at = walked(automaton, forced[:size], state)
            assert not automaton.may_end[at]
            assert np.flatnonzero(automaton.steps[at] >= 0).tolist() == [forced[size]]


@pytest.mark.parametrize("regex", REGEXES)
def test_every_state_leads_to_an_end(regex):
    automaton = byte_automaton(regex)
    texts, rng = [], np.random.default_rng(0)
    for _ in range(20):
        state, text = 0, b""
        while not (automaton.may_end[state] and (rng.random() < 0.2 or len(text) > 99)):
            byte = rng.choice(np.flatnonzero(automaton.steps[state] >= 0))
            text, state = text + bytes([byte]), automaton.steps[state, byte]
            if not (automaton.steps[state] >= 0).any():
                break
        texts.append(text.decode())
    pattern = regex.replace("x{1F600}", "U0001F600").replace("x{1F602}", "U0001F602")
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_states_that_no_token_can_leave_are_left_out():
    """No token spells "b", so "ab" cannot be written, and "a" must not begin it."""
    pieces = [b"a", b"c", b"ac"]
    tables = token_tables(byte_automaton("ab|c"), pieces, 3, spelled)
    assert (tables.following[0, tables.classes] >= 0).tolist() == [False, True, False]
    with pytest.raises(
        ValueError, match="^rx: the model's tokens cannot spell any text"
    ):
        token_tables(byte_automaton("b"), pieces, 3, spelled, "rx")


def test_special_tokens_are_never_allowed():
    tokenizer = stree_jax.load("demo").tokenizer
    vocabulary = Vocabulary(tokenizer, tokenizer.get_vocab_size())
    special = [i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special]
    assert special
    for regex in (r"[\s\S]*x", STRING):
        tables = vocabulary.tables(Constraint(regex))
        assert (tables.following[:, tables.classes[special]] == NONE).all()


def test_forced_text_has_the_tokenizer_s_tokens():
    model = stree_jax.load("demo")
    vocabulary = vocabulary_of(model)
    tables = vocabulary.tables(Constraint(r'\{"name":"[a-z]"\}'))
    ids = [i for i in tables.forced[0].tolist() if i != NONE]
    assert ids == model.tokenizer.encode('{"name":"', add_special_tokens=False).ids
    assert vocabulary._longest_first(b'{"name":"') and not vocabulary._longest_first(
        b""
    )


@pytest.mark.parametrize(
    ("regex", "problem"),
    [
        ("(", "does not compile"),
        (r"(a)\1", "does not compile"),
        ("(?=a)b", "does not compile"),
        ("", "matches only the empty text"),
        ("a{0}", "matches only the empty text"),
        (r"[^\x00-\x{10FFFF}]", "matches no text|does not compile"),
        ("(?:a{900}b{900}){90}", "states|does not compile|too large"),
        ("a" * (expression.MOST_CHARACTERS + 1), "want at most"),
        ("\ud800", "not UTF-8"),
    ],
)
def test_bad_expressions_are_refused_by_name(regex, problem):
    with pytest.raises(ValueError, match=problem) as raised:
        Constraint(regex, name="--regex").check()
    assert str(raised.value).startswith("--regex: ") and "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [3, "yes", [None, 1], [Constraint("a")], {}])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match="^constraint: want a Constraint"):
        rows.constraints_by_row(value, 2)


@pytest.mark.parametrize("texts", ["yes", [], [""], [1], None])
def test_choices_are_texts(texts):
    with pytest.raises(ValueError, match="^choice: want a list of texts"):
        Constraint.choice(texts)


@pytest.mark.parametrize(
    ("regex", "texts", "others"),
    [
        ("a|ab|abc", ["a", "ab", "abc"], ["b", "abca"]),
        ("a*?b?", ["a", "b", "aab"], ["ba"]),
        ("(?:0|0x[0-9]+)+", ["0", "0x1", "00x12"], ["0x"]),
        ("(?i)yes", ["YES", "yEs"], ["no"]),
        ("[0-9]*", ["1", "23"], ["a"]),
    ],
)
def test_every_alternative_counts(regex, texts, others):
    automaton = byte_automaton(regex)
    for text in texts:
        assert automaton.may_end[walked(automaton, text.encode())], text
    for text in others:
        state = walked(automaton, text.encode())
        assert state == NONE or not automaton.may_end[state], text


def test_choices_are_literal():
    texts = ["a.b*c", "x|y", "[z]", "\\d", "#&-~", "tab\tline\n", "é日"]
    automaton = byte_automaton(Constraint.choice(texts).regex)
    for text in texts:
        assert automaton.may_end[walked(automaton, text.encode())], text
    assert walked(automaton, b"aXb") == NONE
    assert all(re.fullmatch(escaped(text), text) for text in texts)


def test_automata_are_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("STREE_JAX_CACHE", str(tmp_path))
    tokenizer = stree_jax.load("demo").tokenizer
    size = tokenizer.get_vocab_size()
    constraint = Constraint(REGEXES[2])
    first = Vocabulary(tokenizer, size).tables(constraint)
    (file,) = (tmp_path / kept.FOLDER).iterdir()
    monkeypatch.setattr(rows, "token_tables", None)  # would fail if called
    again = Vocabulary(tokenizer, size).tables(constraint)
    for name in kept.NAMES:
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    whole = file.read_bytes()
    monkeypatch.setattr(rows, "token_tables", token_tables)
    for damage in (b"", whole[:99], whole[:-40], b"x" * len(whole)):
        file.write_bytes(damage)
        anew = Vocabulary(tokenizer, size).tables(constraint)
        np.testing.assert_array_equal(anew.following, first.following)
    file.write_bytes(whole)
    os.chmod(file, 0o666)  # others can write to it
    monkeypatch.setattr(rows, "token_tables", lambda *args: first)
    assert Vocabulary(tokenizer, size).tables(constraint) is first


def test_files_with_other_values_are_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("STREE_JAX_CACHE", str(tmp_path))
    good = token_tables(
        byte_automaton("a+"), [b"a", b"b"], 2, lambda data: [0] * len(data)
    )
    kept.keep_tables("key", good)
    assert kept.kept_tables("key", 2) is not None
    assert kept.kept_tables("key", 3) is None and kept.kept_tables("other", 2) is None
    wrong = type(good)(
        good.classes, good.following + len(good.may_end), good.may_end, good.forced
    )
    kept.keep_tables("key", wrong)
    assert kept.kept_tables("key", 2) is None


def test_without_a_tokenizer_there_are_no_constraints():
    model = stree_jax.load("demo")
    with pytest.raises(ValueError, match="^regex: this model has no tokenizer"):
        constraint_rows(model.replace(tokenizer=None), [Constraint("a")])
    assert constraint_rows(model.replace(tokenizer=None), [None, None]) is None


def test_the_bytes_of_tokens_are_those_of_texts():
    tokenizer = stree_jax.load("demo").tokenizer
    pieces = token_bytes(tokenizer)
    ids = tokenizer.encode('def f(x):\n    return {"é": x}').ids
    assert b"".join(pieces[i] for i in ids).decode() == tokenizer.decode(ids)


def test_states_of_which_each_leads_to_the_next_only_take_no_time():
    steps = np.full((20_000, 2), NONE, np.int32)
    steps[:-1, 1] = np.arange(1, len(steps))
    may_end = np.arange(len(steps)) == 15_000
    assert (
        expression.useful(steps, may_end).tolist() == [True] * 15_001 + [False] * 4999
    )


@pytest.mark.parametrize(
    "regex", [".{1,30}", '"[^"]{5,40}"', "(?s).{1,40}", r"[a-z\n]{1,40}", "a[^b]{9}"]
)
def test_long_classes_compile_in_time(regex):
    automaton = byte_automaton(regex)
    assert len(automaton.steps) < 400
    for text in ("aaaaaaaaaa", "aaaaa", '"aaaaaa"', "a\naaaaaaaa", "b\n", ""):
        ends = walked(automaton, text.encode())
        wanted = re.fullmatch(regex, text)
        assert (ends != NONE and bool(automaton.may_end[ends])) == bool(wanted)


@pytest.mark.parametrize(
    ("regex", "texts", "others"),
    [
        ("^[0-9]{3}$", ["123"], ["12", "^123"]),
        ("^yes$|^no$", ["yes", "no"], ["yesno", ""]),
        ("(^a|(?:^b|c))d", ["ad", "bd", "cd"], ["d"]),
        (r"\Aab\z", ["ab"], ["a"]),
        (r"[]^][^^]\^", ["]a^", "^a^"], ["]^^"]),
        ("[a[^]b]]x", ["ax", "cx"], ["bx", "]x"]),
        ("(?x)a b # an end", ["ab"], ["a b"]),
        ("(?x) # ( ^\n ^a (?-x: b) [^a] # )", ["a bc"], ["abc"]),
        ("(?m)^(?P<name>a)$", ["a"], [""]),
    ],
)
def test_anchors_and_comments_are_those_of_the_whole_text(regex, texts, others):
    automaton = byte_automaton(regex)
    for text in texts + others:
        ends = walked(automaton, text.encode())
        assert (ends != NONE and bool(automaton.may_end[ends])) == (text in texts), text


@pytest.mark.parametrize(
    ("regex", "fault"),
    [
        ("a^b|c", "\\^ is supported at the start only"),
        ("(?:a|b)^c", "\\^ is supported at the start only"),
        ("yes)|(no", "a parenthesis is not opened"),
        ("a$b", "matches no text"),
    ],
)
def test_refused_expressions(regex, fault):
    with pytest.raises(ValueError, match=f"^regex: '{re.escape(regex)}':? {fault}$"):
        byte_automaton(regex)


def test_wrong_arguments_are_named():
    for fields, name in (
        (dict(special="ab"), "special"),
        (dict(special=["a"] * 17), "special"),
        (dict(written=[1.5]), "written"),
        (dict(written="12"), "written"),
        (dict(written=[True]), "written"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: want .*, got "):
            Constraint("a", **fields)
    for make in (lambda **z: Constraint.json({}, **z), Constraint.any_json):
        with pytest.raises(ValueError, match="^spaces: want True or False, got 3"):
            make(spaces=3)
    assert {Constraint("a", special=["b"], written=[1])}
