"""Test the state of Mamba-1 after 2,000 tokens against a float64 recurrence, however
the tokens were read."""

from functools import cache

import numpy as np
import pytest

from stree_jax.models import Mamba1Config
from tests.support.long_texts import (
    WAYS,
    check_one_layer,
    one_layer,
    random_params,
    recurrence_of,
    rms,
    sigmoid,
)

D, N, RANK, TAPS = 20, 5, 3, 3
TOLERANCE = 1e-5  # relative to the largest entry
MIXERS = {
    norm or "none": Mamba1Config(D, RANK, N, TAPS, norm, 1e-3)
    for norm in (None, "plain", "scaled")
}


def config_of(kind):
    return one_layer(mamba1=MIXERS[kind])


@cache
def params_of(kind):
    return random_params(
        config_of(kind),
        {
            "A_log": lambda noise, rng: np.log(10.0 ** rng.uniform(-4, 1, noise.shape)),
            "dt_bias": lambda noise, rng: 3 * noise - 2,
        },
    )


def mixed(p, u, c):
    """Computes the mixer token by token. Returns its output [n, d] and the state
    [N, D]."""
    x, z = np.split(u @ p["in_proj"].T, 2, axis=1)
    padded = np.concatenate([np.zeros((TAPS - 1, D)), x])
    taps = sum(padded[k : k + len(u)] * p["conv_weight"][:, k] for k in range(TAPS))
    taps = taps + p["conv_bias"]
    x = taps * sigmoid(taps)
    parts = np.split(x @ p["x_proj"].T, [RANK, RANK + N], axis=1)
    if c.norm is not None:
        scales = [p.get(f"{name}_norm", 1.0) for name in ("dt", "B", "C")]
        parts = [rms(part, s, 1e-3) for part, s in zip(parts, scales, strict=True)]
    dt, B, C = parts
    dt = np.logaddexp(0, dt @ p["dt_proj"].T + p["dt_bias"])
    A, state, y = -np.exp(p["A_log"]), np.zeros((D, N)), []
    for t in range(len(u)):
        added = np.outer(dt[t] * x[t], B[t])
        state = np.exp(dt[t][:, None] * A) * state + added
        y.append(state @ C[t] + p["D"] * x[t])
    return (np.stack(y) * z * sigmoid(z)) @ p["out_proj"].T, state.T


@cache
def recurrence(kind):
    return recurrence_of(config_of(kind), params_of(kind), mixed)


def compared(kind, way):
    exact = recurrence(kind)
    check_one_layer(config_of(kind), params_of(kind), way, exact, TOLERANCE)


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("way", ["trees and steps", "prefill"])
def test_states_after_a_long_text_match_a_float64_recurrence(way, kind):
    compared(kind, way)


@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"trees and steps", "prefill"}))
def test_states_after_a_long_text_read_in_other_ways(way):
    compared("scaled", way)
