"""Tiny random checkpoints of every format, by name, and edits of them."""

import json
from functools import cache

import chex
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from tests.support.hf_checkpoints import HF_CASES as HF_CASES
from tests.support.hf_checkpoints import VOCAB as VOCAB
from tests.support.hf_checkpoints import granite as granite
from tests.support.native_checkpoints import NATIVE_CASES as NATIVE_CASES
from tests.support.native_checkpoints import write_mambainllama as write_mambainllama
from tests.support.native_checkpoints import write_native as write_native

CASES = [*HF_CASES, *NATIVE_CASES, "mambainllama"]


def sources(root):
    """Returns a function: name of a case -> its directory.

    Each directory is made once. Copy it before changing it.
    """

    @cache
    def make(name):
        if name in HF_CASES:
            HF_CASES[name]().save_pretrained(root / name)
        elif name == "mambainllama":
            write_mambainllama(root / name)
        else:
            write_native(root / name, **NATIVE_CASES[name])
        return root / name

    return make


def edit_json(file, change):
    """Applies `change` to the JSON object in `file`, in place."""
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def edit_tensors(directory, change):
    """Applies `change` to the tensors of a one-file checkpoint, in place."""
    if (file := directory / "model.safetensors").is_file():
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
    else:
        file = directory / "pytorch_model.bin"
        tensors = torch.load(file, weights_only=True)
        change(tensors)
        torch.save(tensors, file)


def assert_same(model, other):
    """Checks that two loaded models have equal configs and bitwise equal parameters."""
    assert model.config == other.config
    chex.assert_trees_all_equal_shapes_and_dtypes(model.params, other.params)
    chex.assert_trees_all_equal(model.params, other.params)


def small_tokenizer():
    words = {"a": 0, "b": 1, "<|endoftext|>": 2}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
