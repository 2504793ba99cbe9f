"""Test that GGUF files of every architecture give the same model as their source."""

import dataclasses
import json
import sys
import tracemalloc

import chex
import gguf
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.cli.main import main
from stree_jax.convert.checkpoint import READERS, CheckpointError, convert_checkpoint
from stree_jax.convert.tensors import gguf_blocks as blocks
from stree_jax.convert.tensors.gguf_blocks import DECODERS, KINDS, read_blocks
from stree_jax.cpu_kernels import available
from stree_jax.models import by_path
from stree_jax.models.stack.memory import size_of
from stree_jax.models.weights.panels import kind
from tests.support.checkpoints import assert_same
from tests.support.gguf_files import GGUF_CASES, write_gguf, written
from tests.support.vocabularies import byte_level, write_byte_level

ARCHES = list(GGUF_CASES)
# llama.cpp multiplies the multipliers of these models into the weights.
FOLDED = [name for name in ARCHES if name.startswith("falcon-h1")]
LOGITS = [
    *FOLDED,
    "qwen2",
    "llama",
    "qwen35",
    "falcon-mamba",
    "jamba",
    "qwen3-moe",
    "smollm3",
    "olmo3",
    "mistral3",
    "granite-swa",
    "granite-swa-moe",
    "gemma4",
    "gemma4-moe",
]  # compared with transformers


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return written(tmp_path_factory.mktemp("gguf"))


@pytest.mark.parametrize("name", [n for n in ARCHES if n not in (*FOLDED, "qwen2")])
def test_the_same_parameters_as_of_the_directory(made, name):
    directory, file, _ = made(name)
    theirs, ours = stree_jax.load(directory), stree_jax.load(file)
    stops = ours.config.stop_tokens  # of the vocabulary, which these have not
    assert ours.config == dataclasses.replace(theirs.config, stop_tokens=stops)
    wanted, found = by_path(theirs.params), by_path(ours.params)
    assert wanted.keys() == found.keys()
    for path, leaf in wanted.items():
        assert found[path].dtype == leaf.dtype
        if path[-1] == "A_log":  # stored as -exp(A_log)
            np.testing.assert_allclose(found[path], leaf, 1e-6, 1e-6)
        else:
            np.testing.assert_array_equal(found[path], leaf, str(path))


@pytest.mark.parametrize("name", LOGITS)
def test_the_same_logits_as_transformers(made, name):
    _, file, other = made(name)
    tokens = np.random.default_rng(0).integers(0, 61, (1, 20))
    with torch.no_grad():
        theirs = other(torch.tensor(tokens)).logits[0].numpy()
    ours = stree_jax.score(stree_jax.load(file), jnp.asarray(tokens))
    np.testing.assert_allclose(np.asarray(ours)[0], theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "smollm3"])
def test_windows_that_llama_cpp_ignores_have_no_effect(made, tmp_path, name):
    """llama.cpp 0.3.36 ignores the window of these files."""
    directory, file, _ = made(name)

    def extra(writer):
        writer.add_tokenizer_model("no_vocab")
        writer.add_sliding_window(4)

    more = write_gguf(directory, name, tmp_path / "m.gguf", extra=extra)
    said = rf"m.gguf: {name}.attention.sliding_window: 4 has no effect, as in llama.cpp"
    with pytest.warns(UserWarning, match=said):
        found = stree_jax.load(more)
    assert found.config == stree_jax.load(file).config


# --- quantized weights ----------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [k for k in KINDS.values() if not k.plain and k.name not in DECODERS]
)
def test_blocks_match_the_gguf_package(kind, tmp_path, monkeypatch):
    """In pieces, at any offset, and rounded once."""
    rows = 5
    data = np.random.default_rng(0).integers(0, 256, (rows, 2 * kind.size), np.uint8)
    numbered = gguf.GGMLQuantizationType(kind.number)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(data, numbered)
        (tmp_path / "f").write_bytes(b"123" + data.tobytes())
        monkeypatch.setattr(blocks, "PIECE", 4 * kind.block)  # two rows at a time
        where = tmp_path / "f", "t", kind, 3, (rows, 2 * kind.block)
        for dtype in (np.float32, ml_dtypes.bfloat16):
            found = read_blocks(*where, dtype).astype(np.float32)
            rounded = wanted.astype(dtype).astype(np.float32)
            np.testing.assert_array_equal(found, rounded)
    assert gguf.GGML_QUANT_SIZES[numbered] == (kind.block, kind.size)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_weights_are_those_of_the_file(tmp_path, kind):
    model = GGUF_CASES["llama"][1](hidden_size=64, intermediate_size=96, head_dim=16)
    model.save_pretrained(tmp_path / "model")
    file = write_gguf(tmp_path / "model", "llama", tmp_path / "m.gguf", kind)
    reader = gguf.GGUFReader(file)
    tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_down.weight")
    wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    loaded = stree_jax.load(file, dtype="float32")
    found = loaded.params["layers_3"]["mlp"]["down"]
    np.testing.assert_array_equal(found, wanted)
    facts = info(file)
    quantized = kind.lower() if kind.startswith("Q") else None
    usual = "float32" if kind == "F16" else "bfloat16"
    default = usual if quantized is None or not available() else "kept"
    assert (facts["quantized"], facts["dtype"]) == (quantized, default)
    usual_params = stree_jax.load(file, dtype=usual).params
    assert usual_params["layers_3"]["mlp"]["down"].dtype == usual
    low = stree_jax.load(file, dtype="int8").params["layers_3"]["mlp"]["down"]
    assert low.q.dtype == jnp.int8


@pytest.mark.parametrize(
    ("dtype", "largest"), [("bfloat16", 2**22), ("kept", 2**21 * 17 // 16)]
)
def test_memory_is_one_model(tmp_path, monkeypatch, dtype, largest):
    """Extra memory is the parameters that are read at a time, and pieces of them."""
    model = GGUF_CASES["llama"][1](
        hidden_size=256, vocab_size=8192, head_dim=16, intermediate_size=64
    )
    model.save_pretrained(tmp_path / "model")
    file = write_gguf(tmp_path / "model", "llama", tmp_path / "m.gguf", "Q8_0")
    monkeypatch.setattr(blocks, "PIECE", 2**14)
    monkeypatch.setattr(kind, "PACK_BYTES", 2**14)
    stree_jax.load(file, dtype=dtype)  # what is imported counts as well
    tracemalloc.start()
    loaded = stree_jax.load(file, dtype=dtype)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    leaves = [size_of(leaf) for leaf in by_path(loaded.params).values()]
    assert max(leaves) == largest
    at_a_time = READERS if dtype == "kept" else 1
    assert peak < sum(leaves) + at_a_time * max(leaves) + 2**20


def test_without_the_package(made, tmp_path, monkeypatch):
    """Plain floats do not need it; for others one line says what to install."""
    directory, file, _ = made("llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    stree_jax.load(file)
    data = np.zeros((1, 34), np.uint8)
    (tmp_path / "f").write_bytes(data.tobytes())
    with pytest.raises(CheckpointError, match=r"f: .* Q8_0 .* pip install gguf"):
        read_blocks(tmp_path / "f", "t", KINDS[8], 0, (1, 32), np.float32)


def test_mtp_layers_are_left_out(made, tmp_path):
    directory, file, _ = made("nemotron-h-moe")

    def extra(writer):
        writer.add_tokenizer_model("no_vocab")
        values, arch = writer.kv_data[0], "nemotron_h_moe"
        values[f"{arch}.block_count"].value += 1
        values[f"{arch}.attention.head_count_kv"].value += [2]
        values[f"{arch}.feed_forward_length"].value += [20]
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.4.nextn.eh_proj.weight", np.zeros((8, 4), np.float32))

    more = write_gguf(directory, "nemotron-h-moe", tmp_path / "m.gguf", extra=extra)
    assert_same(stree_jax.load(more), stree_jax.load(file))
    with pytest.raises(CheckpointError, match="m.gguf: it has no MTP layers"):
        stree_jax.load(more, mtp=True)


# --- commands -------------------------------------------------------------------------


def test_convert_export_and_shards(made, tmp_path, capsys):
    directory, _, _ = made("granite-hybrid-moe")
    extra = write_byte_level(byte_level("smollm"), "smollm", "{{ messages }}")
    file = write_gguf(directory, "granite-hybrid-moe", tmp_path / "m.gguf", extra=extra)
    loaded = stree_jax.load(tmp_path)  # the one in a directory
    assert main(["convert", str(file), str(tmp_path / "ours")]) == 0
    converted = stree_jax.load(tmp_path / "ours")
    assert_same(converted, loaded)
    text = "a fox, 12"
    ids = loaded.tokenizer.encode(text).ids
    assert converted.tokenizer.encode(text).ids == ids
    assert main(["export", str(file), str(tmp_path / "hf")]) == 0
    assert_same(stree_jax.load(tmp_path / "hf"), loaded)
    kept = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert kept["bos_token_id"] == 1
    settings = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}"
    capsys.readouterr()
    assert main(["info", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["format"], facts["tokenizer"]) == ("gguf granitehybrid", True)
    write_gguf(directory, "granite-hybrid-moe", tmp_path / "s.gguf", shards=20)
    shards = sorted(tmp_path.glob("s-*.gguf"))
    assert len(shards) > 2
    chex.assert_trees_all_equal(stree_jax.load(shards[0]).params, loaded.params)
    for path, said in (
        (shards[1], "name the first of them, s-00001-of"),
        (tmp_path, "several GGUF files, name one: m.gguf, s-00001"),
    ):
        with pytest.raises(CheckpointError, match=said):
            stree_jax.load(path)
    shards[-1].unlink()
    with pytest.raises(CheckpointError, match="this shard is missing"):
        stree_jax.load(shards[0])


# --- errors ---------------------------------------------------------------------------


# By message: the key that is changed, and its value. If None, the key is removed.
REFUSED = {
    "general.architecture: 'gemma2' is not supported; known: llama": ("arch", "gemma2"),
    "llama.block_count: is missing": ("llama.block_count", None),
    "llama.block_count: want 1..1024, got 2000000000": (
        "llama.block_count",
        2_000_000_000,
    ),
    "llama.block_count: want an integer, got 'two'": ("llama.block_count", "two"),
    "tensor blk.2.attn_norm.weight .* is missing": ("llama.block_count", 3),
    "unexpected tensor blk.1.attn_k.bias": ("llama.block_count", 1),
    "final_logit_softcapping: 30.0 is not supported": (
        "llama.final_logit_softcapping",
        30.0,
    ),
    "rope.scaling.type: 'longrope' is not supported": (
        "llama.rope.scaling.type",
        "longrope",
    ),
    "expert_count: 8 is not supported": ("llama.expert_count", 8),
    "rope.dimension_count: 6 of 10 channels": ("llama.rope.dimension_count", 6),
    "want shape .61, 25. by its metadata": ("llama.embedding_length", 25),
    "attention.value_length: 8 is not": ("llama.attention.value_length", 8),
    "layer_norm_rms_epsilon: want a positive number": (
        "llama.attention.layer_norm_rms_epsilon",
        0.0,
    ),
    "general.type: 'adapter' is not a model; merge it": ("general.type", "adapter"),
}


@pytest.mark.parametrize("said", REFUSED)
def test_refused_in_one_line(made, tmp_path, capsys, said):
    directory, _, _ = made("llama")
    key, value = REFUSED[said]

    def extra(writer):
        write_byte_level(byte_level("smollm"), "smollm")(writer)
        values = writer.kv_data[0]
        if key == "arch":
            values["general.architecture"].value = value
        elif value is None:
            del values[key]
        else:
            values.pop(key, None)
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    file = write_gguf(directory, "llama", tmp_path / "m.gguf", extra=extra)
    with pytest.raises(CheckpointError, match=said):
        convert_checkpoint(file, tmp_path / "dst", progress=False)
    assert main(["convert", str(file), str(tmp_path / "dst")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and str(file) in told[0]
    assert [f.name for f in tmp_path.iterdir()] == ["m.gguf"]
