"""Test the state of Mamba-1 after 2,000 tokens against a float64 recurrence, however
the tokens were read."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax import models
from stree_jax.models import Mamba1Config, ModelConfig, init_params
from stree_jax.models.stack.config import named
from tests.support.long_texts import VOCAB, WAYS, rms, sigmoid, text
from tests.support.reference import assert_near

D, N, RANK, TAPS = 20, 5, 3, 3
TOLERANCE = 1e-5  # relative to the largest entry
MIXERS = {
    norm or "none": Mamba1Config(D, RANK, N, TAPS, norm, 1e-3)
    for norm in (None, "plain", "scaled")
}


def config_of(kind):
    return ModelConfig(
        vocab_size=VOCAB,
        num_tokens=VOCAB,
        d_model=16,
        layers=("mamba1",),
        mixers=named(mamba1=MIXERS[kind]),
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
            value = np.log(10.0 ** rng.uniform(-4, 1, leaf.shape))
        elif name == "dt_bias":
            value = 3 * noise - 2
        elif name == "scale" or name.endswith("_norm"):
            value = 1 + 0.3 * noise
        elif name == "conv_weight":
            value = 0.6 * noise
        else:
            value = noise / (1 if leaf.ndim < 2 else np.sqrt(leaf.shape[-1]))
        return jnp.asarray(value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(random, shapes)


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
    """Returns the last hidden state [d] and the state of the layer, in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params_of(kind))
    x, eps, own = p["embedding"][text()], config_of(kind).norm_eps, p["layers_0"]
    out, state = mixed(own["mamba1"], rms(x, own["norm"]["scale"], eps), MIXERS[kind])
    return rms(x + out, p["norm"]["scale"], eps)[-1], state


def compared(kind, way):
    hidden, wanted = recurrence(kind)
    model = models.Model(params_of(kind), config_of(kind))
    last, state = WAYS[way](model, text())
    assert_near(state.layers[0]["mamba1"].ssm[0], wanted, TOLERANCE)
    if last is not None:
        assert_near(last, hidden, 3 * TOLERANCE)


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("way", ["trees and steps", "prefill"])
def test_states_after_a_long_text_match_a_float64_recurrence(way, kind):
    compared(kind, way)


@pytest.mark.parametrize("way", sorted(WAYS.keys() - {"trees and steps", "prefill"}))
def test_states_after_a_long_text_read_in_other_ways(way):
    compared("scaled", way)
