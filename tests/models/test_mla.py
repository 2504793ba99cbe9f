"""Test latent attention in its absorbed form against attention with the keys and values
of every head, in sizes for which XLA:CPU uses other products than for tiny ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax import models
from stree_jax.models import (
    MLAConfig,
    ModelConfig,
    Pending,
    Rope,
    forward_hidden,
    init_params,
    init_records,
    init_state,
    tree_nodes,
)
from stree_jax.models.stack.config import named
from tests.support.reference import MODEL_TOLERANCE, assert_near, random_parents
from tests.support.tiny import perturbed

H, NOPE, SHARED, V, RANK = 4, 128, 64, 96, 256
T, D = 16, 64
CONFIG = ModelConfig(
    vocab_size=32,
    num_tokens=32,
    d_model=D,
    layers=("mla",),
    mixers=named(
        mla=MLAConfig(H, NOPE, SHARED, V, RANK, Rope(50.0, SHARED), gated=True)
    ),
)


def rms(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def turned(x):
    angle = np.arange(len(x))[:, None] / 50.0 ** (np.arange(0, SHARED, 2) / SHARED)
    z = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)[:, None]
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def expanded(p, u):
    """Returns the mixer's output [n, d] for a text u [n, d], in float64."""
    n, c = len(u), u @ p["kv"].T
    q = (u @ p["q"].T).reshape(n, H, -1)
    shared = np.repeat(turned(c[:, None, RANK:]), H, axis=1)
    both = rms(c[:, :RANK], p["kv_norm"], 1e-6) @ p["up"].T
    k, v = np.split(both, [H * NOPE], axis=1)
    k = np.concatenate([k.reshape(n, H, -1), shared], axis=-1)
    q = np.concatenate([q[..., :NOPE], turned(q[..., NOPE:])], axis=-1)
    scores = np.einsum("thd,shd->hts", q, k) * (NOPE + SHARED) ** -0.5
    weights = np.exp(np.where(np.tri(n, dtype=bool), scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    y = np.einsum("hts,shd->thd", weights, v.reshape(n, H, -1))
    y = y / (1 + np.exp(-u @ p["gate"].T))[..., None]
    return y.reshape(n, -1) @ p["out"].T


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_paths_of_trees_match_attention_with_expanded_keys(dtype):
    """The outputs are those of the second of two trees, after a path of the first."""
    key, rng = jax.random.key(0), np.random.default_rng(1)
    params = perturbed(init_params(CONFIG, key, jnp.float32), 0.2, 0)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    parents, tokens = random_parents(rng, 2, T), rng.integers(0, 32, (2, T))

    @jax.jit
    def run(model, state, tokens, parents, pending):
        nodes = tree_nodes(parents, CONFIG.conv_taps)
        return forward_hidden(model, state, tokens, nodes, pending=pending)

    model, path = models.Model(params, CONFIG), [T - 1]
    while (node := parents[0][path[0]]) >= 0:
        path.insert(0, node)
    state, records = init_state(CONFIG, 1, 64, jnp.dtype(dtype)), None
    length = jnp.zeros(1, jnp.int32)
    records = init_records(CONFIG, 1, T, jnp.dtype(dtype))
    rows = jnp.asarray(np.resize(path, T), jnp.int32)[None]
    for b in range(2):
        args = np.int32(tokens[b])[None], np.int32(parents[b])[None]
        pending = Pending(records, rows, length)
        hidden, records, state = run(model, state, *args, pending)
        length = jnp.array([len(path)], jnp.int32)
    before, leaf = tokens[0][path], T - 1
    second = [leaf]
    while (node := parents[1][second[0]]) >= 0:
        second.insert(0, node)
    text = np.concatenate([before, tokens[1][second]])
    x, own = p["embedding"][text], p["layers_0"]
    x = x + expanded(own["mla"], rms(x, own["norm"]["scale"], CONFIG.norm_eps))
    wanted = rms(x, p["norm"]["scale"], CONFIG.norm_eps)[len(before) :]
    assert_near(hidden[0][jnp.array(second)], wanted, MODEL_TOLERANCE[dtype])
