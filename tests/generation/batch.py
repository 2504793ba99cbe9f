"""Batches of four rows with options that share their programs, and what they spell."""

import numpy as np

from stree_jax import Sampling

TREE = "A"  # of 13 nodes
NEW = 40
LENGTHS = [200, 1, 5, 33]  # of the prompts; texts of up to 257 tokens share programs
CAPACITY = 704  # more than any of these texts needs
SAMPLING = [
    Sampling(temperature=0),
    Sampling(0.7, top_k=9, repetition_penalty=1.3, seed=11),
    Sampling(1.0, top_p=0.9, repetition_penalty=0.8, seed=12),
    Sampling(2.0, top_k=40, top_p=0.97, min_p=0.02, repetition_penalty=1.1, seed=13),
]
# As long as they are, they also leave room in the table that all stop strings share.
QUIET = [[f"{row}: this stop string never comes up"] for row in range(4)]
# Pieces that split characters of two, three and four bytes, so that random text has
# whole, split and malformed ones. Id 0 is a special token.
PIECES = [
    b"",
    *(bytes([byte]) for byte in b"abcdef .\n"),
    *(prefix + b"\xc3" for prefix in (b"", b"a", b"b", b"c", b"d", b"e", b"f")),
    *(b"\xa9" + suffix for suffix in (b"", b"a", b"b", b"c", b"d", b"e", b"f")),
    *(b"\xe2\x82", b"a\xe2\x82", b"b\xe2\x82", b"\xe2", b"\x82\xac", b"\xac"),
    *(b"\xaca", b"\xacb", b"\xf0\x9f", b"\x98\x80"),
    *(text.encode() for text in ("é", "aé", "éa", "€", "a€b", "😀")),
    *(b"ab", b"ba", b"abc", b"cab", b"aa", b"bb", b"cc"),
]


def spelled(data):
    """Bytes as a byte-level tokenizer writes them: a visible character for each."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return "".join(
        chr(byte if byte in visible else 256 + others.index(byte)) for byte in data
    )


def with_quiet(lists):
    """Stop strings by row, and one more that fills the table."""
    return [[*row, *quiet] for row, quiet in zip(lists, QUIET, strict=True)]


def data_of(tokens):
    return b"".join(PIECES[token] for token in tokens)


def text_of(tokens):
    return data_of(tokens).decode("utf-8", "replace")


def expected_stop(tokens, strings, begin=0):
    """Tokens kept, text and stop string, found by looking after every token."""
    for end in range(begin + 1, len(tokens) + 1):
        data = data_of(tokens[begin:end])
        found = [
            (data.find(string.encode()), -len(string.encode()), string)
            for string in strings
            if string.encode() in data
        ]
        if found:
            start, _, string = min(found)
            before = data_of(tokens[:begin]) + data[:start]
            return tokens[:end], before.decode("utf-8", "replace"), string
    return tokens, text_of(tokens), None


def across(tokens, size):
    """Substrings of a text that span tokens, those with split characters first."""
    text, found = text_of(tokens), []
    for start in range(len(text) - size + 1):
        string = text[start : start + size]
        kept, _, _ = expected_stop(tokens, [string])
        if "\ufffd" not in string and len(PIECES[kept[-1]]) < len(string.encode()) < 8:
            if 4 <= len(kept) < len(tokens):
                found.append((string.isascii(), string))
    return [string for _, string in sorted(set(found))]


def assert_same_row(one, i, other, j):
    """Row i of a result is row j of another."""
    for name in ("tokens", "texts", "finish_reasons", "stop_reasons"):
        assert getattr(one, name)[i] == getattr(other, name)[j], name
    assert one.lengths[i] == other.lengths[j] == len(one.tokens[i])
    close = dict(rtol=1e-4, atol=1e-4)
    a, b = one.logprobs[i], other.logprobs[j]
    for name in ("raw", "processed", "top_raw", "top"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), **close)


def assert_same(one, other):
    assert len(one.tokens) == len(other.tokens)
    for row in range(len(one.tokens)):
        assert_same_row(one, row, other, row)
