"""Training: losses fall, a killed run resumes exactly, distillation imitates."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.training import train
from stree_jax.training.recipe import TargetSize, target_config
from tests.support.tiny import tiny

CONFIG = train.TrainConfig(
    steps=8,
    batch=2,
    length=70,  # crosses a chunk of the scan
    learning_rate=1e-2,
    warmup=2,
    compute_dtype="float32",
    checkpoint_every=4,
)


@pytest.fixture(autouse=True)
def optax_promotes():
    """Adam's bias correction in optax is a float to an integer power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def tokens():
    return np.tile(np.arange(8, 31, dtype=np.uint16), 60)


def test_sequence_logits_are_the_scores(tokens):
    model = tiny(1)
    batch = jnp.asarray(tokens[:140].reshape(2, 70), jnp.int32)
    whole = train.sequence_logits(model.config, model.params, batch)
    scores = stree_jax.score(model, batch)
    chex.assert_trees_all_close(whole, scores, rtol=1e-4, atol=1e-4)


def test_a_killed_run_resumes_to_the_same_parameters(tokens, tmp_path):
    config = tiny(1).config
    loss = partial(train.next_token_loss, config)

    def fit(folder, steps_until_killed=None):
        bombs = iter(range(steps_until_killed or 10**9))

        def maybe_killed(params, windows):
            jax.debug.callback(lambda: next(bombs))
            return loss(params, windows)

        return train.fit(
            config, CONFIG, maybe_killed, tokens, tokens[:600], folder, progress=False
        )

    whole, history = fit(tmp_path / "whole")
    with pytest.raises(Exception, match="StopIteration"):
        fit(tmp_path / "killed", steps_until_killed=4 + 4 + 2)  # 4 held-out batches
        jax.effects_barrier()
    resumed, resumed_history = fit(tmp_path / "killed")
    chex.assert_trees_all_equal(whole, resumed)
    assert resumed_history == history
    assert [entry["step"] for entry in history] == [4, 8]
    assert history[-1]["heldout_loss"] < history[0]["heldout_loss"]


def test_distillation_pulls_the_drafter_to_the_target(tokens, tmp_path):
    target, drafter = tiny(1), tiny(2, layers=("mamba",))
    loss = partial(
        train.distillation_loss, drafter.config, target.config, target.params
    )
    _, history = train.fit(
        drafter.config, CONFIG, loss, tokens, tokens[:600], tmp_path, progress=False
    )
    assert history[-1]["heldout_loss"] < history[0]["heldout_loss"]
    windows = jnp.asarray(tokens[:142].reshape(2, 71), jnp.int32)
    same = train.distillation_loss(
        target.config, target.config, target.params, target.params, windows
    )
    assert abs(float(same)) < 1e-5


def test_settings_are_checked():
    with pytest.raises(ValueError, match="steps: want more than the 2 of warm-up"):
        dataclasses.replace(CONFIG, steps=2)


@pytest.mark.parametrize(
    ("size", "mixers"),
    [
        (TargetSize(), "mamba mamba attention mamba mamba attention"),
        (TargetSize(256, 4, 1), "mamba mamba mamba attention"),
        (TargetSize(256, 4, 2), "mamba attention mamba attention"),
        (TargetSize(128, 3, 0), "mamba mamba mamba"),
        (TargetSize(128, 2, 2), "attention attention"),
    ],
)
def test_attention_is_spread_evenly(size, mixers):
    config = target_config(300, size)
    assert " ".join(config.layers[::2]) == mixers
    assert set(config.layers[1::2]) == {"mlp"} and config.d_model == size.width


@pytest.mark.parametrize("size", [(100, 4, 1), (128, 2, 3), (128, 0, 0), (0, 1, 0)])
def test_sizes_that_cannot_be(size):
    with pytest.raises(ValueError, match="--width|--attention"):
        TargetSize(*size)
