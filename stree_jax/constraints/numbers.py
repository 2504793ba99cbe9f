"""Writes regular expressions for JSON integers and numbers within bounds.

Numbers have no leading zeros and no plus sign, and integers are not `-0`. Without
bounds a number may have an exponent of one or two digits. With bounds it has no
exponent, at most `MAX_DECIMALS` decimals, and zero has no minus sign.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from stree_jax.constraints.expressions import UnsupportedError, either, repeat

MAX_DECIMALS = 10  # decimals of a number with bounds
# Decimal digits that every float64 keeps. More would allow texts beyond an exclusive
# bound that readers round to the bound.
SAFE_DIGITS = 15
MAX_DIGITS = 40  # digits of a bound
MAX_MULTIPLES = 1_000  # multiples that are listed one by one
MAX_SUFFIX = 3  # multiples of m are recognised by so many last digits

NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+\-]?[0-9]{1,2})?"
INTEGER = "(?:0|-?[1-9][0-9]*)"


class Bounds(NamedTuple):
    """The bounds of a number. Those that are None do not exist.

    Attributes:
      low: the smallest value.
      high: the largest value.
      above: the value is larger than this one.
      below: the value is smaller than this one.
    """

    low: Fraction | None = None
    high: Fraction | None = None
    above: Fraction | None = None
    below: Fraction | None = None


def exact(value: int | float) -> Fraction:
    """Returns the decimal number that a JSON text states, not its nearest float."""
    return Fraction(value if isinstance(value, int) else repr(value))


NO_BOUNDS = Bounds()


def integer_regex(bounds: Bounds = NO_BOUNDS, multiple_of: int = 1) -> str:
    """Returns the expression of the integers within bounds.

    Raises:
      UnsupportedError: there is no such integer, a bound is too long, or the multiples
        are too many to list and do not follow from the last digits.

    Example:
      >>> integer_regex(Bounds(low=Fraction(8), high=Fraction(12)))
      '(?:1[0-2]|[8-9])'
    """
    low, high = _grid(bounds, 1)
    if multiple_of == 1:
        return INTEGER if low is None and high is None else _integers(low, high)
    if low is not None and high is not None:
        first, last = -(-low // multiple_of), high // multiple_of
        if first > last:
            raise UnsupportedError(f"no multiple of {multiple_of} is within the bounds")
        if last - first < MAX_MULTIPLES:
            values = [str(i * multiple_of) for i in range(first, last + 1)]
            return either(sorted(values, key=len, reverse=True))
    return _signed(low, high, lambda a, b: _multiples(a, b, multiple_of))


def number_regex(bounds: Bounds = NO_BOUNDS) -> str:
    """Returns the expression of the numbers within bounds.

    Raises:
      UnsupportedError: there is no such number with `MAX_DECIMALS` decimals, or a bound
        is too long.
    """
    largest = max((abs(b) for b in bounds if b is not None), default=None)
    if largest is None:
        return NUMBER
    whole = len(str(math.floor(largest)))
    places = max(0, min(MAX_DECIMALS, SAFE_DIGITS - whole))
    low, high = _grid(bounds, 10**places)
    if places == 0:
        return _integers(low, high)
    return _signed(low, high, lambda a, b: _decimals(a, b, places))


def _grid(bounds: Bounds, scale: int) -> tuple[int | None, int | None]:
    """Returns the smallest and largest k for which k / scale is within the bounds."""
    if any(b is not None and abs(b) >= 10**MAX_DIGITS for b in bounds):
        raise UnsupportedError(f"bounds have at most {MAX_DIGITS} digits")
    lows, highs = [], []
    if bounds.low is not None:
        lows.append(math.ceil(bounds.low * scale))
    if bounds.above is not None:
        lows.append(math.floor(bounds.above * scale) + 1)
    if bounds.high is not None:
        highs.append(math.floor(bounds.high * scale))
    if bounds.below is not None:
        highs.append(math.ceil(bounds.below * scale) - 1)
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        raise UnsupportedError("no number that can be written is within the bounds")
    return low, high


def _signed(
    low: int | None,
    high: int | None,
    magnitudes: Callable[[int, int | None], str | None],
) -> str:
    """Returns the expression of low .. high from one of non-negative magnitudes."""
    options = []
    if high is None or high >= 0:
        if (positive := magnitudes(max(low or 0, 0), high)) is not None:
            options.append(positive)
    if low is None or low < 0:
        smallest = 1 if high is None else max(1, -high)
        negative = magnitudes(smallest, None if low is None else -low)
        if negative is not None:
            options.append(f"-{negative}")
    if not options:
        raise UnsupportedError("no number that can be written is within the bounds")
    return either(options)


def _integers(low: int | None, high: int | None) -> str:
    return _signed(low, high, _naturals)


def _naturals(low: int, high: int | None) -> str:
    """Returns the expression of the integers low .. high, where 0 <= low.

    Longer numbers come first: some engines end at the first alternative that matches.
    """
    if high is None:
        if low <= 1:
            return "(?:0|[1-9][0-9]*)" if low == 0 else "[1-9][0-9]*"
        size = len(str(low))
        return either(
            ["[1-9]" + repeat("[0-9]", size, None), _naturals(low, 10**size - 1)]
        )
    options = []
    for size in range(len(str(high)), len(str(low)) - 1, -1):
        first = max(low, 10 ** (size - 1) if size > 1 else 0)
        options.append(_same_length(str(first), str(min(high, 10**size - 1))))
    return either(options)


def _same_length(low: str, high: str) -> str:
    """Returns the expression of the digit strings from low to high, of one length."""
    if not low:
        return ""
    rest = len(low) - 1
    zeros, nines = "0" * rest, "9" * rest
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    options, first, last = [], int(low[0]), int(high[0])
    if low[1:] != zeros:
        options.append(low[0] + _same_length(low[1:], nines))
        first += 1
    if high[1:] != nines:
        options.append(high[0] + _same_length(zeros, high[1:]))
        last -= 1
    if first <= last:
        options.append(_digit(first, last) + repeat("[0-9]", rest, rest))
    return either(options)


def _digit(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


def _multiples(low: int, high: int | None, multiple_of: int) -> str | None:
    """Returns the expression of the multiples in low .. high, where 0 <= low.

    If there are none, returns None.
    """
    digits = 1
    while 10**digits % multiple_of and digits < MAX_SUFFIX:
        digits += 1
    scale = 10**digits
    if scale % multiple_of:
        raise UnsupportedError(
            f"multiples of {multiple_of} need a minimum and a maximum with at most "
            f"{MAX_MULTIPLES} of them in between"
        )
    options = []
    suffixes = range(0, scale, multiple_of)

    def add(prefixes: str, first: int, last: int) -> None:
        texts = [f"{s:0{digits}d}" for s in suffixes if first <= s <= last]
        if texts:
            options.append(prefixes + either(texts))

    least = max(low, scale)
    (first, start) = divmod(least, scale)
    if high is None:
        add(_naturals(first + 1, None), 0, scale)
        add(str(first), start, scale)
    elif high >= least:
        last, end = divmod(high, scale)
        if first == last:
            add(str(first), start, end)
        else:
            if first + 1 < last:
                add(_naturals(first + 1, last - 1), 0, scale)
            add(str(first), start, scale)
            add(str(last), 0, end)
    short = [s for s in suffixes if s >= low and (high is None or s <= high)]
    options += sorted(map(str, short), key=len, reverse=True)
    return either(options) if options else None


def _decimals(low: int, high: int | None, places: int) -> str:
    """Returns the expression of low .. high in units of the last decimal place."""
    scale = 10**places
    zeros, nines = "0" * places, "9" * places
    (first, start) = divmod(low, scale)
    start_digits = f"{start:0{places}d}"
    if high is None:
        if start == 0:
            return _naturals(first, None) + _fraction(zeros, nines)
        return either(
            [
                _naturals(first + 1, None) + _fraction(zeros, nines),
                str(first) + _fraction(start_digits, nines),
            ]
        )
    (last, end) = divmod(high, scale)
    end_digits = f"{end:0{places}d}"
    if first == last:
        return str(first) + _fraction(start_digits, end_digits)
    options = [str(last) + _fraction(zeros, end_digits)]
    if first + 1 < last:
        options.append(_naturals(first + 1, last - 1) + _fraction(zeros, nines))
    options.append(str(first) + _fraction(start_digits, nines))
    return either(options)


def _fraction(low: str, high: str) -> str:
    """Returns the expression of a decimal part from .low to .high, empty for 0."""
    text = rf"\.{_decimal_digits(low, high)}"
    return text if low.strip("0") else f"(?:{text})?"


def _decimal_digits(low: str, high: str) -> str:
    """Returns the expression of 1 to n digits that lie from low to high, of n digits.

    A text with fewer digits stands for the one with zeros appended.
    """
    size = len(low)
    zeros, nines = "0" * (size - 1), "9" * (size - 1)
    if not low.strip("0") and not high.strip("9"):
        return repeat("[0-9]", 1, size)
    first, last = int(low[0]), int(high[0])
    if first == last:
        return low[0] + _more_digits(low[1:], high[1:])
    options = []
    if low[1:] != zeros:
        options.append(low[0] + _more_digits(low[1:], nines))
        first += 1
    if high[1:] != nines:
        options.append(high[0] + _more_digits(zeros, high[1:]))
        last -= 1
    if first <= last:
        options.append(_digit(first, last) + repeat("[0-9]", 0, size - 1))
    return either(options)


def _more_digits(low: str, high: str) -> str:
    if not low:
        return ""
    digits = _decimal_digits(low, high)
    return digits if low.strip("0") else f"(?:{digits})?"
