"""Test the writers of published drafters: one drafter, spelled as publishers do."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.drafter_cases import BLOCK, FILE, inputs, prepared
from tests.support.drafter_reference import draft, eagle_draft, peagle_draft
from tests.support.published_drafters import (
    LAYOUTS,
    canonical,
    sizes_of,
    spelled,
    write_drafter,
)
from tests.support.quantized import e2m1

KINDS = ("dflash", "dflash2", "dspark", "eagle3", "peagle")
OWN = {"embed", "head", "head_ids", "markov.after"}  # differ by a layout's vocabulary


def read(directory):
    """Returns the tensors of the directory, and its config."""
    config = json.loads((directory / "config.json").read_text())
    file = directory / "pytorch_model.bin"
    if file.exists():
        return torch.load(file, weights_only=True), config
    return load_file(directory / "model.safetensors"), config


def decoded(tensors, name):
    """Returns the float64 numbers of a tensor, which may be stored in NVFP4."""
    if f"{name}_scale" not in tensors:
        return tensors[name].double().numpy()
    packed = tensors[name].numpy()
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    scale = np.repeat(tensors[f"{name}_scale"].double().numpy(), 16, axis=1)
    return np.vectorize(e2m1)(codes) * scale * tensors[f"{name}_scale_2"].item()


@pytest.mark.parametrize("name", LAYOUTS)
def test_files_hold_the_returned_arrays(name, tmp_path):
    written, layout = write_drafter(tmp_path, name, seed=1), LAYOUTS[name]
    tensors, config = read(tmp_path)
    assert config == written.config
    left = {name for name in tensors if "_scale" not in name} - {"d2t", "t2d"}
    for ours in written.shipped - {"head_ids"}:
        theirs = spelled(ours, layout)
        found = decoded(tensors, theirs).reshape(written.arrays[ours].shape)
        np.testing.assert_array_equal(found, written.arrays[ours], err_msg=theirs)
        left.remove(theirs)
    assert not left
    if "head_ids" in written.arrays:
        ids = tensors["d2t"].numpy() + np.arange(len(tensors["d2t"]))
        np.testing.assert_array_equal(ids, written.arrays["head_ids"])
        np.testing.assert_array_equal(ids, np.flatnonzero(tensors["t2d"].numpy()))
        assert len(tensors["lm_head.weight"]) == len(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_a_kind_hold_the_same_drafter(kind, tmp_path):
    """All layouts but those with NVFP4 hold equal weights, those with NVFP4 hold them
    rounded. The embedding and the rows of a head depend on the layout."""
    names = [name for name, layout in LAYOUTS.items() if layout.kind == kind]
    first = canonical(LAYOUTS[names[0]], 2, sizes_of(kind, {}))
    for name in names:
        written = write_drafter(tmp_path / name, name, seed=2)
        plain = canonical(LAYOUTS[name], 2, sizes_of(kind, {}))
        assert plain.keys() == written.arrays.keys()
        for array, values in plain.items():
            stored = written.arrays[array]
            if LAYOUTS[name].quantized:
                # Half of the widest step of E2M1, and the rounding of its E4M3 scale.
                top = np.abs(values).max(-1, keepdims=True)
                assert (np.abs(values - stored) <= 0.18 * top).all(), array
            else:
                np.testing.assert_array_equal(values, stored)
            if array in first and array not in OWN:
                np.testing.assert_array_equal(values, first[array])


def test_spellings(tmp_path):
    """Each publisher's marks, which a loader has to recognise."""

    def tensors(name, **options):
        written = write_drafter(tmp_path / name, name, **options)
        return read(tmp_path / name)[0], written.config, written.facts

    found, config, facts = tensors("yuhuili")
    assert "midlayer.hidden_norm.weight" in found
    assert found["fc.weight"].dtype == torch.float16
    assert "rope_theta" not in config and facts.boundaries == (2, 4, 5)
    found, config, facts = tensors("modelopt", markov="gated")
    assert {"markov_w1.weight", "gate_proj.bias", "confidence_proj.weight"} <= set(
        found
    )
    assert config["dflash_config"]["shift_label"] and facts.drafts == 4
    found, config, facts = tensors("nvidia")
    assert found["layers.0.mlp.up_proj.weight_scale"].dtype == torch.float8_e4m3fn
    assert found["layers.1.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert config["eagle_aux_hidden_state_layer_ids"] == list(facts.boundaries)
    assert config["target_layer_ids"] == [b - 1 for b in facts.boundaries]
    found, config, facts = tensors("liquid")
    assert "sample_from_anchor" not in config and facts.drafts == 4
    found, config, facts = tensors("z-lab-dflash2")
    assert "candidate_selector.predecessor_codebook" in found
    found, config, facts = tensors("redhat-dspark")
    assert config["aux_hidden_state_layer_ids"] == list(facts.boundaries)
    assert facts.causal == (True, False)


@pytest.mark.parametrize("name", LAYOUTS)
def test_reference_drafts_tokens_of_the_target(name, tmp_path):
    written = write_drafter(tmp_path, name, seed=3)
    rng = np.random.default_rng(3)
    taps = rng.standard_normal((6, len(written.facts.boundaries), 32))
    tokens = rng.integers(0, 64, 6)
    run = {"eagle3": eagle_draft, "peagle": peagle_draft}.get(written.facts.kind)
    if run is None:
        drafts, scores, _ = draft(written.arrays, written.facts, taps, tokens[-1])
        assert len(drafts) == written.facts.drafts
    else:
        drafts, scores = run(written.arrays, written.facts, tokens, taps, 3)
    assert scores.shape == (len(drafts), len(written.arrays["head"]))
    assert set(drafts) <= set(written.arrays.get("head_ids", range(64)))


@pytest.mark.parametrize("case", json.loads(FILE.read_text()))
def test_reference_equals_the_makers_code(case):
    facts, sizes, arrays = prepared(case)
    taps, tokens, count = inputs(facts, sizes)
    sure = []
    if case in BLOCK:
        root, path = tokens[count], tokens[count + 1 : count + 1 + facts.drafts]
        _, scores, sure = draft(arrays, facts, taps[:count], root, path=path)
    elif facts.kind == "peagle":
        _, scores = peagle_draft(arrays, facts, tokens[:count], taps[:count], 3)
    else:
        path = tokens[count : count + 3]
        pairs = tokens[:count], taps[:count]
        _, scores = eagle_draft(arrays, facts, *pairs, 3, path=path)
    theirs = json.loads(FILE.read_text())[case]
    np.testing.assert_array_equal(scores.argmax(-1), theirs["row"])
    np.testing.assert_allclose(scores.max(-1), theirs["best"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(sure, theirs["confidence"], rtol=0, atol=1e-5)


def test_options_of_the_writers(tmp_path):
    """A target of another width, prefixes of names, and given weights."""
    ones = np.ones(32)
    written = write_drafter(
        tmp_path, "yuhuili", target_d=48, prefix="model.", arrays={"norm": ones}
    )
    tensors, config = read(tmp_path)
    assert config["target_hidden_size"] == 48
    assert tensors["model.fc.weight"].shape == (32, 144)
    np.testing.assert_array_equal(tensors["model.norm.weight"].numpy(), ones)
    np.testing.assert_array_equal(written.arrays["norm"], ones)
