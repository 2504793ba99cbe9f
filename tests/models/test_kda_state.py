"""Test the state of Kimi Delta Attention after 2,000 tokens against a float64
recurrence, however the tokens were read."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax import models
from stree_jax.models import KDAConfig, ModelConfig, init_params
from stree_jax.models.stack.config import named
from tests.support.long_texts import VOCAB, WAYS, rms, sigmoid, text, unit
from tests.support.reference import assert_near

HEADS, N, P, TAPS = 4, 6, 5, 3
TOLERANCE = 1e-5  # relative to the largest entry
MIXERS = {
    "softplus": KDAConfig(HEADS, HEADS, N, P, TAPS, 1e-3, decay_rank=3, gate_rank=2),
    "bounded": KDAConfig(HEADS, HEADS, N, P, TAPS, 1e-3, decay_bound=-4.0),
}


def config_of(kind):
    return ModelConfig(
        vocab_size=VOCAB,
        num_tokens=VOCAB,
        d_model=16,
        layers=("kda",),
        mixers=named(kda=MIXERS[kind]),
    )


@cache
def params_of(kind):
    """Returns random parameters. Some channels remember the whole text, and others
    almost nothing."""
    rng, config = np.random.default_rng(0), config_of(kind)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.float32))

    def random(path, leaf):
        noise, name = rng.standard_normal(leaf.shape), path[-1].key
        if name == "A_log":
            value = np.log([1e-3, 1e-1, 0.5, 3.0])
        elif name == "dt_bias":
            value = 3 * noise - 2
        elif name in ("scale", "norm"):
            value = 1 + 0.3 * noise
        elif name == "conv_weight":
            value = 0.6 * noise
        else:
            value = noise / (1 if leaf.ndim < 2 else np.sqrt(leaf.shape[-1]))
        return jnp.asarray(value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(random, shapes)


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
    """Returns the last hidden state [d] and the state of the layer, in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params_of(kind))
    x, eps, own = p["embedding"][text()], config_of(kind).norm_eps, p["layers_0"]
    out, state = mixed(own["kda"], rms(x, own["norm"]["scale"], eps), MIXERS[kind])
    return rms(x + out, p["norm"]["scale"], eps)[-1], state


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("way", ["trees", "trees and steps", "steps", "prefill"])
def test_states_after_a_long_text_match_a_float64_recurrence(way, kind):
    hidden, wanted = recurrence(kind)
    model = models.Model(params_of(kind), config_of(kind))
    last, state = WAYS[way](model, text())
    assert_near(state.layers[0]["kda"].ssm[0], wanted, TOLERANCE)
    if last is not None:
        assert_near(last, hidden, 3 * TOLERANCE)
