"""Test `Past`: saved in a file, cut back, branched, and shared among rows."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load, save

import stree_jax
from stree_jax import CheckpointError, Past
from stree_jax.sampling import sampling_arrays
from tests.support.tiny import REAL, perturbed, tiny

LAYERS = {
    "attention": ("attention", "mlp", "attention", "mlp"),
    "hybrid": ("mamba", "attention", "mlp"),
    "mamba": ("mamba", "mlp"),
}
NEW = 8


@pytest.fixture(scope="module", params=LAYERS)
def model(request):
    return tiny(1, layers=LAYERS[request.param])


@pytest.fixture(scope="module")
def attention():
    return tiny(1, layers=LAYERS["attention"])


def prompt_of(seed, n):
    return np.random.default_rng(seed).integers(8, REAL, n).tolist()


def run(model, prompts, past=None, drafter=None, **options):
    options = dict(max_new_tokens=NEW, capacity=192, logprobs=0) | options
    tree = None if drafter is None else "chain:2"
    return stree_jax.generate(
        model, prompts, drafter=drafter, tree=tree, past=past, keep_past=True, **options
    )


def assert_same(one, other):
    """Asserts equal tokens and bits of log-probabilities."""
    assert one.tokens == other.tokens
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        assert np.array_equal(a.raw, b.raw)


PROMPTS = [prompt_of(1, 70), prompt_of(2, 9)]
MORE = [prompt_of(3, 5), prompt_of(4, 12)]


def test_a_loaded_past_continues_as_before(model, tmp_path):
    file, past = tmp_path / "past.safetensors", run(model, PROMPTS).past
    past.save(file, model)
    assert file.stat().st_mode & 0o777 == 0o600, "it contains the texts"
    loaded = Past.load(str(file), model)
    assert loaded.tokens == past.tokens and loaded.drafter is None
    assert_same(run(model, MORE, loaded), run(model, MORE, past))
    drafted = run(model, MORE, loaded, tiny(2, layers=("mamba",)))
    assert drafted.tokens == run(model, MORE, past).tokens


def test_a_saved_past_has_only_the_rows_in_use(attention, tmp_path):
    past = run(attention, PROMPTS, capacity=1024).past
    past.save(tmp_path / "past", attention)
    used = load((tmp_path / "past").read_bytes())["layers[0]['attention'].k"]
    assert used.shape[2] == max(map(len, past.tokens)) - 1


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_pasts_of_low_precision_are_saved(dtype, tmp_path):
    stree_jax.save(tiny(1, layers=LAYERS["hybrid"]), tmp_path / "model")
    model = stree_jax.load(tmp_path / "model", dtype=dtype)
    past = run(model, PROMPTS).past
    past.save(tmp_path / "past", model)
    loaded = Past.load(tmp_path / "past", model)
    for x, y in zip(*map(jax.tree.leaves, (loaded.target, past.target)), strict=True):
        assert x.dtype == y.dtype
    assert_same(run(model, MORE, loaded), run(model, MORE, past))


def test_a_past_is_cut_back_to_any_token(attention):
    past = run(attention, PROMPTS).past
    draft = tiny(2, layers=("mamba",))
    for lengths in (5, [71, 3], [1, 16], [30, 17]):
        cut = past.at(lengths)
        texts = [row[:n] for row, n in zip(past.tokens, np.resize(lengths, 2))]  # noqa: B905
        assert cut.tokens == texts
        fresh = run(attention, [a + b for a, b in zip(texts, MORE, strict=True)])
        assert_same(run(attention, MORE, cut), fresh)
        assert run(attention, MORE, cut, draft).tokens == fresh.tokens


def test_branches_leave_a_past_as_it_was(attention):
    past = run(attention, PROMPTS).past
    before = run(attention, MORE, past)
    for lengths in (40, 12):
        run(attention, MORE, past.at([lengths, 9]))
        run(attention, MORE[::-1], past)
    assert_same(run(attention, MORE, past), before)


@pytest.mark.parametrize("kind", ["hybrid", "mamba"])
def test_a_recurrent_state_is_not_cut_back(kind):
    past = run(tiny(1, layers=LAYERS[kind]), PROMPTS).past
    assert past.at([len(row) for row in past.tokens]) is past
    with pytest.raises(ValueError, match="^at: the states of Mamba layers cannot"):
        past.at(9)


def test_rows_continue_one_text(model):
    past = run(model, PROMPTS, drafter=tiny(2, layers=("mamba",))).past
    both = [MORE[0], MORE[1], MORE[0]]
    found = run(model, both, past.rows([1, 0, 0]), tiny(2, layers=("mamba",)))
    texts = [past.tokens[i] + more for i, more in zip((1, 0, 0), both, strict=True)]
    for text, tokens in zip(texts, found.tokens, strict=True):
        assert tokens == run(model, [text]).tokens[0]


def test_wrong_arguments(attention):
    past = run(attention, PROMPTS).past
    for length, problem in (
        (0, "at: want 1 to 78 tokens, got 0"),
        ([79, 2], "at: want 1 to 78 tokens, got 79"),
        ([3], "at: 1 lengths for 2 rows"),
    ):
        with pytest.raises(ValueError, match=problem):
            past.at(length)
    for rows in ([], [2], [-1]):
        with pytest.raises(ValueError, match=r"rows: want rows in 0\.\.1"):
            past.rows(rows)


def test_a_file_of_another_model_is_refused(attention, tmp_path):
    run(attention, PROMPTS).past.save(tmp_path / "past", attention)
    for other in (tiny(2, layers=LAYERS["attention"]), tiny(1, layers=("mamba",))):
        with pytest.raises(CheckpointError, match="another model or other weights"):
            Past.load(tmp_path / "past", other)
    (tmp_path / "other").write_bytes(save({"x": np.zeros(3)}))
    with pytest.raises(CheckpointError, match="not a file that"):
        Past.load(tmp_path / "other", attention)
    with pytest.raises(CheckpointError, match="not readable as a past"):
        Past.load(tmp_path / "missing", attention)
    with pytest.raises(CheckpointError, match="cannot be written"):
        run(attention, PROMPTS).past.save(tmp_path / "no" / "past", attention)


def test_damaged_files_are_refused(attention, tmp_path):
    """Without a crash; changed bytes of the caches cannot be noticed."""
    file, past = tmp_path / "past", run(attention, PROMPTS).past
    past.save(file, attention)
    data, rng = file.read_bytes(), np.random.default_rng(4)
    header = int.from_bytes(data[:8], "little") + 8
    for size in (0, 7, header, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            Past.load(file, attention)
    for _ in range(200):
        wrong = bytearray(data)
        wrong[rng.integers(header)] = rng.integers(256)
        file.write_bytes(wrong)
        try:
            found = Past.load(file, attention)
        except CheckpointError as error:
            assert "\n" not in str(error)
        else:
            assert list(map(len, found.tokens)) == list(map(len, past.tokens))
    arrays = load(data)
    for name, value in (
        ("lengths", np.array([78, 16], np.int32)),
        ("tokens", arrays["tokens"] + 10**6),
        ("length", np.array([500, 500], np.int32)),
        ("layers[0]['attention'].k", np.zeros((2, 2, 3), np.float32)),
    ):
        assert name in arrays
        about = {"format": "stree-jax past 1", "model": saved_key(data)}
        file.write_bytes(save(arrays | {name: value}, about))
        with pytest.raises(CheckpointError, match="a damaged past"):
            Past.load(file, attention)


@pytest.mark.parametrize("kind", LAYERS)
def test_files_whose_lengths_do_not_fit_are_refused(kind, tmp_path):
    """All lengths agree with each other; the caches have too few rows, or there is no
    token that the state has not read."""
    file, model = tmp_path / "past", tiny(1, layers=LAYERS[kind])
    run(model, [[9]], max_new_tokens=1).past.save(file, model)
    about = {"format": "stree-jax past 1", "model": saved_key(file.read_bytes())}
    arrays, sizes = load(file.read_bytes()), [0]
    if kind != "mamba":  # which has no caches
        sizes.append(500)
    for n in sizes:
        changed = {
            "lengths": np.array([n], np.int32),
            "length": np.array([n - 1], np.int32),
            "tokens": np.full(n, 9, np.int32),
        }
        file.write_bytes(save(arrays | changed, about))
        with pytest.raises(CheckpointError, match=r"a damaged past \(lengths\)"):
            Past.load(file, model)


def test_dtypes_that_numpy_does_not_have_are_refused(attention, tmp_path):
    file = tmp_path / "past"
    run(attention, PROMPTS).past.save(file, attention)
    key = saved_key(file.read_bytes())
    for about, problem in (
        ({"format": "pt"}, "not a file that"),
        ({"format": "stree-jax past 1", "model": key}, "not readable as a past"),
    ):
        place = {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}
        header = json.dumps({"__metadata__": about, "x": place}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
        with pytest.raises(CheckpointError, match=problem):
            Past.load(file, attention)


def test_a_file_with_a_short_cache_is_refused(attention, tmp_path):
    file = tmp_path / "past"
    run(attention, PROMPTS).past.save(file, attention)
    about = {"format": "stree-jax past 1", "model": saved_key(file.read_bytes())}
    arrays = load(file.read_bytes())
    name = "layers[2]['attention'].k"
    file.write_bytes(save(arrays | {name: arrays[name][:, :, :3]}, about))
    with pytest.raises(CheckpointError, match="different numbers of rows"):
        Past.load(file, attention)


def saved_key(data):
    """Returns the digest of the model in a file."""
    return data[data.index(b'"model":"') + 9 :][:64].decode()


@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_a_scan_over_turns_carries_a_past(attention, drafter):
    """Texts stand in a buffer of fixed size, to which each turn adds five tokens."""
    model, width = attention, 40
    if drafter == "model":
        drafter = model.replace(params=perturbed(model.params, 0.05, 3))
    keys = jax.random.split(jax.random.key(0), 4)

    def turn(texts, key, *, reads=True):
        tokens, lengths, past = texts
        done = stree_jax.generate_tokens(
            model,
            tokens,
            lengths,
            max_new_tokens=4,
            drafter=drafter,
            tree="chain:2",
            stop_tokens=[],
            sampling=sampling_arrays(2, key=key),
            past=past if reads else None,
            keep_past=True,
        )
        joined = done.joined(tokens, lengths)
        ends = joined.lengths[:, None] == jnp.arange(width)[None]
        tokens = jnp.where(ends, 8, joined.tokens[:, :width])
        return (tokens, joined.lengths + 1, done.past), None

    @jax.jit
    def scanned(tokens, lengths):
        first, _ = turn((tokens, lengths, None), keys[0])
        return jax.lax.scan(turn, first, keys[1:])[0]

    tokens = jnp.zeros((2, width), jnp.int32).at[:, :5].set(9)
    start = tokens, jnp.asarray([5, 3], jnp.int32)
    texts = *start, None
    for key in keys:
        texts, _ = turn(texts, key, reads=False)
    found = scanned(*start)
    assert found[0].tolist() == texts[0].tolist()
    assert found[1].tolist() == [25, 23]
