"""Test Medusa heads on disk: published layouts, round trips, and errors."""

import errno
import json
import os
import pickle
from collections import OrderedDict
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.checkpoints.kinds.finding import is_heads
from stree_jax.checkpoints.kinds.heads import ACCURACY, load_heads, save_heads
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.models.drafters.heads import head_logits
from tests.support.heads import random_heads
from tests.support.reference import assert_near
from tests.support.tiny import tiny

D, V = 32, 50
TABLE = ((0.5, 0.25), (0.1, 1 / 3), (0.0, 0.0))
KINDS = {
    "the model's output": dict(heads=3, accuracy=TABLE),
    "own outputs": dict(heads=2, blocks=2, own_output=True),
    "no bias": dict(heads=1, blocks=3, bias=False),
    "outputs alone": dict(heads=2, blocks=0, own_output=True),
    "eleven heads": dict(heads=11),
}


@pytest.fixture(scope="module")
def model():
    return tiny(1, layers=("mlp",))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "heads"
    path.mkdir()
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_heads_load_unchanged(model, tmp_path, kind, dtype):
    """Bitwise, with the accuracies, in the saved dtype or in a given one."""
    heads, path = random_heads(model, dtype=dtype, **KINDS[kind]), tmp_path / "h"
    save_heads(heads, str(path), "a target")
    assert {f.name for f in path.iterdir()} == {
        "config.json",
        "medusa_lm_head.safetensors",
    }
    assert is_heads(DrafterFiles(str(path)))
    assert [p.name for p in tmp_path.iterdir()] == ["h"]
    again, config = load_heads(path), heads.config
    assert again.config == replace(config, bias=again.config.bias)
    assert again.config.bias == (config.bias and config.blocks > 0)
    chex.assert_trees_all_equal(again.params, heads.params)
    chex.assert_trees_all_equal_dtypes(again.params, heads.params)
    for other in ("float32", "bfloat16"):
        cast = jax.tree.map(lambda x, other=other: x.astype(other), heads.params)
        chex.assert_trees_all_equal(load_heads(path, dtype=other).params, cast)
    fields = json.loads((path / "config.json").read_text())
    assert fields["medusa_num_heads"] == config.heads
    assert fields["medusa_num_layers"] == config.blocks
    assert (fields["hidden_size"], fields["vocab_size"]) == (D, V)
    assert fields["base_model_name_or_path"] == "a target"
    assert (ACCURACY in fields) == bool(config.accuracy)


# The published code (FasterDecoding/Medusa, medusa/model/medusa_model.py), with its
# names


class ResBlock(torch.nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.linear = torch.nn.Linear(hidden_size, hidden_size)
        self.act = torch.nn.SiLU()

    def forward(self, x):
        return x + self.act(self.linear(x))


def published(heads=4, blocks=1, seed=0):
    """Returns its `medusa_head`: heads of residual blocks and a matrix without bias."""
    torch.manual_seed(seed)
    made = [
        torch.nn.Sequential(
            *(ResBlock(D) for _ in range(blocks)), torch.nn.Linear(D, V, bias=False)
        )
        for _ in range(heads)
    ]
    return torch.nn.ModuleList(made)


def write(folder, tensors, file="medusa_lm_head.pt", **fields):
    if file.endswith(".safetensors"):
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    if fields is not None:
        (folder / "config.json").write_text(json.dumps(fields))


WRONG_CONFIG = {
    "medusa_num_heads": 2,  # like vicuna-7b's, which has five heads
    "medusa_num_layers": 1,
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "transformers_version": "4.31.0",
}
FILES = ["medusa_lm_head.pt", "medusa_lm_head.safetensors"]


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("file", FILES)
def test_published_heads_load(model, folder, file, blocks):
    """Whatever the number of heads in their config. Their logits are those of
    PyTorch."""
    theirs = published(blocks=blocks)
    tensors = theirs.state_dict()
    assert list(tensors)[:2] == ["0.0.linear.weight", "0.0.linear.bias"]
    assert f"3.{blocks}.weight" in tensors
    write(folder, tensors, file, **WRONG_CONFIG)
    assert is_heads(DrafterFiles(str(folder)))
    heads = load_heads(folder)
    c = heads.config
    assert (c.heads, c.blocks, c.own_output, c.bias) == (4, blocks, True, True)
    assert (c.d_model, c.vocab_size, c.accuracy) == (D, V, ())
    hidden = np.random.default_rng(0).standard_normal((3, D)).astype(np.float32)
    with torch.no_grad():
        want = torch.stack([head(torch.tensor(hidden)) for head in theirs], dim=1)
    found = head_logits(heads, model, jnp.asarray(hidden), 4)
    assert_near(found, want.numpy(), 1e-5)


@pytest.mark.parametrize(
    ("stored", "kept"), [("float16", "float32"), ("bfloat16",) * 2]
)
@pytest.mark.parametrize("file", FILES)
def test_dtypes_of_published_heads(folder, file, stored, kept):
    tensors = {
        n: t.to(getattr(torch, stored)) for n, t in published(2).state_dict().items()
    }
    write(folder, tensors, file)
    heads = load_heads(folder)
    found = np.asarray(heads.params["head_1"]["block_0"]["weight"])
    assert found.dtype.name == kept
    want = tensors["1.0.linear.weight"].float().numpy()
    np.testing.assert_array_equal(found.astype(np.float32), want)


def vllm(tensors, blocks, prefix):
    """Returns the same tensors with vLLM's names."""
    named = {}
    for name, tensor in tensors.items():
        k, j, *rest = name.split(".")
        name = f"lm_heads.{k}.weight"
        if int(j) < blocks:
            name = f"blocks.{k}.layers.{j}.{rest[-1]}"
        named[prefix + name] = tensor
    return named


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_heads_with_the_names_of_vllm_load(folder, prefix):
    tensors = published(3, blocks=2).state_dict()
    write(folder, tensors, "medusa_lm_head.safetensors")
    want = load_heads(folder)
    other = folder.parent / "vllm"
    other.mkdir()
    named = vllm(tensors, 2, prefix)
    assert f"{prefix}blocks.2.layers.1.bias" in named
    write(other, named, "model.safetensors", model_type="medusa")
    assert is_heads(DrafterFiles(str(other)))
    found = load_heads(other)
    assert found.config == want.config
    chex.assert_trees_all_equal(found.params, want.params)


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
def test_heads_with_a_module_prefix_load(folder, prefix):
    tensors = published(2).state_dict()
    write(folder, {prefix + name: t for name, t in tensors.items()})
    found = load_heads(folder)
    own = found.params["head_1"]["output"]["weight"]
    np.testing.assert_array_equal(own, tensors["1.1.weight"].numpy())


def test_heads_that_share_the_output_of_the_model(model, folder):
    """They have no output matrix, like this library's own heads. The config may state
    the vocabulary."""
    tensors = {n: t for n, t in published(2).state_dict().items() if "linear" in n}
    write(folder, tensors)
    heads = load_heads(folder)
    assert not heads.config.own_output and heads.config.heads == 2
    hidden = np.random.default_rng(0).standard_normal((3, D)).astype(np.float32)
    theirs = [head[0] for head in published(2)]
    with torch.no_grad():
        states = torch.stack([block(torch.tensor(hidden)) for block in theirs], dim=1)
    want = states.numpy() @ np.asarray(model.params["embedding"]).T
    assert_near(head_logits(heads, model, jnp.asarray(hidden), 2), want, 1e-5)


def test_a_directory_without_a_config_loads(folder):
    torch.save(published(2).state_dict(), folder / "medusa_lm_head.pt")
    assert load_heads(folder).config.heads == 2


def test_other_directories_are_not_heads(folder):
    assert not is_heads(DrafterFiles(str(folder)))
    (folder / "config.json").write_text('{"model_type": "mamba2"}')
    assert not is_heads(DrafterFiles(str(folder)))


# --- errors ---------------------------------------------------------------------------


def refused(path):
    """Checks that a directory is refused in one line. Returns the line."""
    with pytest.raises(CheckpointError) as caught:
        load_heads(path)
    line = str(caught.value)
    assert line.startswith(str(path)) and "\n" not in line and len(line) < 1000
    return line


def without(name):
    return lambda t: {n: v for n, v in t.items() if n != name}


DAMAGES = {
    "no weight": (without("1.0.linear.weight"), "head_1.block_0.weight is missing"),
    "no bias": (without("2.0.linear.bias"), "head_2.block_0.bias is missing"),
    "no bias of the first": (without("0.0.linear.bias"), "bias belongs to no head"),
    "no output": (without("2.1.weight"), "head_2.output.weight is missing"),
    "no first output": (without("0.1.weight"), "output.weight belongs to no head"),
    "no first block": (without("0.0.linear.weight"), "block_0.weight is missing"),
    "a head left out": (
        lambda t: {n: v for n, v in t.items() if n[0] != "1"},
        "head_1.block_0.bias is missing|head_1.block_0.weight is missing",
    ),
    "a block of another width": (
        lambda t: t | {"1.0.linear.weight": torch.zeros(D, D + 1)},
        r"head_1.block_0.weight: want shape \[32, 32\], got \[32, 33\]",
    ),
    "another vocabulary": (
        lambda t: t | {"2.1.weight": torch.zeros(V + 1, D)},
        r"head_2.output.weight: want shape \[50, 32\], got \[51, 32\]",
    ),
    "a bias that is a matrix": (
        lambda t: t | {"0.0.linear.bias": torch.zeros(D, 1)},
        r"head_0.block_0.bias: want shape \[32\], got \[32, 1\]",
    ),
    "a flat block": (lambda t: t | {"0.0.linear.weight": torch.zeros(D)}, "matri"),
    "a flat output": (lambda t: t | {"0.1.weight": torch.zeros(V)}, "matri"),
    "an output that is a number": (
        lambda t: t | {"0.1.weight": torch.tensor(1.0)},
        "matri",
    ),
    "one tensor more": (
        lambda t: t | {"more": torch.zeros(1)},
        "unexpected tensor more",
    ),
    "a bias of an output": (
        lambda t: t | {"0.1.bias": torch.zeros(V)},
        "head_0.output.bias belongs to no head",
    ),
    "a second output": (
        lambda t: t | {"0.2.weight": torch.zeros(V, D)},
        "0.[12].weight",
    ),
    "a block by two names": (
        lambda t: t | {"blocks.0.layers.0.weight": torch.zeros(D, D)},
        "twice",
    ),
    "a block of one head": (
        lambda t: t | {"0.1.linear.weight": torch.zeros(D, D)},
        "missing",
    ),
    "integers": (
        lambda t: t | {"0.0.linear.weight": torch.zeros(D, D, dtype=torch.int32)},
        "0.0.linear.weight: dtype int32 is not supported|dtype I32 is not supported",
    ),
    "doubles": (
        lambda t: t | {"1.1.weight": torch.zeros(V, D, dtype=torch.float64)},
        "dtype float64 is not supported",
    ),
    "nothing": (lambda t: {}, "want block 0 or an output of head 0"),
    "too many heads": (
        lambda t: {f"{k}.0.linear.weight": torch.zeros(2, 2) for k in range(65)},
        "heads: want 1..64, got 65",
    ),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_tensors_are_refused(folder, name, file):
    damage, message = DAMAGES[name]
    write(folder, damage(dict(published(3).state_dict())), file)
    with pytest.raises(CheckpointError, match=message):
        load_heads(folder)
    assert str(folder / file) in refused(folder)


TABLES = {
    "a number": 0.5,
    "a row": [0.5, 0.5],
    "no rows": [],
    "empty rows": [[], []],
    "a row too few": [[0.5]],
    "uneven rows": [[0.5], [0.5, 0.1]],
    "above 1": [[1.5], [0.5]],
    "below 0": [[-0.1], [0.5]],
    "above 1 together": [[0.6, 0.6], [0.1, 0.1]],
    "not a number": [[float("nan")], [0.5]],
    "infinite": [[float("inf")], [0.5]],
    "words": [["0.5"], ["0.5"]],
    "truths": [[True], [False]],
    "too wide": [[0.01] * 65] * 2,
    "too large": [[10**400], [0]],
    "nested": [[[0.5]], [[0.5]]],
    "an object": {"0": [0.5]},
}


@pytest.mark.parametrize("name", TABLES)
def test_invalid_accuracies_are_refused(folder, name):
    write(folder, published(2).state_dict(), **{ACCURACY: TABLES[name]})
    assert f"config.json: {ACCURACY}: want" in refused(folder)


@pytest.mark.parametrize("rows", ["50", 1.5, None, True, -1, [50]])
def test_an_invalid_vocabulary_size_is_refused(folder, rows):
    """For heads that share the model's output, only the config can state it."""
    tensors = {n: t for n, t in published(2).state_dict().items() if "linear" in n}
    write(folder, tensors, vocab_size=rows)
    assert "config.json: vocab_size: want a number" in refused(folder)


def test_invalid_configs_are_refused(folder):
    write(folder, published(2).state_dict())
    for text in ("[]", "no json", "{"):
        (folder / "config.json").write_text(text)
        refused(folder)


def test_missing_and_invalid_files_are_refused(folder, tmp_path):
    assert "no Medusa heads; want medusa_lm_head.safetensors or" in refused(folder)
    assert "no such directory" in refused(tmp_path / "absent")
    (folder / "medusa_lm_head.pt").mkdir()
    refused(folder)
    (folder / "medusa_lm_head.pt").rmdir()
    for text in (b"", b"hello", b"\x80\x02."):
        for file in FILES:
            (folder / file).write_bytes(text)
            refused(folder)
            (folder / file).unlink()


class Code:
    """An object that creates a file if an unsafe reader unpickles it."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return open, (str(self.canary), "w")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["value", "key", "root"])
def test_code_in_a_pickle_does_not_run(folder, tmp_path, place, zipped):
    canary, tensors = tmp_path / "canary", dict(published(2).state_dict())
    code = Code(canary)
    harmful = {
        "value": tensors | {"0.0.linear.weight": code},
        "key": tensors | {code: torch.zeros(1)},
        "root": code,
    }[place]
    file = folder / "medusa_lm_head.pt"
    if zipped:
        torch.save(harmful, file)
    else:
        file.write_bytes(pickle.dumps(harmful))
    assert "refused by torch.load" in refused(folder)
    assert not canary.exists()


@pytest.mark.parametrize(
    "found",
    [[1, 2], torch.zeros(3), 7, {"0.0.linear.weight": [1.0]}, {3: torch.zeros(2)}],
)
def test_pickles_of_other_objects_are_refused(folder, found):
    torch.save(found, folder / "medusa_lm_head.pt")
    assert "want a dictionary of named tensors" in refused(folder)


def test_an_ordered_dictionary_loads(folder):
    torch.save(OrderedDict(published(2).state_dict()), folder / "medusa_lm_head.pt")
    assert load_heads(folder).config.heads == 2


def test_truncated_files_are_refused(folder):
    for file in FILES:
        write(folder, published(2).state_dict(), file)
        whole = (folder / file).read_bytes()
        for size in (1, 100, len(whole) // 2, len(whole) - 1):
            (folder / file).write_bytes(whole[:size])
            refused(folder)
        (folder / file).unlink()


@pytest.mark.parametrize("dtype", ["float16", "int4", "float", 3])
def test_invalid_dtypes_are_refused(folder, dtype):
    write(folder, published(2).state_dict())
    with pytest.raises(CheckpointError, match="dtype") as caught:
        load_heads(folder, dtype=dtype)
    assert "\n" not in str(caught.value)


# --- saving ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def heads(model):
    return random_heads(model, heads=2)


def test_existing_paths_are_not_overwritten(heads, tmp_path):
    for name, make in {
        "file": lambda p: p.write_text("mine"),
        "folder": lambda p: p.mkdir(),
        "link": lambda p: p.symlink_to("nowhere"),
    }.items():
        make(tmp_path / name)
        with pytest.raises(CheckpointError, match="exists already"):
            save_heads(heads, tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"
    assert not list((tmp_path / "folder").iterdir())
    with pytest.raises(CheckpointError, match="absent: no such directory"):
        save_heads(heads, tmp_path / "absent" / "h")
    assert len(list(tmp_path.iterdir())) == 3


def test_a_failed_save_leaves_nothing(heads, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left\non device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_heads(heads, tmp_path / "h")
    assert not list(tmp_path.iterdir())


def test_weights_of_another_dtype_are_not_written(heads, tmp_path):
    half = replace(
        heads, params=jax.tree.map(lambda x: x.astype("float16"), heads.params)
    )
    with pytest.raises(CheckpointError, match="float16"):
        save_heads(half, tmp_path / "h")
    assert not list(tmp_path.iterdir())


def test_saved_heads_load_in_the_published_code(model, tmp_path):
    """Its module accepts the tensors unchanged."""
    heads = random_heads(model, heads=4, blocks=2, own_output=True)
    save_heads(heads, tmp_path / "h")
    theirs = published(4, blocks=2)
    theirs.load_state_dict(load_file(tmp_path / "h" / "medusa_lm_head.safetensors"))
    hidden = np.random.default_rng(0).standard_normal((3, D)).astype(np.float32)
    with torch.no_grad():
        want = torch.stack([head(torch.tensor(hidden)) for head in theirs], dim=1)
    assert_near(head_logits(heads, model, jnp.asarray(hidden), 4), want.numpy(), 1e-5)
