"""Test the states of lightning attention after 2,000 tokens against a float64
recurrence, however the tokens were read."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax import models
from stree_jax.models import LightningConfig, ModelConfig, ResidualScales, init_params
from stree_jax.models.stack.config import named
from tests.support.long_texts import TOKENS, VOCAB, WAYS, rms, sigmoid, text
from tests.support.reference import assert_near
from tests.support.tiny import perturbed

D, LAYERS = 16, 2
MIXER = LightningConfig(4, 6, norm_eps=1e-3)
SCALES = ResidualScales(0.9, 0.5)
# The first heads remember almost nothing, the last ones the whole text.
SLOPES = np.array([1.0, 0.05, 1e-3, 1e-5])
# Relative to the largest entry. A step multiplies by the same float32 each time, whose
# rounding error of up to 2^-25 adds up over the tokens that a head remembers.
TOLERANCES = 1e-5 + 2.0**-25 * np.minimum(1 / SLOPES, TOKENS)
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    num_tokens=VOCAB,
    d_model=D,
    layers=("stream:lightning",) * LAYERS,
    mixers=named(lightning=MIXER),
    residual_scales={"lightning": SCALES},
)


@cache
def params():
    random = init_params(CONFIG, jax.random.key(0), jnp.float32)
    random = perturbed(random, 0.3, 1)
    for i in range(LAYERS):
        slopes = jnp.asarray(SLOPES * 0.8**i, jnp.float32)
        random[f"layers_{i}"]["lightning"]["slope"] = slopes
    return random


def mixed(p, u):
    """Computes lightning attention token by token, as the equations say.

    Returns:
      Its output [n, d], and the state [H, P, P] after the text.
    """
    into = u @ p["in_proj"].T
    qkv, gate = into[:, : 3 * MIXER.d_inner], into[:, 3 * MIXER.d_inner :]
    qkv = (qkv * sigmoid(qkv)).reshape(len(u), 3, MIXER.num_heads, MIXER.head_dim)
    kept = np.exp(-p["slope"])[:, None, None]
    state, y = np.zeros((MIXER.num_heads, MIXER.head_dim, MIXER.head_dim)), []
    for q, k, v in qkv:
        state = kept * state + v[:, :, None] * k[:, None]
        y.append((state @ q[..., None]).reshape(-1))
    y = rms(np.stack(y), p["norm"], MIXER.norm_eps) * sigmoid(gate)
    return y @ p["out_proj"].T, state


@cache
def exact():
    """Returns the last hidden state [d], and the state of each layer."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params())
    x, states = p["embedding"][text()], []
    for i in range(LAYERS):
        own = p[f"layers_{i}"]
        u = rms(x, own["norm"]["scale"], CONFIG.norm_eps)
        out, state = mixed(own["lightning"], u)
        x = SCALES.stream * u + SCALES.added * out
        states.append(state)
    return rms(x, p["norm"]["scale"], CONFIG.norm_eps)[-1], states


@pytest.mark.parametrize("way", WAYS)
def test_states_after_a_long_text_match_a_float64_recurrence(way):
    hidden, states = exact()
    last, state = WAYS[way](models.Model(params(), CONFIG), text())
    for layer, wanted in zip(state.layers, states, strict=True):
        kv = layer["lightning"].kv
        assert kv.dtype == jnp.float32
        for head in range(MIXER.num_heads):
            assert_near(kv[0, head], wanted[head], TOLERANCES[head])
    if last is not None:
        assert_near(last, hidden, 3 * TOLERANCES.max())


def test_states_have_32_bits_in_a_model_of_16_bits():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())
    for i in range(LAYERS):
        slope = params()[f"layers_{i}"]["lightning"]["slope"]
        half[f"layers_{i}"]["lightning"]["slope"] = slope
    _, state = WAYS["trees"](models.Model(half, CONFIG), text(n=20))
    assert {layer["lightning"].kv.dtype for layer in state.layers} == {
        np.dtype("float32")
    }
