"""Test that a custom checkpoint family works everywhere once it is registered, and that
a model remembers its family."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.convert import CheckpointError, CheckpointFiles, convert_checkpoint
from stree_jax.convert.export import export_hf
from stree_jax.convert.families import families
from stree_jax.convert.families.configs import detect
from stree_jax.convert.families.hf_config import hf_config
from stree_jax.models import init_params
from tests.support.checkpoints import HF_CASES, assert_same, small_tokenizer
from tests.support.tiny import perturbed, tiny
from tests.support.toy_family import TOY

LAYERS = ("mlp", "attention", "mlp", "attention")
ASKED = {"max_new_tokens": 8, "stop_tokens": ()}
IDS = [[5, 9, 2, 5, 9, 2]]


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(families(), TOY.name, TOY)


def model_type(directory):
    return json.loads((directory / "config.json").read_text())["model_type"]


def export(model, directory, **options):
    export_hf(model.config, model.params, model.tokenizer, directory, **options)
    return model_type(directory)


def test_a_toy_family_from_load_to_export(toy, tmp_path):
    whole = tiny(0, LAYERS)
    model = whole.replace(
        config=whole.config.with_mixers(mamba=None), tokenizer=small_tokenizer()
    )
    assert export(model, tmp_path / "theirs") == "toy"
    loaded = stree_jax.load(tmp_path / "theirs")
    assert loaded.config.family == "toy"
    assert loaded.config == replace(model.config, num_tokens=model.config.vocab_size)
    assert info(tmp_path / "theirs")["format"] == "toy"
    asked = {"drafter": None, "context": 64, "max_new_tokens": 16}
    assert stree_jax.plan(loaded.config, "100MB", **asked).best is not None
    near = loaded.replace(params=perturbed(loaded.params, 0.01, 3))
    plain = stree_jax.generate(loaded, IDS, drafter=None, **ASKED)
    for tree in ("A", "beam:2x3"):
        found = stree_jax.generate(loaded, IDS, drafter=near, tree=tree, **ASKED)
        assert found.tokens == plain.tokens
    stree_jax.save(loaded, tmp_path / "saved")
    convert_checkpoint(tmp_path / "theirs", tmp_path / "converted", progress=False)
    for name in ("saved", "converted"):
        again = stree_jax.load(tmp_path / name)
        assert again.config.family == "toy"
        assert_same(again, loaded)
        assert export(again, tmp_path / f"{name}-again") == "toy"
        assert_same(stree_jax.load(tmp_path / f"{name}-again"), loaded)


def test_an_unregistered_family_is_unknown(tmp_path):
    config = tiny(0, LAYERS).config
    with pytest.raises(CheckpointError, match="no Hugging Face class has them"):
        hf_config(config, "float32")
    (tmp_path / "config.json").write_text('{"model_type": "toy"}')
    with pytest.raises(CheckpointError, match="'toy' is not supported; known: bail"):
        detect(CheckpointFiles(tmp_path).fields())


@pytest.fixture
def experts(tmp_path):
    """Returns a Qwen3-Next model whose layers all have experts, as in Qwen3.5."""
    HF_CASES["qwen3-next"]().save_pretrained(tmp_path / "source")
    config = stree_jax.load(tmp_path / "source").config
    layers = tuple(str(block).replace("mlp", "moe") for block in config.layers)
    config = replace(config, layers=layers).with_mixers(mlp=None)
    params = init_params(config, jax.random.key(0), jnp.float32)
    return stree_jax.Model(params, config)


def test_a_model_remembers_its_family(experts, tmp_path):
    stree_jax.save(experts, tmp_path / "ours")
    again = stree_jax.load(tmp_path / "ours")
    assert export(again, tmp_path / "new") == "qwen3_next"
    assert_same(stree_jax.load(tmp_path / "new"), again)


def test_the_layers_decide_for_directories_without_a_family(experts, tmp_path):
    stree_jax.save(experts, tmp_path / "ours")
    file = tmp_path / "ours" / "config.json"
    values = json.loads(file.read_text())
    del values["model"]["family"], values["checksum"]
    file.write_text(json.dumps(values))
    old = stree_jax.load(tmp_path / "ours")
    assert export(old, tmp_path / "new") == "qwen3_5_moe_text"


@pytest.mark.parametrize("family", ["llama", "mistral", "mamba", "unknown"])
def test_a_family_that_does_not_describe_the_model_is_not_used(experts, family):
    config = replace(experts.config, family=family)
    assert hf_config(config, "float32")["model_type"] == "qwen3_5_moe_text"
