"""Test quantized checkpoints whose recipe is not in config.json, and MLX's layouts."""

import json

import pytest

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.convert import CheckpointError
from tests.support.checkpoints import assert_same, edit_json, edit_tensors
from tests.support.hf_checkpoints import mamba2
from tests.support.quantized import write
from tests.support.quantized_int4 import MODELS, SPELLINGS

# As written by AutoGPTQ 0.2 and AutoAWQ 0.1, and by AutoRound.
GPTQ = {
    "bits": 4,
    "group_size": 32,
    "damp_percent": 0.01,
    "desc_act": False,
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
    "model_name_or_path": None,
    "model_file_base_name": None,
}
AWQ = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
CASES = {
    "AutoGPTQ": ("gptq", "quantize_config.json", GPTQ, "int4_32"),
    "AutoAWQ": ("awq by 64", "quant_config.json", AWQ, "int4_64"),
    "AutoAWQ, a newer name": ("awq by 64", "quantize_config.json", None, "int4_64"),
    "AutoRound": ("auto-round", "quantization_config.json", None, "int4_32"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "llama"
    MODELS["llama"]().bfloat16().save_pretrained(path)
    return path


@pytest.mark.parametrize("case", CASES)
def test_a_recipe_in_a_file_of_its_own(plain, tmp_path, case):
    spelling, file, values, scheme = CASES[case]
    path = tmp_path / "in"
    write(plain, path, spelling, SPELLINGS)
    wanted = stree_jax.load(path, dtype="float32")
    values = SPELLINGS[spelling][1] if values is None else values
    edit_json(path / "config.json", lambda c: c.pop("quantization_config"))
    with pytest.raises(CheckpointError) as caught:
        info(path)
    said = "is quantized, but config.json has no quantization_config; copy"
    assert said in str(caught.value) and "\n" not in str(caught.value)
    (path / file).write_text(json.dumps(values))
    assert info(path)["quantized"] == scheme
    assert_same(stree_jax.load(path, dtype="float32"), wanted)


def test_a_file_that_was_left_over(plain, tmp_path):
    """In the directory of a model without quantized weights it has no effect."""
    path = tmp_path / "in"
    write(plain, path, "gptq", {"gptq": (lambda module, w: None, {})})
    edit_json(path / "config.json", lambda c: c.pop("quantization_config"))
    (path / "quantize_config.json").write_text(json.dumps(GPTQ))
    assert info(path)["quantized"] is None


def test_config_json_takes_precedence(plain, tmp_path):
    path = tmp_path / "in"
    write(plain, path, "gptq", SPELLINGS)
    (path / "quantize_config.json").write_text(json.dumps(GPTQ | {"bits": 8}))
    assert info(path)["quantized"] == "int4_32"


def test_older_files_of_mlx(plain, tmp_path):
    """Their recipe is in the field "quantization" only."""
    path = tmp_path / "in"
    write(plain, path, "mlx", SPELLINGS)
    wanted = stree_jax.load(path, dtype="float32")
    edit_json(
        path / "config.json",
        lambda c: c.update(quantization=c.pop("quantization_config")),
    )
    assert_same(stree_jax.load(path, dtype="float32"), wanted)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 6}, "'affine' weights of 6 bits by MLX are not supported"),
        ({"mode": "nvfp4"}, "mode: 'nvfp4' weights of 4 bits by MLX are not supp"),
        ({"group_size": 48}, "group_size: 48 is not supported"),
    ],
)
def test_other_weights_of_mlx_are_refused(plain, tmp_path, changes, said):
    path = tmp_path / "in"
    write(plain, path, "mlx", SPELLINGS)
    config = path / "config.json"
    edit_json(config, lambda c: c["quantization_config"].update(changes))
    with pytest.raises(CheckpointError, match=said):
        info(path)


def test_convolutions_of_mlx_are_refused(tmp_path):
    """mlx-lm transposes them, from [C, 1, K] to [C, K, 1]."""
    mamba2().save_pretrained(tmp_path / "in")

    def change(tensors):
        for name in [n for n in tensors if n.endswith("conv1d.weight")]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()

    edit_tensors(tmp_path / "in", change)
    with pytest.raises(CheckpointError) as caught:
        info(tmp_path / "in")
    said = "conv1d.weight: in MLX's own layout, which is supported for models of"
    assert said in str(caught.value) and "\n" not in str(caught.value)
