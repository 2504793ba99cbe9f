"""Test the index of shards: it decides which file a tensor is read from."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.convert import CheckpointError
from tests.support.checkpoints import assert_same
from tests.support.hf_checkpoints import llama

NORM = "model.norm.weight"
BASE, OVER = "model-base.safetensors", "model-over.safetensors"


@pytest.fixture
def shards(tmp_path):
    """Returns a function that writes a checkpoint as two shards and an index.

    Its arguments: the shards' tensors, and the index's map. All tensors are `found`.
    """
    llama().save_pretrained(tmp_path / "m")
    found = load_file(tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "model.safetensors").unlink()

    def write(base, over, weight_map):
        save_file(base, tmp_path / "m" / BASE)
        save_file(over, tmp_path / "m" / OVER)
        index = tmp_path / "m" / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return tmp_path / "m"

    return found, write


@pytest.mark.parametrize("owner", [BASE, OVER])
@pytest.mark.parametrize("first", [BASE, OVER])
def test_overlay_shards(shards, owner, first):
    """Both shards have a norm. The order of the files in the index does not count."""
    found, write = shards
    over = {NORM: found[NORM] + 3, "lm_head.weight": found["lm_head.weight"]}
    base = {n: t for n, t in found.items() if n != "lm_head.weight"}
    where = dict.fromkeys(base, BASE) | {"lm_head.weight": OVER, NORM: owner}
    order = sorted(where, key=lambda name: where[name] != first)
    path = write(base, over, {name: where[name] for name in order})
    norm = stree_jax.load(path).params["norm"]["scale"]
    np.testing.assert_array_equal(norm, (over if owner == OVER else base)[NORM])
    assert info(path)["parameters"] == sum(t.size for t in found.values())


def test_a_tensor_twice_that_the_index_does_not_list(shards):
    found, write = shards
    where = dict.fromkeys(found, BASE) | {"lm_head.weight": OVER}
    del where[NORM]
    over = {n: found[n] for n in (NORM, "lm_head.weight")}
    path = write(found, over, where)
    with pytest.raises(CheckpointError) as caught:
        info(path)
    said = f"{OVER}: {NORM} is also in {BASE}, and no index says which of the two"
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_tensor_that_the_index_does_not_list_is_read(shards):
    """As in transformers."""
    found, write = shards
    over = {"lm_head.weight": found["lm_head.weight"]}
    where = dict.fromkeys(found, BASE) | {"lm_head.weight": OVER}
    base = {n: t for n, t in found.items() if n not in over}
    whole = stree_jax.load(write(base, over, where))
    assert_same(stree_jax.load(write(base, over, without(where, NORM))), whole)


def test_a_tensor_that_neither_the_index_nor_the_model_has_is_ignored(shards):
    found, write = shards
    over = {"lm_head.weight": found["lm_head.weight"], "old.weight": np.ones(2, "f4")}
    where = dict.fromkeys(found, BASE) | {"lm_head.weight": OVER}
    base = {n: t for n, t in found.items() if n not in over}
    path = write(base, over, where)
    assert info(path)["parameters"] == sum(t.size for t in found.values())
    stree_jax.load(path)
    path = write(base, over, where | {"old.weight": OVER})
    with pytest.raises(CheckpointError, match="unexpected tensor old.weight"):
        stree_jax.load(path)


def without(values, name):
    return {n: v for n, v in values.items() if n != name}
