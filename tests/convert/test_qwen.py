"""Test Qwen3-Next and Qwen3.5: logits, spellings of files, and MTP layers."""

import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import stree_jax
from stree_jax import models
from stree_jax.checkpoints.info import info
from stree_jax.cli import main as cli
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.export import export_hf
from stree_jax.models import without_mtp
from tests.support import hf_checkpoints as hf
from tests.support import qwen
from tests.support.checkpoints import assert_same, edit_json, edit_tensors
from tests.support.qwen import MAKERS, TOKENS, mtp_score, score
from tests.support.reference import path_to, random_tree

LEFT_OUT = r"model.visual.\* \(the vision encoder\) is left out"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return qwen.checkpoints(tmp_path_factory.mktemp("qwen"))


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def theirs(directory, tokens=TOKENS):
    """Returns the logits of transformers."""
    other = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        return other.eval()(torch.tensor(tokens[None])).logits[0].numpy()


@pytest.mark.parametrize("name", MAKERS)
def test_float64_recomputation(source, name):
    """transformers, the library and the recomputation agree; so do the last two for the
    MTP layers, which transformers lacks."""
    oracle = qwen.Recomputed(source(name))
    wanted = oracle.logits(oracle.target_states(TOKENS))
    assert wanted.std() > 0.5
    close(theirs(source(name)), wanted)
    model = stree_jax.load(source(name), mtp=True)
    close(score(model), wanted)
    mtp = oracle.mtp_logits(TOKENS)
    assert mtp.std() > 0.5
    close(mtp_score(model), mtp)


@pytest.mark.parametrize("name", MAKERS)
def test_trees_of_64_nodes(source, name):
    """Along every path of a random tree, logits are those of the path alone."""
    oracle, rng = qwen.Recomputed(source(name)), np.random.default_rng(5)
    parents, tokens = random_tree(rng, 64), qwen.tokens_of(6, 64)
    found = stree_jax.score_tree(stree_jax.load(source(name)), TOKENS, tokens, parents)
    for leaf in set(range(64)) - set(parents.tolist()):
        path = path_to(parents, leaf)
        states = oracle.target_states(np.concatenate([TOKENS, tokens[path]]))
        close(found[np.array(path)], oracle.logits(states[-len(path) :]))


# Spellings of files


@pytest.mark.parametrize("where", ["model.", "mtp.", ""])
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3-5-moe"])
def test_fused_experts(source, tmp_path, name, where):
    """Fuse the experts of the model, of the MTP layers, or both, as releases do."""
    shutil.copytree(source(name), tmp_path / "fused")
    qwen.fuse_experts(tmp_path / "fused", where)
    plain = stree_jax.load(source(name), mtp=True)
    assert_same(stree_jax.load(tmp_path / "fused", mtp=True), plain)


def in_text_config(values):
    text = dict(values)
    values.clear()
    kind = text["model_type"]
    text.pop("architectures")
    values |= {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": kind.removesuffix("_text"),
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5"},
        "tie_word_embeddings": text.pop("tie_word_embeddings"),
        "eos_token_id": 3,
    }


def nest_tensors(tensors):
    for name in [name for name in tensors if name.startswith("model.")]:
        tensors[f"model.language_{name}"] = tensors.pop(name)
    tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(2, 3, 1, 4, 4)
    tensors["model.visual.blocks.0.attn.qkv.bias"] = torch.zeros(6)


@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-5-moe"])
def test_text_model_within_a_multimodal_one(source, tmp_path, name):
    path = shutil.copytree(source(name), tmp_path / "both")
    edit_json(path / "config.json", in_text_config)
    edit_tensors(path, nest_tensors)
    with pytest.warns(UserWarning, match=LEFT_OUT) as told:
        model = stree_jax.load(path, mtp=True)
    assert len(told) == 1
    plain = stree_jax.load(source(name), mtp=True)
    assert model.config.stop_tokens == (3,)
    changed = replace(model.config, stop_tokens=plain.config.stop_tokens)
    assert_same(model.replace(config=changed), plain)
    facts, text = info(path), info(source(name))
    assert facts.pop("left_out") == ["model.visual.*"]
    for key in ("parameters", "weight_bytes", "mtp_layers", "mtp_weight_bytes"):
        assert facts[key] == text[key]


@pytest.mark.parametrize("field", ["text_config", "tie_word_embeddings"])
def test_odd_fields_of_multimodal_models(source, tmp_path, field):
    """An error of one line that names the field."""
    path = shutil.copytree(source("qwen3-5"), tmp_path / "both")
    edit_json(path / "config.json", in_text_config)
    for odd in (7, "x", [-1], [], True if field == "text_config" else 1.5):
        edit_json(path / "config.json", lambda v, odd=odd: v.update({field: odd}))
        with pytest.raises(CheckpointError, match=field) as caught:
            stree_jax.load(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3-5"])
def test_verify_in_bfloat16(source, tmp_path, name, capsys):
    """Scales of norms keep their bits, and so does the comparison's other side."""
    path = shutil.copytree(source(name), tmp_path / "many-bits")

    def change(tensors):
        for tensor in tensors.values():
            if tensor.ndim == 1:
                tensor *= 0.9173

    edit_tensors(path, change)
    words = ["convert", path, tmp_path / "ours", "--verify", "--dtype", "bfloat16"]
    assert cli.main([str(word) for word in words]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings(f"ignore:.*{LEFT_OUT}:UserWarning")
def test_multimodal_models_of_transformers(tmp_path, experts, tied):
    """Test that a multimodal directory has the logits of its language model."""
    other = hf.qwen3_5_multimodal(experts, tied)
    other.set_experts_implementation("eager")
    other.save_pretrained(tmp_path / "both")
    with torch.no_grad():
        wanted = other(torch.tensor(TOKENS[None])).logits[0].numpy()
    model = stree_jax.load(tmp_path / "both")
    assert model.config.tie_embeddings == tied
    close(score(model), wanted)
    close(theirs(tmp_path / "both"), wanted)
    export_hf(model.config, model.params, None, tmp_path / "text")
    close(theirs(tmp_path / "text"), wanted)


def test_float32_decays_in_a_bfloat16_file(source, tmp_path):
    """A_log keeps its bits; the default dtype is that of the matrices. Scales of norms
    are float32, because 1 + w needs more bits than w."""
    path = shutil.copytree(source("qwen3-5"), tmp_path / "mixed")

    def change(tensors):
        for name, tensor in tensors.items():
            if not name.endswith(("A_log", "linear_attn.norm.weight")):
                tensors[name] = tensor.bfloat16()

    edit_tensors(path, change)
    model, tensors = stree_jax.load(path), load_file(path / "model.safetensors")
    delta = model.params["layers_0"]["delta"]
    assert delta["in_proj"].dtype == jnp.bfloat16
    name = "model.layers.0.linear_attn.A_log"
    np.testing.assert_array_equal(delta["A_log"], tensors[name].numpy())
    scale = tensors["model.norm.weight"].float().numpy() + 1
    np.testing.assert_array_equal(model.params["norm"]["scale"], scale)
    assert model.params["norm"]["scale"].dtype == jnp.float32


# MTP layers


def test_mtp_layers_are_left_out_by_default(source):
    both = stree_jax.load(source("qwen3-5-moe"), mtp=True)
    assert both.config.mtp == models.blocks(("attention", "moe"))
    plain = stree_jax.load(source("qwen3-5-moe"))
    assert plain.config.mtp == ()
    assert_same(without_mtp(both), plain)


@pytest.mark.parametrize("name", MAKERS)
def test_round_trips_with_mtp(source, tmp_path, name):
    """Converted, saved and exported: equal tensors and equal names."""
    model = stree_jax.load(source(name), mtp=True)
    convert_checkpoint(source(name), tmp_path / "ours", progress=False)
    stree_jax.save(model, tmp_path / "saved")
    export_hf(model.config, model.params, None, tmp_path / "hf")
    for path in ("ours", "saved", "hf"):
        assert_same(stree_jax.load(tmp_path / path, mtp=True), model)
        assert_same(stree_jax.load(tmp_path / path), without_mtp(model))
    before = load_file(source(name) / "model.safetensors")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    close(theirs(tmp_path / "hf"), score(model))


def drop_mtp(tensors):
    for name in [name for name in tensors if name.startswith("mtp.")]:
        tensors.pop(name)


def test_the_tensors_decide_if_the_config_says_nothing(source, tmp_path):
    """Qwen3-Next has no field for the number of MTP layers."""
    path = shutil.copytree(source("qwen3-next"), tmp_path / "silent")
    edit_json(path / "config.json", lambda v: v.pop("mtp_num_hidden_layers"))
    expected = stree_jax.load(source("qwen3-next"), mtp=True)
    assert_same(stree_jax.load(path, mtp=True), expected)
    edit_tensors(path, drop_mtp)
    assert_same(stree_jax.load(path), without_mtp(expected))
    assert info(path)["mtp_layers"] == []
    with pytest.raises(CheckpointError, match="it has no MTP layers"):
        stree_jax.load(path, mtp=True)


DISAGREE = {
    "no tensors": (lambda v: None, drop_mtp, "layers: 1, but .* has no mtp"),
    "denied": (
        lambda v: v.update(mtp_num_hidden_layers=0),
        lambda t: None,
        "mtp_num_hidden_layers: 0, but .* has mtp",
    ),
    "several": (
        lambda v: v.update(mtp_num_hidden_layers=2),
        lambda t: None,
        "mtp_num_hidden_layers: 2 is not supported",
    ),
    "own embedding": (
        lambda v: v.update(mtp_use_dedicated_embeddings=True),
        lambda t: None,
        "mtp_use_dedicated_embeddings",
    ),
}


@pytest.mark.parametrize("case", DISAGREE)
def test_mtp_that_is_not_supported(source, tmp_path, case):
    """An error with mtp=True; everything else continues without the layers."""
    config, tensors, message = DISAGREE[case]
    path = shutil.copytree(source("qwen3-5"), tmp_path / "odd")
    edit_json(path / "config.json", config)
    edit_tensors(path, tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        stree_jax.load(path, mtp=True)
    assert "\n" not in str(caught.value)
    plain, told = stree_jax.load(source("qwen3-5")), []
    assert_same(stree_jax.load(path), plain)
    assert info(path)["mtp_layers"] == []
    convert_checkpoint(path, tmp_path / "ours", progress=False, warn=told.append)
    assert_same(stree_jax.load(tmp_path / "ours"), plain)
    assert len(told) == 1 and told[0].endswith("its MTP layers are left out")


def test_missing_mtp_tensors_are_named(source, tmp_path):
    path = shutil.copytree(source("qwen3-5"), tmp_path / "short")
    edit_tensors(path, lambda t: t.pop("mtp.pre_fc_norm_hidden.weight"))
    with pytest.raises(CheckpointError, match="pre_fc_norm_hidden.* is missing"):
        stree_jax.load(path, mtp=True)
    stree_jax.load(path)
