"""Test training: losses fall, killed runs resume exactly, distillation imitates the
target.
"""

import dataclasses
import os
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.models import (
    Model,
    extend,
    init_params,
    init_state,
    logits_of,
    mtp_model,
)
from stree_jax.training import losses, train
from stree_jax.training.recipe import TargetSize, drafter_config, target_config
from tests.support.tiny import tiny

CONFIG = train.TrainConfig(
    steps=8,
    batch=2,
    length=70,  # more than one chunk of the scan
    learning_rate=1e-2,
    warmup=2,
    compute_dtype="float32",
    checkpoint_every=4,
)


@pytest.fixture(autouse=True)
def optax_promotes():
    """optax's Adam raises a float to an integer power, which needs dtype promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def tokens():
    return np.tile(np.arange(8, 31, dtype=np.uint16), 60)


def test_sequence_logits_match_score(tokens):
    model = tiny(1)
    batch = jnp.asarray(tokens[:140].reshape(2, 70), jnp.int32)
    whole = losses.sequence_logits(model, batch)
    scores = stree_jax.score(model, batch)
    chex.assert_trees_all_close(whole, scores, rtol=1e-4, atol=1e-4)


class Fuse:
    """A loss that calls a function at one of its evaluations."""

    def __init__(self):
        self.left, self.action = 0, None

    def burn(self):
        self.left -= 1
        if self.left == 0:
            self.action()

    def loss(self, *args):
        jax.debug.callback(self.burn)
        return losses.next_token_loss(*args)


FUSE = Fuse()
LOSS = FUSE.loss  # a single function, so that the tests share its programs


def fit(folder, *, config=CONFIG, after=0, action=None, **options):
    """Trains. `action` is called at loss number `after`."""
    FUSE.left, FUSE.action = after, action
    tokens = np.tile(np.arange(8, 31, dtype=np.uint16), 60)
    options = {"progress": False, **options}
    model = tiny(1).config
    return train.fit(model, config, LOSS, tokens, tokens[:600], folder, **options)


def kill():
    raise RuntimeError("killed")


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def saved_steps(folder):
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with jax.numpy_dtype_promotion("standard"):
        params, history = fit(tmp_path_factory.mktemp("runs") / "whole")
    assert [entry["step"] for entry in history] == [4, 8]
    assert history[-1]["heldout_loss"] < history[0]["heldout_loss"]
    return params, history


def assert_goes_on_to(whole, folder, **options):
    params, history = fit(folder, **options)
    chex.assert_trees_all_equal(whole[0], params)
    assert history == whole[1]


def test_a_killed_run_resumes_to_the_same_parameters(whole, tmp_path):
    with pytest.raises(Exception, match="killed"):
        fit(tmp_path, after=4 + 4 + 2, action=kill)  # includes 4 held-out batches
        jax.effects_barrier()
    assert saved_steps(tmp_path) == {4}
    assert_goes_on_to(whole, tmp_path)


def test_ctrl_c_saves_and_says_how_to_resume(whole, tmp_path, capsys):
    usual = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, after=2, action=interrupt, progress=True)
    assert signal.getsignal(signal.SIGINT) is usual
    (step,) = saved_steps(tmp_path)
    assert 2 <= step < 4, "neither lost nor run to the next evaluation"
    said = capsys.readouterr().err
    assert f"saved step {step} in {tmp_path}; run the same command to resume" in said
    assert_goes_on_to(whole, tmp_path, progress=True)
    assert f"going on from step {step}, saved in {tmp_path}" in capsys.readouterr().err


def test_it_saves_at_time_intervals(whole, tmp_path):
    with pytest.raises(Exception, match="killed"):
        fit(tmp_path, save_minutes=1e-9, after=4, action=kill)
        jax.effects_barrier()
    assert max(saved_steps(tmp_path)) in (2, 3)
    assert_goes_on_to(whole, tmp_path)


def test_it_stops_at_the_time_limit(whole, tmp_path):
    _, (entry,) = fit(tmp_path, minutes=1e-9)
    assert entry["step"] == 1 and entry["heldout_loss"] > 0
    assert saved_steps(tmp_path) == {1}


def test_saves_of_another_run_are_refused(tmp_path):
    fit(tmp_path, minutes=1e-9)
    other = dataclasses.replace(CONFIG, learning_rate=1.0, seed=3)
    with pytest.raises(ValueError, match="another learning_rate, seed; use the same"):
        fit(tmp_path, config=other)
    assert saved_steps(tmp_path) == {1}


def test_too_little_held_out_text_is_refused_before_training(tokens, tmp_path):
    model = tiny(1).config
    with pytest.raises(ValueError, match="held-out text has 100 tokens, but one batch"):
        train.fit(model, CONFIG, LOSS, tokens, tokens[:100], tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_distillation_brings_the_draft_model_closer_to_the_target(tokens, tmp_path):
    target, drafter = tiny(1), tiny(2, layers=("mamba",))
    _, history = train.fit(
        drafter.config,
        CONFIG,
        losses.distillation_loss,
        tokens,
        tokens[:600],
        tmp_path,
        teacher=target,
        progress=False,
    )
    assert history[-1]["heldout_loss"] < history[0]["heldout_loss"]
    windows = jnp.asarray(tokens[:142].reshape(2, 71), jnp.int32)
    same = losses.distillation_loss(target, windows, target)
    assert abs(float(same)) < 1e-5


def test_teachers_share_the_compiled_step(tokens, tmp_path):
    """A teacher's weights are arguments of the step, not constants in the program."""
    traces = []

    def loss(*args):
        traces.append(1)
        return losses.distillation_loss(*args)

    drafter, count, found = tiny(2, layers=("mamba",)), [], []
    for seed in (1, 3):
        teacher = tiny(seed, layers=("mamba",))
        _, history = train.fit(
            drafter.config,
            CONFIG,
            loss,
            tokens,
            tokens[:600],
            tmp_path / str(seed),
            teacher=teacher,
            minutes=1e-9,
            progress=False,
        )
        count.append(len(traces))
        found.append(history[0]["train_loss"])
    assert count[0] == count[1] and found[0] != found[1]


def test_settings_are_checked():
    with pytest.raises(ValueError, match="steps: want more than the 2 of warm-up"):
        dataclasses.replace(CONFIG, steps=2)
    with pytest.raises(ValueError, match="learning_rate: want more than 0, got nan"):
        dataclasses.replace(CONFIG, learning_rate=float("nan"))


@pytest.mark.parametrize("name", ["minutes", "save_minutes"])
def test_times_are_checked(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name}: want more than 0, got 0"):
        fit(tmp_path, **{name: 0})


@pytest.mark.parametrize(
    ("steps", "warmup"), [(3600, 150), (2000, 150), (100, 10), (1, 0)]
)
def test_warmup_is_a_tenth_of_the_steps_and_at_most_150(steps, warmup):
    assert train.TrainConfig(steps).warmup_steps == warmup


@pytest.mark.parametrize(
    ("size", "mixers"),
    [
        (TargetSize(), "mamba mamba attention mamba mamba attention"),
        (TargetSize(256, 4, 1), "mamba mamba mamba attention"),
        (TargetSize(256, 4, 2), "mamba attention mamba attention"),
        (TargetSize(128, 3, 0), "mamba mamba mamba"),
        (TargetSize(128, 2, 2), "attention attention"),
        (TargetSize(128, 4, 1, "delta"), "delta delta delta attention"),
    ],
)
def test_attention_is_spread_evenly(size, mixers):
    config = target_config(300, size)
    assert " ".join(config.kinds[::2]) == mixers
    assert set(config.kinds[1::2]) == {"mlp"} and config.d_model == size.width


@pytest.mark.parametrize(
    "size",
    [(100, 4, 1), (128, 2, 3), (128, 0, 0), (0, 1, 0), (128, 4, 1, "mamba", True)],
)
def test_invalid_sizes_are_refused(size):
    with pytest.raises(ValueError, match="--width|--attention|--mtp"):
        TargetSize(*size)


def test_sizes_of_draft_models():
    target = target_config(300, TargetSize())
    bundled = drafter_config(target)
    assert (bundled.d_model, bundled.kinds) == (192, ("mamba", "mamba"))
    wide = drafter_config(target, 320, 3)
    assert (wide.d_model, wide.kinds) == (320, ("mamba",) * 3)
    odd = dataclasses.replace(target, d_model=100)
    assert drafter_config(odd).d_model == 64, "heads of 64"
    for width, layers in ((100, 2), (0, 2), (64, 0)):
        with pytest.raises(ValueError, match="--width|--layers"):
            drafter_config(target, width, layers)


@pytest.fixture(scope="module")
def delta():
    """A model of one delta-rule layer, with an MTP layer."""
    config = target_config(50, TargetSize(128, 1, 0, "delta", mtp=True))
    return Model(init_params(config, jax.random.key(0), jnp.float32), config)


def test_the_mtp_loss_is_that_of_the_token_after_the_next(delta, tokens):
    windows = jnp.asarray(tokens[:24].reshape(2, 12), jnp.int32)
    hidden = losses.sequence_hidden(delta, windows[:, :-1])
    layers = mtp_model(delta)
    state = init_state(layers.config, 2, 10, jnp.float32)
    terms = []
    for t in range(10):  # the MTP layer reads tokens 1 to t + 1, token by token
        args = layers, state, windows[:, t + 1 : t + 2], jnp.ones((2,), jnp.int32)
        out, state = extend(*args, previous=hidden[:, t : t + 1])
        logits = jax.nn.log_softmax(logits_of(layers, out)[:, 0])
        terms.append(-logits[jnp.arange(2), windows[:, t + 2]])
    plain = losses.next_token_loss(delta, windows)
    expected = plain + 0.3 * jnp.stack(terms).mean()
    found = losses.with_mtp_loss(delta, windows)
    assert found == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("length", [30, 100])  # one chunk of the delta rule, or two
def test_gradients_through_the_delta_rule(delta, tokens, length):
    """Compared with a difference quotient along a random direction."""
    windows = jnp.asarray(tokens[: 2 * length].reshape(2, length), jnp.int32)
    at = jax.jit(lambda p: losses.with_mtp_loss(delta.replace(params=p), windows))
    grads = jax.jit(jax.grad(at))(delta.params)
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))
    keys = iter(jax.random.split(jax.random.key(3), 99))
    along = jax.tree.map(lambda p: jax.random.normal(next(keys), p.shape), delta.params)
    step = 1e-4

    def moved(by):
        return at(jax.tree.map(lambda p, d: p + by * d, delta.params, along))

    slope = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, grads, along)))
    assert (moved(step) - moved(-step)) / (2 * step) == pytest.approx(
        float(slope), rel=2e-2
    )
