"""Reads and writes rotary embeddings of GGUF files, with llama.cpp's keys and
defaults."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models.configs.rope import Rope, Yarn, rope_frequencies

ROPE_FACTORS = "rope_freqs.weight"  # tensor with the divisor of each frequency
ROTATED, THETA = "rope.dimension_count", "rope.freq_base"
# Kind of frequency scaling, its factor (the second name is an old one), the factor of
# the cosines and sines, and the context length of the training.
SCALING, TURNS = "rope.scaling.type", "rope.scaling.attn_factor"
FACTORS = ("rope.scaling.factor", "rope.scale_linear")
ORIGINAL = "rope.scaling.original_context_length"


def rope(fields: ConfigFields, head_dim: int, partial: bool = False) -> Rope:
    """Reads a rotary embedding.

    Args:
      fields: the metadata.
      head_dim: channels of a head.
      partial: True if the architecture may rotate only the first channels of a head.

    Raises:
      CheckpointError: the number of rotated channels or the scaling is unsupported.
    """
    dim = fields.size(ROTATED, head_dim)
    if dim % 2 or (dim > head_dim if partial else dim != head_dim):
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
    """Reads linear and YaRN scaling as llama.cpp does. Without a kind of scaling, the
    factor means linear scaling. It may be under a current or an older key. The kind
    "none" ignores the factor."""
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
    """Finds the llama3 scaling that has these divisors of the frequencies.

    The file has only the divisors, not the scaling's parameters. In all published
    models the low and high factors are 1 and 4 and the length is a power of two.
    """
    plain = rope_frequencies(rope)
    factor = float(factors.max()) if factors.size else 0.0
    if factors.shape == plain.shape and 1 < factor < math.inf:
        for power in range(4, 24):
            scaled = replace(rope, llama3=(factor, 1.0, 4.0, float(2**power)))
            if np.allclose(plain / rope_frequencies(scaled), factors, 1e-5, 0):
                return scaled
    raise fields.error(ROPE_FACTORS, "is not the frequency scaling of Llama 3")


def rope_values(rope: Rope | None) -> dict[str, Any]:
    """Returns the keys of a rotary embedding, and the divisors of its frequencies, if
    it has them: the inverse of `rope`. The divisors are a tensor in the file."""
    if rope is None:
        return {}
    values: dict[str, Any] = {THETA: rope.theta, ROTATED: rope.dim}
    if rope.linear != 1:
        values |= {SCALING: "linear", FACTORS[0]: rope.linear}
    if (yarn := rope.yarn) is not None:
        turns = yarn.attention_factor
        if yarn.factor > 1:  # llama.cpp multiplies by this itself
            turns /= 0.1 * math.log(yarn.factor) + 1.0
        values |= {SCALING: "yarn", FACTORS[0]: yarn.factor, TURNS: turns}
        values[ORIGINAL] = round(yarn.original_length)
    if rope.llama3 is not None:
        plain = rope_frequencies(replace(rope, llama3=None))
        values[ROPE_FACTORS] = plain / rope_frequencies(rope)
    return values
