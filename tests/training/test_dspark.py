"""Test the training of DSpark drafters: blocks, losses, and resumed runs."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.models import base_model, logits_of
from stree_jax.models.dflash import (
    DFlash,
    DFlashLayer,
    add_context,
    draft_logits,
    empty_context,
    run_block,
)
from stree_jax.models.dflash_pairs import no_memory, pair_scores
from stree_jax.models.heads import head_of
from stree_jax.training import dspark as training
from stree_jax.training import kept
from stree_jax.training.recipe import Job
from stree_jax.training.train import TrainConfig
from tests.support.cycle import cycling_target, write_text
from tests.support.dflash import KINDS, random_dflash
from tests.support.tiny import REAL, tiny

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
SIZE = training.DSparkSize(layers=1, taps=1, drafts=M, mlp=16, rank=16, window=8)


@pytest.fixture(autouse=True, scope="module")
def small():
    """Makes texts short and batches small, and allows dtype promotion for optax's
    Adam."""
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        for module in (kept, training):
            patch.setattr(module, "PROMPT", PROMPT)
            patch.setattr(module, "GENERATED", GENERATED)
        patch.setattr(kept, "READ_AT_ONCE", 4)
        patch.setattr(kept, "SPEAK_AT_ONCE", 4)
        patch.setattr(training, "HELD_OUT", 8)
        patch.setattr(training, "HEAD", 8)
        yield


@pytest.fixture(scope="module")
def model():
    return base_model(tiny(1, layers=("attention", "mlp")))


def batch_of(drafter, rng, T=12, places=((1, 4, 5), (2, 7, 9))):
    """Returns a batch of random states and tokens."""
    c = drafter.config
    shape = len(places), T, 1 + len(c.boundaries), c.target_width
    return {
        "states": jnp.asarray(rng.standard_normal(shape), jnp.float32),
        "tokens": jnp.asarray(rng.integers(0, REAL, shape[:2]), jnp.int32),
        "places": jnp.asarray(places, jnp.int32),
    }


# --- blocks ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dspark", "dspark-gated", "dspark-rnn"])
def test_all_blocks_of_a_text_are_as_drafted_one_by_one(model, kind):
    """Each block sees the context rows before its root and none after, within the
    window; scores are those of drafting along the text."""
    layers = (DFlashLayer(6), DFlashLayer(0, True))
    options = KINDS[kind] | dict(slots=M, from_root=True, layers=layers)
    drafter = random_dflash(model, **options)
    batch = batch_of(drafter, np.random.default_rng(0))
    tokens, places, taps = batch["tokens"], batch["places"], batch["states"][:, :, 1:]
    roots = jnp.take_along_axis(tokens, places, axis=1)
    hidden = training.block_states(drafter, head_of(model), taps, roots, places)
    every = jnp.arange(drafter.config.vocab_size, dtype=jnp.int32)[None]

    @jax.jit
    def one_by_one(taps, text, place):
        """Returns the states and the logits of a block, drafted along the text."""
        rows = tuple(taps[None, :, i] for i in range(taps.shape[1]))
        context = empty_context(drafter, 1, 16, jnp.float32)
        context = add_context(drafter, context, rows, place[None])
        states = run_block(drafter, head_of(model), context, text[place][None], M)
        logits = draft_logits(drafter, head_of(model), states)
        memory, found = no_memory(drafter, (1, 1)), []
        for k in range(M):
            one = states[:, k], text[place + k][None, None], every
            pairs, memory = pair_scores(drafter, *one, memory)
            found.append(logits[:, k] + pairs[:, 0])
        return states, jnp.stack(found, axis=1)

    slots = places[..., None] + jnp.arange(M, dtype=jnp.int32)[None, None]
    for b, a in np.ndindex(places.shape):
        states, logits = one_by_one(taps[b], tokens[b], places[b, a])
        np.testing.assert_allclose(hidden[b, a], states[0], atol=2e-5)
        previous = tokens[b, slots[b, a]][None]
        found = training.forced(drafter, head_of(model), states, previous)[1]
        np.testing.assert_allclose(found, logits, atol=1e-4)


def test_the_loss_is_that_of_its_definition(model):
    """Slot k is compared with the target's state at the root's place + k."""
    options = KINDS["dspark"] | dict(slots=M, confidence_pairs=True)
    drafter, out = random_dflash(model, **options), head_of(model)
    batch = batch_of(drafter, np.random.default_rng(1))
    found = training.Blocks(drafter.config).loss(drafter.params, batch, out)
    _, q, alone, sure = training.block_scores(drafter, out, batch)
    p = jax.nn.log_softmax(logits_of(out, batch["states"][:, :, 0])[..., :REAL])
    total, weight = 0.0, np.exp(-np.arange(M) / training.DECAY)
    for n, (b, a) in enumerate(np.ndindex(2, 3)):
        for k in range(M):
            at = np.exp(np.asarray(p[b, int(batch["places"][b, a]) + k], np.float64))
            own, c = np.exp(np.asarray(q[n, k], np.float64)), float(sure[n, k])
            kept_ = np.minimum(at, own).sum()
            bce = -kept_ * np.log(c) - (1 - kept_) * np.log(1 - c)
            kl = (at * np.log(at / own)).sum()
            kl += (at * (np.log(at) - np.asarray(alone[n, k]))).sum() / 4
            total += weight[k] * (kl + 1 - kept_ + bce) / 6
    np.testing.assert_allclose(found, total / weight.sum(), rtol=1e-4)


def test_roots_are_in_text_that_the_target_wrote():
    rng = np.random.default_rng(0)
    tokens = np.tile(np.arange(24), (2, 1))
    source = training.Stretches(tokens, np.zeros((2, 24, 2, 4)), PROMPT - 1)
    for _ in range(20):
        batch = source.cut(rng, 20, 4, M)
        places = batch["places"]
        assert batch["tokens"][0] == 4 and batch["states"].shape == (20, 2, 4)
        assert len(set(places.tolist())) == 4
        assert batch["tokens"][places].min() >= PROMPT - 1
        assert places.max() <= 20 - M


def test_the_token_of_the_slots_is_the_rarest(model):
    text = np.concatenate([np.arange(REAL - 2), [REAL - 1]])
    assert training.rarest_token(text, model.config) == REAL - 2
    assert training.rarest_token(text[:-1], model.config) == REAL - 1


# --- training -------------------------------------------------------------------------


def train(target, text, folder, config=TRAIN, size=SIZE, **options):
    job = Job([text], folder / "out", folder / "work", config)
    sizes = dict(roots=4, tokens=600, own_tokens=300, window=WINDOW) | options
    return training.train_dspark(job, target, size, **sizes)[0]


@pytest.fixture(scope="module")
def target():
    return cycling_target(("mamba", "mlp"))


@pytest.fixture(scope="module")
def text(target, tmp_path_factory):
    return write_text(target, tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(target, text, tmp_path_factory):
    return train(target, text, tmp_path_factory.mktemp("whole"))


def test_a_drafter_learns_to_predict_the_target(whole, target, capfd):
    """Drafted chains are accepted, and text is that of plain decoding."""
    assert {x.dtype.name for x in jax.tree.leaves(whole.params)} <= {
        "bfloat16",
        "float32",
    }
    prompts, asked = [[5, 6, 7], [9]], dict(max_new_tokens=12, stop_tokens=())
    plain = stree_jax.generate(target, prompts, **asked, drafter=None)
    untrained = training.Blocks(whole.config).init(jax.random.key(0))
    calls = {}
    for name, params in {"trained": whole.params, "not": untrained}.items():
        drafter = DFlash(params, whole.config)
        chain = dict(drafter=drafter, tree=f"chain:{M}")
        result = stree_jax.generate(target, prompts, **chain, **asked)
        assert result.tokens == plain.tokens
        calls[name] = int(result.target_calls.sum())
    assert calls["trained"] < 0.7 * calls["not"]


def test_a_killed_run_resumes_to_the_same_drafter(
    whole, target, text, tmp_path, monkeypatch
):
    made = training.block_examples

    def examples(*args):
        found = made(*args)

        def batches(start):
            for i, batch in enumerate(found.batches(start), start=start):
                if i == 26:
                    raise RuntimeError("killed")
                yield batch

        return replace(found, batches=batches)

    with monkeypatch.context() as patch:
        patch.setattr(training, "block_examples", examples)
        with pytest.raises(RuntimeError, match="killed"):
            train(target, text, tmp_path)
    chex.assert_trees_all_equal(train(target, text, tmp_path), whole)


WRONG = {
    "too many taps": (dict(size=replace(SIZE, taps=2)), "--taps: want 1..1, got 2"),
    "no drafts": (dict(size=replace(SIZE, drafts=0)), "--drafts: want at least 1"),
    "no roots": (dict(roots=0), "--roots: want at least 1, got 0"),
    "too many roots": (dict(roots=15), "--length: want 26..24 tokens for 15 blocks"),
}


@pytest.mark.parametrize("name", WRONG)
def test_sizes_that_do_not_fit_are_refused(target, text, tmp_path, name):
    options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        train(target, text, tmp_path, **options)
