"""Test that quantized checkpoints are dequantized exactly, bit for bit."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.export import export_hf
from stree_jax.convert.tensors import dequantize, quantization_config, stored_tensors
from stree_jax.verify import parity
from tests.support import hf_checkpoints as hf
from tests.support.checkpoints import assert_same
from tests.support.quantized import (
    BF16,
    E4M3,
    LINEAR,
    MODELS,
    SPELLINGS,
    load_file,
    nearest,
    plain_models,
    write,
)

SCHEMES = {"fp8": "fp8", "nvfp4": "nvfp4", "int8": "int8", "mixed": "fp8+nvfp4"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return plain_models(tmp_path_factory.mktemp("plain"))


def dequantized(source, directory, exact, dtype):
    """Returns the same checkpoint in plain floats, rounded once."""
    shutil.copytree(source, directory)
    kept = {
        name: nearest(t, dtype) if t.dtype == np.float64 else t
        for name, t in exact.items()
    }
    save_file(kept, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", MODELS)
def test_parameters(plain, tmp_path, name, spelling):
    """Equal to independently computed numbers, rounded once, in both dtypes, bit for
    bit."""
    exact = write(plain(name), tmp_path / "in", spelling)
    assert sum(t.dtype == np.float64 for t in exact.values()) >= 6
    for dtype in (np.dtype(BF16), np.dtype(np.float32)):
        path = dequantized(plain(name), tmp_path / dtype.name, exact, dtype)
        model = stree_jax.load(tmp_path / "in", dtype=dtype.name)
        assert model.params["embedding"].dtype == dtype
        assert_same(model, stree_jax.load(path, dtype=dtype.name))


@pytest.mark.parametrize("name", MODELS)
def test_logits(plain, tmp_path, name):
    spelling = {"mamba2": "compressed nvfp4", "llama": "fp8"}.get(
        name, "modelopt mixed"
    )
    exact = write(plain(name), tmp_path / "in", spelling)
    path = dequantized(plain(name), tmp_path / "out", exact, np.dtype(BF16))
    tokens = np.random.default_rng(0).integers(0, hf.VOCAB, (1, 12))
    ours, theirs = (
        np.asarray(stree_jax.score(stree_jax.load(p, "bfloat16"), tokens), np.float32)
        for p in (tmp_path / "in", path)
    )
    assert np.isfinite(ours).all() and ours.std() > 0.1
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_info(plain, tmp_path, spelling):
    """The scheme in the file, and the bytes in memory."""
    write(plain("nemotron-h"), tmp_path / "in", spelling)
    fact = info(tmp_path / "in")
    word = next(word for word in spelling.split() if word.split("_")[-1] in SCHEMES)
    assert fact["quantized"] == SCHEMES[word.split("_")[-1]]
    wanted = info(plain("nemotron-h"))
    assert wanted["quantized"] is None
    assert fact["dtype"] == "bfloat16"
    assert fact["weight_bytes"] == wanted["weight_bytes"]
    assert fact["parameters"] == wanted["parameters"]


def test_without_a_field_in_config(plain, tmp_path):
    """Older exports of Model Optimizer have only its own file."""
    write(plain("llama"), tmp_path / "in", "modelopt nvfp4")
    loaded = stree_jax.load(tmp_path / "in")
    file = tmp_path / "in" / "config.json"
    values = json.loads(file.read_text())
    del values["quantization_config"]
    file.write_text(json.dumps(values))
    with pytest.raises(CheckpointError):
        stree_jax.load(tmp_path / "in")
    quantization = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head*.none"],
    }
    own = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (tmp_path / "in" / "hf_quant_config.json").write_text(json.dumps(own))
    assert_same(stree_jax.load(tmp_path / "in"), loaded)


def test_only_the_cache(plain, tmp_path):
    """Only scales of the KV cache, which are ignored."""
    shutil.copytree(plain("llama"), tmp_path / "in")
    file = tmp_path / "in" / "config.json"
    config = {"quant_method": "modelopt", "quant_algo": None}
    values = json.loads(file.read_text()) | {"quantization_config": config}
    file.write_text(json.dumps(values))
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = np.ones((), np.float32)
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    assert_same(stree_jax.load(tmp_path / "in"), stree_jax.load(plain("llama")))
    assert info(tmp_path / "in")["quantized"] is None


def test_float16_next_to_quantized(plain, tmp_path):
    """Of q, k and v, which are one parameter, only q is quantized."""
    spelling = "compressed int8"
    exact = write(plain("llama"), tmp_path / "in", spelling)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    source = load_file(plain("llama") / "model.safetensors")
    for name in [n for n in exact if n.endswith(("k_proj.weight", "v_proj.weight"))]:
        del tensors[name + "_scale"]
        tensors[name] = exact[name] = source[name].astype(np.float16)
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    out = dequantized(plain("llama"), tmp_path / "out", exact, np.dtype(np.float32))
    for dtype in ("bfloat16", "float32"):
        loaded = stree_jax.load(tmp_path / "in", dtype)
        if dtype == "float32":
            assert_same(loaded, stree_jax.load(out, dtype))
        assert loaded.params["layers_0"]["attention"]["qkv"].dtype == dtype


@pytest.mark.parametrize("spelling", ["modelopt mixed", "compressed int8 packed"])
def test_convert_by_shards(plain, tmp_path, spelling):
    """A weight and its scales may be in shards of their own."""
    write(plain("nemotron-h"), tmp_path / "in", spelling)
    whole = stree_jax.load(tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    names = [f"part-{i}.safetensors" for i in range(3)]
    where = {n: names[i % 3] for i, n in enumerate(tensors)}
    for file in names:
        shard = {n: t for n, t in tensors.items() if where[n] == file}
        save_file(shard, tmp_path / "in" / file)
    (tmp_path / "in" / "model.safetensors").unlink()
    index = tmp_path / "in" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    convert_checkpoint(tmp_path / "in", tmp_path / "out", progress=False)
    assert_same(stree_jax.load(tmp_path / "out"), whole)
    assert info(tmp_path / "out")["quantized"] is None


def test_export_is_plain(plain, tmp_path):
    write(plain("mamba2"), tmp_path / "in", "compressed fp8")
    model = stree_jax.load(tmp_path / "in")
    export_hf(
        model.config, model.params, None, tmp_path / "out", source=tmp_path / "in"
    )
    assert "quant" not in (tmp_path / "out" / "config.json").read_text()
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} <= {np.dtype(BF16), np.dtype("f4")}
    assert all("scale" not in name for name in tensors)
    assert_same(stree_jax.load(tmp_path / "out"), model)


def test_verify_is_refused(plain, tmp_path):
    write(plain("mamba2"), tmp_path / "in", "fp8")
    with pytest.raises(CheckpointError, match="--verify compares with transformers"):
        parity.check_verifiable(tmp_path / "in")


def test_nan_is_reported(plain, tmp_path):
    """E4M3 has a NaN, which is kept and reported, as in any checkpoint."""
    write(plain("mamba2"), tmp_path / "in", "modelopt fp8")
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("in_proj.weight"))
    tensors[name][1, 2] = np.nan
    save_file(tensors, file)
    told = []
    convert_checkpoint(
        tmp_path / "in", tmp_path / "out", progress=False, warn=told.append
    )
    assert len(told) == 1 and f"{name} holds NaN" in told[0]


# Bugs in the reader, which the comparison must find


def swap_nibbles(patch):
    patch.setattr(dequantize, "E2M1_OF_BYTE", dequantize.E2M1_OF_BYTE[:, ::-1])


def multiply_by_reciprocal(patch):
    key = ("nvfp4-pack-quantized", "float", 4)
    wrong = replace(quantization_config.COMPRESSED[key], reciprocal=False)
    patch.setitem(quantization_config.COMPRESSED, key, wrong)


def other_axis(patch):
    """Reads the grid of scales column by column."""
    right = dequantize._spread

    def wrong(values, *where):
        return right(values.T.reshape(values.shape), *where)

    patch.setattr(dequantize, "_spread", wrong)


def fold(patch):
    """Multiplies the global scale into the E4M3 scales."""

    def wrong(scheme, arrays, dtype):
        if "global_scale" in arrays:
            factor = arrays["global_scale"].astype(np.float32).reshape(())
            scale = arrays["scale"].astype(np.float32)
            scale = scale / factor if scheme.reciprocal else scale * factor
            one = np.ones((), np.float32)
            arrays = {**arrays, "scale": scale.astype(E4M3), "global_scale": one}
        return dequantize.dequantize(scheme, arrays, dtype)

    patch.setattr(stored_tensors, "dequantize", wrong)


MISTAKES = {
    "nibbles swapped": ("modelopt nvfp4", swap_nibbles),
    "reciprocal multiplied": ("compressed nvfp4", multiply_by_reciprocal),
    "axis of groups": ("modelopt nvfp4", other_axis),
    "axis of blocks": ("fp8", other_axis),
    "axis of int8 groups": ("compressed int8 by group", other_axis),
    "global scale folded": ("modelopt nvfp4", fold),
    "reciprocal folded": ("compressed nvfp4", fold),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_bugs_are_found(plain, tmp_path, monkeypatch, mistake):
    spelling, plant = MISTAKES[mistake]
    exact = write(plain("llama"), tmp_path / "in", spelling)
    path = dequantized(plain("llama"), tmp_path / "out", exact, np.dtype(BF16))
    right = stree_jax.load(path)
    assert_same(stree_jax.load(tmp_path / "in"), right)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(stree_jax.load(tmp_path / "in"), right)


def test_what_is_quantized(plain, tmp_path):
    """The writer's pattern matches most of each model's matrices."""
    for name in MODELS:
        names = [
            n.removesuffix(".weight")
            for n, t in load_file(plain(name) / "model.safetensors").items()
            if t.ndim == 2
        ]
        left = [n for n in names if not LINEAR.fullmatch(n)]
        kept = ("embed_tokens", "embeddings", "gate", "in_proj_ba")
        assert all(n.endswith(kept) for n in left), left
