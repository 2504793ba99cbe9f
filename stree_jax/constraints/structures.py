"""Expressions of JSON arrays, objects and values of any kind."""

from stree_jax.constraints.expressions import either, repeat
from stree_jax.constraints.numbers import NUMBER
from stree_jax.constraints.strings import string_regex

ANY_DEPTH = 2  # nested arrays and objects of a value without rules


def separators(spaces: bool) -> tuple[str, str]:
    """Returns the texts between members and after names."""
    return (", ", ": ") if spaces else (",", ":")


def any_value(depth: int, comma: str, colon: str) -> str:
    """Returns the expression of values with up to `depth` nested arrays and objects."""
    options = ["null", "true", "false", NUMBER, string_regex()]
    if depth > 0:
        item = any_value(depth - 1, comma, colon)
        options.append(array([], item, 0, None, comma))
        options.append(any_object(depth, comma, colon))
    return either(options)


def any_object(depth: int, comma: str, colon: str) -> str:
    """Returns the expression of objects, the first of up to `depth` nested values."""
    member = string_regex() + colon + any_value(depth - 1, comma, colon)
    return rf"\{{(?:{member}(?:{comma}{member})*)?\}}"


def array(
    prefix: list[str], item: str | None, low: int, high: int | None, comma: str
) -> str:
    """Returns the expression of an array.

    Args:
      prefix: the first items. The array may end within them after `low` items.
      item: further items. If None, there are none.
      low, high: number of items.
      comma: the text between items.
    """
    high = len(prefix) if item is None else high
    count = len(prefix) if high is None else min(len(prefix), high)
    text, later = "", None if high is None else high - count
    if item is not None and later != 0:
        if count:
            text = repeat(f"(?:{comma}{item})", max(low - count, 0), later)
        else:
            more = None if later is None else later - 1
            text = item + repeat(f"(?:{comma}{item})", max(low - 1, 0), more)
            text = text if low else f"(?:{text})?"
    for place in reversed(range(count)):
        text = (comma if place else "") + prefix[place] + text
        text = text if place < low else f"(?:{text})?"
    return rf"\[{text}\]"
