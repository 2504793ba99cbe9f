"""Test conversion: memory and disk use, warnings about weights, and --verify."""

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import stree_jax
from stree_jax.cli import main as cli
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.export import export_hf
from stree_jax.convert.saved import store
from stree_jax.verify import parity as verify
from tests.support.checkpoints import HF_CASES, write_mambainllama, write_native

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Returns a function: name of a case -> a new copy of its directory."""
    root = tmp_path_factory.mktemp("sources")
    count = 0

    def make(name):
        nonlocal count
        count += 1
        if not (root / name).exists():
            HF_CASES[name]().save_pretrained(root / name)
        return shutil.copytree(root / name, root / f"{name}-{count}")

    return make


def edit(directory, change):
    """Applies `change` to the tensors of a checkpoint, in place."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def run(capsys, *args):
    code = cli.main([str(arg) for arg in args])
    return code, capsys.readouterr().err


# Disk


@pytest.mark.parametrize("command", ["convert", "export"])
def test_a_full_disk_is_reported_first(source, tmp_path, monkeypatch, command):
    src, asked = source("mamba2"), []
    model = stree_jax.load(src)

    def usage(path):
        asked.append(path)
        assert not any(file.is_file() for file in tmp_path.rglob("*"))
        return Usage(2**40, 2**40 - 10**7, 10**7)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(CheckpointError) as caught:
        if command == "convert":
            convert_checkpoint(src, tmp_path / "full", progress=False)
        else:
            export_hf(model.config, model.params, None, tmp_path / "full")
    assert str(caught.value) == (
        f"{tmp_path / 'full'}: needs 0.07 GB of disk space, but only 0.01 GB are free"
    )
    assert asked == [tmp_path] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_need_follows_the_dtype(source, tmp_path, monkeypatch, dtype):
    """The parameters in the new dtype, 1 % of them, and the margin."""
    model = stree_jax.load(source("mamba2"), dtype=dtype)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    need = int(1.01 * size) + store.SPACE_MARGIN
    arguments = (tmp_path / "new", model.config, dtype)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, need))
    store.check_space(*arguments)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, need - 1))
    with pytest.raises(CheckpointError, match="new: needs 0.07 GB of disk space"):
        store.check_space(*arguments)


# Weights that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_reported(source, tmp_path, value):
    src, name = source("llama"), "model.layers.1.self_attn.k_proj.weight"

    def change(tensors):
        tensors[name][3, 2] = value

    edit(src, change)
    with pytest.warns(UserWarning) as caught:
        convert_checkpoint(src, tmp_path / "ours", progress=False)
    text = f"{src / 'model.safetensors'}: {name} holds NaN or infinity; kept as it is"
    assert [str(w.message) for w in caught] == [text]
    model = stree_jax.load(tmp_path / "ours")
    qkv = model.params["layers_2"]["attention"]["qkv"]
    assert np.argwhere(~np.isfinite(qkv)).tolist() == [[40 + 3, 2]]


def test_the_warning_is_one_line_of_the_command(source, tmp_path, capsys):
    src = source("mamba2")
    edit(src, lambda tensors: tensors["backbone.norm_f.weight"].fill_(torch.nan))
    code, err = run(capsys, "convert", src, tmp_path / "ours")
    lines = [line for line in err.splitlines() if ": warning: " in line]
    assert code == 0 and len(lines) == 1
    assert lines[0].startswith("stree-jax: warning: ")
    assert "model.safetensors: backbone.norm_f.weight holds NaN" in lines[0]


def test_a_cast_that_overflows_is_reported(source, tmp_path):
    src = source("llama")
    edit(src, lambda tensors: tensors["model.norm.weight"].fill_(3.4e38))
    convert_checkpoint(src, tmp_path / "float32", progress=False)
    with pytest.warns(UserWarning, match=r"model\.norm\.weight holds NaN or infinity"):
        convert_checkpoint(src, tmp_path / "b", dtype="bfloat16", progress=False)


# --verify


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mamba2", []),
        ("granite", []),
        ("granite", ["--dtype", "bfloat16"]),
        ("nemotron-h", []),
        ("nemotron-h", ["--dt-floor"]),
    ],
)
def test_verify_finds_the_logits_equal(source, tmp_path, capsys, name, options):
    src = source(name)
    if name == "nemotron-h":  # a floor that shows
        config = json.loads((src / "config.json").read_text())
        config["time_step_min"] = 0.7
        (src / "config.json").write_text(json.dumps(config))
    code, err = run(capsys, "convert", src, tmp_path / "ours", "--verify", *options)
    assert code == 0
    told, absolute, largest, relative = verified(err)
    assert told == "largest difference to transformers' logits"
    assert 0 < absolute < 1e-4 and largest > 0
    assert relative == pytest.approx(absolute / max(largest, 1), rel=0.05)


def verified(err):
    """Returns the words and the three numbers of the last line."""
    told, rest = err.splitlines()[-1].split(": ", 1)
    absolute, rest = rest.split(", of the largest of ")
    largest, relative = rest.split(": ")
    return told, float(absolute), float(largest), float(relative)


@pytest.mark.parametrize(
    ("absolute", "largest", "passes"),
    [
        (0.9e-4, 0.1, True),  # not tighter than at logits of 1
        (1.1e-4, 0.1, False),
        (1.1e-4, 1.0, False),
        (1.2e-4, 40.0, True),  # a real model of 135 M parameters
        (5e-3, 40.0, False),
        (float("nan"), 1.0, False),
        (0.0, float("nan"), False),
    ],
)
def test_the_limit_grows_with_the_logits(absolute, largest, passes):
    difference = verify.Difference(absolute, largest)
    assert (difference.relative <= verify.LIMIT) == passes


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_verify_notices_a_changed_tensor(source, tmp_path, capsys, monkeypatch, factor):
    src, name = source("mamba2"), "backbone.layers.1.mixer.in_proj.weight"
    original = verify.largest_difference

    def change_first(src, *args):  # the source is another one than was converted
        edit(src, lambda tensors: tensors[name][5].mul_(factor))
        return original(src, *args)

    monkeypatch.setattr(verify, "largest_difference", change_first)
    code, err = run(capsys, "convert", src, tmp_path / "ours", "--verify")
    assert code == 1
    assert not verified(err)[3] <= verify.LIMIT
    assert (tmp_path / "ours").is_dir()


@pytest.mark.parametrize("name", ["native", "mambainllama"])
def test_verify_without_a_class_says_so_first(tmp_path, capsys, name):
    {"native": write_native, "mambainllama": write_mambainllama}[name](tmp_path / name)
    code, err = run(capsys, "convert", tmp_path / name, tmp_path / "ours", "--verify")
    assert code == 2 and err.count("\n") == 1
    assert f"{name}: transformers has no class for {name} checkpoints" in err
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_verify_without_a_package_says_so_first(
    source, tmp_path, capsys, monkeypatch, package
):
    src = source("mamba2")
    monkeypatch.setitem(sys.modules, package, None)
    code, err = run(capsys, "convert", src, tmp_path / "ours", "--verify")
    assert code == 2 and not (tmp_path / "ours").exists()
    assert err == f"stree-jax: --verify needs {package}; pip install {package}\n"


def test_verify_wants_every_weight_in_the_source(source, tmp_path):
    """Weights that transformers would fill with random numbers are not compared."""
    src = source("mamba2")
    convert_checkpoint(src, tmp_path / "ours", progress=False)
    name = "backbone.layers.0.mixer.dt_bias"
    tensors = load_file(src / "model.safetensors")
    del tensors[name]
    save_file(tensors, src / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"transformers does not find {name}"):
        verify.largest_difference(src, tmp_path / "ours")


# Memory

PEAK = """
import re, sys
from pathlib import Path
import jax.numpy as jnp
import orbax.checkpoint
import torch
from stree_jax.convert import convert_checkpoint

def peak():  # getrusage would count what the parent process had at the fork
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1])

jnp.zeros(3) + 1
before = peak()
convert_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], progress=False)
print(peak() - before)
"""


def nvfp4(layer, generator):
    """Replaces the matrices of a layer by other numbers."""
    for name in [name for name, tensor in layer.items() if tensor.ndim == 2]:
        rows, columns = layer[name].shape
        sizes = {"weight": (rows, columns // 2), "weight_scale": (rows, columns // 16)}
        found = {
            name.replace("weight", word): torch.randint(
                1, 120, size, dtype=torch.uint8, generator=generator
            )
            for word, size in sizes.items()
        }
        scale = name.replace("weight", "weight_scale")
        found[scale] = found[scale].view(torch.float8_e4m3fn)
        layer |= {**found, f"{scale}_2": torch.tensor(1e-4)}


def write_large(directory, layers, dtype, suffix, quantized=False):
    """Writes a Llama with a shard per layer; returns the number of its weights."""
    d, hidden, vocab = 768, 3072, 64
    config = {
        "model_type": "llama",
        "hidden_size": d,
        "intermediate_size": hidden,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }
    if quantized:
        method = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        config["quantization_config"] = method
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    parts = {f"self_attn.{letter}_proj": (d, d) for letter in "qkvo"} | {
        "mlp.gate_proj": (hidden, d),
        "mlp.up_proj": (hidden, d),
        "mlp.down_proj": (d, hidden),
        "input_layernorm": (d,),
        "post_attention_layernorm": (d,),
    }
    generator = torch.Generator().manual_seed(0)

    def normal(shapes):  # random, so that it shrinks little when written
        return {
            f"model.{name}.weight": torch.randn(shape, generator=generator).to(dtype)
            for name, shape in shapes.items()
        }

    layer = normal(parts)
    count = layers * sum(tensor.numel() for tensor in layer.values())
    if quantized:
        nvfp4(layer, generator)
    shards = [normal({"embed_tokens": (vocab, d), "norm": (d,)})]
    for i in range(layers):
        prefix = f"model.layers.{i}."
        shards.append({k.replace("model.", prefix): v for k, v in layer.items()})
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"part-{i}.{suffix}"
        weight_map |= dict.fromkeys(shard, file)
        (save_file if suffix == "safetensors" else torch.save)(shard, directory / file)
    stem = {"safetensors": "model", "bin": "pytorch_model"}[suffix]
    index = directory / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return count + sum(tensor.numel() for tensor in shards[0].values())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="wants Linux")
@pytest.mark.parametrize(
    ("dtype", "suffix", "layers", "quantized"),
    [
        (torch.bfloat16, "safetensors", 16, False),
        (torch.float32, "bin", 8, False),
        (torch.bfloat16, "safetensors", 16, True),
    ],
)
def test_memory(tmp_path, dtype, suffix, layers, quantized):
    """The parameters in bfloat16 once, and a constant amount.

    A second copy, made by the writer or of the mapped files, would be over the limit.
    """
    size = 2 * write_large(tmp_path / "source", layers, dtype, suffix, quantized)
    paths = [str(tmp_path / name) for name in ("source", "ours")]
    result = subprocess.run(
        [sys.executable, "-c", PEAK, *paths, "bfloat16"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(result.stdout) < size + 2.8e8
