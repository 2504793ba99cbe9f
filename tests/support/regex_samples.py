"""Draws random texts that a regular expression matches."""

import re
from functools import lru_cache
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]

MAX_REPEATS = 3  # repetitions above the smallest number, unless the limit is drawn
# Characters to draw for negated classes.
OTHERS = [*"aZ09 _-/'{}[]:,é\u00a0ß\u2028😀\U0010ffff\ud7ff\x80中", '"', "\\"]


def sample(regex, rng):
    """Returns a text that the expression matches; `rng` is a `random.Random`."""
    return "".join(_draw(_parsed(regex), rng))


@lru_cache(maxsize=4)
def _parsed(regex):
    return parser.parse(regex)


def _draw(items, rng):
    for code, value in items:
        if code is codes.LITERAL:
            yield chr(value)
        elif code is codes.NOT_LITERAL:
            yield rng.choice([char for char in OTHERS if ord(char) != value])
        elif code is codes.IN:
            yield _member(value, rng)
        elif code is codes.BRANCH:
            yield from _draw(rng.choice(value[1]), rng)
        elif code is codes.SUBPATTERN:
            yield from _draw(value[-1], rng)
        elif code is codes.MAX_REPEAT:
            low, high, inner = value
            most = min(high, low + MAX_REPEATS)
            if high < codes.MAXREPEAT and rng.random() < 0.1:
                most = min(high, 40)
            for _ in range(rng.choice([low, most, rng.randint(low, most)])):
                yield from _draw(inner, rng)
        else:
            raise AssertionError(f"unexpected part of an expression: {code}")


def _member(options, rng):
    if options[0][0] is codes.NEGATE:
        excluded = [_span(option) for option in options[1:]]
        free = [c for c in OTHERS if not any(a <= ord(c) <= b for a, b in excluded)]
        return rng.choice(free)
    low, high = _span(rng.choice(options))
    code = rng.choice([low, high, rng.randint(low, high)])
    return chr(code if not 0xD800 <= code < 0xE000 else low)


def _span(option):
    code, value = option
    return value if code is codes.RANGE else (value, value)


def matches(regex, text):
    """True if the expression matches all of a text."""
    return re.fullmatch(regex, text) is not None
