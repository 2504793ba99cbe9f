"""The number of states that the automaton of an expression needs."""

import random

import pytest

from stree_jax.constraints.determinism import check_determinism
from stree_jax.constraints.expressions import UnsupportedError, written_out_size
from stree_jax.constraints.json_schema import schema_regex


@pytest.mark.parametrize(
    ("expression", "states"),
    [
        ("abc", 4),
        ("a{2,5}x", 7),
        ("a{3}", 4),
        ("(?:ab|ac){2}", 5),
        ("[ab]*a[ab]{9}", 512),  # which of the last nine characters were an a
        ("[^a-y]+z", 2),
        (r"[+\-\]][+-]\x41", 4),
    ],
)
def test_states_are_counted(expression, states):
    assert check_determinism(expression) == states


def test_states_are_about_those_of_outlines_core():
    outlines_core = pytest.importorskip("outlines_core")
    ascii_only = {bytes([byte]): [byte] for byte in range(128)}
    vocabulary = outlines_core.Vocabulary(128, ascii_only)
    rng = random.Random(0)
    for _ in range(60):
        parts = [rng.choice("abc") for _ in range(rng.randint(2, 9))]
        for place in range(len(parts)):
            low = rng.randint(0, 2)
            counts = f"{{{low},{low + 2}}}"
            parts[place] += rng.choice(["", "?", "*", "+", counts])
        regex = rng.choice(["(?:{})+", "(?:{}|ab*)c", "{}"]).format("".join(parts))
        index = outlines_core.Index(f"\\x00(?:{regex})x", vocabulary)
        states = len(index.get_transitions())
        # The engine keeps some states apart that behave alike.
        assert states / 4 <= check_determinism(f"(?:{regex})x") <= states, regex


@pytest.mark.parametrize("pattern", ["a.{20}$", "^(a|b)*a(a|b){18}$"])
def test_patterns_with_too_many_states_are_refused(pattern):
    schema = {"type": "string", "pattern": pattern}
    with pytest.raises(ValueError, match=r"^json_schema: \$\.pattern: the automaton"):
        schema_regex(schema)


def test_patterns_that_multiply_each_other_are_refused():
    patterns = [f"{char}.{{5}}{char}" for char in "abcdef"]
    options = [{"type": "string", "pattern": pattern} for pattern in patterns]
    for option in options:
        schema_regex(option)
    with pytest.raises(ValueError, match=r"^json_schema: \$: the automaton"):
        schema_regex({"anyOf": options})


@pytest.mark.parametrize(
    ("expression", "size"),
    [("abc", 3), (r"\.[^\]a]{3}", 4), ("(?:ab|c){2,5}d*", 16), ("(?:a{3}){4,}", 15)],
)
def test_sizes_are_of_written_out_repetitions(expression, size):
    assert written_out_size(expression) == size


def test_deep_groups_are_refused():
    with pytest.raises(UnsupportedError, match="more than 200 groups are nested"):
        written_out_size("(?:" * 300 + "a" + ")" * 300)
