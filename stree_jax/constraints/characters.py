"""Sets of characters of a pattern, and their spellings in JSON strings."""

from stree_jax.constraints.expressions import UnsupportedError, either, literal
from stree_jax.constraints.strings import json_text

LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_ESCAPED = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F))

Ranges = tuple[tuple[int, int], ...]

_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
    (0xFEFF, 0xFEFF),
)
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}


def union(ranges: list[tuple[int, int]] | Ranges) -> Ranges:
    """Returns sorted ranges that do not touch each other."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """Returns the ranges of all other characters."""
    found, start = [], 0
    for first, last in union(ranges):
        if start < first:
            found.append((start, first - 1))
        start = last + 1
    return (*found, (start, LAST)) if start <= LAST else tuple(found)


def spellings(ranges: Ranges) -> str:
    """Returns the expression of a character, as it is written in a JSON string.

    Raises:
      UnsupportedError: there is no such character.
    """
    raw = complement(union((*complement(ranges), *_ESCAPED, _SURROGATES)))
    options = []
    if raw:
        # A negated class is shorter for almost all characters.
        negated = raw[-1][1] == LAST
        shown = complement(raw) if negated else raw
        shown = _without_surrogates(shown)
        one = not negated and len(shown) == 1 and shown[0][0] == shown[0][1]
        body = "".join(_range(*r) for r in shown)
        options.append(body if one else f"[{'^' * negated}{body}]")
    wanted = [
        json_text(chr(code))[1:-1]
        for first, last in _ESCAPED
        for code in range(first, last + 1)
        if any(start <= code <= end for start, end in ranges)
    ]
    short = "".join(literal(text[1]) for text in wanted if len(text) == 2)
    if short:
        options.append(rf"\\[{short}]")
    long = [text[4:] for text in wanted if len(text) == 6]
    if long:
        options.append(rf"\\u00{either(_pairs(long))}")
    if not options:
        raise UnsupportedError("a class of the pattern matches no character")
    return either(options)


def _without_surrogates(ranges: Ranges) -> Ranges:
    """Returns ranges whose ends can be written in UTF-8."""
    first, last = _SURROGATES
    found = []
    for start, end in ranges:
        start = last + 1 if first <= start <= last else start
        end = first - 1 if first <= end <= last else end
        if start <= end:
            found.append((start, end))
    return tuple(found)


def _pairs(texts: list[str]) -> list[str]:
    """Returns expressions of two hexadecimal digits, grouped by the first one."""
    seconds: dict[str, str] = {}
    for text in texts:
        seconds[text[0]] = seconds.get(text[0], "") + text[1]
    return [f"{first}[{second}]" for first, second in seconds.items()]


def _range(first: int, last: int) -> str:
    texts = [
        f"\\x{code:02x}" if code < 0x20 or code == 0x7F else literal(chr(code))
        for code in (first, last)
    ]
    return texts[0] if first == last else "-".join(texts)
