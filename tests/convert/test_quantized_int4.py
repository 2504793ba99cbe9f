"""Test checkpoints of 4-bit integers and MXFP4: dequantized bit for bit, and kept."""

import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.models.weights.kept import Panels, Stack
from tests.support import hf_checkpoints as hf
from tests.support.checkpoints import assert_same
from tests.support.quantized import BF16, write
from tests.support.quantized_int4 import MODELS, SPELLINGS

# Names of the kept layouts, as `info` shows them; all others have groups of 32.
SCHEMES = {
    "gptq without groups": "int4_64",
    "gptq by channel": "int4_128+int4_64",
    "gptq by 16": "int4",
    "awq by 64": "int4_64",
    "compressed int4 by channel": "int4_128+int4_64",
    "compressed int4 with unused groups": "int4_64",
    "compressed mxfp4": "mxfp4",
}
KEPT = ["gptq in order of activations", "awq", "compressed int4 by channel"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Returns a function: name of a model -> its directory in bfloat16."""
    root = tmp_path_factory.mktemp("plain")

    def make(name):
        if not (root / name).exists():
            MODELS[name]().bfloat16().save_pretrained(root / name)
        return root / name

    return make


CASES = [("llama", spelling) for spelling in SPELLINGS]
CASES += [("nemotron-h", "gptq"), ("nemotron-h", "awq")]  # with experts by name


@pytest.mark.parametrize(("name", "spelling"), CASES)
def test_parameters(plain, tmp_path, name, spelling):
    """Equal to independently computed numbers, rounded once, bit for bit."""
    from tests.convert.test_quantized import dequantized

    exact = write(plain(name), tmp_path / "in", spelling, SPELLINGS)
    assert sum(t.dtype == np.float64 for t in exact.values()) >= 6
    for dtype in (np.dtype(BF16), np.dtype(np.float32)):
        path = dequantized(plain(name), tmp_path / dtype.name, exact, dtype)
        model = stree_jax.load(tmp_path / "in", dtype=dtype.name)
        assert_same(model, stree_jax.load(path, dtype=dtype.name))
    assert info(tmp_path / "in")["quantized"] == SCHEMES.get(spelling, "int4_32")
