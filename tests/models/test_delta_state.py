"""Test the state of delta-rule mixers after 2,000 tokens against a float64 recurrence,
however the tokens were read, and that no recurrent state has 16 bits."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import models
from stree_jax.models import DeltaConfig, ModelConfig
from stree_jax.models.mixers.delta import DeltaRecord, DeltaState
from stree_jax.models.stack.config import named
from stree_jax.server.batch import Batch
from stree_jax.server.rows import Sizes, TextRequest
from stree_jax.speculation.default_tree import spec_for
from tests.support.long_texts import (
    TOKENS,
    VOCAB,
    WAYS,
    random_params,
    rms,
    sigmoid,
    text,
    unit,
)
from tests.support.reference import MODEL_TOLERANCE, assert_near
from tests.support.tiny import tiny_delta

D, LAYERS = 16, 2
MIXER = DeltaConfig(2, 4, 6, 5, d_conv=3, norm_eps=1e-3)
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    num_tokens=VOCAB,
    d_model=D,
    layers=("delta",) * LAYERS,
    norm="rms_float32",
    mixers=named(delta=MIXER),
)
CONFIGS = {  # Olmo-Hybrid's writes may reverse what a key holds
    "qwen": CONFIG,
    "olmo": CONFIG.with_mixers(delta=replace(MIXER, beta_max=2.0)),
}
CASES = [("qwen", way) for way in WAYS] + [("olmo", "trees"), ("olmo", "prefill")]
TOLERANCE = 1e-5  # relative to the largest entry


@cache
def params_of(dtype="float32"):
    own = {"A_log": lambda noise, rng: np.log([1e-4, 1e-2, 0.3, 4.0])}
    return random_params(CONFIG, own, dtype)


def mixed(p, u, c):
    """Computes a Gated DeltaNet mixer token by token, as the equations say.

    Returns:
      Its output [n, d], the state [H, P, N] after the text, and the last inputs of the
      convolution [K - 1, C].
    """
    r = c.value_heads // c.key_heads
    qkvz, gates = u @ p["in_proj"].T, u @ p["gates"].T
    qkv, z = qkvz[:, : c.d_qkv], qkvz[:, c.d_qkv :].reshape(len(u), c.value_heads, -1)
    beta = c.beta_max * sigmoid(gates[:, : c.value_heads])
    step = np.log1p(np.exp(gates[:, c.value_heads :] + p["dt_bias"]))
    decay = np.exp(-np.exp(p["A_log"]) * step)
    padded = np.concatenate([np.zeros((c.d_conv - 1, c.d_qkv)), qkv])
    taps = [padded[k : k + len(u)] * p["conv_weight"][:, k] for k in range(c.d_conv)]
    q, k, v = np.split(sum(taps) * sigmoid(sum(taps)), [c.d_key, 2 * c.d_key], axis=1)
    q, k = (unit(x.reshape(len(u), c.key_heads, -1)) for x in (q, k))
    v, y = v.reshape(len(u), c.value_heads, -1), []
    state = np.zeros((c.value_heads, c.value_dim, c.key_dim))
    for t in range(len(u)):
        for h in range(c.value_heads):
            S, key, query = state[h], k[t, h // r], q[t, h // r] * c.key_dim**-0.5
            S *= decay[t, h]
            S += np.outer(beta[t, h] * (v[t, h] - S @ key), key)
            y.append(S @ query)
    y = rms(np.reshape(y, z.shape), p["norm"], c.norm_eps) * z * sigmoid(z)
    return y.reshape(len(u), -1) @ p["out_proj"].T, state, padded[-c.d_conv + 1 :]


@cache
def recurrence(kind):
    """Returns the hidden states [n, d] of the text and the states of each layer, in
    float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params_of())
    x, states, eps = p["embedding"][text()], [], CONFIG.norm_eps
    for layer in range(LAYERS):
        own = p[f"layers_{layer}"]
        out, *state = mixed(
            own["delta"],
            rms(x, own["norm"]["scale"], eps),
            CONFIGS[kind].mixers["delta"],
        )
        x = x + out
        states.append(state)
    return rms(x, p["norm"]["scale"], eps), states


def model_of(dtype="float32"):
    return models.Model(params_of(dtype), CONFIG)


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_states_after_a_long_text_match_a_float64_recurrence(kind, way):
    hidden, states = recurrence(kind)
    model = models.Model(params_of(), CONFIGS[kind])
    last, state = WAYS[way](model, text())
    assert int(state.length[0]) == TOKENS
    for layer, (ssm, conv) in zip(state.layers, states, strict=True):
        assert_near(layer["delta"].ssm[0], ssm, TOLERANCE)
        assert_near(layer["delta"].conv[0], conv, TOLERANCE)
    if last is not None:
        assert_near(last, hidden[-1], 3 * TOLERANCE)


def test_windows_in_bfloat16_make_no_difference_between_trees_and_steps():
    """Keys are rounded before the system is solved, so that trees, chains and single
    tokens round the same numbers: their states are closer to each other than to those
    in float32 by far."""
    model, tokens = model_of("bfloat16"), text(n=200)
    states = [WAYS[way](model, tokens)[1] for way in ("trees", "chains", "steps")]
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), model.params)
    exact = WAYS["steps"](models.Model(wide, CONFIG), tokens)[1]
    first = [layer["delta"] for layer in states[0].layers]
    rounding = MODEL_TOLERANCE["bfloat16"]
    for other in states[1:]:
        for ours, layer in zip(first, other.layers, strict=True):
            assert ours.conv.dtype == jnp.bfloat16 and ours.ssm.dtype == jnp.float32
            assert_near(ours.ssm, layer["delta"].ssm, rounding)
    # The first layer's inputs do not depend on the order of sums in earlier layers.
    for other in states[1:]:
        assert_near(first[0].ssm, other.layers[0]["delta"].ssm, TOLERANCE)
    gap = np.abs(np.asarray(first[0].ssm - exact.layers[0]["delta"].ssm)).max()
    assert gap > 100 * TOLERANCE * np.abs(np.asarray(first[0].ssm)).max()


def parts_of(tree):
    """Returns all delta states and records in a pytree."""
    kinds = DeltaState, DeltaRecord
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [leaf for leaf in leaves if isinstance(leaf, kinds)]


def assert_float32(tree, count):
    """Asserts that recurrent states are float32, and what is added to them."""
    found = parts_of(tree)
    assert len(found) == count
    for part in found:
        exact = ("ssm",) if isinstance(part, DeltaState) else ("u", "k_scale", "a")
        assert {getattr(part, name).dtype.name for name in exact} == {"float32"}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_no_recurrent_state_has_16_bits(dtype, tmp_path):
    """In states and records of decoding, in a `past`, and in the rows and prefixes of a
    server."""
    path = tmp_path / "model"
    stree_jax.save(tiny_delta(1), path)
    model = stree_jax.load(path, dtype=dtype, mtp=True)
    layers = model.config.kinds.count("delta")
    spec = spec_for(model, model, "chain:2", None, None)
    batch = Batch(model, spec, Sizes(rows=2, context=128, steps=9, prefix_memory=2**20))
    batch.clear()
    batch.admit(0, TextRequest(list(range(8, 80)), 8))
    batch.advance()
    assert len(batch.prefixes) == 3  # a chunk, and ends of the prompt and its answer
    # A state and pending records of the target, and a state of the draft model.
    assert_float32(batch._decoding, 3 * layers)
    for end in (72, 73):
        found = batch.prefixes.find(list(range(8, 8 + end)))
        assert_float32(found.restored(), 2 * layers)
    options = dict(max_new_tokens=5, drafter=model, tree="chain:2", keep_past=True)
    past = stree_jax.generate(model, [[9, 10, 11]], **options).past
    assert_float32((past.target, past.drafter), 2 * layers)
