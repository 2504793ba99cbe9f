"""Test mixtures of experts in GGUF files, whose quantized matrices are kept."""

import numpy as np
import pytest

import stree_jax
from stree_jax.convert import open_local
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.models import by_path
from stree_jax.models.stack.memory import size_of
from stree_jax.models.stack.sizes import weight_bytes
from stree_jax.models.weights.experts import Experts, expert_at
from stree_jax.models.weights.kept import Panels
from tests.support.gguf_files import EXPERTS, granite, nemotron, write_gguf
from tests.support.gguf_qwen import qwen35moe
from tests.support.hf_checkpoints import GRANITE_MOE

LIMIT = 2e-3  # of the largest logit; the delta mixers magnify rounding 20 times
WIDTH = 64  # of hidden layers; tiles of panels have 64 columns
QWEN = {"hidden_size": WIDTH, "moe_intermediate_size": WIDTH}
QWEN |= {"linear_num_value_heads": 8, "shared_expert_intermediate_size": WIDTH}
ATTENTION = {"layer_types": ["attention"] * 3, "attention_bias": False}
GRANITE = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "mamba_d_head": 16}
GRANITE |= {"shared_intermediate_size": WIDTH}
LATENT = {"hidden_size": WIDTH, "moe_latent_size": WIDTH}
LATENT |= {"moe_intermediate_size": WIDTH, "moe_shared_expert_intermediate_size": WIDTH}
LATENT |= {"mamba_head_dim": 8, "head_dim": 16}
# Name of a case in `GGUF_CASES` -> the model and the type of matrices.
CASES = {
    "qwen35moe": (lambda: qwen35moe(**QWEN), "Q8_0"),
    "granite-moe": (
        lambda: granite(**(ATTENTION | GRANITE_MOE | GRANITE)),
        "Q4_0",
    ),
    "nemotron-h-latent": (lambda: nemotron(**(EXPERTS | LATENT)), "Q8_0"),
}


@pytest.fixture(scope="module", params=CASES)
def file(request, tmp_path_factory):
    model, kind = CASES[request.param]
    root = tmp_path_factory.mktemp("experts")
    model().save_pretrained(root / "model")
    return write_gguf(root / "model", request.param, root / "m.gguf", kind)


def test_experts_are_those_of_the_file(file):
    kept, exact = (stree_jax.load(file, dtype=d) for d in ("kept", "float32"))
    flat, count = by_path(kept.params), 0
    for path, leaf in by_path(exact.params).items():
        if leaf.ndim == 3:
            experts = flat[path]
            assert isinstance(experts, Experts) and isinstance(experts.stack, Panels)
            assert experts.shape == leaf.shape
            for e, matrix in enumerate(leaf):
                own = expert_at(experts.stack, e).matrix()
                np.testing.assert_array_equal(own, matrix)
            count += 1
        elif isinstance(flat[path], Panels):  # rows or columns may change their order
            np.testing.assert_array_equal(flat[path].matrix(), leaf, str(path))
    assert count > 0
    text = [[3, 17, 5, 29, 8, 11, 2, 40, 33]]
    wanted, found = (np.asarray(stree_jax.score(m, text)) for m in (exact, kept))
    assert np.abs(found - wanted).max() < LIMIT * np.abs(wanted).max()
    format = open_local(CheckpointFiles(file)).weight_format("kept")
    assert weight_bytes(kept.config, format) == size_of(kept.params)


def test_trees_give_the_text_of_plain_decoding(file):
    model = stree_jax.load(file, dtype="kept")
    prompts = [[3, 17, 5, 29, 3, 17, 5], [8, 11, 8, 11, 8]]
    tree = [-1, 0, 0, 1, 1, 2, 2]
    options = {"max_new_tokens": 12, "stop_tokens": ()}
    plain = stree_jax.generate(model, prompts, drafter=None, **options)
    drafted = stree_jax.generate(model, prompts, drafter=model, tree=tree, **options)
    assert drafted.tokens == plain.tokens


def test_a_directory_of_kept_experts(file, tmp_path):
    """They are the same after a save, and dequantized on request."""
    kept, exact = (stree_jax.load(file, dtype=d) for d in ("kept", "float32"))
    stree_jax.save(kept, tmp_path / "ours")
    again = by_path(stree_jax.load(tmp_path / "ours").params)
    wide = by_path(stree_jax.load(tmp_path / "ours", dtype="float32").params)
    for path, leaf in by_path(exact.params).items():
        if leaf.ndim == 3:
            assert isinstance(again[path], Experts)
            panels = by_path(kept.params)[path].stack.panels
            np.testing.assert_array_equal(again[path].stack.panels, panels)
            np.testing.assert_array_equal(wide[path], leaf)
