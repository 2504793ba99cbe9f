"""Texts decoded in the rows of a server's batch."""

import numpy as np

import stree_jax
from stree_jax.server.rows import Sizes, TextRequest
from stree_jax.speculation.decoding import RUNNING
from tests.support.tiny import REAL

SIZES = Sizes(rows=2, context=256, steps=4, prefix_memory=2**20)
CAPACITY = 512


def prompt_of(seed, n):
    return np.random.default_rng(seed).integers(8, REAL, n).tolist()


def decoded(batch, asked):
    """Returns the tokens of texts. A text gets a row as soon as one is free."""
    found, waiting, rows = [[] for _ in asked], list(range(len(asked))), {}
    while waiting or rows:
        for row in batch.free_rows()[: len(waiting)]:
            rows[row] = waiting.pop(0)
            batch.admit(row, TextRequest(*asked[rows[row]]))
        for row, update in batch.advance().items():
            found[rows[row]] += update.tokens
            if update.finish != RUNNING:
                del rows[row]
    return found


def plain(model, prompt, new):
    options = dict(max_new_tokens=new, capacity=CAPACITY, drafter=None)
    return stree_jax.generate(model, [prompt], **options).tokens[0]
