"""Formats of strings: the texts are valid, and common ones are accepted."""

import datetime
import random

import jsonschema
import pytest

from stree_jax.constraints.expressions import UnsupportedError
from stree_jax.constraints.formats import FORMATS, format_regex
from tests.support.regex_samples import matches, sample

TEXTS = 150  # random texts of each format
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


@pytest.mark.parametrize("name", FORMATS)
def test_random_texts_are_valid(name):
    assert name in CHECKER.checkers  # otherwise every text passes
    rng = random.Random(0)
    for _ in range(TEXTS):
        text = sample(format_regex(name), rng)
        assert CHECKER.conforms(text, name), text
        assert not set('"\\') & set(text) and text.isprintable()


def test_dates_are_those_of_the_calendar():
    regex = format_regex("date")
    for year in (1, 4, 100, 400, 1900, 2000, 2023, 2024, 2100, 9996, 9999):
        for month in range(14):
            for day in (0, 1, 9, 10, 28, 29, 30, 31, 32):
                text = f"{year:04d}-{month:02d}-{day:02d}"
                try:
                    datetime.date(year, month, day)
                except ValueError:
                    assert not matches(regex, text), text
                else:
                    assert matches(regex, text), text
    assert not matches(regex, "0000-01-01")


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        (
            "time",
            ["00:00:00Z", "23:59:59.123456+05:30"],
            ["24:00:00Z", "12:00:00", "12:60:00Z", "1:00:00Z"],
        ),
        (
            "date-time",
            ["2024-02-29T12:30:00Z", "1999-12-31T23:59:59-08:00"],
            ["2023-02-29T12:30:00Z", "2024-01-01 12:00:00Z", "2024-01-01"],
        ),
        (
            "duration",
            ["P1Y2M3DT4H5M6S", "PT36H", "P3W", "P1M", "PT1M30S"],
            ["P", "PT", "1D", "P1D2Y", "P1YT", "P-1D", "P1W2D"],
        ),
        (
            "uuid",
            ["123e4567-e89b-12d3-a456-426614174000"],
            [
                "123e4567e89b12d3a456426614174000",
                "123e4567-e89b-12d3-a456-42661417400g",
            ],
        ),
        ("ipv4", ["0.0.0.0", "255.255.255.255"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
        (
            "ipv6",
            ["::", "::1", "fe80::1", "1:2:3:4:5:6:7:8", "1::8", "1:2:3:4:5:6:7::"],
            [":", "1:2:3:4:5:6:7", "1::2::3", "12345::", "1:2:3:4:5:6:7:8:9"],
        ),
        (
            "email",
            ["a@b.co", "first.last+tag@mail.example.org"],
            ["a", "a@b", "@b.co", ".a@b.co", "a..b@c.de", "a@-b.co"],
        ),
        (
            "hostname",
            ["localhost", "www.example.co.uk", "a-b.c1"],
            ["-a", "a-", "a..b", "a_b", "", "1.2.3.4"],
        ),
        (
            "uri",
            [
                *("https://example.com", "http://a.b:8080/c/d?e=f&g=%20#h"),
                *("mailto:a@b.co", "urn:isbn:0451450523", "http://a.b/c"),
            ],
            ["example.com", "http://", "http://a b", "http://a/%zz", "//a/b", "1a:b"],
        ),
    ],
)
def test_accepts_common_texts(name, accepted, refused):
    regex = format_regex(name)
    assert [text for text in accepted if not matches(regex, text)] == []
    assert [text for text in refused if matches(regex, text)] == []


def test_unknown_formats_are_refused():
    with pytest.raises(UnsupportedError, match="'iri' is not one of date, time"):
        format_regex("iri")
