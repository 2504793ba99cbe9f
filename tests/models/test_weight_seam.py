"""Test that a custom weight format works everywhere like the library's own."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from bench.widen import widened
from stree_jax.checkpoints.info import info
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.export import export_hf
from stree_jax.convert.export_gguf import write_gguf
from stree_jax.models import (
    FORMATS,
    AttentionConfig,
    MLPConfig,
    ModelConfig,
    Rope,
    by_path,
    cast_params,
    init_params,
    parameter_count,
)
from stree_jax.models.drafters.heads import Heads, HeadsConfig, head_logits, init_heads
from stree_jax.models.stack.config import named
from stree_jax.models.stack.memory import size_of
from stree_jax.models.stack.param_table import param_at
from stree_jax.models.weights.weight import take
from stree_jax.sizing.memory import abstract_model, memory_of
from stree_jax.sizing.parts import BufferSizes
from tests.support.checkpoints import HF_CASES
from tests.support.tiny import REAL, perturbed, tiny
from tests.support.toy_format import TOY, Toy

ROOT = Path(__file__).parents[2]
LLAMA = ModelConfig(
    *(64, 64, 32, ("attention", "mlp")),
    mixers=named(
        attention=AttentionConfig(4, 2, 8, rope=Rope(1e4, 8)), mlp=MLPConfig(64)
    ),
)
PROMPTS = [np.random.default_rng(n).integers(8, REAL, n).tolist() for n in (5, 9)]
ASKED = {"max_new_tokens": 12, "stop_tokens": ()}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(FORMATS, TOY.name, TOY)


def in_toy(model):
    return model.replace(params=cast_params(model.config, model.params, "toy16"))


@pytest.fixture(scope="module")
def pair():
    """Returns a hybrid model, a draft model that is mostly right, and plain outputs."""
    model = tiny(1)
    near = model.replace(params=perturbed(model.params, 0.01, 3))
    target, drafter = (
        m.replace(params=cast_params(m.config, m.params, TOY)) for m in (model, near)
    )
    plain = stree_jax.generate(target, PROMPTS, **ASKED, drafter=None)
    assert min(plain.min_margin) > 1e-3, "a tie: take another seed"
    return target, drafter, plain.tokens


# Values


def test_matrices_are_stored_and_other_parameters_are_float32():
    model = tiny(1)
    for path, leaf in by_path(in_toy(model).params).items():
        wanted = by_path(model.params)[path]
        param = param_at(model.config, path)
        if param is None or not param.quantizable:
            assert leaf is wanted or (leaf == wanted).all()
            continue
        assert isinstance(leaf, Toy) and leaf.shape == wanted.shape
        most = np.abs(wanted).max()
        np.testing.assert_allclose(leaf.matrix(), wanted, atol=most / 2**15)
    assert in_toy(model).weight_format is TOY
    assert parameter_count(in_toy(model).params) == parameter_count(model.params)


def test_parts_of_a_weight_equal_weights_of_parts():
    matrix = np.random.default_rng(0).standard_normal((6, 48)).astype(np.float32)
    whole = jax.tree.map(np.asarray, TOY.store(matrix))
    places = slice(8, 16), slice(40, 48)
    part = take(whole, places, 1)
    assert part.shape == (6, 16)
    np.testing.assert_array_equal(
        part.matrix(), take(np.asarray(whole.matrix()), places, 1)
    )
    with pytest.raises(ValueError, match="cannot split units of 8 along axis 1"):
        take(whole, (slice(4, 12),), 1)
    again = TOY.store(take(matrix, places, 1), columns=48)
    np.testing.assert_array_equal(part.blocks, again.blocks)
    np.testing.assert_array_equal(
        take(whole, (slice(2, 4),), 0).blocks, whole.blocks[2:4]
    )


# Outputs


@pytest.mark.parametrize("tree", ["A", "E", "beam:2x3", "auto"])
def test_every_tree_gives_the_output_of_plain_decoding(pair, tree):
    target, drafter, plain = pair
    found = stree_jax.generate(target, PROMPTS, **ASKED, drafter=drafter, tree=tree)
    assert found.tokens == plain


def test_continuing_and_streaming(pair):
    target, drafter, plain = pair
    asked = {"drafter": drafter, "tree": "A", "stop_tokens": ()}
    begun = stree_jax.generate(
        target, PROMPTS, **asked, max_new_tokens=4, keep_past=True
    )
    more = stree_jax.generate(
        target, [[], []], **asked, max_new_tokens=8, past=begun.past
    )
    both = zip(begun.tokens, more.tokens, strict=True)
    assert [[*first, *then] for first, then in both] == [list(row) for row in plain]
    *_, last = stree_jax.stream(target, PROMPTS, **asked, max_new_tokens=12, steps=2)
    assert last.tokens == plain


def test_heads_of_the_format_are_counted_and_run(pair):
    target = pair[0]
    config = HeadsConfig(d_model=32, vocab_size=50, heads=2)
    heads = Heads(init_heads(config, jax.random.key(0), "toy16"), config)
    assert heads.weight_format is TOY
    assert head_logits(heads, target, jnp.ones((1, 32)), 2).shape == (1, 2, 50)
    found = stree_jax.generate(
        target, PROMPTS, **ASKED, drafter=heads, tree="cartesian:2x1"
    )
    assert found.tokens == pair[2]


# Bytes


def test_bytes_are_counted_and_planned(pair):
    target, drafter, plain = pair
    abstract = abstract_model(target.config, "toy16")
    alike = [(x.shape, x.dtype) for x in jax.tree.leaves(target)]
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)] == alike
    weights = memory_of(abstract, None, "chain:0", BufferSizes(2, 256, 16)).weights
    assert weights == size_of(target.params)
    asked = {"drafter": None, "context": 64, "max_new_tokens": 16}
    best = stree_jax.plan(target.config, "100MB", dtypes=["toy16"], **asked).best
    assert best.dtype == "toy16" and best.memory.weights == weights
    held = stree_jax.generate(
        target, PROMPTS, **ASKED, drafter=drafter, tree="A", memory="1GB"
    )
    assert held.tokens == plain


# Files and devices


def test_a_checkpoint_is_loaded_into_the_format(tmp_path):
    """From safetensors and from our own format."""
    HF_CASES["granite"]().save_pretrained(tmp_path / "theirs")
    convert_checkpoint(tmp_path / "theirs", tmp_path / "ours", progress=False)
    plain = stree_jax.load(tmp_path / "theirs", dtype="float32")
    wanted = in_toy(plain)
    for name in ("theirs", "ours"):
        found = stree_jax.load(tmp_path / name, dtype="toy16")
        assert jax.tree.structure(found.params) == jax.tree.structure(wanted.params)
        for got, want in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            np.testing.assert_array_equal(got, want)
    with pytest.raises(CheckpointError, match="kept-int8 or toy16, got 'toy17'"):
        stree_jax.load(tmp_path / "ours", dtype="toy17")


def test_models_are_saved_and_converted_in_the_format(tmp_path):
    """The files of such models load into every format, but cannot be exported."""
    HF_CASES["granite"]().save_pretrained(tmp_path / "theirs")
    model = stree_jax.load(tmp_path / "theirs", dtype="toy16")
    stree_jax.save(model, tmp_path / "saved")
    convert_checkpoint(
        tmp_path / "theirs", tmp_path / "converted", dtype="toy16", progress=False
    )
    exact = {
        path: np.asarray(leaf.matrix() if isinstance(leaf, Toy) else leaf)
        for path, leaf in by_path(model.params).items()
    }
    plain = stree_jax.generate(model, PROMPTS, **ASKED, drafter=None)
    for name in ("saved", "converted"):
        again = stree_jax.load(tmp_path / name)
        assert again.weight_format == TOY
        assert jax.tree.structure(again.params) == jax.tree.structure(model.params)
        for got, want in zip(*map(jax.tree.leaves, (again, model)), strict=True):
            np.testing.assert_array_equal(got, want)
        found = stree_jax.generate(again, PROMPTS, **ASKED, drafter=None)
        assert found.tokens == plain.tokens
        about = info(tmp_path / name)
        assert about["dtype"] == "toy16"
        assert about["weight_bytes"] == size_of(model.params)
        floats = by_path(stree_jax.load(tmp_path / name, dtype="float32").params)
        for path, leaf in floats.items():
            np.testing.assert_array_equal(leaf, exact[path], str(path))
        with pytest.raises(CheckpointError, match="kept quantized; load the model in"):
            export_hf(again.config, again.params, None, tmp_path / "no")


def test_quantized_blocks_are_kept(tmp_path):
    """Q8_0 is kept, with the rows of q and k in our order."""
    params = init_params(LLAMA, jax.random.key(0), jnp.float32)
    write_gguf(LLAMA, params, "q8_0", tmp_path / "q8.gguf")
    exact = by_path(stree_jax.load(tmp_path / "q8.gguf", dtype="float32").params)
    found = by_path(stree_jax.load(tmp_path / "q8.gguf", dtype="toy16").params)
    for path, leaf in found.items():
        if isinstance(leaf, Toy):
            np.testing.assert_array_equal(leaf.matrix(), exact[path], str(path))


def test_a_model_is_widened():
    """Keeps the format's values, as `bench --widen` does."""
    params = perturbed(init_params(LLAMA, jax.random.key(0), jnp.float32), 0.2, 1)
    target = in_toy(stree_jax.Model(params=params, config=LLAMA))
    wide = widened(target, 4)
    assert wide.weight_format is TOY
    text = [[1, 2, 3]]
    np.testing.assert_allclose(
        stree_jax.score(wide, text)[0], stree_jax.score(target, text)[0], atol=2e-2
    )


def test_eight_devices_give_the_output_of_one(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "tests.mesh.toy_format", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["texts"] == [found["plain"]] * len(found["texts"])
    assert found["loaded"] == {"theirs": True, "ours": True}
    assert "columns in units of 8 do not divide by 8 devices" in found["refused"]
