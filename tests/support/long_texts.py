"""Ways to read a long text into the states of a model, and parts of float64
recurrences to compare these with."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax import models
from stree_jax.models import (
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
from stree_jax.models.stack.config import named
from tests.support.reference import assert_near, path_to, random_parents

VOCAB, TOKENS = 32, 2000
T, M = 8, 5  # nodes of a tree, and its longest accepted path


def text(seed=1, n=TOKENS):
    return np.random.default_rng(seed).integers(0, VOCAB, n).astype(np.int32)


def rms(x, scale, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * scale


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def unit(x):
    return x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6)


def one_layer(**mixer):
    """Returns the config of a model of one layer with this mixer."""
    sizes = dict(vocab_size=VOCAB, num_tokens=VOCAB, d_model=16)
    return ModelConfig(**sizes, layers=tuple(mixer), mixers=named(**mixer))


def random_params(config, own, dtype="float32"):
    """Returns random parameters.

    Args:
      own: functions (noise, rng) of the values of parameters, by name, such as decays
        with which some channels remember the whole text, and others almost nothing.
    """
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(
        lambda: init_params(config, jax.random.key(0), jnp.dtype(dtype))
    )

    def random(path, leaf):
        noise, name = rng.standard_normal(leaf.shape), path[-1].key
        if name in own:
            value = own[name](noise, rng)
        elif name == "scale" or name.endswith("norm"):
            value = 1 + 0.3 * noise
        elif name == "conv_weight":
            value = 0.6 * noise
        else:
            value = noise / (1 if leaf.ndim < 2 else np.sqrt(leaf.shape[-1]))
        return jnp.asarray(value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(random, shapes)


def recurrence_of(config, params, mixed):
    """Returns the last hidden state [d] of a text and the state of the only layer, in
    float64.

    Args:
      mixed: function (parameters, input [n, d], config of the mixer) that computes the
        mixer's output [n, d] and its state after the text.
    """
    (name,) = config.kinds
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x, eps, own = p["embedding"][text()], config.norm_eps, p["layers_0"]
    u = rms(x, own["norm"]["scale"], eps)
    out, state = mixed(own[name], u, config.mixers[name])
    return rms(x + out, p["norm"]["scale"], eps)[-1], state


def check_one_layer(config, params, way, exact, tolerance):
    """Checks the only layer's state after a text, and the hidden state if there is one;
    `exact` is as from `recurrence_of`."""
    (name,), (hidden, wanted) = config.kinds, exact
    last, state = WAYS[way](models.Model(params, config), text())
    assert_near(state.layers[0][name].ssm[0], wanted, tolerance)
    if last is not None:
        assert_near(last, hidden, 3 * tolerance)


@jax.jit
def pass_of(model, state, tokens, parents, pending):
    nodes = tree_nodes(parents, model.config.conv_taps)
    return forward_hidden(model, state, tokens, nodes, pending=pending)


def by_trees(model, tokens, draw, capacity=8):
    """Reads a text by passes over trees; each pass accepts a path.

    The other nodes are random tokens. Each pass first replays the path that the one
    before it accepted.

    Args:
      draw: returns the parents [T] of a tree, and a path down from its root.
      capacity: rows of KV caches. A model without attention needs none.
    """
    rng = np.random.default_rng(2)
    dtype = models.param_dtype(model.params)
    state, done, last = init_state(model.config, 1, capacity, dtype), 0, None
    records = init_records(model.config, 1, len(draw(rng)[0]), dtype)
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


def by_prefill(model, tokens, chunk, capacity=8):
    dtype = models.param_dtype(model.params)
    state = init_state(model.config, 1, capacity, dtype)
    length = jnp.asarray([len(tokens)], jnp.int32)
    padded = np.pad(tokens, (0, -len(tokens) % chunk), constant_values=VOCAB - 1)
    read = jax.jit(partial(prefill, chunk=chunk))
    return None, read(model, state, padded[None], length)[0]


def by_steps(model, tokens, capacity=8):
    """Reads a text token by token."""

    @jax.jit
    def run(model, tokens):
        dtype = models.param_dtype(model.params)
        start = (
            init_state(model.config, 1, capacity, dtype),
            jnp.zeros((1, 1, model.config.d_model), jnp.float32),
        )

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
