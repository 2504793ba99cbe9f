"""Test the shapes of published models: their sizes, counted by hand or published."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from bench import budgets, shapes
from stree_jax.models import init_records, init_state
from stree_jax.models.stack.memory import size_of
from stree_jax.models.stack.shapes import abstract_params
from stree_jax.models.stack.sizes import weight_bytes

MILLIONS = {  # of parameters
    "bamba-9b": 9780,
    "gemma-3-270m": 268.1,
    "granite-4.0-h-1b": 1461.5,
    "granite-4.0-h-350m": 340.3,
    "granite-4.0-h-micro": 3191,
    "granite-4.0-h-small": 32200,
    "hybrid-1.2b": 1200,
    "hybrid-130m": 130.8,
    "hybrid-2m": 1.94,
    "lara-4-mini": 7282,
    "lfm2-1.2b": 1170,
    "lfm2-350m": 354,
    "llama-135m": 134.5,
    "llama-70b": 70554,
    "llama-7b": 6738,
    "mamba2-1.3b": 1344,
    "mamba2-130m": 129,
    "mamba2-2.7b": 2703,
    "mamba2-370m": 368,
    "mamba2-780m": 780,
    "mambainllama-8b": 8301,
    "nemotron-3-nano-4b": 3973.56,
    "qwen3.5-0.8b": 752,
    "qwen3.5-2b": 1880,
    "qwen3.5-27b": 26900,
    "qwen3.5-35b-a3b": 34700,
    "qwen3.5-4b": 4200,
    "qwen3.5-9b": 8950,
}


@pytest.mark.parametrize("name", shapes.NAMES)
def test_parameters_of_the_shapes(name):
    count = weight_bytes(shapes.config_of(name), jnp.bfloat16) / 2e6
    assert count == pytest.approx(MILLIONS[name], rel=5e-3)


def test_the_mambainllama_shape():
    config = shapes.config_of("mambainllama-8b")
    mamba = config.mixers["mamba"]
    assert mamba.d_in_proj == 10272 and mamba.d_xBC == 6144  # as in the checkpoint
    assert config.kinds[::2] == ("mamba", "attention") * 16


def test_the_padded_vocabulary_of_mamba2():
    config = shapes.config_of("mamba2-130m")
    assert (config.vocab_size, config.num_tokens) == (50288, 50277)


def test_mtp_layers_are_left_out_unless_wanted():
    for name, second in (("qwen3.5-0.8b", "mlp"), ("qwen3.5-35b-a3b", "moe")):
        config = shapes.config_of(name)
        assert not config.mtp
        wanted = shapes.config_of(name, mtp=True)
        assert wanted == replace(config, mtp=("attention", second))


def test_an_unknown_shape_names_the_closest_one():
    with pytest.raises(ValueError, match="did you mean 'mamba2-130m'"):
        shapes.config_of("mamba-130m")


@pytest.mark.parametrize(
    ("name", "state", "window", "record", "billions"),
    [
        ("lara-4-mini", 1_048_576, 24_576, 18_528, 7.28),
        ("qwen3.5-0.8b", 1_048_576, 36_864, 24_704, 0.75),
        ("qwen3.5-9b", 2_097_152, 49_152, 37_056, 8.95),
        ("qwen3.5-27b", 3_145_728, 61_440, 49_408, 26.9),
        ("qwen3.5-35b-a3b", 2_097_152, 49_152, 37_056, 34.7),
    ],
)
def test_bytes_of_a_delta_layer(name, state, window, record, billions):
    """Computed by hand: H P N floats, 3 rows of 2 G N + H P 16-bit inputs; and of each
    node H P + H + G floats, and G N + 2 G N + H P 16-bit numbers."""
    config = shapes.config_of(name)
    mixer = jax.eval_shape(lambda: init_state(config, 1, 1, jnp.bfloat16)).layers[0]
    assert size_of(mixer["delta"].ssm) == state
    assert size_of(mixer["delta"].conv) == window
    records = jax.eval_shape(lambda: init_records(config, 1, 1, jnp.bfloat16))
    assert size_of(records[0]) == record
    assert weight_bytes(config, jnp.bfloat16) / 2e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize("dtype", ["kept", "kept-int8"])
def test_random_weights_in_four_bits(dtype):
    """Every matrix is kept, experts too, and the model runs."""
    small = {"vocab_size": 128, "num_tokens": 128, "d_model": 64}
    whole = shapes.config_of("lara-4-mini")
    moe = replace(whole.mixers["moe"], num_experts=8, d_hidden=64)
    moe = replace(moe, shared=replace(moe.shared, d_hidden=64))
    config = replace(whole, **small, layers=whole.layers[:8]).with_mixers(moe=moe)
    model = shapes.random_model(config, dtype)
    format = shapes.weight_format(config, dtype)
    assert size_of(model.params) == size_of(abstract_params(config, format))
    assert str(model.weight_format) == dtype
    assert "q4_0, 4.5 bits" in model.weight_format.storage(model.params)
    logits = stree_jax.score(model, [[1, 2, 3, 4]])
    assert np.isfinite(logits).all() and np.std(logits) > 1e-3


def test_budgets_of_shapes_with_mtp_layers():
    subject = budgets.subject_of("qwen3.5-0.8b", 4 * 10**9)
    rows = budgets.breakdown(subject, (16,))
    (row,) = [r for r in rows if (r["axis"], r["value"]) == ("nodes", 16)]
    assert row["parts"]["drafter's weights"] > 2e7
    assert row["parts"]["SSM and convolution state"] > 18 * (1_048_576 + 36_864)
