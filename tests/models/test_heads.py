"""Test Medusa heads against float64, their table of shapes, and invalid configs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models import Model
from stree_jax.models.drafters.heads import (
    HeadsConfig,
    head_logits,
    head_of,
    init_heads,
)
from stree_jax.models.layers.params import by_path
from stree_jax.models.stack.model import logits_of
from tests.support.heads import random_heads, reference_logits
from tests.support.reference import assert_near
from tests.support.tiny import VOCAB, perturbed, tiny

D = 32


def model_of(tied, divisor):
    """Returns a small model; only its head matters here."""
    model = tiny(1, layers=("mlp",))
    config = replace(model.config, tie_embeddings=tied, logits_divisor=divisor)
    params = dict(model.params)
    if not tied:
        params["lm_head"] = perturbed(params["embedding"], 0.5, 7)
    return Model(params, config)


CASES = {
    "the model's output": (True, 1.0, dict(heads=3)),
    "untied": (False, 1.0, dict(heads=3, blocks=2)),
    "divided": (True, 2.5, dict(heads=2, bias=False)),
    "untied and divided": (False, 0.5, dict(heads=2, blocks=3, bias=False)),
    "own outputs": (True, 2.5, dict(heads=3, own_output=True)),
    "own outputs, no bias": (False, 3, dict(heads=2, own_output=True, bias=False)),
    "own outputs alone": (True, 1.0, dict(heads=3, blocks=0, own_output=True)),
}


def hidden_of(*shape):
    return jax.random.normal(jax.random.key(3), (*shape, D), jnp.float32)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_equations(name):
    """For every head, few and many states, and the model without its layers."""
    tied, divisor, options = CASES[name]
    model = model_of(tied, divisor)
    heads, K = random_heads(model, **options), options["heads"]
    run = jax.jit(head_logits, static_argnums=3)
    for shape in ((2,), (2, 40)):
        hidden = hidden_of(*shape)
        want = reference_logits(heads, model, hidden)
        found = run(heads, head_of(model), hidden, K)
        assert found.shape == (*shape, K, VOCAB) and found.dtype == jnp.float32
        assert_near(found, want, 1e-5)
        if options.get("blocks", 1):
            alike = np.abs(want[..., 1:, :] - want[..., :1, :]).max(axis=-1)
            assert alike.min() > 0.01, "the heads must differ"


@pytest.mark.parametrize("name", ["untied", "own outputs"])
def test_fewer_heads_are_the_first_ones(name):
    tied, divisor, options = CASES[name]
    model = model_of(tied, divisor)
    heads, hidden = random_heads(model, **options), hidden_of(5)
    want = reference_logits(heads, model, hidden)
    for count in range(1, options["heads"] + 1):
        found = head_logits(heads, head_of(model), hidden, count)
        assert_near(found, want[:, :count], 1e-5)
    for count in (0, -1, options["heads"] + 1):
        message = f"want 1..{options['heads']} heads, got {count}"
        with pytest.raises(ValueError, match=message):
            head_logits(heads, head_of(model), hidden, count)


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_dtypes_of_heads_and_model_may_differ(weights):
    """Products round to the weights' dtype; logits are float32 all the same."""
    model = model_of(True, 1.0)
    other = {"bfloat16": "float32", "float32": "bfloat16"}[weights]
    cast = Model(
        jax.tree.map(lambda x: x.astype(other), model.params),
        model.config,
    )
    heads, hidden = random_heads(model, dtype=weights, heads=2), hidden_of(6)
    found = head_logits(heads, head_of(cast), hidden, 2)
    assert found.dtype == jnp.float32
    assert_near(found, reference_logits(heads, cast, hidden), 2e-2)


def test_a_new_head_predicts_the_same_as_the_model():
    """Its blocks are zeros: r(h) = h + silu(0)."""
    model, hidden = model_of(False, 2.5), hidden_of(5)
    config = HeadsConfig(D, VOCAB, heads=2, blocks=2)
    params = init_heads(config, jax.random.key(0), jnp.float32)
    heads = random_heads(model, heads=2, blocks=2).replace(params=params)
    found = head_logits(heads, model, hidden, 2)
    for k in range(2):
        np.testing.assert_array_equal(found[:, k], logits_of(model, hidden))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_shapes_are_the_parameters(name, dtype):
    options = CASES[name][2]
    config = HeadsConfig(D, VOCAB, **options)
    made = by_path(init_heads(config, jax.random.key(0), dtype))
    assert {leaf.dtype.name for leaf in made.values()} <= {dtype}
    want = {}
    for k in range(options["heads"]):
        for i in range(options.get("blocks", 1)):
            want[f"head_{k}", f"block_{i}", "weight"] = (D, D)
            if options.get("bias", True):
                want[f"head_{k}", f"block_{i}", "bias"] = (D,)
        if options.get("own_output"):
            want[f"head_{k}", "output", "weight"] = (VOCAB, D)
    assert {path: leaf.shape for path, leaf in made.items()} == want


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(heads=0), "heads: want 1..64, got 0"),
        (dict(heads=65), "heads: want 1..64, got 65"),
        (dict(heads=-3), "heads: want 1..64, got -3"),
        (dict(blocks=-1), "blocks: want 0..16, got -1"),
        (dict(blocks=17), "blocks: want 0..16, got 17"),
        (dict(blocks=0), "blocks: with 0 blocks and no output matrix"),
        (dict(heads=2, accuracy=((0.5,),)), "accuracy: 1 rows for 2 heads"),
    ],
)
def test_invalid_configs_raise(options, message):
    with pytest.raises(ValueError, match=message):
        HeadsConfig(D, VOCAB, **options)


def test_repr():
    heads = random_heads(model_of(True, 1.0), heads=2, own_output=True)
    count = 2 * (D * D + D + VOCAB * D)
    assert repr(heads) == f"Heads(2, 1 blocks each, own outputs, {count:,})"
    assert "the model's output" in repr(random_heads(model_of(True, 1.0)))
