"""Test groups of compressed-tensors that overlap: the stored tensors decide.

compressed-tensors 0.20 sorts patterns by their text, and others take the first. Both
orders are published, so a reader that trusts one of them misreads files of the other.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import stree_jax
from stree_jax.checkpoints.info import info
from tests.support.checkpoints import assert_same
from tests.support.quantized import (
    CHANNEL,
    FLOAT4,
    FLOAT8,
    MODELS,
    compressed_channel,
    compressed_config,
    compressed_nvfp4,
    nearest,
    write,
)
from tests.support.quantized_int4 import compressed, packed_config

PART = r"re:.*\.(in|out|[qkvo])_proj$"
FP4 = {"weights": FLOAT4 | {"group_size": 16}, "format": "nvfp4-pack-quantized"}
FP8 = {"weights": FLOAT8 | CHANNEL, "format": "float-quantized"}


def int4(**changes):
    group = packed_config(32, **changes)["config_groups"]["group_0"]
    return {"weights": group["weights"], "format": "pack-quantized"}


def in_part(module):
    return module.endswith("_proj") and "mlp" not in module


def floats(module, w):
    return (compressed_channel if in_part(module) else compressed_nvfp4)(module, w)


def integers(module, w):
    if w.shape[1] % 32:  # not whole groups
        return None
    return compressed(32, symmetric=in_part(module))(module, w)


# By name: what is stored, the groups in the file's order, and the result of `info`.
CASES = {
    "a pattern for all, then one for a part": (
        floats,
        [("re:.*", FP4), (PART, FP8)],
        "fp8+nvfp4",
    ),
    "a part, then all": (floats, [(PART, FP8), ("re:.*", FP4)], "fp8+nvfp4"),
    "a later pattern that is broader": (
        floats,
        [(r"re:.*self_attn.*", FP8), (r"re:.*(mlp|self_attn|lm_head).*", FP4)],
        "fp8+nvfp4",
    ),
    "a class twice": (floats, [("Linear", FP8), ("Linear", FP4)], "fp8+nvfp4"),
    "a class twice, turned": (floats, [("Linear", FP4), ("Linear", FP8)], "fp8+nvfp4"),
    "two classes": (floats, [("Linear", FP4), ("Embedding", FP8)], "fp8+nvfp4"),
    "with zero points, and without": (
        integers,
        [("re:.*", int4()), ("Linear", int4(symmetric=False))],
        "int4_32",
    ),
    "without zero points, and with": (
        integers,
        [("re:.*", int4(symmetric=False)), (PART, int4())],
        "int4_32",
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "llama"
    MODELS["llama"]().bfloat16().save_pretrained(path)
    return path


@pytest.mark.parametrize("case", CASES)
def test_stored_tensors_decide(plain, tmp_path, case):
    store, groups, schemes = CASES[case]
    named = {
        f"group_{i}": {"targets": [target], **group}
        for i, (target, group) in enumerate(groups)
    }
    config = compressed_config("mixed-precision", None, config_groups=named)
    exact = write(plain, tmp_path / "in", "case", {"case": (store, config)})
    assert info(tmp_path / "in")["quantized"] == schemes
    model = stree_jax.load(tmp_path / "in", dtype="float32")
    kept = {
        name: nearest(t, np.dtype("f4")) if t.dtype == np.float64 else t
        for name, t in exact.items()
    }
    save_file(kept, tmp_path / "in" / "model.safetensors")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    assert_same(model, stree_jax.load(tmp_path / "in", dtype="float32"))
