"""Test the state of Kimi Delta Attention after 2,000 tokens against a float64
recurrence, however the tokens were read."""

from functools import cache

import numpy as np
import pytest

from stree_jax.models import KDAConfig
from tests.support.long_texts import (
    check_one_layer,
    one_layer,
    random_params,
    recurrence_of,
    rms,
    sigmoid,
    unit,
)

HEADS, N, P, TAPS = 4, 6, 5, 3
TOLERANCE = 1e-5  # relative to the largest entry
MIXERS = {
    "softplus": KDAConfig(HEADS, HEADS, N, P, TAPS, 1e-3, decay_rank=3, gate_rank=2),
    "bounded": KDAConfig(HEADS, HEADS, N, P, TAPS, 1e-3, decay_bound=-4.0),
}


def config_of(kind):
    return one_layer(kda=MIXERS[kind])


@cache
def params_of(kind):
    return random_params(
        config_of(kind),
        {
            "A_log": lambda noise, rng: np.log([1e-3, 1e-1, 0.5, 3.0]),
            "dt_bias": lambda noise, rng: 3 * noise - 2,
        },
    )


def decays(p, u, c):
    """Returns the decays [n, H, N]."""
    f = (u @ p["decay_in"].T if c.decay_rank else u) @ p["decay"].T + p["dt_bias"]
    f, rate = f.reshape(len(u), HEADS, N), np.exp(p["A_log"])[:, None]
    if c.decay_bound is None:
        return np.exp(-rate * np.logaddexp(0, f))
    return np.exp(c.decay_bound * sigmoid(rate * f))


def mixed(p, u, c):
    """Computes the mixer token by token. Returns its output [n, d] and the state
    [H, P, N]."""
    qkv, z = np.split(u @ p["in_proj"].T, [c.d_qkv], axis=1)
    if c.gate_rank:
        z = u @ p["gate_in"].T @ p["gate_out"].T
    beta, decay = sigmoid(u @ p["gates"].T), decays(p, u, c)
    padded = np.concatenate([np.zeros((TAPS - 1, c.d_qkv)), qkv])
    taps = sum(padded[k : k + len(u)] * p["conv_weight"][:, k] for k in range(TAPS))
    q, k, v = np.split(taps * sigmoid(taps), [c.d_key, 2 * c.d_key], axis=1)
    q, k = (unit(x.reshape(len(u), HEADS, N)) for x in (q, k))
    v, y = v.reshape(len(u), HEADS, P), []
    state = np.zeros((HEADS, P, N))
    for t in range(len(u)):
        state *= decay[t][:, None]
        known = np.einsum("hpn,hn->hp", state, k[t])
        added = beta[t][:, None] * (v[t] - known)
        state += added[..., None] * k[t][:, None]
        y.append(np.einsum("hpn,hn->hp", state, q[t]) * N**-0.5)
    y = rms(np.stack(y), p["norm"], c.norm_eps) * sigmoid(z.reshape(v.shape))
    return y.reshape(len(u), -1) @ p["out_proj"].T, state


@cache
def recurrence(kind):
    return recurrence_of(config_of(kind), params_of(kind), mixed)


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("way", ["trees", "trees and steps", "steps", "prefill"])
def test_states_after_a_long_text_match_a_float64_recurrence(way, kind):
    exact = recurrence(kind)
    check_one_layer(config_of(kind), params_of(kind), way, exact, TOLERANCE)
