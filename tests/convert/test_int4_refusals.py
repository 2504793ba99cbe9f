"""Test that invalid checkpoints of 4-bit integers raise one line with file and tensor
or field."""

import shutil

import numpy as np
import pytest

from stree_jax.checkpoints.info import info
from stree_jax.convert import CheckpointError, convert_checkpoint
from tests.support.quantized import quantized_llamas
from tests.support.quantized_edits import (
    FIELD,
    UP,
    config,
    count_refused_fields,
    edit,
    gone,
    group,
    put,
)
from tests.support.quantized_int4 import MODELS, SPELLINGS


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    return quantized_llamas(tmp_path_factory.mktemp("int4"), MODELS, SPELLINGS)


def first(value):
    def change(array):
        array = array.copy()
        array.flat[3] = value
        return array

    return change


G, ORDERED, AWQ = "gptq", "gptq in order of activations", "awq"
CT, CTG = "compressed int4", "compressed int4 in order of activations"
MX, AR = "compressed mxfp4", "auto-round"
HEADERS = {  # seen without reading weights
    "gptq of 3 bits": (G, config(bits=3), [f"{FIELD}.bits: 3 is not supported"]),
    "gptq of no bits": (G, config(bits=None), [f"{FIELD}.bits", "missing"]),
    "gptq for marlin": (
        G,
        config(checkpoint_format="marlin"),
        [f"{FIELD}.checkpoint_format: 'marlin' is not supported", "gptq_v2"],
    ),
    "old gptq for marlin": (G, config(is_marlin_format=True), ["is_marlin_format"]),
    "bitblas": (G, config(format="bitblas"), [f"{FIELD}.format", "bitblas"]),
    "in int64": (G, config(pack_dtype="int64"), ["pack_dtype", "int64"]),
    "group of 0": (G, config(group_size=0), [f"{FIELD}.group_size"]),
    "other groups": (G, config(group_size=64), ["scales", "want shape [1, 61]"]),
    "8 bits for some": (
        G,
        config(dynamic={".*up_proj": {"bits": 8}}),
        [f"{FIELD}.dynamic..*up_proj.bits: 8 is not supported"],
    ),
    "bad pattern": (G, config(dynamic={"-:(": {}}), [f"{FIELD}.dynamic.-:(", "'('"]),
    "dynamic of names": (G, config(dynamic=["a"]), [f"{FIELD}.dynamic", "object"]),
    "excluded": (G, config(dynamic={"-:.*up_proj": {}}), [UP, "no scheme for it"]),
    "gptq called awq": (G, config(quant_method="awq"), ["lm_head", "want shape"]),
    "gemv": (AWQ, config(version="gemv"), [f"{FIELD}.version: 'gemv' is not supp"]),
    "gemv_fast": (AWQ, config(version="gemv_fast"), ["'gemv_fast' is not supp"]),
    "awq for marlin": (AWQ, config(version="marlin"), ["'marlin' is not supported"]),
    "llm-awq": (AWQ, config(backend="llm-awq"), [f"{FIELD}.backend", "llm-awq"]),
    "auto-round of 8 bits for some": (
        AR,
        config(extra_config={"model.layers.0.mlp.up_proj": {"bits": 8}}),
        [f"{FIELD}.extra_config.model.layers.0.mlp.up_proj.bits: 8 is not supported"],
    ),
    "auto-round in floats for some": (
        AR,
        config(extra_config={UP: {"bits": 16}}),
        [f"{UP}.qweight", "not quantized"],
    ),
    "auto-round of 2 bits": (AR, config(bits=2), [f"{FIELD}.bits: 2 is not supp"]),
    "auto-round's fake format": (
        AR,
        config(packing_format="auto_round:fake"),
        [f"{FIELD}.packing_format: 'auto_round:fake' with int weights", "known"],
    ),
    "auto-round with a rotation": (
        AR,
        config(rotation_config={"hadamard_type": "random"}),
        [f"{FIELD}.rotation_config", "not supported"],
    ),
    "awq of 8 bits": (AWQ, config(bits=8), [f"{FIELD}.bits: 8 is not supported"]),
    "not converted": (
        AWQ,
        config(modules_to_not_convert=["up_proj"]),
        [f"{UP}.qweight", "not quantized"],
    ),
    "by block": (CT, group(strategy="block"), ["strategy", "block"]),
    "mxfp4 by 16": (MX, group(group_size=16), ["group_size", "32"]),
    "no scales": (G, gone("scales"), [f"{UP}.scales is missing"]),
    "no zeros": (AWQ, gone("qzeros"), [f"{UP}.qzeros is missing"]),
    "no groups": (ORDERED, gone("g_idx"), [f"{UP}.g_idx is missing"]),
    "no groups of ct": (CTG, gone("weight_g_idx"), [f"{UP}.weight_g_idx is missing"]),
    "no shape": (CT, gone("weight_shape"), [f"{UP}.weight_shape is missing"]),
    "groups of another size": (
        G,
        edit("g_idx", lambda g: g[:-1]),
        [f"{UP}.g_idx", "want shape [64], got [63]"],
    ),
    "groups of floats": (G, edit("g_idx", np.float32), [f"{UP}.g_idx", "float32"]),
    "weight of bytes": (
        G,
        edit("qweight", lambda w: w.view(np.uint8)),
        [f"{UP}.qweight: want qweight of dtype I32", "U8"],
    ),
    "three axes": (G, edit("qweight", lambda w: w[None]), [UP, "want a matrix"]),
    "zeros cut": (AWQ, edit("qzeros", lambda z: z[:, 1:]), ["qzeros", "want shape"]),
    "scales turned": (G, edit("scales", lambda s: s.T), [UP, "want shape [2, 128]"]),
    "exponents as floats": (
        MX,
        edit("weight_scale", np.float16),
        [f"{UP}.weight_scale", "want dtype U8"],
    ),
}
DATA = {
    "no weight": (G, gone("qweight"), [f"{UP}.weight", "missing"]),
    "negative group": (G, edit("g_idx", first(-2)), ["g_idx", "group -2", "0..1"]),
    "group too large": (G, edit("g_idx", first(2)), ["g_idx", "group 2", "0..1"]),
    "uneven groups": (
        ORDERED,
        edit("g_idx", lambda g: np.where(np.arange(64) < 40, 0, 1).astype(g.dtype)),
        ["g_idx", "group 0 has 40 columns, want 32"],
    ),
    "NaN": (G, edit("scales", first(np.nan)), [f"{UP}.scales", "not finite"]),
    "infinite": (CT, edit("weight_scale", first(np.inf)), [UP, "not finite"]),
    "NaN of E8M0": (MX, edit("weight_scale", first(255)), [UP, "not finite"]),
    "other shape": (
        CT,
        put("weight_shape", np.array([128, 63])),
        ["weight_shape", "want [128, 64]"],
    ),
}


@pytest.mark.parametrize("case", [*HEADERS, *DATA])
def test_refusals(quantized, tmp_path, case):
    spelling, change, parts = (HEADERS | DATA)[case]
    shutil.copytree(quantized(spelling), tmp_path / "in")
    change(tmp_path / "in")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError) as caught:
        if case in HEADERS:
            info(tmp_path / "in")
        else:
            convert_checkpoint(tmp_path / "in", tmp_path / "out" / "m", progress=False)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert str(tmp_path / "in") in message
    assert "\n" not in message and len(message) < 600
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "spelling", ["gptq by module", AWQ, CTG, "auto-round by module"]
)
def test_odd_fields_never_crash(quantized, tmp_path, spelling):
    shutil.copytree(quantized(spelling), tmp_path / "in")
    assert count_refused_fields(tmp_path / "in") > 20
