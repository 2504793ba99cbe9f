"""Test MTP layers of Nemotron-H: reading on request, keeping, writing, errors."""

import json
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.cli import main as cli
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.export import export_hf
from stree_jax.convert.families.hf_config import hf_config
from stree_jax.models import blocks, by_path, without_mtp
from tests.support import mtp
from tests.support.checkpoints import (
    assert_same,
    edit_json,
    edit_tensors,
    small_tokenizer,
    sources,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return mtp.write(tmp_path_factory.mktemp("nemotron") / "checkpoint")


@pytest.fixture
def changed(source, tmp_path):
    """Returns a function: changes to config and tensors -> the directory with them."""

    def make(config=lambda values: None, tensors=lambda tensors: None):
        shutil.copytree(source, tmp_path / "changed")
        edit_json(tmp_path / "changed" / "config.json", config)
        edit_tensors(tmp_path / "changed", tensors)
        return tmp_path / "changed"

    return make


def convert(src, dst, warn=lambda text: pytest.fail(text)):
    convert_checkpoint(src, dst, progress=False, warn=warn)
    return dst


def drop(tensors):
    """Drops the layers as transformers does, which keeps the config's field."""
    for name in [name for name in tensors if name.startswith("mtp.")]:
        tensors.pop(name)


def test_every_tensor_is_read(source):
    model = stree_jax.load(source, mtp=True)
    tensors = load_file(source / "model.safetensors")
    params = {
        "/".join(path): leaf for path, leaf in by_path(model.params["mtp"]).items()
    }

    def equal(ours, *theirs):
        joined = np.concatenate([tensors[f"mtp.layers.{n}"].numpy() for n in theirs])
        np.testing.assert_array_equal(params.pop(ours), joined)

    equal("enorm/scale", "0.enorm.weight")
    equal("hnorm/scale", "0.hnorm.weight")
    equal("eh_proj", "0.eh_proj.weight")
    equal("layers_0/norm/scale", "0.norm.weight")
    equal("layers_0/attention/qkv", *(f"0.mixer.{x}_proj.weight" for x in "qkv"))
    equal("layers_0/attention/out", "0.mixer.o_proj.weight")
    equal("layers_1/norm/scale", "1.norm.weight")
    equal("norm/scale", "1.final_layernorm.weight")
    equal("layers_1/moe/router", "1.mixer.gate.weight")
    equal("layers_1/moe/router_bias", "1.mixer.gate.e_score_correction_bias")
    assert {name.split("/")[1] for name in params} == {"moe"}  # as the backbone's


def test_they_are_left_out_by_default(source, changed):
    """By default, a checkpoint with them equals one without them."""
    plain = stree_jax.load(source)
    assert plain.config.mtp == () and "mtp" not in plain.params
    both = stree_jax.load(source, mtp=True)
    assert both.config.mtp == blocks(("attention", "moe"))
    assert_same(without_mtp(both), plain)
    assert_same(stree_jax.load(changed(tensors=drop)), plain)


SPELLINGS = {
    "list": {"mtp_layers_block_type": ["attention", "moe"]},
    "names of transformers 5": {"mtp_layers_block_type": ["full_attention", "moe"]},
    "pattern": {"mtp_hybrid_override_pattern": "*E"},
    "both": {
        "mtp_layers_block_type": ["attention", "moe"],
        "mtp_hybrid_override_pattern": "*E",
    },
    "neither": {},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_the_config(source, changed, spelling):
    def respell(values):
        values.pop("mtp_layers_block_type")
        values.update(SPELLINGS[spelling])

    directory = changed(respell)
    assert_same(stree_jax.load(directory, mtp=True), stree_jax.load(source, mtp=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trips_are_bit_for_bit(source, tmp_path, dtype):
    """Converted, saved, exported and converted again."""
    model = stree_jax.load(source, dtype=dtype, mtp=True)
    convert_checkpoint(source, tmp_path / "ours", dtype=dtype, progress=False)
    stree_jax.save(model, tmp_path / "saved")
    export_hf(model.config, model.params, None, tmp_path / "hf")
    for name in ("ours", "saved", "hf"):
        assert_same(stree_jax.load(tmp_path / name, mtp=True), model)
        assert_same(stree_jax.load(tmp_path / name), without_mtp(model))
    assert_same(
        stree_jax.load(convert(tmp_path / "hf", tmp_path / "x"), mtp=True), model
    )
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    if dtype == "float32":
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_transformers_reads_the_exported_config(source, tmp_path):
    model = stree_jax.load(source, mtp=True)
    export_hf(model.config, model.params, None, tmp_path / "hf")
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    assert config.num_nextn_predict_layers == 1
    assert config.mtp_hybrid_override_pattern == "*E"  # what vLLM and SGLang go by


def test_the_config_of_a_model_without_them(source, tmp_path):
    model = stree_jax.load(source)
    export_hf(model.config, model.params, None, tmp_path / "hf", source=source)
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert not any("mtp" in name or "nextn" in name for name in values)


BROKEN = {
    "no tensors": (None, drop, "num_nextn_predict_layers: 1, but .* has no mtp"),
    "no promise": (
        lambda v: v.pop("num_nextn_predict_layers"),
        None,
        "num_nextn_predict_layers: 0, but .* has mtp",
    ),
    "several": (
        lambda v: v.update(num_nextn_predict_layers=2),
        None,
        r"num_nextn_predict_layers: 2 is not supported \(want 1\)",
    ),
    "unknown layers": (
        lambda v: v.update(mtp_layers_block_type=["rwkv"]),
        None,
        "mtp_layers_block_type: unknown layer type 'rwkv'",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_configs_and_tensors_that_disagree(source, changed, tmp_path, case):
    """An error with mtp=True; convert warns and continues without them."""
    config, tensors, message = BROKEN[case]
    edits = {"config": config, "tensors": tensors}
    directory = changed(**{k: edit for k, edit in edits.items() if edit})
    with pytest.raises(CheckpointError, match=message) as caught:
        stree_jax.load(directory, mtp=True)
    assert "\n" not in str(caught.value)
    plain, told = stree_jax.load(source), []
    with warnings.catch_warnings(action="error"):
        assert_same(stree_jax.load(directory), plain)
    assert info(directory)["mtp_layers"] == []
    assert_same(stree_jax.load(convert(directory, tmp_path / "x", told.append)), plain)
    (line,) = told
    assert str(caught.value) in line and line.endswith("its MTP layers are left out")


TENSORS = {
    "missing": (lambda t: t.pop("mtp.layers.0.hnorm.weight"), "hnorm.* is missing"),
    "unexpected": (
        lambda t: t.update({"mtp.layers.1.enorm.weight": torch.ones(mtp.D)}),
        "unexpected tensor mtp.layers.1.enorm.weight",
    ),
    "shape": (
        lambda t: t.update({"mtp.layers.0.eh_proj.weight": torch.ones(mtp.D, mtp.D)}),
        r"eh_proj.weight: want shape \[32, 64\]",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit(changed, tmp_path, case):
    change, message = TENSORS[case]
    directory = changed(tensors=change)
    with pytest.raises(CheckpointError, match=message):
        stree_jax.load(directory, mtp=True)
    with pytest.raises(CheckpointError, match=message):
        convert(directory, tmp_path / "ours")
    stree_jax.load(directory)


def test_models_without_them(tmp_path):
    """With mtp=True: one line, for any format and for our own."""
    message = "has no MTP layers, which mtp=True and drafter 'mtp' need"
    other = sources(tmp_path)("mamba2")
    ours = convert(other, tmp_path / "ours")
    for directory in (other, ours):
        assert info(directory)["mtp_layers"] == []
        with pytest.raises(CheckpointError, match=message):
            stree_jax.load(directory, mtp=True)


def test_other_classes_cannot_express_them(tmp_path):
    config = stree_jax.load(sources(tmp_path)("llama")).config
    with pytest.raises(CheckpointError, match="llama cannot express .* MTP layers"):
        hf_config(replace(config, mtp=("attention", "mlp")), "float32")


def run(capsys, *arguments):
    code = cli.main([str(a) for a in arguments])
    return code, *capsys.readouterr()


def test_the_command(source, tmp_path, capsys):
    """The command shows, converts and exports them, and drafts with them."""
    ours, hf = tmp_path / "ours", tmp_path / "hf"
    assert run(capsys, "convert", source, ours, "--verify")[0] == 0
    assert run(capsys, "export", ours, hf)[0] == 0
    model = stree_jax.load(source, mtp=True)
    assert_same(stree_jax.load(hf, mtp=True), model)
    small_tokenizer().save(str(hf / "tokenizer.json"))
    facts = [json.loads(run(capsys, "info", path, "--json")[1]) for path in (ours, hf)]
    for fact in facts:
        assert fact["mtp_layers"] == ["attention", "moe"]
        own = sum(leaf.nbytes for leaf in by_path(model.params["mtp"]).values())
        assert fact["mtp_weight_bytes"] == own
        assert fact["weight_bytes"] == info(source)["weight_bytes"]
    options = ["--model", hf, "--drafter", "mtp", "--max-new-tokens", "12"]
    shown = ["--tree", "E", "--compare", "--json", "--ignore-eos"]
    code, out, err = run(capsys, "generate", "a", *options, *shown)
    assert code == 0, err
    report = json.loads(out)
    assert report["equal_to_plain"] and report["tokens_by_origin"]["drafter"] > 0
    code, out, err = run(capsys, "tune", "--model", hf, "--drafter", "mtp")
    assert code == 0 and "step with a tree of 4 nodes: " in out, err
    code, _, err = run(capsys, "generate", "a", "--drafter", "mtp")
    assert code == 2 and "it has no MTP layers" in err
    code, _, err = run(capsys, "generate", "a", *options, "--ngrams", "x")
    assert code == 2 and "proposes tokens for a draft model" in err
