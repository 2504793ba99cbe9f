"""Helpers that decode a few steps with any `Spec`, and return the loop's state."""

import jax.numpy as jnp
import numpy as np

from stree_jax.generation.generate import begin
from stree_jax.models.layers.mixer import map_leaves
from stree_jax.speculation import loop
from stree_jax.speculation.drafter import Prompts

LENGTHS = [1, 7, 33]  # of the prompts


def decode(spec, target, prompts, max_new_tokens, steps=loop.FOREVER):
    """Returns tokens by row and the loop's state after `steps` steps."""
    begun, _ = begin(target, prompts, max_new_tokens=max_new_tokens, drafter=None)
    padded = np.zeros((len(prompts), max(LENGTHS)), np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    begun = loop.init_decoding_jit(
        spec,
        jnp.asarray(padded),
        jnp.asarray([len(ids) for ids in prompts], jnp.int32),
        begun.requests,
        max_new_tokens=max_new_tokens,
    )
    done = loop.advance_jit(spec, begun, jnp.int32(steps))
    rows = zip(np.asarray(done.tokens), np.asarray(done.length), strict=True)
    return [row[:n].tolist() for row, n in rows], done


def row_of(state, b):
    """Returns the arrays of one row of a model's state: recurrent states, windows, and
    caches up to the committed length."""
    found, n = [], int(state.length[b])

    def visit(x, metadata):
        row, axis = np.asarray(x[b]), metadata.capacity_axis
        found.append(row if axis is None else row.take(range(n), axis - 1))
        return x

    map_leaves(visit, state.layers)
    assert found
    return found


def prompts_of(texts, update_width, capacity=64, padding=9):
    """Returns texts of several lengths as drafters get them. Padding may equal a
    token."""
    width = max(map(len, texts))
    padded = np.full((len(texts), width), padding, np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    lengths = jnp.asarray([len(text) for text in texts], jnp.int32)
    return Prompts(jnp.asarray(padded), lengths, capacity, update_width)
