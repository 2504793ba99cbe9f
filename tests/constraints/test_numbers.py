"""Expressions of integers and numbers within bounds, against brute force."""

import random
import re
from fractions import Fraction

import pytest

from stree_jax.constraints.expressions import UnsupportedError
from stree_jax.constraints.numbers import Bounds, exact, integer_regex, number_regex

BOUNDS = 100  # random bounds of each test


def obeys(bounds, value):
    return (
        (bounds.low is None or value >= bounds.low)
        and (bounds.high is None or value <= bounds.high)
        and (bounds.above is None or value > bounds.above)
        and (bounds.below is None or value < bounds.below)
    )


def random_bounds(rng, size, places):
    def bound():
        scale = 10 ** rng.randint(0, places)
        value = Fraction(rng.randint(-size * scale, size * scale), scale)
        return rng.choice([None, value])

    return Bounds(bound(), bound(), bound(), bound())


def test_integers_are_those_within_the_bounds():
    rng = random.Random(0)
    numbers = range(-1500, 1501)
    for _ in range(BOUNDS):
        bounds = random_bounds(rng, 1200, 1)
        multiple = rng.choice([1, 1, 1, 2, 5, 20, 8, 125, 3, 7])
        wanted = {n for n in numbers if obeys(bounds, n) and n % multiple == 0}
        try:
            regex = re.compile(integer_regex(bounds, multiple))
        except UnsupportedError as error:
            assert not wanted or "need a minimum" in str(error), (bounds, multiple)
            continue
        found = {n for n in numbers if regex.fullmatch(str(n))}
        assert found == wanted, (bounds, multiple)
        for text in ("-0", "00", "01", "+1", "1.0", "1e1", ""):
            assert not regex.fullmatch(text)


@pytest.mark.parametrize("digits", [1, 2, 9, 18, 19, 38])
def test_large_bounds_are_exact(digits):
    for low in (10**digits - 1, 10**digits, 10**digits + 1, -(10**digits)):
        regex = re.compile(integer_regex(Bounds(low=Fraction(low))))
        other = re.compile(integer_regex(Bounds(high=Fraction(low))))
        for number in range(low - 12, low + 13):
            assert bool(regex.fullmatch(str(number))) == (number >= low)
            assert bool(other.fullmatch(str(number))) == (number <= low)
        assert regex.fullmatch(str(abs(low) * 1000 + 7))
        assert other.fullmatch(str(-abs(low) * 1000 - 7))


def spellings(places, size):
    """Yields the numbers up to a size, with up to `places` decimals."""
    for decimals in range(places + 1):
        for units in range(size * 10**decimals + 1):
            whole, part = divmod(units, 10**decimals)
            yield f"{whole}.{part:0{decimals}d}" if decimals else str(whole)


def test_numbers_are_those_within_the_bounds(monkeypatch):
    rng = random.Random(1)
    monkeypatch.setattr("stree_jax.constraints.numbers.MAX_DECIMALS", 2)
    positive = list(spellings(2, 13))
    texts = positive + [f"-{text}" for text in positive if float(text) != 0]
    for _ in range(BOUNDS):
        bounds = random_bounds(rng, 13, 3)
        if bounds == Bounds():
            continue
        wanted = {text for text in texts if obeys(bounds, Fraction(text))}
        try:
            regex = re.compile(number_regex(bounds))
        except UnsupportedError:
            assert not wanted
            continue
        assert {text for text in texts if regex.fullmatch(text)} == wanted, bounds
        for text in ("-0", "-0.0", "00", "01.5", "1.", ".5", "1e1", "1.000"):
            assert not regex.fullmatch(text)


def test_bounds_are_the_decimal_numbers_of_the_schema():
    regex = number_regex(Bounds(above=exact(0.1), high=exact(0.3)))
    for text, accepted in [
        *(("0.1", False), ("0.1000000001", True), ("0.3", True), ("0.30", True)),
        *(("0.3000000001", False), ("0.2", True), ("0.29999999999", False)),
    ]:
        assert bool(re.fullmatch(regex, text)) == accepted, text


def test_numbers_beyond_float64_have_no_decimals():
    """A text such as 10000000000000000.5 is read as the bound itself."""
    regex = number_regex(Bounds(above=Fraction(10**16)))
    assert re.fullmatch(regex, "10000000000000001")
    assert not re.fullmatch(regex, "10000000000000000.5")


@pytest.mark.parametrize("write", [integer_regex, number_regex])
def test_impossible_bounds_are_refused(write):
    with pytest.raises(UnsupportedError, match="no number that can be written"):
        write(Bounds(above=Fraction(3), below=Fraction(3)))
    with pytest.raises(UnsupportedError, match="at most 40 digits"):
        write(Bounds(low=Fraction(10**40)))


def test_multiples_beyond_a_list_need_their_last_digits():
    with pytest.raises(UnsupportedError, match="multiples of 7 need"):
        integer_regex(Bounds(low=Fraction(0)), 7)
    regex = integer_regex(Bounds(low=Fraction(-100), high=Fraction(100_000)), 25)
    for text, accepted in [
        *(("-100", True), ("-125", False), ("0", True), ("99975", True)),
        *(("100000", True), ("100025", False), ("99980", False), ("025", False)),
    ]:
        assert bool(re.fullmatch(regex, text)) == accepted, text
