"""Test that all file formats and config spellings give equal tensors."""

import json
import math
import shutil
import sys
import warnings
from functools import partial

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.cli import main as cli
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.models import init_params, param_shapes
from tests.support.checkpoints import (
    CASES,
    HF_CASES,
    VOCAB,
    assert_same,
    edit_json,
    edit_tensors,
    small_tokenizer,
    sources,
)

convert = partial(convert_checkpoint, progress=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return sources(tmp_path_factory.mktemp("sources"))


def write_shards(directory, tensors, suffix):
    """Replaces the file of tensors by three shards and an index."""
    weight_map = {}
    for i in range(3):
        name = f"part-{i}.{suffix}"
        part = dict(list(tensors.items())[i::3])
        weight_map |= dict.fromkeys(part, name)
        (save_file if suffix == "safetensors" else torch.save)(part, directory / name)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    index = directory / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("name", CASES)
def test_converted_is_loaded_directly(source, tmp_path, name):
    direct = stree_jax.load(source(name))
    convert(source(name), tmp_path / "converted")
    converted = stree_jax.load(tmp_path / "converted")
    assert_same(converted, direct)
    stree_jax.save(converted, tmp_path / "saved")
    assert_same(stree_jax.load(tmp_path / "saved"), direct)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["converted", "saved"]
    # Not run, because that would compile a program for every shape.
    init = partial(init_params, direct.config, dtype=jnp.float32)
    expected = jax.eval_shape(init, jax.random.key(0))
    chex.assert_trees_all_equal_shapes_and_dtypes(direct.params, expected)


def test_shapes_of_a_deep_model_are_those_of_its_init(source):
    config = stree_jax.load(source("granite")).config
    params = init_params(config, jax.random.key(0), jnp.float32)
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    expected = {tuple(k.key for k in path): leaf.shape for path, leaf in flat}
    assert param_shapes(config) == expected


# Weights and files


@pytest.mark.parametrize("name", ["mamba2", "llama", "granite"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_16_bit_weights(tmp_path, name, stored):
    """bfloat16 stays as it is, bit for bit; float16 becomes float32."""
    other = HF_CASES[name]().to(getattr(torch, stored))
    other.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "converted")
    model = stree_jax.load(tmp_path / "converted")
    assert_same(model, stree_jax.load(tmp_path / "source"))
    kept = "bfloat16" if stored == "bfloat16" else "float32"
    assert model.params["embedding"].dtype == kept
    embedding = other.get_input_embeddings().weight.detach().float().numpy()
    np.testing.assert_array_equal(model.params["embedding"], embedding.astype(kept))
    if model.config.mixers.get("mamba") is not None:
        mixer = model.params["layers_0"]["mamba"]
        assert {mixer[k].dtype.name for k in ("A_log", "dt_bias", "D")} == {"float32"}


def test_dtype_argument(source, tmp_path):
    exact = stree_jax.load(source("mamba2"))
    convert(source("mamba2"), tmp_path / "rounded", dtype="bfloat16")
    rounded = stree_jax.load(tmp_path / "rounded")
    assert_same(rounded, stree_jax.load(source("mamba2"), dtype=jnp.bfloat16))
    table = np.asarray(exact.params["embedding"]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rounded.params["embedding"], table)
    back = stree_jax.load(tmp_path / "rounded", dtype="float32")
    assert back.params["embedding"].dtype == "float32"
    for wrong in ("float16", "int4", "nonsense"):
        with pytest.raises(
            CheckpointError, match="dtype: want float32, bfloat16, int8"
        ):
            stree_jax.load(tmp_path / "rounded", dtype=wrong)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards(source, tmp_path, suffix):
    shutil.copytree(source("granite"), tmp_path / "shards")
    file = tmp_path / "shards" / "model.safetensors"
    write_shards(tmp_path / "shards", load_file(file), suffix)
    file.unlink()
    assert_same(stree_jax.load(tmp_path / "shards"), stree_jax.load(source("granite")))


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_new_and_old(source, tmp_path, zipped):
    """.bin files of today and of torch before 1.6, with parameters in them."""
    shutil.copytree(source("mamba2"), tmp_path / "pickled")
    file = tmp_path / "pickled" / "model.safetensors"
    tensors = {k: torch.nn.Parameter(t) for k, t in load_file(file).items()}
    bin_file = file.with_name("pytorch_model.bin")
    torch.save(tensors, bin_file, _use_new_zipfile_serialization=zipped)
    file.unlink()
    assert_same(stree_jax.load(tmp_path / "pickled"), stree_jax.load(source("mamba2")))


def test_bin_without_torch_is_one_line(source, monkeypatch):
    directory = source("plain")  # written with torch
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match="pytorch_model.bin.*needs torch"):
        stree_jax.load(directory)


# config.json


# Families whose configs have always had `layer_types`, or had it before.
NEWER = ("gemma3_text", "lfm2", "lfm2_moe", "lfm3", "minimax", "olmo_hybrid")
NEWER += ("smollm3", "olmo3", "granite_swa", "granitemoe_swa")
NEWER += ("lara_mini", "zaya")
NEWER += ("gemma4_text", "gemma4_unified_text")


def old_spelling(values):
    """Rewrites the config with the field names of transformers 4 and the hub."""
    rope = values.pop("rope_parameters", None)
    if rope is not None and "hybrid" in rope:  # ZAYA; published files have both
        values["rope_parameters"] = {**rope, "rope_type": "default"}
    elif rope is not None and "full_attention" in rope:  # one for each type of layer
        old_spelling_by_layer(values, rope)
    elif rope is not None:
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in rope:
                values[name] = rope.pop(name)
        rope["type"] = rope.pop("rope_type")
        values["rope_scaling"] = None if rope["type"] == "default" else rope
    values["torch_dtype"] = values.pop("dtype", "float32")
    if values["model_type"] in ("kimi_linear", "bailing_hybrid"):
        old_spelling_of_kda(values)
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    if values["model_type"].startswith("qwen3"):
        if values.pop("layer_types", None):
            values["full_attention_interval"] = 4
    elif "layer_types" in values and values["model_type"] not in NEWER:
        kinds = values.pop("layer_types")
        values["layers_block_type"] = [names.get(kind, kind) for kind in kinds]


def old_spelling_by_layer(values, rope):
    """Rewrites the rotary embeddings of a config as in releases of Gemma 3. LFM3 and
    Gemma 4 have no older spelling, and that of Olmo 3 has one base for all layers."""
    if values["model_type"] != "gemma3_text":
        values["rope_parameters"] = rope
        return
    far, near = rope["full_attention"], rope["sliding_attention"]
    values["rope_theta"] = far.pop("rope_theta")
    values["rope_local_base_freq"] = near["rope_theta"]
    values["rope_scaling"] = None if far["rope_type"] == "default" else far


def old_spelling_of_kda(values):
    """Rewrites the config as in releases of Kimi-Linear or Ling-3."""
    kinds, mlps = values.pop("layer_types"), values.pop("mlp_layer_types")
    values["first_k_dense_replace"] = mlps.count("dense")
    size, heads, taps = (
        values.pop(f"linear_{name}")
        for name in ("head_dim", "num_heads", "conv_kernel_dim")
    )
    if values["model_type"] == "bailing_hybrid":
        values |= {"head_dim": size, "short_conv_kernel_size": taps}
        values["layer_group_size"] = 1 + kinds.index("full_attention")
        return
    every = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}
    lists = {
        name: [i for i, kind in enumerate(kinds, 1) if kind == wanted]
        for name, wanted in every.items()
    }
    sizes = {"num_heads": heads, "head_dim": size, "short_conv_kernel_size": taps}
    values["linear_attn_config"] = lists | sizes


@pytest.mark.parametrize("name", HF_CASES)
def test_both_spellings(source, tmp_path, name):
    shutil.copytree(source(name), tmp_path / "old")
    edit_json(tmp_path / "old" / "config.json", old_spelling)
    assert_same(stree_jax.load(tmp_path / "old"), stree_jax.load(source(name)))


@pytest.mark.parametrize(
    "spelled",
    [None, [0, math.inf], [0.0, "Infinity"], [0.0, {"__float__": "Infinity"}]],
    ids=str,
)
def test_spellings_of_infinity(source, tmp_path, spelled):
    shutil.copytree(source("mamba2"), tmp_path / "open")
    file = tmp_path / "open" / "config.json"
    edit_json(file, lambda values: values.update(time_step_limit=spelled))
    assert stree_jax.load(tmp_path / "open").config.mixers.get("mamba").dt_limit == (
        0,
        math.inf,
    )


def test_rows_take_precedence_over_vocab_size(source, tmp_path):
    native = stree_jax.load(source("plain")).config
    assert (native.vocab_size, native.num_tokens) == (64, VOCAB)
    shutil.copytree(source("llama"), tmp_path / "resized")
    file = tmp_path / "resized" / "config.json"
    edit_json(file, lambda values: values.update(vocab_size=VOCAB - 7))
    resized = stree_jax.load(tmp_path / "resized").config
    assert (resized.vocab_size, resized.num_tokens) == (VOCAB, VOCAB)


def test_the_other_spelling_of_mamba2_embeddings(source, tmp_path):
    shutil.copytree(source("mamba2"), tmp_path / "renamed")

    def rename(tensors):
        table = tensors.pop("backbone.embeddings.weight")
        tensors["backbone.embedding.weight"] = table

    edit_tensors(tmp_path / "renamed", rename)
    assert_same(stree_jax.load(tmp_path / "renamed"), stree_jax.load(source("mamba2")))


@pytest.mark.parametrize(
    "config, generation, stops",
    [
        (7, None, (7,)),
        ([7, 9], None, (7, 9)),
        (None, None, ()),
        (None, 4, (4,)),
        ([-1, 3, 1 << 40], None, (3,)),
        (7, [4, 7], (4, 7)),
    ],
)
def test_stop_tokens(source, tmp_path, config, generation, stops):
    shutil.copytree(source("llama"), tmp_path / "source")
    file = tmp_path / "source" / "config.json"
    edit_json(file, lambda values: values.update(eos_token_id=config))
    text = json.dumps({"eos_token_id": generation})
    (tmp_path / "source" / "generation_config.json").write_text(text)
    assert info(tmp_path / "source")["stop_tokens"] == list(stops)


@pytest.mark.parametrize(
    "name, config, generation, odd",
    [
        ("llama", VOCAB, None, f"config.json: eos_token_id {VOCAB}"),
        ("llama", 2, [2, 1 << 40], f"generation_config.json: eos_token_id {1 << 40}"),
        ("plain", VOCAB + 1, None, f"config.json: eos_token_id {VOCAB + 1}"),  # padding
        ("llama", [2, -1], None, None),  # -1 is how some say none
    ],
)
def test_invalid_stop_tokens(source, tmp_path, capsys, name, config, generation, odd):
    """Reported once, however the model is read; valid ones are kept."""
    directory = shutil.copytree(source(name), tmp_path / "source")
    file = directory / "config.json"
    edit_json(file, lambda values: values.update(eos_token_id=config))
    text = json.dumps({"eos_token_id": generation})
    (directory / "generation_config.json").write_text(text)
    told, expected = (
        [],
        []
        if odd is None
        else [
            f"{tmp_path}/source/{odd} is not among the {VOCAB} tokens of the model, "
            "so that it never stops there"
        ],
    )
    convert(directory, tmp_path / "ours", warn=told.append)
    assert told == expected
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = stree_jax.load(directory)
    assert [str(w.message) for w in caught] == expected
    kept = (VOCAB + 1,) if name == "plain" else (2,) if config != VOCAB else ()
    assert model.config.stop_tokens == kept
    stree_jax.load(tmp_path / "ours")  # has been told
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for command in ("convert", "export") if name == "llama" else ("convert",):
            dst = tmp_path / command
            assert cli.main([command, str(directory), str(dst)]) == 0
            lines = [f"stree-jax: warning: {text}" for text in expected]
            assert capsys.readouterr().err.splitlines() == [*lines, f"wrote {dst}"]


def test_tokenizer_is_copied(source, tmp_path):
    """It also gives a native checkpoint its stop token."""
    shutil.copytree(source("plain"), tmp_path / "source")
    small_tokenizer().save(str(tmp_path / "source" / "tokenizer.json"))
    (tmp_path / "source" / "chat_template.jinja").write_text("{{ messages }}")
    convert(tmp_path / "source", tmp_path / "out")
    model = stree_jax.load(tmp_path / "out")
    assert model.config.stop_tokens == (2,)
    assert model.tokenizer.encode("b", add_special_tokens=False).ids == [1]
    assert (tmp_path / "out" / "chat_template.jinja").is_file()
    stree_jax.save(model, tmp_path / "again")
    assert stree_jax.load(tmp_path / "again").tokenizer.to_str() == (
        model.tokenizer.to_str()
    )


@pytest.mark.parametrize("name", ["mamba2-tied", "plain"])
def test_tied_head_may_be_stored(source, tmp_path, name):
    shutil.copytree(source(name), tmp_path / "source")

    def store_head(tensors):
        table = next(t for k, t in tensors.items() if "backbone.embedding" in k)
        tensors["lm_head.weight"] = table.clone()
        tensors["model.rotary_emb.inv_freq"] = torch.ones(3)

    edit_tensors(tmp_path / "source", store_head)
    assert_same(stree_jax.load(tmp_path / "source"), stree_jax.load(source(name)))

    def change_head(tensors):
        tensors["lm_head.weight"][3, 5] += 1

    edit_tensors(tmp_path / "source", change_head)
    with pytest.warns(UserWarning, match="the model keeps both"):
        model = stree_jax.load(tmp_path / "source")
    assert model.params["lm_head"].shape == model.params["embedding"].shape


def test_info_reads_no_weights(source, tmp_path):
    """The same values from a checkpoint, from our own format, and without any
    weights."""
    convert(source("granite"), tmp_path / "ours")
    for file in (tmp_path / "ours" / "params").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    ours, theirs = info(tmp_path / "ours"), info(source("granite"))
    differ = {key for key in ours if ours[key] != theirs[key]}
    assert differ == {"path", "format"}
    model = stree_jax.load(source("granite"))
    leaves = jax.tree.leaves(model.params)
    assert ours["parameters"] == sum(leaf.size for leaf in leaves)
    assert ours["weight_bytes"] == sum(leaf.nbytes for leaf in leaves)
    assert ours["layers"] == {"mamba": 2, "attention": 1, "mlp": 3}
    assert ours["cache_bytes_per_token"] == 2 * 2 * 8 * 4  # k, v; heads; width; bytes
    ssm, conv = 8 * 8 * 5, 4 * (8 * 8 + 2 * 2 * 5)
    assert ours["state_bytes_per_sequence"] == 2 * 4 * (ssm + conv) + 4
