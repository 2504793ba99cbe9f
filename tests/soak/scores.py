"""Distributions of the next token, from `score`, with filters by sorting."""

import numpy as np

import stree_jax
from stree_jax import Sampling
from stree_jax.models import PREFILL_CHUNK
from tests.soak.cases import MOST_PROMPTS, MOST_SAMPLES, models
from tests.support.tiny import REAL

# A single shape, so a single program
SCORED = MOST_PROMPTS * MOST_SAMPLES, 2 * PREFILL_CHUNK


def scores(target: str, texts: list[list[int]]) -> np.ndarray:
    """Returns logits [rows, places, REAL] of a target of `TARGETS` after every
    token."""
    table = np.zeros(SCORED, np.int32)
    for row, text in zip(table, texts, strict=False):
        row[: len(text)] = text
    logits = np.asarray(stree_jax.score(models(target)["right"], table))
    return logits[: len(texts), :, :REAL].astype(np.float64)


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def keep_top_k(z: np.ndarray, k: int, slack: float) -> np.ndarray:
    if not 0 < k < z.shape[-1]:
        return z
    kth = np.sort(z, axis=-1)[:, -k, None]
    return np.where(z >= kth - max(slack, 0), z, -np.inf)


def keep_top_p(z: np.ndarray, p: float, slack: float) -> np.ndarray:
    if p >= 1:
        return z
    order = np.argsort(-z, axis=-1, kind="stable")
    mass = np.take_along_axis(np.exp(log_softmax(z)), order, axis=-1)
    before = mass.cumsum(axis=-1) - mass
    count = (before < p + slack).sum(axis=-1, keepdims=True)
    last = np.take_along_axis(z, np.take_along_axis(order, count - 1, 1), 1)
    return np.where(z >= last, z, -np.inf)


def keep_min_p(z: np.ndarray, p: float, slack: float) -> np.ndarray:
    if p <= 0:
        return z
    return np.where(z >= z.max(axis=-1, keepdims=True) + np.log(p) - slack, z, -np.inf)


def filtered(z: np.ndarray, s: Sampling, slack: float) -> np.ndarray:
    """Returns log-probabilities of z [L, V] after the filters, widened by `slack`."""
    z = keep_top_k(z, s.top_k, slack)
    z = keep_top_p(z, float(np.float32(s.top_p)), slack)
    return log_softmax(keep_min_p(z, float(np.float32(s.min_p)), slack))
