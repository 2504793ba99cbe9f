"""On CPUs with kernels a token's logits have the same bits however the text is read:
token by token, in chains, in trees, in batches, or by `score`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import cpu_kernels
from stree_jax.models import (
    Model,
    cast_params,
    chain_nodes,
    commit,
    forward_tapped,
    forward_tree,
    init_params,
    init_state,
    logits_of,
    param_dtype,
    tree_nodes,
)
from tests.support.families import FAMILIES
from tests.support.tiny import perturbed, tiny_hybrid

if cpu_kernels.level() is None:
    pytest.skip("without CPU kernels bits may differ", allow_module_level=True)

# As users' programs are: without optimisation, XLA's own loops differ by their lengths.
pytestmark = pytest.mark.usefixtures("optimised")

S = 96  # tokens of a text; more than one block of attention's places
KINDS = list(FAMILIES)
MIXED = ["granite", "qwen3.5", "lfm3", "gemma4", "zaya"]
DTYPES = ("float32", "bfloat16", "int8")


def model_of(name, dtype):
    if name == "lightning":
        layers = ("lightning", "mlp", "short_conv", "moe", "near", "mlp", "delta")
        model = tiny_hybrid(1, layers)
    else:
        params = init_params(FAMILIES[name], jax.random.key(1), jnp.float32)
        model = Model(perturbed(params, 0.2, 1), FAMILIES[name])
    params = cast_params(model.config, model.params, jnp.dtype(dtype))
    return model.replace(params=params)


def text_of(model, rows=1):
    draw = np.random.default_rng(0)
    return draw.integers(8, model.config.num_tokens, (rows, S)).astype(np.int32)


def read(model, text, T):
    """Returns logits [B, S, V] of a text that is read in passes of T tokens, and the
    state after it."""

    @jax.jit
    def one(model, state, tokens):
        B = tokens.shape[0]
        nodes = chain_nodes(B, T, model.config.conv_taps, "tree")
        hidden, _, records, state = forward_tapped(model, state, tokens, nodes, taps=())
        length = jnp.full((B,), T, jnp.int32)
        return logits_of(model, hidden), commit(state, records, nodes.depth, length)

    rows = text.shape[0]
    state = init_state(model.config, rows, 2 * S, param_dtype(model.params))
    found = []
    for tokens in np.split(text, S // T, axis=1):
        logits, state = one(model, state, jnp.asarray(tokens))
        found.append(np.asarray(logits))
    return np.concatenate(found, axis=1), state


def same(a, b):
    return np.array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*KINDS, "lightning"])
def test_logits_do_not_depend_on_what_is_read_together(name, dtype):
    model = model_of(name, dtype)
    text = text_of(model)
    one, state = read(model, text, 1)
    for T in (3, 16, 48):
        several, after = read(model, text, T)
        assert same(several, one), T
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
            if a.ndim > 2:  # rows of caches past the text are unspecified
                a, b = (np.asarray(z)[..., :S, :] for z in (a, b))
            assert np.array_equal(a, b), T
    assert same(stree_jax.score(model, text), one)


@pytest.mark.parametrize("name", [*MIXED, "lightning"])
def test_a_node_of_a_tree_has_the_bits_of_its_path(name):
    model = model_of(name, "bfloat16")
    text = text_of(model)
    _, state = read(model, text, 48)
    draw = np.random.default_rng(2)
    parents = np.array([-1, *(draw.integers(max(0, n - 5), n) for n in range(1, 40))])
    tokens = draw.integers(8, model.config.num_tokens, 40)
    nodes = tree_nodes(jnp.asarray(parents[None], jnp.int32), model.config.conv_taps)
    run = jax.jit(forward_tree)
    logits = run(model, state, jnp.asarray(tokens[None], jnp.int32), nodes)[0]
    for leaf in (39, 38, 21):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        chain = chain_nodes(1, len(path), model.config.conv_taps, "tree")
        own = jnp.asarray(tokens[path][None], jnp.int32)
        alone = run(model, state, own, chain)[0]
        assert same(np.asarray(logits)[:, path], alone), leaf


@pytest.mark.parametrize("name", [*MIXED, "jamba"])
def test_a_row_has_the_same_bits_in_any_batch(name):
    model = model_of(name, "bfloat16")
    text = text_of(model, rows=3)
    together = read(model, text, 16)[0]
    for b in range(3):
        assert same(read(model, text[b : b + 1], 16)[0], together[b : b + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["granite", "lightning"])
def test_a_row_has_the_same_bits_in_a_large_batch(name, dtype):
    """A pass of the batch has 1,104 rows."""
    model = model_of(name, dtype)
    text = text_of(model, rows=23)
    together = read(model, text, 48)[0]
    for b in (0, 22):
        assert same(read(model, text[b : b + 1], 48)[0], together[b : b + 1])
