"""Test training of heads: losses, ranks and accuracy tables against brute force, and
resumed runs.
"""

import json
from dataclasses import replace
from itertools import pairwise

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.models.drafters.heads import Heads, head_of
from stree_jax.training import heads as training
from stree_jax.training import hidden_state_files as kept
from stree_jax.training.recipe import Job
from stree_jax.training.train import TrainConfig
from tests.support.cycle import cycling_target, write_text
from tests.support.heads import random_heads, reference_logits
from tests.support.tiny import REAL, perturbed, tiny

K = 3
PROMPT, GENERATED, WINDOW = 8, 17, 24
TRAIN = TrainConfig(
    steps=60,
    batch=8,
    length=20,
    learning_rate=3e-2,
    warmup=2,
    compute_dtype="float32",
    checkpoint_every=20,
)


@pytest.fixture(autouse=True, scope="module")
def small():
    """Makes texts short and batches small, and allows dtype promotion for optax's
    Adam."""
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        for module in (kept, training):
            patch.setattr(module, "PROMPT", PROMPT)
            patch.setattr(module, "GENERATED", GENERATED)
            patch.setattr(module, "READ_AT_ONCE", 4)
        patch.setattr(kept, "SPEAK_AT_ONCE", 4)
        patch.setattr(training, "HELD_OUT", 8)
        yield


@pytest.fixture(scope="module")
def model():
    return tiny(1, layers=("mamba",))


@pytest.fixture(scope="module")
def target():
    return cycling_target()


@pytest.fixture(scope="module")
def text(target, tmp_path_factory):
    """Returns a folder of prepared tokens."""
    return write_text(target, tmp_path_factory.mktemp("text"))


# --- counts ---------------------------------------------------------------------------


@pytest.mark.parametrize("own_output", [False, True])
def test_ranks_match_a_full_sort(model, own_output):
    """Head k ranks the token k + 1 places after the one that the state chooses."""
    heads = random_heads(model, heads=K, scale=0.5, own_output=own_output)
    rng, bare = np.random.default_rng(0), head_of(model)
    hidden = rng.standard_normal((2, 9, 32)).astype(np.float32)
    tokens = rng.integers(0, REAL, (2, 10), np.int32)
    found = training.head_ranks(heads, bare, jnp.asarray(hidden), jnp.asarray(tokens))
    logits = reference_logits(heads, model, hidden)[..., :REAL]
    want = np.zeros((2, 9 - K, K), int)
    for b, t, k in np.ndindex(want.shape):
        guesses = np.argsort(-logits[b, t, k], kind="stable").tolist()
        want[b, t, k] = guesses.index(tokens[b, t + k + 2])
    np.testing.assert_array_equal(found, want)


def test_equal_guesses_are_ranked_by_id(model):
    """As in drafting. Padding of the vocabulary has no rank."""
    heads = random_heads(model, heads=1, own_output=True)
    heads = heads.replace(params=jax.tree.map(jnp.zeros_like, heads.params))
    tokens = jnp.arange(6, dtype=jnp.int32)[None]
    hidden = jnp.ones((1, 5, 32), jnp.float32)
    found = training.head_ranks(heads, head_of(model), hidden, tokens)
    assert found[0, :, 0].tolist() == [2, 3, 4, 5]


def plain_table(ranks, width):
    rows = []
    for k in range(len(ranks[0])):
        here = [r for r in ranks if all(x < width for x in r[:k])]
        shares = [
            sum(r[k] == w for r in here) / max(len(here), 1) for w in range(width)
        ]
        rows.append(shares)
    return rows


@pytest.mark.parametrize(("seed", "width"), [(0, 4), (1, 10), (2, 1)])
def test_accuracies_are_conditional_on_earlier_heads(seed, width):
    rng = np.random.default_rng(seed)
    ranks = rng.geometric(0.3, (200, K)) - 1
    table = training.accuracy_table(ranks, width)
    np.testing.assert_allclose(table, plain_table(ranks.tolist(), width), rtol=1e-12)
    assert (table.sum(axis=1) <= 1 + 1e-12).all() and table.sum() > 0
    always = (ranks[:, None] == np.arange(width)[:, None]).mean(axis=0).T
    assert width == 1 or not np.allclose(table[1:], always[1:])
    nobody = training.accuracy_table(np.full((5, K), width), width)
    assert nobody.tolist() == [[0.0] * width] * K


def test_ranks_in_texts(model):
    """From a given place on, for any number of texts."""
    heads = random_heads(model, heads=2, scale=0.5)
    texts = np.random.default_rng(0).integers(0, REAL, (6, 14), np.int32)
    found = training.ranks_in(heads, model, texts, 5)
    want = []
    for row in texts:
        hidden = kept.hidden_states(model, jnp.asarray(row[None]))
        guesses = reference_logits(heads, model, np.asarray(hidden[0]))[..., :REAL]
        for t in range(5, 14 - 1 - 2):
            want.append(
                [
                    int((guesses[t, k] > guesses[t, k, row[t + k + 2]]).sum())
                    for k in range(2)
                ]
            )
    np.testing.assert_array_equal(found, want)


def test_the_loss_is_the_mean_kl_divergence(model):
    """Of each head's distribution from the target's at the same place of the text."""
    heads = random_heads(model, heads=K, scale=0.3)
    hidden = np.random.default_rng(0).standard_normal((2, 9, 32))
    subject = training.HeadsSubject(heads.config)
    found = subject.loss(
        heads.params, jnp.asarray(hidden, jnp.bfloat16), head_of(model)
    )
    rounded = np.asarray(jnp.asarray(hidden, jnp.bfloat16), np.float64)

    def log_p(z):
        z = z - z.max(axis=-1, keepdims=True)
        return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))

    said = log_p(rounded @ np.asarray(model.params["embedding"], np.float64).T)
    own, total = log_p(reference_logits(heads, model, rounded)), []
    for b, t, k in np.ndindex(2, 9 - K, K):
        p = said[b, t + k + 1]
        total.append((np.exp(p) * (p - own[b, t, k])).sum())
    assert float(found) == pytest.approx(np.mean(total), rel=1e-4)
    assert float(found) > 0.1


# --- stored texts and states ----------------------------------------------------------


def windows(seed=0, count=40):
    rng = np.random.default_rng(seed)
    return rng.integers(0, REAL, (count, WINDOW + 1), np.int32)


def test_own_text_matches_plain_decoding(model, tmp_path):
    """After the beginning of every window, for any number of rows. Stop tokens do not
    end it."""
    bare, texts = model, windows(count=6)
    said = kept.keep_own_text(bare, texts, tmp_path / "own")
    prompts = texts[:, :PROMPT].tolist()
    options = dict(max_new_tokens=GENERATED, stop_tokens=())
    plain = stree_jax.generate(model, prompts, **options, drafter=None)
    assert np.asarray(said).tolist() == [
        p + t for p, t in zip(prompts, plain.tokens, strict=True)
    ]


def test_states_are_those_of_the_target_in_bfloat16(model, tmp_path):
    bare, texts = model, windows(count=6)
    found = kept.keep_hidden(bare, texts, tmp_path / "states")
    assert found.shape == (6, WINDOW, 32) and found.dtype.name == "bfloat16"
    want = kept.hidden_states(bare, jnp.asarray(texts[:, :WINDOW]))
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(want), rtol=2**-7, atol=1e-3
    )
    logits = np.asarray(want[0] @ model.params["embedding"].T)
    scores = np.asarray(stree_jax.score(model, texts[:1, :WINDOW]))[0]
    np.testing.assert_allclose(logits, scores, rtol=1e-4, atol=1e-4)


KEPT = {"hidden_states": kept.keep_hidden, "own_text": kept.keep_own_text}


class Calls:
    """A function that counts its calls and fails at one of them."""

    def __init__(self, function, at=None):
        self.function, self.at, self.count = function, at, 0

    def __call__(self, *args, **options):
        self.count += 1
        if self.count == self.at:
            raise RuntimeError("killed")
        return self.function(*args, **options)


@pytest.mark.parametrize("name", KEPT)
def test_a_killed_reading_resumes(model, tmp_path, monkeypatch, name):
    """It resumes after the last recorded rows: 32 of them, at 4 a pass."""
    bare, texts = model, windows()
    keep = KEPT[name]
    whole = np.array(keep(bare, texts, tmp_path / "whole"))
    function = getattr(kept, name)
    monkeypatch.setattr(kept, name, Calls(function, at=10))
    with pytest.raises(RuntimeError, match="killed"):
        keep(bare, texts, tmp_path / "cut")
    assert json.loads((tmp_path / "cut.json").read_text())["done"] == 32
    after = Calls(function)
    monkeypatch.setattr(kept, name, after)
    np.testing.assert_array_equal(np.array(keep(bare, texts, tmp_path / "cut")), whole)
    assert after.count == 2
    np.testing.assert_array_equal(np.array(keep(bare, texts, tmp_path / "cut")), whole)
    assert after.count == 2, "what is there is not read again"
    (tmp_path / "cut.json").unlink()
    np.testing.assert_array_equal(np.array(keep(bare, texts, tmp_path / "cut")), whole)
    assert after.count == 12, "of what nobody told of, nothing is known"


def others(model):
    """Returns targets and texts that differ from those of a file."""
    bare, text = model, windows(count=6)
    layer = dict(model.params["layers_0"])
    mamba = {**layer["mamba"], "out_proj": -layer["mamba"]["out_proj"]}
    deeper = {**model.params, "layers_0": {**layer, "mamba": mamba}}
    swapped = text.copy()
    swapped[:, :PROMPT] = text[:, :PROMPT][:, ::-1]
    return {
        "another embedding": (
            bare.replace(params=perturbed(model.params, 0.1, 3)),
            text,
        ),
        "another layer": (bare.replace(params=deeper), text),
        "another norm": (
            replace(bare, config=replace(bare.config, norm_eps=1e-3)),
            text,
        ),
        "more text": (bare, windows(count=7)),
        "another text": (bare, windows(1, 6)),
        "the same tokens in another order": (bare, swapped),
    }


@pytest.mark.parametrize("keep", KEPT.values())
def test_files_of_another_target_or_text_are_refused(model, tmp_path, keep):
    file = tmp_path / "file"
    keep(model, windows(count=6), file)
    told = tmp_path / "file.json"
    before = file.read_bytes(), told.read_text()
    for name, (target, texts) in others(model).items():
        with pytest.raises(ValueError, match="of another target, text or size") as no:
            keep(target, texts, file)
            pytest.fail(name)
        assert "\n" not in str(no.value) and str(no.value).startswith(str(file))
    assert before == (file.read_bytes(), told.read_text())


# --- training -------------------------------------------------------------------------


def job_of(text, folder, train=TRAIN, **options):
    return Job([text], folder / "out", folder / "work", train, **options)


def train(target, text, folder, *, config=TRAIN, heads=K, **options):
    sizes = dict(tokens=600, own_tokens=300, window=WINDOW) | options
    return training.train_heads(job_of(text, folder, config), target, heads, **sizes)


@pytest.fixture(scope="module")
def whole(target, text, tmp_path_factory):
    """Returns heads, their training history, and the folder of the run."""
    folder, histories = tmp_path_factory.mktemp("whole"), []

    def learn(*args, **options):
        params, history = _learn(*args, **options)
        histories.append(history)
        return params, history

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "learn", learn)
        heads = train(target, text, folder)
    return heads, histories[0], folder


_learn = training.learn


def test_heads_learn_to_predict_the_target(whole, target, text):
    """The held-out loss falls, and the accuracies on the target's own text rise."""
    heads, history, folder = whole
    assert not (folder / "out").exists(), "the caller writes"
    assert [entry["step"] for entry in history] == [20, 40, 60]
    losses = [entry["heldout_loss"] for entry in history]
    assert all(b < a for a, b in pairwise(losses))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(heads.params)} == {"bfloat16"}
    said = np.fromfile(folder / "work" / "heldout.own", np.int32)
    said = said.reshape(-1, PROMPT + GENERATED)
    bare = target
    fresh = training.init_heads(heads.config, jax.random.key(0), jnp.float32)
    before = training.calibrated(Heads(fresh, heads.config), bare, said).config.accuracy
    after = heads.config.accuracy
    assert np.shape(after) == (K, training.RANKS)
    assert training.calibrated(heads, bare, said).config.accuracy == after
    for old, new in zip(before, after, strict=True):
        assert new[0] > old[0] + 0.1
    ranks = training.ranks_in(heads, bare, said, PROMPT - 1)
    assert len(ranks) == len(said) * (GENERATED - K)
    np.testing.assert_allclose(after, plain_table(ranks.tolist(), training.RANKS))


def test_text_is_identical_to_plain_decoding(whole, target):
    heads, prompts = whole[0], [[5, 6, 7], [9]]
    asked = dict(max_new_tokens=12, stop_tokens=())
    plain = stree_jax.generate(target, prompts, **asked, drafter=None)
    chain = dict(drafter=heads, tree=f"chain:{heads.config.heads}")
    result = stree_jax.generate(target, prompts, **chain, **asked)
    assert result.tokens == plain.tokens
    assert result.target_calls.sum() < 24


def killed_at(monkeypatch, step):
    """Makes the batch of one step fail."""
    made = training.examples_of

    def examples(*args):
        found = made(*args)

        def batches(start):
            for i, batch in enumerate(found.batches(start), start=start):
                if i == step:
                    raise RuntimeError("killed")
                yield batch

        return replace(found, batches=batches)

    monkeypatch.setattr(training, "examples_of", examples)


def test_a_killed_run_resumes_to_the_same_heads(
    whole, target, text, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(kept, "own_text", Calls(kept.own_text, at=2))
        with pytest.raises(RuntimeError, match="killed"):
            train(target, text, tmp_path)
    with monkeypatch.context() as patch:
        killed_at(patch, 26)
        with pytest.raises(RuntimeError, match="killed"):
            train(target, text, tmp_path)
    saves = [
        p.name for p in (tmp_path / "work" / "saves").iterdir() if p.name.isdigit()
    ]
    assert saves == ["20"]
    reading = Calls(kept.hidden_states)
    monkeypatch.setattr(kept, "hidden_states", reading)
    heads = train(target, text, tmp_path)
    chex.assert_trees_all_equal(heads, whole[0])
    assert reading.count == 0, "what was read is not read again"


def test_batches_depend_only_on_the_step():
    rng = np.random.default_rng(0)
    sources = [rng.standard_normal((n, 30, 2)) for n in (5, 3)]
    examples = training.examples_of(TRAIN, sources, sources)
    first = [batch for batch, _ in zip(examples.batches(0), range(5), strict=False)]
    later = next(examples.batches(3))
    np.testing.assert_array_equal(later, first[3])
    assert later.shape == (TRAIN.batch, TRAIN.length, 2)
    for i, row in enumerate(first[0]):
        source = sources[i % 2]
        stretches = np.lib.stride_tricks.sliding_window_view(source, TRAIN.length, 1)
        assert (stretches == row.T).all(axis=(-1, -2)).any()
    held = np.concatenate(list(examples.heldout))
    assert held.shape == (8, TRAIN.length, 2)
    np.testing.assert_array_equal(held[:5], sources[0][:, -TRAIN.length :])


REFUSED = {
    "another target": (dict(), "of another target, text or size; take another --work"),
    "more heads": (dict(heads=K + 1), "saves of a run with another"),
    "more blocks": (dict(blocks=2), "saves of a run with another"),
    "own outputs": (dict(own_output=True), "saves of a run with another"),
    "more tokens": (dict(tokens=700), "of another target, text or size"),
    "more of its own": (dict(own_tokens=500), "of another target, text or size"),
    "another rate": (
        dict(config=replace(TRAIN, learning_rate=1e-3)),
        "saves of a run with another learning_rate",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_work_folder_of_another_run_is_refused(whole, target, text, name):
    options, message = REFUSED[name]
    if name == "another target":
        target = target.replace(params=perturbed(target.params, 0.1, 3))
    with pytest.raises(ValueError, match=message) as caught:
        train(target, text, whole[2], **options)
    assert "\n" not in str(caught.value)


WRONG = {
    "no tokens": (dict(tokens=0), "--tokens: want at least 1, got 0"),
    "fewer than none": (dict(own_tokens=-1), "--own-tokens: want at least 0, got -1"),
    "no heads": (dict(heads=0), "heads: want 1..64, got 0"),
    "no blocks": (dict(blocks=0), "blocks: with 0 blocks"),
    "longer than a window": (
        dict(config=replace(TRAIN, length=WINDOW + 1)),
        "--length: want .*24.*, got 25",
    ),
    "no longer than heads": (
        dict(config=replace(TRAIN, length=K)),
        "--length: want .*, got 3",
    ),
    "a text that is too short": (
        dict(window=500),
        "text: 400 tokens; want 501 at least",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_options_are_refused_before_reading(target, text, tmp_path, name):
    """With a real target, reading takes an hour."""
    options, message = WRONG[name]
    with pytest.raises(ValueError, match=message) as caught:
        train(target, text, tmp_path, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "work").exists()


def test_training_on_text_alone(target, text, tmp_path):
    """Also for heads with separate output matrices."""
    config = replace(TRAIN, steps=3, warmup=0)
    options = dict(own_tokens=0, own_output=True, heads=2, config=config)
    heads = train(target, text, tmp_path, **options)
    assert heads.config.accuracy and heads.config.own_output
    assert heads.params["head_1"]["output"]["weight"].shape == (
        target.config.vocab_size,
        32,
    )
    assert not (tmp_path / "work" / "train.own").exists()


def test_windows_are_spread_over_the_text():
    tokens = np.arange(101)
    found = kept.spread_windows(tokens, 10, 4)
    assert found.shape == (4, 11)
    assert found[:, 0].tolist() == [0, 30, 60, 90]
    assert (np.diff(found, axis=1) == 1).all()
    assert kept.spread_windows(tokens, 10, 99).shape == (10, 11)
    assert kept.spread_windows(tokens, 100, 1).shape == (1, 101)
    with pytest.raises(ValueError, match="text: 100 tokens; want 101 at least"):
        kept.spread_windows(tokens[:100], 100, 1)
