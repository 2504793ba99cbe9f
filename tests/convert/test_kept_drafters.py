"""Test drafters whose quantized matrices are kept as they are in their files."""

import jax
import numpy as np
import pytest

import stree_jax
from stree_jax.checkpoints.draft_tokens import DraftVocabulary
from stree_jax.checkpoints.drafters import load_drafter
from stree_jax.checkpoints.info import drafter_info
from stree_jax.checkpoints.pair import load_pair, pair_configs
from stree_jax.models import by_path
from stree_jax.models.stack.memory import size_of
from stree_jax.models.weights.kept import Panels
from stree_jax.models.weights.parameters import as_weight
from stree_jax.speculation.drafters.table import abstract_source
from tests.support import kept_files
from tests.support.loaded_drafters import errors, tiny_target, write_of
from tests.support.published_drafters import write_drafter

SIZES = dict(hidden=64, rank=64)  # in whole tiles of 64 columns
KEPT = [
    ("fc",),
    *((f"layers_{i}", name) for i in (0, 1) for name in ("gate_up", "down")),
    ("pairs", "following"),
]


@pytest.fixture(scope="module")
def target():
    return tiny_target(d_model=64)


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def test_matrices_are_kept_as_they_are(target, tmp_path):
    """They equal those of the file to float32, and scores differ by the rounding of
    rows only."""
    wrote = write_of(target, tmp_path / "d", "nvidia", d=64, **SIZES)
    kept, small, whole = (
        load_drafter(tmp_path / "d", dtype=dtype, target=target)
        for dtype in ("kept", "kept-int8", "bfloat16")
    )
    assert kept.weight_format.name == "kept"
    flat = by_path(kept.params)
    packed = {p for p, x in flat.items() if isinstance(x, Panels)}
    assert packed == set(KEPT)
    arrays = wrote.arrays
    for path, names in {
        ("fc",): ["fc"],
        ("layers_1", "gate_up"): ["1.gate", "1.up"],
        ("layers_0", "down"): ["0.down"],
        ("pairs", "following"): ["markov.after"],
    }.items():
        matrix = np.concatenate([arrays[name] for name in names])
        found = as_weight(flat[path]).matrix()
        np.testing.assert_allclose(found, matrix, rtol=2e-7)
    assert max(errors(wrote, kept, target)) < 1e-3  # 16-bit rows, bfloat16 attention
    assert max(errors(wrote, small, target)) < 5e-2
    assert size_of(kept.params) < 0.9 * size_of(whole.params)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns a quantized target and drafters of it."""
    folder = tmp_path_factory.mktemp("kept")
    kept_files.write_llama(folder / "m.gguf")
    sizes = dict(d=128, vocab=320, target_layers=2, boundaries=(1, 2))
    for layout in ("nvidia", "nvidia-bf16"):
        write_drafter(folder / layout, layout, **sizes, **SIZES)
    return folder


def test_a_drafter_of_a_kept_target_is_kept(files):
    """In memory as planned, and text equals plain decoding."""
    names = [str(files / name) for name in ("m.gguf", "nvidia")]
    target, drafter = load_pair(*names, "kept")
    assert drafter.weight_format.name == "kept-int8"
    assert isinstance(drafter.params["fc"], Panels)
    prompts, options = [[3, 9, 4], [60]], dict(max_new_tokens=8, stop_tokens=())
    out = stree_jax.generate(
        target, prompts, drafter=drafter, tree="chain:3", **options
    )
    plain = stree_jax.generate(target, prompts, drafter=None, **options)
    assert out.tokens == plain.tokens
    found = pair_configs(*names, "kept")
    planned = abstract_source(found.drafter, found.weights, found.target).value
    assert shapes(planned) == shapes(drafter)
    loaded = abstract_source(drafter, target.weight_format, target.config).value
    assert shapes(loaded) == shapes(drafter)
    said = drafter_info(files / "nvidia")
    assert said["kept_weight_bytes"] == size_of(drafter.params) < said["weight_bytes"]
    assert said["quantized"] == "nvfp4"


def test_a_kept_drafter_with_a_draft_vocabulary(files):
    names = [str(files / name) for name in ("m.gguf", "nvidia")]
    _, drafter = load_pair(*names, "kept", vocabulary=DraftVocabulary(40))
    following = drafter.params["pairs"]["following"]
    assert isinstance(following, Panels) and following.shape == (40, 64)
    found = pair_configs(*names, "kept", draft_vocab=40)
    planned = abstract_source(found.drafter, found.weights, found.target).value
    own = shapes(planned.params["pairs"]), shapes(drafter.params["pairs"])
    assert own[0] == own[1]


def test_other_drafters_of_a_kept_target_are_int8(files):
    names = [str(files / name) for name in ("m.gguf", "nvidia-bf16")]
    _, drafter = load_pair(*names, "kept")
    assert drafter.weight_format.name == "int8"
    assert pair_configs(*names, "kept").drafter.kept.name == "int8"
    assert "kept_weight_bytes" not in drafter_info(files / "nvidia-bf16")
