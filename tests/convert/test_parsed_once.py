"""Test that a checkpoint's small files are parsed once, and bytes counted as stored."""

from collections import Counter

import numpy as np
import pytest
from safetensors.numpy import save_file

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.convert import convert_checkpoint, open_local
from stree_jax.convert.tensors import gguf_header as header
from stree_jax.convert.tensors import tensor_files
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.tensor_files import open_files
from tests.support import published, quantized
from tests.support.checkpoints import edit_json

JSON = {"config.json", "generation_config.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "qwen2"
    path.mkdir()
    published.qwen2(path)
    edit_json(
        path / "generation_config.json", lambda v: v.pop("repetition_penalty")
    )  # of which `load` warns
    return path


@pytest.fixture
def parsed(monkeypatch):
    """Counts how often each JSON file or GGUF header is parsed, by name."""
    counts = Counter()

    def count(module, name):
        real = getattr(module, name)

        def counted(file, *args):
            counts[file.name] += 1
            return real(file, *args)

        monkeypatch.setattr(module, name, counted)

    count(tensor_files, "read_text")
    count(header, "read_one")
    return counts


@pytest.mark.parametrize("read", [stree_jax.load, info])
def test_a_directory_of_transformers(theirs, parsed, read):
    read(theirs)
    assert {name: parsed[name] for name in JSON} == dict.fromkeys(JSON, 1)
    assert parsed["tokenizer.json"] <= 1


@pytest.mark.parametrize("read", [stree_jax.load, info])
def test_a_directory_of_ours(theirs, parsed, read, tmp_path):
    convert_checkpoint(theirs, tmp_path / "ours", progress=False)
    parsed.clear()
    read(tmp_path / "ours")
    assert parsed["config.json"] == 1 and max(parsed.values()) == 1


@pytest.mark.parametrize("read", [stree_jax.load, info])
def test_a_gguf_file(theirs, parsed, read, tmp_path):
    file = tmp_path / "model.gguf"
    published.write_gguf(theirs, "qwen2", file)
    read(file)
    assert parsed == {"model.gguf": 1}


def test_a_conversion(theirs, parsed, tmp_path):
    """It reads the source's config once, and its own result once."""
    convert_checkpoint(theirs, tmp_path / "ours", progress=False)
    assert parsed["config.json"] == 2 and parsed["tokenizer_config.json"] == 1


def test_bytes_are_those_in_the_file(tmp_path):
    arrays = {
        name: np.zeros((3, 8), name) for name in ("float32", "float16", "int8", "int64")
    }
    save_file(arrays, tmp_path / "model.safetensors")
    opened = open_files(tmp_path, [tmp_path / "model.safetensors"])
    for name, array in arrays.items():
        assert opened.nbytes(name) == array.nbytes


@pytest.mark.parametrize("spelling", ["compressed fp8 by channel", "modelopt nvfp4"])
def test_bytes_of_quantized_weights_include_scales(tmp_path, spelling):
    quantized.MODELS["llama"]().save_pretrained(tmp_path / "plain")
    quantized.write(tmp_path / "plain", tmp_path / "in", spelling)
    found = open_local(CheckpointFiles(tmp_path / "in")).source
    down = "model.layers.0.mlp.down_proj"
    stored = open_files(tmp_path, [tmp_path / "in" / "model.safetensors"])
    parts = [name for name in stored.tensors if name.startswith(f"{down}.weight")]
    assert len(parts) > 1 and f"{down}.weight" in found.quantized
    assert found.nbytes(f"{down}.weight") == sum(map(stored.nbytes, parts))
    rows, columns = found.tensors[f"{down}.weight"].shape
    per_number = 0.5 if "fp4" in spelling else 1
    scale_bytes = found.nbytes(f"{down}.weight") - rows * columns * per_number
    assert 0 < scale_bytes < rows * columns / 8
