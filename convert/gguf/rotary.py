"""Rotary embeddings as GGUF files describe them: llama.cpp's keys and defaults."""

import math
from dataclasses import replace

import numpy as np

from stree_jax.convert.fields import ConfigFields
from stree_jax.models.rope import Rope, Yarn, rope_frequencies

ROPE_FACTORS = "rope_freqs.weight"  # what each frequency is divided by
ROTATED, THETA = "rope.dimension_count", "rope.freq_base"
# How frequencies are scaled, by how much (the second name is an old one), what the
# cosines and sines are multiplied by, and the longest text of the training.
SCALING, TURNS = "rope.scaling.type", "rope.scaling.attn_factor"
FACTORS = ("rope.scaling.factor", "rope.scale_linear")
ORIGINAL = "rope.scaling.original_context_length"


def rope(fields: ConfigFields, head_dim: int) -> Rope:
    """Checks that whole heads rotate, as in every architecture here."""
    dim = fields.size(ROTATED, head_dim)
    if dim != head_dim or dim % 2:
        problem = f"{dim} of {head_dim} channels is not supported"
        raise fields.error(ROTATED, problem)
    found = _scaled(fields, Rope(fields.positive(THETA, 10000.0), dim))
    factors = fields.get(ROPE_FACTORS, None)
    if factors is None:
        return found
    if found.linear != 1 or found.yarn is not None:
        raise fields.error(ROPE_FACTORS, "beside another scaling is not supported")
    return _llama3(fields, found, factors)


def _scaled(fields: ConfigFields, rope: Rope) -> Rope:
    """Reads linear and YaRN scaling as llama.cpp does: linear is the default, by the
    factor of either key, and "none" ignores the factor."""
    kind = fields.choice(SCALING, "linear", ("none", "linear", "yarn"))
    factor = 1.0
    for name in FACTORS:
        if name in fields.values:
            factor = fields.positive(name) if fields.number(name) else 1.0
            break
    turns = fields.positive(TURNS, 1.0)
    if kind == "yarn":
        trained = ORIGINAL if ORIGINAL in fields.values else "context_length"
        length = fields.positive(trained)
        if factor > 1:
            turns *= 0.1 * math.log(factor) + 1.0
        return replace(rope, yarn=Yarn(factor, length, attention_factor=turns))
    if turns != 1:
        raise fields.error(TURNS, f"{turns} without yarn is not supported")
    return rope if kind == "none" else replace(rope, linear=factor)


def _llama3(fields: ConfigFields, rope: Rope, factors: np.ndarray) -> Rope:
    """The llama3 scaling that divides frequencies so: the file has its results alone.

    All published models have 1 and 4 for low and high; the length is a power of two.
    """
    plain = rope_frequencies(rope)
    factor = float(factors.max()) if factors.size else 0.0
    if factors.shape == plain.shape and 1 < factor < math.inf:
        for power in range(4, 24):
            scaled = replace(rope, llama3=(factor, 1.0, 4.0, float(2**power)))
            if np.allclose(plain / rope_frequencies(scaled), factors, 1e-5, 0):
                return scaled
    raise fields.error(ROPE_FACTORS, "is not the frequency scaling of Llama 3")
