"""Test that seeds give the same text under any jax settings of the user's process.

TPU programs often set `jax_default_prng_impl` to "rbg". The expected numbers are those
of `jax.random` with default settings.
"""

from contextlib import contextmanager, nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.models import init_params
from stree_jax.models.base.keys import key_of
from stree_jax.sampling.settings import sampling_rows
from stree_jax.sampling.threefry import as_threefry, uniform
from stree_jax.server.batch import Batch
from stree_jax.server.rows import Sizes, TextRequest, requests_of
from stree_jax.speculation.default_tree import spec_for
from stree_jax.training import losses, train
from stree_jax.training.ngrams import sample_text
from tests.support.tiny import perturbed, tiny


@contextmanager
def setting(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


SETTINGS = {
    "rbg": lambda: jax.default_prng_impl("rbg"),
    "unsafe_rbg": lambda: jax.default_prng_impl("unsafe_rbg"),
    "not partitionable": lambda: jax.threefry_partitionable(False),
    "offset": lambda: setting("jax_random_seed_offset", 7),
}
UNUSUAL = pytest.mark.parametrize("name", SETTINGS)


def words(key):
    return np.asarray(jax.random.key_data(key)).tolist()


@pytest.fixture(scope="module")
def target():
    return tiny(1, layers=("mamba", "attention"))


@pytest.mark.parametrize("seed", [0, 5, 2**32 - 1])
@UNUSUAL
def test_keys_match_the_defaults_of_jax(name, seed):
    want = words(jax.random.key(seed, impl="threefry2x32"))
    with SETTINGS[name]():
        assert words(key_of(seed)) == want


@UNUSUAL
def test_rows_draw_the_same_numbers(name):
    base = jax.random.key(0, impl="threefry2x32")
    fold = jax.random.fold_in
    want = [words(fold(fold(base, np.uint32(seed)), 0)) for seed in (3, 1)]
    with SETTINGS[name]():
        rows = sampling_rows([Sampling(seed=3), Sampling()])
    assert words(rows.key) == want


@UNUSUAL
def test_the_server_draws_the_same_numbers(target, name):
    want = sampling_rows([Sampling(seed=3)], jax.random.key(0, impl="threefry2x32"))
    with SETTINGS[name]():
        spec = spec_for(target, None, None, None, None)
        batch = Batch(target, spec, Sizes(rows=1, context=64))
        asked = TextRequest([1], 2, Sampling(seed=3))
        requests = requests_of(
            asked, batch._stops, batch._key, target.config.num_tokens
        )
    assert words(requests.sampling.key) == words(want.key)


@pytest.mark.parametrize("size", [1, 2, 47])
@UNUSUAL
def test_uniform_numbers_match_the_defaults_of_jax(name, size):
    want = jax.random.uniform(jax.random.key(9, impl="threefry2x32"), (size,))
    with SETTINGS[name]():
        own = jax.jit(uniform, static_argnums=1)(key_of(9), size)
    np.testing.assert_array_equal(own, want)


KEYS = {
    "typed": lambda: jax.random.key(5),
    "raw": lambda: jax.random.PRNGKey(5),
    "raw, of NumPy": lambda: np.asarray(jax.random.PRNGKey(5)),
    "split": lambda: jax.random.split(jax.random.key(5), 3)[2],
    "folded": lambda: jax.random.fold_in(jax.random.key(5), 11),
}


@pytest.mark.parametrize("form", KEYS)
def test_an_rbg_key_becomes_a_threefry_key(form):
    """An "rbg" key holds the words of the Threefry key twice, also after split and
    fold_in."""
    with jax.default_prng_impl("threefry2x32"):
        want = words(KEYS[form]())
    with jax.default_prng_impl("rbg"):
        given = KEYS[form]()
        assert np.size(given if "raw" in form else words(given)) == 4
        assert words(as_threefry(given)) == want
        assert words(jax.jit(as_threefry)(given)) == want


def test_unsafe_rbg_keys_become_distinct_threefry_keys():
    keys = jax.random.split(jax.random.key(5, impl="unsafe_rbg"), 50)
    found = [tuple(words(as_threefry(key))) for key in keys]
    assert len(set(found)) == 50
    assert found == [tuple(words(as_threefry(key))) for key in keys]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (3, "got 3"),
        ("a", "got 'a'"),
        (np.zeros(2), r"got float64\[2\]"),
        (np.zeros((3, 2), np.uint32), r"got uint32\[3, 2\]"),
        (np.zeros(3, np.uint32), r"got uint32\[3\]"),
        (np.uint32(3), r"got uint32\[\]"),
        (jax.random.split(jax.random.key(0)), r"keys \[2\]; give one, or one for each"),
    ],
)
def test_invalid_keys_are_refused(key, said):
    with pytest.raises(ValueError, match=f"key: want .*{said}") as caught:
        sampling_rows([Sampling()], key)
    assert "\n" not in str(caught.value)


def sampled(target, **options):
    options = {"max_new_tokens": 6, "sampling": Sampling(1.0, seed=3), **options}
    return stree_jax.generate(target, [[1, 2, 3]], **options).tokens[0]


@pytest.fixture(scope="module")
def speculated(target):
    drafter = target.replace(params=perturbed(target.params, 0.1, 3))
    options = {"drafter": drafter, "tree": "chain:2", "rule": "leviathan"}
    return lambda: sampled(target, **options)


@pytest.mark.parametrize("name", ["rbg", "not partitionable"])
def test_a_seed_gives_the_same_text(target, speculated, name):
    key = [lambda: None, lambda: jax.random.key(7)][name == "rbg"]
    plain, tested = sampled(target, key=key()), speculated()
    with SETTINGS[name]():
        assert sampled(target, key=key()) == plain
        assert speculated() == tested


def test_ngrams_are_counted_in_the_same_text_under_rbg(target):
    def text():
        (found,) = sample_text(target, 512, 1.5, 2, 0)
        return found

    want = text()
    with SETTINGS["rbg"]():
        np.testing.assert_array_equal(text(), want)


@UNUSUAL
def test_training_starts_from_the_same_weights(target, name):
    config = target.config
    want = init_params(config, jax.random.key(4, impl="threefry2x32"), jnp.float32)
    settings = train.TrainConfig(steps=1, warmup=0, seed=4)
    subject = train.Text(config, losses.next_token_loss)
    examples = train.Examples(lambda step: iter(()), [], {})
    learner = train._Learner(subject, settings, None, examples, False)
    with SETTINGS[name]():
        found = learner.begin().params
    for one, other in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_training_works_under_strict_dtype_promotion(tmp_path):
    """optax raises a float to an integer power, which strict promotion forbids."""
    config = tiny(1, layers=("mamba",)).config
    settings = train.TrainConfig(
        steps=1, batch=1, length=8, warmup=0, compute_dtype="float32"
    )
    tokens = np.arange(40, dtype=np.uint16)
    fit = (config, settings, losses.next_token_loss, tokens, tokens, tmp_path / "run")
    with jax.numpy_dtype_promotion("strict"):
        _, history = train.fit(*fit, progress=False)
    assert np.isfinite(history[0]["train_loss"])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("jax_debug_infs", True, "jax_debug_infs: .*unset it"),
        ("jax_debug_nans", True, None),
        ("jax_disable_jit", True, None),
    ],
)
def test_debug_settings_give_the_same_text_or_one_line(name, value, said):
    """The tree has one level, because jax.lax.scan cannot have length zero without
    jit."""
    target = tiny(1, layers=("mamba",))
    options = {"max_new_tokens": 2, "drafter": target, "tree": "chain:1"}
    refused = pytest.raises(ValueError, match=said) if said else nullcontext()
    want = sampled(target, **options)
    with setting(name, value), refused:
        assert sampled(target, **options) == want


def test_training_without_jit_is_refused(tmp_path):
    tokens = np.arange(40, dtype=np.uint16)
    settings = train.TrainConfig(steps=1, batch=1, length=8, warmup=0)
    fit = (tiny(1).config, settings, losses.next_token_loss, tokens, tokens)
    with jax.disable_jit(), pytest.raises(ValueError, match="jax_disable_jit: .*unset"):
        train.fit(*fit, tmp_path / "run")
    assert not (tmp_path / "run").exists()
