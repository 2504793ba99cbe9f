"""Writes regular expressions for JSON strings: any text, fixed texts, other names."""

import json
from collections.abc import Iterable

from stree_jax.constraints.expressions import literal, repeat

_HEX = "[0-9a-fA-F]"
# JSON forbids the first 32, U+007F shows nothing as well, and the last 16 characters of
# Unicode stand for special tokens (`Constraint.special`).
SPECIAL = tuple(map(chr, range(0x10FFF0, 0x110000)))
_CONTROL = rf"\x00-\x1f\x7f{SPECIAL[0]}-{SPECIAL[-1]}"
_PLAIN = rf'[^"\\{_CONTROL}]'
# `\u` escapes of characters, and of pairs of surrogates. A lone surrogate is no text.
_ESCAPE = (
    r'\\(?:["\\/bfnrt]|u(?:'
    rf"[0-9a-cA-CefEF]{_HEX}{{3}}|[dD](?:[0-7]{_HEX}{{2}}"
    rf"|[89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}})))"
)
CHARACTER = f"(?:{_PLAIN}|{_ESCAPE})"


def string_regex(low: int = 0, high: int | None = None) -> str:
    """Returns the expression of the strings with low to high characters."""
    return f'"{repeat(CHARACTER, low, high)}"'


def json_text(value: object, *, spaces: bool = False) -> str:
    """Returns the JSON text of a value in the fixed form."""
    separators = (", ", ": ") if spaces else (",", ":")
    text = json.dumps(value, ensure_ascii=False, separators=separators, allow_nan=False)
    for char in SPECIAL:
        text = text.replace(char, json.dumps(char)[1:-1])
    return text.replace("\x7f", "\\u007f")


def value_regex(value: object, *, spaces: bool = False) -> str:
    """Returns the expression of one value in the fixed form."""
    return literal(json_text(value, spaces=spaces))


def other_name_regex(names: Iterable[str]) -> str:
    """Returns the expression of the strings, without escapes, that differ from names.

    Without escapes a name has one spelling only, so a listed name cannot appear in
    another one.
    """
    # A name that needs an escape cannot be written without one.
    plain = [name for name in names if json_text(name) == f'"{name}"']
    return f'"{_differs(plain)}"'


def _differs(names: list[str]) -> str:
    """Returns the expression of the texts that differ from each name."""
    if not names:
        return f"{_PLAIN}*"
    firsts = sorted({name[0] for name in names if name})
    excluded = "".join(map(literal, firsts))
    options = [rf'[^"\\{_CONTROL}{excluded}]{_PLAIN}*']
    for first in firsts:
        rest = [name[1:] for name in names if name[:1] == first]
        options.append(literal(first) + _differs(rest))
    choice = f"(?:{'|'.join(options)})"
    return choice if "" in names else f"{choice}?"
