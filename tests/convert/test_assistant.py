"""Test assistants of Gemma 4 as published: fields and tensors that are refused."""

import shutil

import numpy as np
import pytest
import torch

import stree_jax
from stree_jax.convert import CheckpointError
from tests.support import assistant as hf
from tests.support.checkpoints import edit_json, edit_tensors


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return hf.saved("clusters", tmp_path_factory.mktemp("clusters"))[1]


@pytest.fixture
def copied(directory, tmp_path):
    return shutil.copytree(directory, tmp_path / "copy")


FIELDS = {  # field and value, and the start of what is said about it
    "hidden_size_per_layer_input": (8, "is not supported in an assistant"),
    "enable_moe_block": (True, "is not supported in an assistant"),
    "use_double_wide_mlp": (True, "is not supported in an assistant"),
    "num_kv_shared_layers": (2, "2 is not supported"),
}
OUTER = {
    "tie_word_embeddings": (False, "False is not supported"),
    "num_centroids": (7, "7 does not divide 60"),
    "centroid_intermediate_top_k": (13, "want 1..12"),
}


@pytest.mark.parametrize("field", [*FIELDS, *OUTER])
def test_fields_are_refused_by_name(field, copied):
    value, said = (FIELDS | OUTER)[field]
    moe = dict(num_experts=4, top_k_experts=2, moe_intermediate_size=8)

    def change(values):
        if field in FIELDS:
            values["text_config"] |= {"vocab_size_per_layer_input": 60} | moe
            values = values["text_config"]
        values[field] = value

    edit_json(copied / "config.json", change)
    with pytest.raises(CheckpointError, match=f"{field}: {said}") as caught:
        stree_jax.load_drafter(copied)
    assert "\n" not in str(caught.value)


def renamed(tensors):
    tensors["pre.weight"] = tensors.pop("pre_projection.weight")


def without_order(tensors):
    del tensors["masked_embedding.token_ordering"]


def twice(tensors):
    tensors["masked_embedding.token_ordering"][:] = 3


def further(tensors):
    tensors["model.layers.0.self_attn.sinks"] = torch.ones(6)


def thinner(tensors):
    name = "post_projection.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()


TENSORS = {
    renamed: "tensor pre_projection.weight .* is missing",
    without_order: "masked_embedding.token_ordering: want 60 tokens",
    twice: "masked_embedding.token_ordering: want each token once",
    further: "unexpected tensor model.layers.0.self_attn.sinks",
    thinner: r"post_projection.weight: want shape \[32, 20\]",
}


@pytest.mark.parametrize("change", TENSORS)
def test_tensors_are_refused_by_name(change, copied):
    edit_tensors(copied, change)
    with pytest.raises(CheckpointError, match=TENSORS[change]) as caught:
        stree_jax.load_drafter(copied)
    assert "\n" not in str(caught.value)


def test_a_family_that_is_no_name_is_refused(copied):
    edit_json(
        copied / "config.json",
        lambda values: values["text_config"].update(model_type=[]),
    )
    with pytest.raises(CheckpointError, match="text_config: ") as caught:
        stree_jax.load_drafter(copied)
    assert "\n" not in str(caught.value)


def test_unread_keys_are_ignored(directory, copied):
    """Published files may have keys and values of their own for shared layers."""

    def add(tensors):
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.ones(20, 20)
        tensors["model.layers.0.self_attn.k_norm.weight"] = torch.ones(10)

    edit_tensors(copied, add)
    one, other = (stree_jax.load_drafter(path).params for path in (directory, copied))
    np.testing.assert_array_equal(one["pre"], other["pre"])


def test_dtypes(copied):
    assert stree_jax.load_drafter(copied).weight_format.name == "float32"

    def half(tensors):
        for name, x in tensors.items():
            if x.dtype == torch.float32:
                tensors[name] = x.bfloat16()

    edit_tensors(copied, half)
    drafter = stree_jax.load_drafter(copied)
    assert drafter.weight_format.name == "bfloat16"
    assert drafter.params["ordering"].dtype == np.int32
    assert stree_jax.load_drafter(copied, dtype="int8").weight_format.name == "int8"


def test_assistants_are_not_written(directory, tmp_path):
    drafter = stree_jax.load_drafter(directory)
    with pytest.raises(CheckpointError, match="is not written; copy its directory"):
        stree_jax.save_drafter(drafter, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
