"""Test the state of delta-rule mixers after 2,000 tokens against a float64 recurrence,
however the tokens were read, and that no recurrent state has 16 bits."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import models
from stree_jax.default_tree import spec_for
from stree_jax.models import (
    DeltaConfig,
    ModelConfig,
    Pending,
    commit,
    extend,
    forward_hidden,
    init_params,
    init_records,
    init_state,
    prefill,
    tree_nodes,
)
from stree_jax.models.config import named
from stree_jax.models.mixers.delta import DeltaRecord, DeltaState
from stree_jax.server.batch import Batch, Sizes, TextRequest
from tests.support.reference import (
    MODEL_TOLERANCE,
    assert_near,
    path_to,
    random_parents,
)
from tests.support.tiny import tiny_delta

VOCAB, D, LAYERS = 32, 16, 2
TOKENS, T, M = 2000, 8, 5  # of the text, a tree, and its longest accepted path
MIXER = DeltaConfig(2, 4, 6, 5, d_conv=3, norm_eps=1e-3)
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    num_tokens=VOCAB,
    d_model=D,
    layers=("delta",) * LAYERS,
    norm="rms_float32",
    mixers=named(delta=MIXER),
)
TOLERANCE = 1e-5  # relative to the largest entry


@cache
def params_of(dtype="float32"):
    """Returns random parameters. Some heads remember the whole text, and others almost
    nothing."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(
        lambda: init_params(CONFIG, jax.random.key(0), jnp.dtype(dtype))
    )

    def random(path, leaf):
        noise, name = rng.standard_normal(leaf.shape), path[-1].key
        if name == "A_log":
            value = np.log([1e-4, 1e-2, 0.3, 4.0])
        elif name in ("scale", "norm"):
            value = 1 + 0.3 * noise
        elif name == "conv_weight":
            value = 0.6 * noise
        else:
            value = noise / (1 if leaf.ndim < 2 else np.sqrt(leaf.shape[-1]))
        return jnp.asarray(value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(random, shapes)


def text(seed=1, n=TOKENS):
    return np.random.default_rng(seed).integers(0, VOCAB, n).astype(np.int32)


def rms(x, scale, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * scale


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def unit(x):
    return x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6)


def mixed(p, u):
    """Computes a Gated DeltaNet mixer token by token, as the equations say.

    Returns:
      Its output [n, d], the state [H, P, N] after the text, and the last inputs of the
      convolution [K - 1, C].
    """
    c, r = MIXER, MIXER.value_heads // MIXER.key_heads
    qkvz, gates = u @ p["in_proj"].T, u @ p["gates"].T
    qkv, z = qkvz[:, : c.d_qkv], qkvz[:, c.d_qkv :].reshape(len(u), c.value_heads, -1)
    beta = sigmoid(gates[:, : c.value_heads])
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
def recurrence():
    """Returns the hidden states [n, d] of the text and the states of each layer, in
    float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params_of())
    x, states, eps = p["embedding"][text()], [], CONFIG.norm_eps
    for layer in range(LAYERS):
        own = p[f"layers_{layer}"]
        out, *state = mixed(own["delta"], rms(x, own["norm"]["scale"], eps))
        x = x + out
        states.append(state)
    return rms(x, p["norm"]["scale"], eps), states


def model_of(dtype="float32"):
    return models.Model(params_of(dtype), CONFIG)


@jax.jit
def pass_of(model, state, tokens, parents, pending):
    nodes = tree_nodes(parents, CONFIG.conv_taps)
    return forward_hidden(model, state, tokens, nodes, pending=pending)


def by_trees(model, tokens, draw):
    """Reads a text by passes over trees; each pass accepts a path.

    The other nodes are random tokens. Each pass first replays the path that the one
    before it accepted.

    Args:
      draw: returns the parents [T] of a tree, and a path down from its root.
    """
    rng = np.random.default_rng(2)
    dtype = models.param_dtype(model.params)
    state, done, last = init_state(CONFIG, 1, 8, dtype), 0, None
    records = init_records(CONFIG, 1, len(draw(rng)[0]), dtype)
    pending = Pending(records, jnp.zeros((1, M), jnp.int32), jnp.zeros(1, jnp.int32))
    while done < len(tokens):
        parents, path = draw(rng)
        path = path[: len(tokens) - done]
        nodes = rng.integers(0, VOCAB, len(parents)).astype(np.int32)
        nodes[path] = tokens[done : done + len(path)]
        hidden, records, state = pass_of(
            model, state, nodes[None], np.asarray(parents, np.int32)[None], pending
        )
        done, last = done + len(path), hidden[0, path[-1]]
        padded = np.resize(path, M).astype(np.int32)[None]
        length = jnp.asarray([len(path)], jnp.int32)
        pending = Pending(records, jnp.asarray(padded), length)
    return last, commit(state, pending.records, pending.path, pending.length)


def random_path(rng):
    parents = random_parents(rng, 1, T)[0]
    return parents, path_to(parents, int(rng.integers(T)))[:M]


def chain(n):
    return lambda rng: (np.arange(n) - 1, np.arange(n))


def trees_and_steps(rng):
    """Draws trees; in many, only the root is accepted."""
    parents, path = random_path(rng)
    return parents, path[: 1 + (rng.random() < 0.5) * M]


def by_prefill(model, tokens, chunk):
    dtype = models.param_dtype(model.params)
    state = init_state(CONFIG, 1, 8, dtype)
    length = jnp.asarray([len(tokens)], jnp.int32)
    padded = np.pad(tokens, (0, -len(tokens) % chunk), constant_values=VOCAB - 1)
    read = jax.jit(partial(prefill, chunk=chunk))
    return None, read(model, state, padded[None], length)[0]


def by_steps(model, tokens):
    """Reads a text token by token."""

    @jax.jit
    def run(model, tokens):
        dtype = models.param_dtype(model.params)
        start = init_state(CONFIG, 1, 8, dtype), jnp.zeros((1, 1, D), jnp.float32)

        def step(carry, token):
            one = jnp.ones((1,), jnp.int32)
            hidden, state = extend(model, carry[0], token[None, None], one)
            return (state, hidden), None

        return jax.lax.scan(step, start, tokens)[0]

    state, hidden = run(model, jnp.asarray(tokens))
    return hidden[0, 0], state


WAYS = {
    "trees": partial(by_trees, draw=random_path),
    "trees and steps": partial(by_trees, draw=trees_and_steps),
    "chains": partial(by_trees, draw=chain(M)),
    "steps with a replay": partial(by_trees, draw=chain(1)),
    "steps": by_steps,
    "prefill": partial(by_prefill, chunk=256),
    "prefill by short chunks": partial(by_prefill, chunk=24),
}


@pytest.mark.parametrize("way", WAYS)
def test_states_after_a_long_text_match_a_float64_recurrence(way):
    hidden, states = recurrence()
    last, state = WAYS[way](model_of(), text())
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
    exact = by_steps(models.Model(wide, CONFIG), tokens)[1]
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
    batch = Batch(model, spec, Sizes(rows=2, context=128, steps=9, prefixes=2))
    batch.clear()
    batch.admit(0, TextRequest(list(range(8, 80)), 8))
    batch.advance()
    assert len(batch.prefixes) == 1
    # A state and pending records of the target, and a state of the draft model.
    assert_float32(batch._decoding, 3 * layers)
    assert_float32(batch.prefixes._kept[0].past, 2 * layers)
    options = dict(max_new_tokens=5, drafter=model, tree="chain:2", keep_past=True)
    past = stree_jax.generate(model, [[9, 10, 11]], **options).past
    assert_float32((past.target, past.drafter), 2 * layers)
