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


def with_quiet(lists):
    """Stop strings by row, and one more that fills the table."""
    return [[*row, *quiet] for row, quiet in zip(lists, QUIET, strict=True)]


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
