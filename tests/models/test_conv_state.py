"""Test the windows of short convolutions after 2,000 tokens against float64, however
the tokens were read."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax import models
from stree_jax.models import ModelConfig, ShortConvConfig, init_params
from stree_jax.models.stack.config import named
from tests.support.long_texts import VOCAB, WAYS, rms, text
from tests.support.reference import assert_near
from tests.support.tiny import perturbed

D, TAPS, TOLERANCE = 16, 4, 1e-5
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    num_tokens=VOCAB,
    d_model=D,
    layers=("short_conv",) * 2,
    mixers=named(short_conv=ShortConvConfig(D, TAPS, bias=True)),
)


@cache
def params():
    random = init_params(CONFIG, jax.random.key(0), jnp.float32)
    return perturbed(random, 0.3, 1)


@cache
def exact():
    """Returns the last hidden state [d] and the last inputs [K-1, C] of each
    convolution."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params())
    x, windows = p["embedding"][text()], []
    for i in range(2):
        own = p[f"layers_{i}"]["short_conv"]
        u = rms(x, p[f"layers_{i}"]["norm"]["scale"], CONFIG.norm_eps)
        into, out, v = np.split(u @ own["in_proj"].T + own["in_proj_bias"], 3, axis=1)
        inputs = np.concatenate([np.zeros((TAPS - 1, D)), into * v])
        taps = sum(
            inputs[k : k + len(u)] * own["conv_weight"][:, k] for k in range(TAPS)
        )
        y = out * (taps + own["conv_bias"])
        x = x + y @ own["out_proj"].T + own["out_proj_bias"]
        windows.append(inputs[1 - TAPS :])
    return rms(x, p["norm"]["scale"], CONFIG.norm_eps)[-1], windows


@pytest.mark.parametrize("way", WAYS)
def test_windows_after_a_long_text(way):
    hidden, windows = exact()
    last, state = WAYS[way](models.Model(params(), CONFIG), text())
    for layer, wanted in zip(state.layers, windows, strict=True):
        assert_near(layer["short_conv"].conv[0], wanted, TOLERANCE)
    if last is not None:
        assert_near(last, hidden, 3 * TOLERANCE)
