"""Test that published drafters are read in the layouts of all publishers, and that they
compute what a NumPy reference computes from the same weights."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.checkpoints.drafters import load_drafter
from stree_jax.checkpoints.info import drafter_info
from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.checkpoints.kinds.table import kind_of
from stree_jax.convert.drafters.eagle import TAPS
from stree_jax.models import by_path
from tests.support.loaded_drafters import errors, loaded, tiny_target, write_of
from tests.support.published_drafters import LAYOUTS

EAGLE = [name for name, layout in LAYOUTS.items() if "eagle" in layout.kind]
BLOCK = [name for name in LAYOUTS if name not in EAGLE]
MARKOV = {"deepspec": "gated", "redhat-dspark": "rnn"}  # vanilla in all others


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("layout", BLOCK)
def test_loaded_drafters_compute_what_their_publishers_do(layout, target, tmp_path):
    markov = MARKOV.get(layout, "vanilla")
    wrote = write_of(target, tmp_path / "d", layout, markov=markov)
    drafter = loaded(tmp_path / "d", layout, target, dtype="float32")
    c, facts = drafter.config, wrote.facts
    assert c.boundaries == facts.boundaries and c.drafts == facts.drafts
    assert max(errors(wrote, drafter, target)) < 1e-5


KINDS = {
    "dflash": ("z-lab-flat", "z-lab-nested"),
    "dflash2": ("z-lab-dflash2", "redhat-dflash2"),
    "dspark": ("deepspec", "modelopt", "specforge", "liquid"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_a_drafter_load_alike(kind, target, tmp_path):
    """To equal bits, without the copies of the target's embedding and head. The file of
    a rotary embedding with neighbouring pairs has other rows."""
    found = []
    for layout in KINDS[kind]:
        write_of(target, tmp_path / layout, layout)
        found.append(by_path(loaded(tmp_path / layout, layout, target).params))
    for layout, other in zip(KINDS[kind], found, strict=True):
        assert other.keys() == found[0].keys()
        assert other["fc",].dtype == jnp.bfloat16
        for path, array in other.items():
            if layout == "liquid" and path[-1] in ("q", "kv", "q_norm", "k_norm"):
                array = jnp.sort(array, axis=0)
                np.testing.assert_array_equal(array, jnp.sort(found[0][path], axis=0))
            else:
                np.testing.assert_array_equal(array, found[0][path])


@pytest.mark.parametrize("layout", EAGLE)
def test_eagle_drafters_load(layout, target, tmp_path):
    wrote = write_of(target, tmp_path / "d", layout)
    drafter = load_drafter(tmp_path / "d", target=target)
    assert drafter.config.boundaries == wrote.facts.boundaries
    ids = np.asarray(drafter.params["head_ids"])
    np.testing.assert_array_equal(np.sort(ids), wrote.arrays["head_ids"])
    fc = np.asarray(drafter.params["fc"], np.float64)
    np.testing.assert_array_equal(fc, wrote.arrays["fc"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_info_reads_no_weights(layout, target, tmp_path):
    wrote = write_of(target, tmp_path / "d", layout)
    facts, found = wrote.facts, drafter_info(tmp_path / "d")
    kinds = {"eagle3": "EAGLE-3", "peagle": "P-EAGLE", "dspark": "DSpark"}
    kinds |= {"dflash": "DFlash", "dflash2": "DFlash2"}
    assert found["format"] == kinds[facts.kind]
    listed = layout not in ("yuhuili", "specforge-eagle3")
    said = str(found["boundaries"])
    assert not listed or said.startswith(str(list(facts.boundaries)))
    assert found["layers"] == facts.layers
    if facts.kind not in ("eagle3", "peagle"):
        assert found["drafts"] == facts.drafts
    by_speculators = "speculators_config" in wrote.config
    assert (found["target"] == "example/target") == by_speculators
    quantized = LAYOUTS[layout].quantized
    assert found["quantized"] == ("nvfp4" if quantized else None)


@pytest.mark.parametrize("last", [8, 7])
def test_the_layers_of_nvidias_eagle_config(last, target, tmp_path):
    """Those that begin with 1 are layers whose output is read, unless the last one is
    the number of the target's layers (gpt-oss). `info` does not know that number."""
    write_of(target, tmp_path / "d", "nvidia-eagle3", norm_before_fc=True)
    file = tmp_path / "d" / "config.json"
    config = json.loads(file.read_text())
    config["eagle_config"][TAPS] = [1, 4, last]
    file.write_text(json.dumps(config))
    found = load_drafter(tmp_path / "d", target=target).config
    assert found.boundaries == ((1, 4, 8) if last == 8 else (2, 5, 8))
    assert found.norm_residual and found.input_norm == "whole"
    said = drafter_info(tmp_path / "d")["boundaries"]
    assert said == f"[2, 5, {last + 1}], or [1, 4, {last}] of a target of {last} layers"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "kept"])
def test_dtypes(dtype, target, tmp_path):
    write_of(target, tmp_path / "d", "nvidia")
    drafter = load_drafter(tmp_path / "d", dtype=dtype, target=target)
    format = "bfloat16" if dtype == "kept" else dtype
    assert drafter.weight_format.name == format


def test_float16_becomes_float32(target, tmp_path):
    """Residual streams of some targets have channels beyond the range of float16."""
    write_of(target, tmp_path / "d", "yuhuili")
    assert load_drafter(tmp_path / "d", target=target).weight_format.name == "float32"


def test_kinds_of_the_bundled_files():
    kinds = {"demo-drafter": "draft model", "demo-heads": "Medusa heads"}
    for name, kind in kinds.items():
        assert kind_of(DrafterFiles(name)).name == kind
    assert drafter_info("demo") is None
