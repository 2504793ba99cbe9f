"""Test the training of drafters on answers that the target wrote."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.models import logits_of
from stree_jax.models.drafters.heads import head_of
from stree_jax.models.stack.chunks import PREFILL_CHUNK
from stree_jax.training import answers, dspark
from stree_jax.training import hidden_state_files as kept
from stree_jax.training import tapped_drafters as stretches
from stree_jax.training.eagle import EagleSize
from stree_jax.training.recipe import Job
from stree_jax.training.train import TrainConfig
from tests.support.cycle import cycling_target
from tests.support.tiny import tiny

T, M = 24, 3
PROMPTS = [[5, 6, 7, 8], [30, 31], [9, 10, 11, 12, 13, 14], [20, 21, 22]] * 12
TRAIN = TrainConfig(
    steps=60,
    batch=8,
    length=T,
    learning_rate=2e-2,
    warmup=2,
    compute_dtype="float32",
    checkpoint_every=60,
)
SIZE = dspark.DSparkSize(1, 1, M, mlp=16, rank=16, window=8, draft_vocab=60)
SIZES = {"dspark": SIZE, "eagle3": EagleSize(1, 1, M, 16, window=8, draft_vocab=60)}
AMOUNTS = stretches.Amounts(roots=4, own_tokens=0, window=T)


@pytest.fixture(autouse=True, scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(stretches, "PROMPT", 8)
        patch.setattr(stretches, "HELD_OUT", 8)
        patch.setattr(stretches, "HEAD", 8)
        patch.setattr(kept, "READ_AT_ONCE", 4)
        patch.setattr(answers, "WIDTH_STEP", 8)
        yield


@pytest.fixture(scope="module")
def target():
    return cycling_target(("mamba", "mlp"))


def write(file, rows, width=40):
    """Writes a file of answers from (prompt, answer) pairs; padding is token 3."""
    tokens = np.full((len(rows), width), 3)
    for row, (prompt, answer) in zip(tokens, rows, strict=True):
        row[: len(prompt) + len(answer)] = [*prompt, *answer]
    start = np.array([len(prompt) for prompt, _ in rows])
    end = start + [len(answer) for _, answer in rows]
    np.savez(file, tokens=tokens, start=start, end=end)


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    options = dict(max_new_tokens=30, stop_tokens=(), drafter=None)
    said = stree_jax.generate(target, PROMPTS, **options).tokens
    rows = list(zip(PROMPTS, said, strict=True))
    write(folder / "a.npz", rows[:30])
    write(folder / "b.npz", rows[30:], 36)
    return folder


def read(target, folder, work, taps=()):
    files = answers.answer_files([folder])
    return answers.read_answers(target, taps, files, work, T, M)


def test_drafts_are_tokens_of_answers_and_stretches_of_one_row(target, tmp_path):
    """Answers shorter than a root's drafts have no roots."""
    rows = [([50] * 9, [60] * n) for n in (30, 4, 3, 2)] + [([50], [60] * 5)]
    write(tmp_path / "a.npz", rows * 8)
    learnt, held = read(target, tmp_path, tmp_path)
    assert len(learnt.tokens) + len(held.tokens) == 4 * 8 and len(held.tokens) == 2
    rng, lengths = np.random.default_rng(0), set()
    for _ in range(300):
        batch = learnt.cut(rng, T, 6, M)
        tokens, places = batch["tokens"], batch["places"]
        assert tokens.shape == (T,) and places.shape == (6,) and places.min() >= 1
        assert all((tokens[p + 1 : p + 1 + M] == 60).all() for p in places)
        assert set(tokens[: places[0]].tolist()) <= {50, 60}, "the row itself"
        lengths.add((tokens == 60).sum())
    assert lengths == {T, 5, 4, 3}


def test_states_are_those_of_the_whole_row(target, folder, tmp_path):
    """The target reads a row from its first token, also before the stretch."""
    learnt, _ = read(target, folder, tmp_path)
    rows = answers.read_rows(folder / "a.npz", target.config.num_tokens)
    states = kept.hidden_states(target, jnp.asarray(rows.tokens[1:2]))[0]
    begin = rows.end[1] - T
    assert begin > 0, "the stretch is not the whole row"
    want = np.asarray(states[begin : begin + T])
    found = np.asarray(learnt.states[0][:, 0], np.float32)
    np.testing.assert_allclose(found, want, rtol=1e-2, atol=1e-2)
    assert (learnt.tokens[0] == rows.tokens[1, begin : begin + T]).all()


@pytest.mark.parametrize("layers", [("mamba", "mlp"), ("attention", "mlp")])
def test_states_of_texts_longer_than_a_chunk(layers):
    """Later chunks continue from the state of earlier ones."""
    target = tiny(1, layers=layers)
    L = PREFILL_CHUNK + 9
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 40, (2, L)), jnp.int32)
    found = kept.tapped_states(target, tokens, (-1,))
    hidden = kept.hidden_states(target, tokens)
    np.testing.assert_allclose(found[:, :, 0], hidden, rtol=1e-3, atol=1e-4)
    embedded = target.module.apply({"params": target.params}, tokens, method="embed")
    np.testing.assert_allclose(found[:, :, 1], embedded, rtol=1e-6)


def train(target, folder, work, size=SIZE, amounts=AMOUNTS):
    job = Job([folder], work / "out", work / "work", TRAIN)
    return stretches.train_drafter(job, target, size, amounts)[0]


@pytest.mark.parametrize("kind", SIZES)
def test_a_drafter_with_a_trimmed_vocabulary_learns(target, folder, tmp_path, kind):
    drafter = train(target, folder, tmp_path, SIZES[kind])
    files = answers.answer_files([folder])
    text = answers.answer_tokens(files, target.config.num_tokens)
    subject = SIZES[kind].subject(target, text, "")
    ids = np.asarray(subject.ids)
    assert drafter.config.head_rows == len(ids) == 60
    assert len(text) == 30 * len(PROMPTS) and np.isin(text, ids).mean() > 0.97
    head = target.params["lm_head"][ids].astype("bfloat16")
    found = drafter.params["head" if kind == "dspark" else "lm_head"]
    assert (found == head).all(), "the target's rows, not trained"
    options = dict(max_new_tokens=30, stop_tokens=())
    plain = stree_jax.generate(target, PROMPTS[:2], **options, drafter=None)
    untrained = subject.drafter(subject.init(jax.random.key(0)), target)
    calls = []
    for one in (drafter, untrained):
        result = stree_jax.generate(
            target, PROMPTS[:2], drafter=one, tree=f"chain:{M}", **options
        )
        assert result.tokens == plain.tokens
        calls.append(int(result.target_calls.sum()))
    assert calls[0] < 0.7 * calls[1]


def test_files_that_are_added_later_are_read(target, folder, tmp_path, monkeypatch):
    """Those that were read are not read again."""
    read(target, folder, tmp_path / "work")
    more = tmp_path / "more"
    more.mkdir()
    for file in answers.answer_files([folder]):
        (more / file.name).write_bytes(file.read_bytes())
    write(more / "c.npz", [(PROMPTS[0], [9] * 20)])
    passes, run = [], kept.tapped_states
    monkeypatch.setattr(kept, "tapped_states", lambda *a: passes.append(a) or run(*a))
    learnt, _ = read(target, more, tmp_path / "work")
    assert len(passes) == 1
    assert (learnt.tokens[-1][-20:] == 9).all()


@pytest.mark.parametrize("kind", SIZES)
def test_the_loss_is_over_the_trimmed_vocabulary(target, kind):
    """Both distributions are those of the draft vocabulary's tokens."""
    subject = SIZES[kind].subject(target, np.arange(1, 41), "")
    rng, c = np.random.default_rng(1), target.config
    batch = {
        "states": jnp.asarray(rng.standard_normal((1, 12, 2, c.d_model)), jnp.float32),
        "tokens": jnp.asarray(rng.integers(1, 40, (1, 12)), jnp.int32),
        "places": jnp.asarray([[2, 5]], jnp.int32),
    }
    p, q = subject.log_probs(subject.init(jax.random.key(0)), batch, head_of(target))
    assert p.shape == q.shape == (2, M, 60)
    states = batch["states"][0, jnp.asarray([2, 3, 4]), 0]
    logits = logits_of(target, states)[:, jnp.asarray(subject.ids)]
    np.testing.assert_allclose(p[0], jax.nn.log_softmax(logits), atol=1e-4)


def damaged(arrays, **changes):
    return {name: x for name, x in (arrays | changes).items() if x is not None}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (dict(end=None), "want an .npz of tokens, start, end"),
        (dict(start=np.array([1])), r"want tokens \[n, W\], start \[n\] and end"),
        (dict(end=np.array([5, 41])), "want 0 < start <= end <= 40"),
        (dict(start=np.array([0, 2])), "want 0 < start <= end <= 40"),
        (dict(start=np.array([2.0, 2.0])), "want integers"),
        (dict(tokens=np.full((2, 40), 10**6)), r"want tokens in 0\.\."),
    ],
)
def test_damaged_files_are_named(target, tmp_path, changes, problem):
    good = dict(
        tokens=np.full((2, 40), 5), start=np.array([2, 2]), end=np.array([9, 9])
    )
    np.savez(tmp_path / "a.npz", **damaged(good, **changes))
    with pytest.raises(ValueError, match=f"a.npz: {problem}"):
        train(target, tmp_path, tmp_path)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("kind", ["bytes", "array", "text"])
def test_files_that_are_no_archive_are_named(target, tmp_path, kind):
    text = tmp_path / "text"
    text.mkdir()
    write(text / "a.npz", [(PROMPTS[0], [9] * 20)] * 40)
    if kind == "bytes":
        with np.load(text / "a.npz") as arrays:
            np.savez_compressed(text / "a.npz", **arrays)
        data = bytearray((text / "a.npz").read_bytes())
        data[60:120] = bytes(60)
        (text / "a.npz").write_bytes(data)
    if kind == "array":
        with open(text / "a.npz", "wb") as file:
            np.save(file, np.arange(3))
    if kind == "text":
        (text / "notes.txt").write_text("words")
    problem = "a.npz, notes.txt" if kind == "text" else "a.npz: want an .npz of tokens"
    with pytest.raises(ValueError, match=problem):
        train(target, text, tmp_path)


def test_a_run_with_other_draft_tokens_does_not_resume(target, folder, tmp_path):
    """Also if the tokens of the files, and so the stored states, are the same."""
    few = dataclasses.replace(TRAIN, steps=1, warmup=0, checkpoint_every=1)
    (tmp_path / "text").mkdir()
    for shift, problem in ((0, None), (9, "other")):
        for file in answers.answer_files([folder]):
            with np.load(file) as arrays:
                changed = dict(arrays)
            changed["start"] = changed["start"] + shift
            np.savez(tmp_path / "text" / file.name, **changed)
        job = Job([tmp_path / "text"], tmp_path / "out", tmp_path / "work", few)
        if problem is None:
            stretches.train_drafter(job, target, SIZE, AMOUNTS)
        else:
            with pytest.raises(ValueError, match=problem):
                stretches.train_drafter(job, target, SIZE, AMOUNTS)


def test_options_that_answers_have_no_use_for_are_refused(target, folder, tmp_path):
    amounts = dataclasses.replace(AMOUNTS, own_tokens=9)
    with pytest.raises(ValueError, match="--own-tokens: leave it out"):
        train(target, folder, tmp_path, amounts=amounts)
