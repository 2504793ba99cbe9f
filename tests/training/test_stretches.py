"""Test the training of drafters on stretches of text, from text to a drafter that
drafts, and resumed runs."""

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest

import stree_jax
from stree_jax.training import dspark, eagle
from stree_jax.training import hidden_state_files as kept
from stree_jax.training import tapped_drafters as stretches
from stree_jax.training.recipe import Job
from stree_jax.training.train import TrainConfig
from tests.support.cycle import cycling_target, write_text

PROMPT, GENERATED, WINDOW, M = 8, 17, 24, 3
TRAIN = TrainConfig(
    steps=60,
    batch=8,
    length=20,
    learning_rate=2e-2,
    warmup=2,
    compute_dtype="float32",
    checkpoint_every=20,
)
SIZES = {
    "dspark": dspark.DSparkSize(1, taps=1, drafts=M, mlp=16, rank=16, window=8),
    "dflash": dspark.DSparkSize(1, taps=1, drafts=M, mlp=96, rank=0, window=8),
    "eagle3": eagle.EagleSize(1, taps=1, drafts=M, mlp=16, window=8),
}
AMOUNTS = stretches.Amounts(roots=4, tokens=600, own_tokens=300, window=WINDOW)


@pytest.fixture(autouse=True, scope="module")
def small():
    """Makes texts short and batches small, and allows dtype promotion for optax's
    Adam."""
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        for module in (kept, stretches):
            patch.setattr(module, "PROMPT", PROMPT)
            patch.setattr(module, "GENERATED", GENERATED)
        patch.setattr(kept, "READ_AT_ONCE", 4)
        patch.setattr(kept, "SPEAK_AT_ONCE", 4)
        patch.setattr(stretches, "HELD_OUT", 8)
        patch.setattr(stretches, "HEAD", 8)
        yield


def test_roots_are_in_text_that_the_target_wrote():
    rng = np.random.default_rng(0)
    tokens = np.tile(np.arange(24), (2, 1))
    source = stretches.Stretches(tokens, np.zeros((2, 24, 2, 4)), PROMPT - 1)
    for _ in range(20):
        batch = source.cut(rng, 20, 4, M)
        places = batch["places"]
        assert batch["tokens"][0] == 4 and batch["states"].shape == (20, 2, 4)
        assert len(set(places.tolist())) == 4
        assert batch["tokens"][places].min() >= PROMPT - 1
        assert places.max() <= 20 - M


@pytest.fixture(scope="module", params=SIZES)
def kind(request):
    return request.param


def train(kind, target, text, folder, config=TRAIN, size=None, amounts=AMOUNTS):
    job = Job([text], folder / "out", folder / "work", config)
    return stretches.train_drafter(job, target, size or SIZES[kind], amounts)[0]


@pytest.fixture(scope="module")
def target():
    return cycling_target(("mamba", "mlp"))


@pytest.fixture(scope="module")
def text(target, tmp_path_factory):
    return write_text(target, tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(kind, target, text, tmp_path_factory):
    return train(kind, target, text, tmp_path_factory.mktemp("whole"))


def test_a_drafter_learns_to_predict_the_target(kind, whole, target):
    """Drafted chains are accepted, and text is that of plain decoding."""
    assert {x.dtype.name for x in jax.tree.leaves(whole.params)} <= {
        "bfloat16",
        "float32",
    }
    prompts, asked = [[5, 6, 7], [9]], dict(max_new_tokens=12, stop_tokens=())
    plain = stree_jax.generate(target, prompts, **asked, drafter=None)
    c = whole.config
    subject = eagle.Levels(c, M) if kind == "eagle3" else dspark.Blocks(c)
    untrained = subject.init(jax.random.key(0))
    calls = {}
    for name, params in {"trained": whole.params, "not": untrained}.items():
        chain = dict(drafter=whole.replace(params=params), tree=f"chain:{M}")
        result = stree_jax.generate(target, prompts, **chain, **asked)
        assert result.tokens == plain.tokens
        calls[name] = int(result.target_calls.sum())
    assert calls["trained"] < 0.7 * calls["not"]


def test_a_killed_run_resumes_to_the_same_drafter(
    kind, whole, target, text, tmp_path, monkeypatch
):
    made = stretches.stretch_examples

    def examples(*args):
        found = made(*args)

        def batches(start):
            for i, batch in enumerate(found.batches(start), start=start):
                if i == 26:
                    raise RuntimeError("killed")
                yield batch

        return replace(found, batches=batches)

    with monkeypatch.context() as patch:
        patch.setattr(stretches, "stretch_examples", examples)
        with pytest.raises(RuntimeError, match="killed"):
            train(kind, target, text, tmp_path)
    chex.assert_trees_all_equal(train(kind, target, text, tmp_path), whole)


WRONG = {
    "too many taps": (dict(taps=2), {}, "--taps: want 1..1, got 2"),
    "no drafts": (dict(drafts=0), {}, "--drafts: want at least 1"),
    "no roots": ({}, dict(roots=0), "--roots: want at least 1, got 0"),
    "too many roots": ({}, dict(roots=15), "--length: want 26..24 tokens for 15 roots"),
}


@pytest.mark.parametrize("name", WRONG)
def test_sizes_that_do_not_fit_are_refused(kind, target, text, tmp_path, name):
    size, amounts, message = WRONG[name]
    size, amounts = replace(SIZES[kind], **size), replace(AMOUNTS, **amounts)
    with pytest.raises(ValueError, match=message):
        train(kind, target, text, tmp_path, size=size, amounts=amounts)
