"""Prompts and drafters with which tests compare trees with plain decoding."""

import numpy as np

from stree_jax.drafters import Staged
from stree_jax.training.ngrams import count_grams, katz
from tests.support.heads import random_heads
from tests.support.tiny import REAL, perturbed


def random_prompts(lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(8, REAL, n).tolist() for n in lengths]


def drafters_of(target, texts, noise):
    """Returns drafters by name: prompt lookup, a draft model near the target, Medusa
    heads, n-grams of the texts, and the draft model with these n-grams.

    Args:
      texts: token ids of texts like those that the target writes.
      noise: standard deviation of what is added to the draft model's parameters.
    """
    half = target.replace(params=perturbed(target.params, noise, 3))
    text = np.resize(sum(texts, []), (1, 256)).astype(np.int32)
    ngrams = katz(count_grams(text, 3, REAL), REAL, slots=512, keep=4)
    return {
        "lookup": "lookup",
        "model": half,
        "heads": random_heads(target, heads=2, blocks=1),
        "ngrams": ngrams,
        "staged": Staged(half, ngrams),
    }
