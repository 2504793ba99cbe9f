"""Puts regular expressions together in the dialect of Rust's `regex` crate.

Expressions use groups, classes and bounded repetitions only, so that they mean the same
in Python's `re`. They have no look-around and no back references.
"""

from collections.abc import Iterable

MAX_REPETITION = 1_000  # bounds of lengths and items; an automaton has a copy for each
MAX_LENGTH = 200_000  # characters of an expression
MAX_SIZE = 60_000  # characters after repetitions are written out, about as many states

MAX_NESTING = 200  # nested groups; the `regex` crate refuses more than 250

_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~")


class UnsupportedError(ValueError):
    """An expression cannot be written. The caller adds the place in the schema."""


def literal(text: str) -> str:
    """Returns the expression of a text."""
    return "".join(f"\\{char}" if char in _SPECIAL else char for char in text)


def either(options: Iterable[str]) -> str:
    """Returns the expression of one or more alternatives, each of them once."""
    distinct = list(dict.fromkeys(options))
    return distinct[0] if len(distinct) == 1 else f"(?:{'|'.join(distinct)})"


def repeat(item: str, low: int, high: int | None) -> str:
    """Returns `item` repeated low to high times. If `high` is None, it has no limit.

    `item` is one character, class or group.
    """
    if high == 0:
        return ""
    if (low, high) == (1, 1):
        return item
    if (low, high) == (0, 1):
        return f"{item}?"
    if high is None and low < 2:
        return item + "*+"[low]
    if low == high:
        return f"{item}{{{low}}}"
    return f"{item}{{{low},{'' if high is None else high}}}"


def written_out_size(expression: str) -> int:
    """Returns the number of characters and classes, with repetitions written out.

    Raises:
      UnsupportedError: more than `MAX_NESTING` groups are nested.
    """
    sizes, last, place = [0], 0, 0
    while place < len(expression):
        char = expression[place]
        if char == "(":
            sizes[-1] += last
            sizes.append(0)
            if len(sizes) > MAX_NESTING:
                raise UnsupportedError(f"more than {MAX_NESTING} groups are nested")
            last, place = 0, place + 2  # skips "?:"
        elif char == ")":
            last += sizes.pop()
        elif char == "{":
            end = expression.index("}", place)
            low, comma, high = expression[place + 1 : end].partition(",")
            last *= int(high) if high else int(low) + bool(comma)
            place = end
        elif char not in "|*+?":
            sizes[-1] += last
            last = 1
            if char == "\\":
                place += 1
            elif char == "[":
                while expression[place] != "]":
                    place += 2 if expression[place] == "\\" else 1
        place += 1
    return sizes[-1] + last
