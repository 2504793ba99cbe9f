"""Test that invalid quantized checkpoints raise one line with file and tensor or
field."""

import shutil

import numpy as np
import pytest
import safetensors.torch
import torch

from stree_jax.convert import CheckpointError, convert_checkpoint
from tests.support.quantized import E4M3, compressed_config, quantized_llamas
from tests.support.quantized_edits import (
    FIELD,
    UP,
    config,
    count_refused_fields,
    edit,
    gone,
    group,
    put,
    tensors,
)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    return quantized_llamas(tmp_path_factory.mktemp("quantized"))


def pickled(directory):
    file = directory / "model.safetensors"
    torch.save(safetensors.torch.load_file(file), directory / "pytorch_model.bin")
    file.unlink()


def first_nan(scale):
    scale = scale.astype(np.float32)
    scale.flat[3] = np.nan
    return scale.astype(E4M3)


F4, F8, CT, INT = (
    "modelopt nvfp4",
    "modelopt fp8",
    "compressed nvfp4",
    "compressed int8",
)
BLOCK, PACK = "fp8", "compressed int8 packed"
F32 = np.float32
REFUSALS = {
    # Methods
    **{
        f"method {method}": (F8, config(quant_method=method), [FIELD, method])
        for method in (
            "bitsandbytes",
            "marlin",
            "hqq",
            "quark",
            "torchao",
        )
    },
    "no method": (F8, config(quant_method=None), [f"{FIELD}.quant_method"]),
    "odd method": (F8, config(quant_method=["fp8"]), [f"{FIELD}.quant_method"]),
    **{
        f"algorithm {word}": (F8, config(quant_algo=word), ["quant_algo", str(word)])
        for word in ("W4A16_AWQ", "NVFP4_AWQ", "MXFP8", "W8A8_SQ_PER_CHANNEL", 4)
    },
    "mixed without layers": (
        F8,
        config(quant_algo="MIXED_PRECISION"),
        ["lm_head.weight: no scheme for it in config.json"],
    ),
    "mixed with an odd one": (
        F8,
        config(
            quant_algo="MIXED_PRECISION", quantized_layers={UP: {"quant_algo": "X"}}
        ),
        [f"{FIELD}.quantized_layers.{UP}.quant_algo", "'X'"],
    ),
    "group of 32": (F4, config(group_size=32), ["group_size", "16", "32"]),
    **{
        f"format {word}": (CT, config(format=word), [f"{FIELD}.format", word])
        for word in ("mxfp8-quantized", "marlin-24", "dense", "mixed-precision")
    },
    "4 bits": (INT, group(num_bits=4), ["num_bits", "4-bit int int-quantized"]),
    "packed asymmetric": (PACK, group(symmetric=False), ["symmetric", "pack-quant"]),
    "activation order": (INT, group(actorder="group"), ["actorder", "group"]),
    "by token": (INT, group(strategy="token"), ["strategy", "token"]),
    "odd groups": (PACK, group(group_size="16"), ["group_size"]),
    "group of none": (INT, group(strategy="group"), ["group_size", "missing"]),
    "nvfp4 by none": (CT, group(group_size=None), ["group_size", "16"]),
    "nvfp4 by 32": (CT, group(group_size=32), ["group_size", "16"]),
    "block without size": (INT, group(strategy="block"), ["block_structure"]),
    "bad pattern": (CT, group(targets=["re:("]), ["targets", "re:("]),
    "odd targets": (CT, group(targets="Linear"), ["targets", "list"]),
    "transforms": (INT, config(transform_config={"a": 1}), ["transform_config"]),
    "sparsity": (INT, config(sparsity_config={"format": "sparse-24"}), ["sparsity"]),
    "two groups, which both do not fit": (
        INT,
        config(
            config_groups={
                "a": {
                    "targets": ["Linear"],
                    "weights": {"strategy": "group", "group_size": 7},
                },
                "b": {"targets": ["re:.*"], "weights": {"strategy": "tensor"}},
            }
        ),
        ["lm_head.weight_scale: want shape [] or [1] or [1, 1]"],
    ),
    "ue8m0": (BLOCK, config(scale_fmt="ue8m0"), ["scale_fmt", "ue8m0"]),
    "odd block": (BLOCK, config(weight_block_size=[0, 4]), ["weight_block_size"]),
    "pickled": (F8, pickled, ["pytorch_model.bin", "safetensors files only"]),
    # Tensors that contradict the config
    "ignored": (F4, config(ignore=["*.up_proj"]), [f"{UP}.weight", "not quantized"]),
    "ignored by ct": (CT, config(ignore=[UP]), [f"{UP}.weight_packed", "not quant"]),
    "ignored by fp8": (
        BLOCK,
        config(modules_to_not_convert=["up_proj"]),
        [f"{UP}.weight", "not quantized"],
    ),
    "ignored by pattern": (CT, config(ignore=["re:.*up_proj"]), [UP, "not quantized"]),
    "fp8 called nvfp4": (F8, config(quant_algo="NVFP4"), ["want weight of dtype U8"]),
    "nvfp4 called fp8": (
        F4,
        config(quant_algo="FP8"),
        ["want weight of dtype F8_E4M3"],
    ),
    "spelled by another": (
        F4,
        lambda d: config(**compressed_config("float-quantized", {"num_bits": 8}))(d),
        [FIELD],
    ),
    "plain after all": (
        F8,
        tensors(
            lambda t: [
                t.update({n: v.astype(F32)}) if v.dtype == E4M3 else t.pop(n)
                for n, v in list(t.items())
                if v.dtype == E4M3 or n.endswith("scale")
            ]
        ),
        ["config.json", "no tensor is"],
    ),
    "float weight with a scale": (
        F8,
        put("weight", np.ones((48, 32), F32)),
        [f"unexpected tensor {UP}.weight_scale"],
    ),
    # Scales
    "no scale": (F4, gone("weight_scale"), [f"{UP}.weight_scale is missing"]),
    "no global scale": (
        F4,
        gone("weight_scale_2"),
        [f"{UP}.weight_scale_2 is missing"],
    ),
    "no inverse": (BLOCK, gone("weight_scale_inv"), [f"{UP}.weight_scale_inv is"]),
    "no weight": (F8, gone("weight"), [f"{UP}.weight", "missing"]),
    "no shape": (PACK, gone("weight_shape"), [f"{UP}.weight_shape is missing"]),
    "other shape": (
        PACK,
        put("weight_shape", np.array([48, 31])),
        ["weight_shape", "32"],
    ),
    "reciprocal of 0": (CT, put("weight_global_scale", [F32(0)]), ["scale", "is 0"]),
    "scale of 0": (F8, put("weight_scale", F32(0)), [f"{UP}.weight_scale", "is 0"]),
    "infinite": (F4, put("weight_scale_2", F32(np.inf)), ["weight_scale_2", "finite"]),
    "NaN of E4M3": (F4, edit("weight_scale", first_nan), ["weight_scale", "finite"]),
    "negative": (F8, edit("weight_scale", lambda s: -s), ["weight_scale", "negative"]),
    "scale of other dtype": (
        F4,
        edit("weight_scale", lambda s: s.astype(F32)),
        [f"{UP}.weight_scale", "want dtype F8_E4M3, got float32"],
    ),
    "scale of integers": (F8, put("weight_scale", np.int32(1)), ["dtype", "I32"]),
    "scales turned": (
        F4,
        edit("weight_scale", lambda s: s.T.copy()),
        [f"{UP}.weight_scale", "want shape [48, 2], got [2, 48]"],
    ),
    "two scales": (F8, put("weight_scale", np.ones(2, F32)), ["want shape [] or [1]"]),
    "columns cut": (
        F4,
        edit("weight", lambda w: w[:, :-1].copy()),
        [f"{UP}.weight", "30 columns are not whole groups of 16"],
    ),
    "rows cut": (
        F8,
        edit("weight", lambda w: w[:-1].copy()),
        [f"{UP}.weight", "want shape [48, 32]", "got [47, 32]"],
    ),
    "no matrix": (F8, put("weight", np.ones((2, 3, 4), E4M3)), [UP, "want a matrix"]),
    "twice": (CT, put("weight", np.ones((48, 32), F32)), [f"{UP}.weight", "twice"]),
    "five bits of exponent": (
        F8,
        lambda d: as_e5m2(d),
        [f"{UP}.weight", "F8_E5M2"],
    ),
}


def as_e5m2(directory):
    file = directory / "model.safetensors"
    found = safetensors.torch.load_file(file)
    found[f"{UP}.weight"] = found[f"{UP}.weight"].float().to(torch.float8_e5m2)
    safetensors.torch.save_file(found, file)


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(quantized, tmp_path, case):
    spelling, change, parts = REFUSALS[case]
    shutil.copytree(quantized(spelling), tmp_path / "in")
    change(tmp_path / "in")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError) as caught:
        convert_checkpoint(tmp_path / "in", tmp_path / "out" / "m", progress=False)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert str(tmp_path / "in") in message
    assert "\n" not in message and len(message) < 600
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("spelling", [F4, "modelopt mixed", CT, PACK, BLOCK])
def test_odd_fields_never_crash(quantized, tmp_path, spelling):
    shutil.copytree(quantized(spelling), tmp_path / "in")
    assert count_refused_fields(tmp_path / "in") > 20


def test_bytes_cut_off_after_the_listing(quantized, tmp_path, monkeypatch):
    """Data that safetensors does not read is checked here."""
    from stree_jax.convert.tensors import quantized as module
    from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
    from stree_jax.convert.tensors.tensor_files import open_source

    shutil.copytree(quantized(F8), tmp_path / "in")
    files = CheckpointFiles(tmp_path / "in")
    source = module.logical(open_source(files.path), files)
    file = tmp_path / "in" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:4000])
    with pytest.raises(CheckpointError, match="up_proj.weight"):
        source.read(f"{UP}.weight")
