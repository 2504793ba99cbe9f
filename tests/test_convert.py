"""Checkpoints in and out: equal tensors, clear refusals, and no partial output."""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import stree_jax
from stree_jax.checkpoint import info
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.configs import read_config
from stree_jax.convert.export import export_hf
from stree_jax.convert.source import open_source
from stree_jax.convert.tensors import check_tensors, param_shapes, rows_of
from stree_jax.models import init_params
from tests.checkpoints import (
    HF_CASES,
    NATIVE_CASES,
    VOCAB,
    write_mambainllama,
    write_native,
)

convert = partial(convert_checkpoint, progress=False)
CASES = [*HF_CASES, *NATIVE_CASES, "mambainllama"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A function: the name of a case -> its directory, made once and never changed."""
    root = tmp_path_factory.mktemp("sources")

    @cache
    def make(name):
        if name in HF_CASES:
            HF_CASES[name]().save_pretrained(root / name)
        elif name == "mambainllama":
            write_mambainllama(root / name)
        else:
            write_native(root / name, **NATIVE_CASES[name])
        return root / name

    return make


def edit_json(file, change):
    """Apply `change` to the JSON object in `file`, in place."""
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def edit_tensors(directory, change):
    """Apply `change` to the tensors of a one-file checkpoint, in place."""
    if (file := directory / "model.safetensors").is_file():
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
    else:
        file = directory / "pytorch_model.bin"
        tensors = torch.load(file, weights_only=True)
        change(tensors)
        torch.save(tensors, file)


def write_shards(directory, tensors, suffix):
    """The tensors in three files and an index, in place of the one file."""
    weight_map = {}
    for i in range(3):
        name = f"part-{i}.{suffix}"
        part = dict(list(tensors.items())[i::3])
        weight_map |= dict.fromkeys(part, name)
        (save_file if suffix == "safetensors" else torch.save)(part, directory / name)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    index = directory / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_same(model, other):
    assert model.config == other.config
    chex.assert_trees_all_equal_shapes_and_dtypes(model.params, other.params)
    chex.assert_trees_all_equal(model.params, other.params)


@pytest.mark.parametrize("name", CASES)
def test_converted_is_loaded_directly(source, tmp_path, name):
    direct = stree_jax.load(source(name))
    convert(source(name), tmp_path / "converted")
    converted = stree_jax.load(tmp_path / "converted")
    assert_same(converted, direct)
    stree_jax.save(converted, tmp_path / "saved")
    assert_same(stree_jax.load(tmp_path / "saved"), direct)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["converted", "saved"]
    expected = init_params(direct.config, jax.random.key(0), jnp.float32)
    chex.assert_trees_all_equal_shapes_and_dtypes(direct.params, expected)


def test_shapes_of_a_deep_model_are_those_of_its_init(source):
    config = stree_jax.load(source("granite")).config
    params = init_params(config, jax.random.key(0), jnp.float32)
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    expected = {tuple(k.key for k in path): leaf.shape for path, leaf in flat}
    assert param_shapes(config) == expected


# Numbers and files


@pytest.mark.parametrize("name", ["mamba2", "llama", "granite"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_sixteen_bits(tmp_path, name, stored):
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
    if model.config.mamba is not None:
        mixer = model.params["layers_0"]["mamba"]
        assert {mixer[k].dtype.name for k in ("A_log", "dt_bias", "D")} == {"float32"}


def test_dtype_asked_for(source, tmp_path):
    exact = stree_jax.load(source("mamba2"))
    convert(source("mamba2"), tmp_path / "rounded", dtype="bfloat16")
    rounded = stree_jax.load(tmp_path / "rounded")
    assert_same(rounded, stree_jax.load(source("mamba2"), dtype=jnp.bfloat16))
    table = np.asarray(exact.params["embedding"]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rounded.params["embedding"], table)
    back = stree_jax.load(tmp_path / "rounded", dtype="float32")
    assert back.params["embedding"].dtype == "float32"
    for wrong in ("float16", "int8", "nonsense"):
        with pytest.raises(CheckpointError, match="dtype: want float32 or bfloat16"):
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
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match="pytorch_model.bin.*needs torch"):
        stree_jax.load(source("plain"))


# config.json


def old_spelling(values):
    """As transformers 4 and the hub spell it."""
    rope = values.pop("rope_parameters", None)
    if rope is not None:
        values["rope_theta"] = rope.pop("rope_theta")
        rope["type"] = rope.pop("rope_type")
        values["rope_scaling"] = None if rope["type"] == "default" else rope
    values["torch_dtype"] = values.pop("dtype", "float32")
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    if "layer_types" in values:
        kinds = values.pop("layer_types")
        values["layers_block_type"] = [names.get(kind, kind) for kind in kinds]


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
def test_spellings_of_no_limit(source, tmp_path, spelled):
    shutil.copytree(source("mamba2"), tmp_path / "open")
    file = tmp_path / "open" / "config.json"
    edit_json(file, lambda values: values.update(time_step_limit=spelled))
    assert stree_jax.load(tmp_path / "open").config.mamba.dt_limit == (0, math.inf)


def test_rows_win_over_vocab_size(source, tmp_path):
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


def small_tokenizer():
    words = {"a": 0, "b": 1, "<|endoftext|>": 2}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))


def test_tokenizer_goes_along(source, tmp_path):
    """It is copied, and gives a native checkpoint its stop token."""
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
    with pytest.raises(CheckpointError, match="lm_head.weight differs"):
        stree_jax.load(tmp_path / "source")


def test_info_reads_no_weights(source, tmp_path):
    """The same figures from a checkpoint, from ours, and without any numbers."""
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


# Refusals: one line that names the file and the field or tensor; nothing left behind


def config_with(**changes):
    return lambda d: edit_json(d / "config.json", lambda v: v.update(changes))


def ssm_with(**changes):
    return lambda d: edit_json(
        d / "config.json", lambda v: v["ssm_cfg"].update(changes)
    )


def mixer_with(**changes):
    return lambda d: edit_json(d / "mamba_config.json", lambda v: v.update(changes))


def tensors_with(change):
    return lambda d: edit_tensors(d, change)


def rename_mamba1(tensors):
    for name in [n for n in tensors if n.endswith("mamba.in_proj.weight")]:
        tensors[name.replace("in_proj", "in_proj_x")] = tensors.pop(name)


def truncate(name, keep=0.5):
    def change(directory):
        data = (directory / name).read_bytes()
        (directory / name).write_bytes(data[: int(len(data) * keep)])

    return change


def huge_header(directory):
    header = (1 << 62).to_bytes(8, "little")
    (directory / "model.safetensors").write_bytes(header + b"{}")


def shards_at(name):
    """An index that points outside the directory, or at nothing."""

    def change(directory):
        (directory / "model.safetensors").rename(directory.parent / "loot.safetensors")
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))

    return change


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (self.file.touch, ())


def pickle_code(directory):
    trap = Touch(directory / "trap")
    torch.save({"lm_head.weight": trap}, directory / "pytorch_model.bin")


def hollow_tensor(directory):
    """A huge table that is one number seen a hundred million times."""

    def change(tensors):
        tensors["backbone.embedding.weight"] = torch.zeros(1).expand(1 << 22, 24)

    edit_tensors(directory, change)


def as_text(name, text):
    return lambda d: (d / name).write_text(text)


def quantized(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)


IN_PROJ = "backbone.layers.1.mixer.in_proj.weight"
REFUSALS = {
    # Other architectures
    "native mamba-1 by absence": (
        "plain",
        lambda d: edit_json(d / "config.json", lambda v: v["ssm_cfg"].pop("layer")),
        ["config.json", "ssm_cfg.layer", "Mamba1"],
    ),
    "native mamba-1": ("plain", ssm_with(layer="Mamba1"), ["ssm_cfg.layer", "Mamba1"]),
    "native mamba-3": ("plain", ssm_with(layer="Mamba3"), ["ssm_cfg.layer", "Mamba3"]),
    "native attention ahead": (
        "plain",
        config_with(attn_layer_idx=[1], attn_cfg={"num_heads": 4}),
        ["config.json", "attn_cfg.causal", "looks ahead"],
    ),
    **{
        kind: ("mamba2", config_with(model_type=kind), ["model_type", kind, "Mamba-1"])
        for kind in ("mamba", "falcon_mamba", "jamba")
    },
    "unknown": (
        "mamba2",
        config_with(model_type="qwen3_next"),
        ["config.json", "model_type", "qwen3_next", "mamba2", "llama"],
    ),
    "no architecture": (
        "mamba2",
        lambda d: edit_json(d / "config.json", lambda v: v.pop("model_type")),
        ["config.json", "model_type"],
    ),
    "mambainllama mamba-1": (
        "mambainllama",
        tensors_with(rename_mamba1),
        ["model.safetensors", "mamba.in_proj_x.weight", "Mamba-1"],
    ),
    "repeat_kv_before_conv": (
        "mambainllama",
        mixer_with(ssm_cfg={"ngroups": 6, "d_state": 4, "repeat_kv_before_conv": True}),
        ["mamba_config.json", "ssm_cfg.repeat_kv_before_conv"],
    ),
    "experts": (
        "granite",
        config_with(num_local_experts=4, num_experts_per_tok=5),
        ["config.json", "moe: 5 experts a token from"],
    ),
    "quantized": (
        "llama",
        config_with(quantization_config={"bits": 4}),
        ["config.json", "quantization_config"],
    ),
    "rope type": (
        "llama",
        config_with(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
        ["config.json", "rope_parameters.rope_type", "yarn"],
    ),
    "old rope type": (
        "llama",
        config_with(rope_parameters=None, rope_scaling={"type": "linear", "factor": 2}),
        ["config.json", "rope_scaling.type", "linear"],
    ),
    # Fields
    **{
        f"{field} {value!r}": (name, config_with(**{field: value}), [field])
        for name, field, value in [
            ("mamba2", "hidden_size", -24),
            ("mamba2", "hidden_size", 0),
            ("mamba2", "hidden_size", "24"),
            ("mamba2", "state_size", 1 << 60),
            ("mamba2", "conv_kernel", 1 << 20),
            ("mamba2", "num_hidden_layers", 1 << 40),
            ("mamba2", "n_groups", 5),
            ("mamba2", "num_heads", 7),
            ("mamba2", "time_step_limit", [1, 0]),
            ("mamba2", "time_step_limit", 3),
            ("mamba2", "layer_norm_epsilon", math.nan),
            ("llama", "num_key_value_heads", 3),
            ("llama", "head_dim", 1.5),
            ("llama", "hidden_act", "gelu"),
            ("llama", "eos_token_id", "two"),
            ("llama", "tie_word_embeddings", "yes"),
            ("granite", "layer_types", ["mamba"]),
            ("granite", "layer_types", ["mamba", "moe", "mamba"]),
            ("granite", "logits_scaling", 0),
            ("plain", "n_layer", True),
            ("plain", "ssm_cfg", []),
        ]
    },
    "d_xb": ("mambainllama", mixer_with(d_xb=9), ["mamba_config.json", "d_xb"]),
    "attn_layers": ("mambainllama", mixer_with(attn_layers=[3]), ["attn_layers"]),
    "d_ssm": ("plain", ssm_with(d_ssm=480), ["ssm_cfg.d_ssm"]),
    # Tensors
    "missing": (
        "mamba2",
        tensors_with(lambda t: t.pop(IN_PROJ)),
        ["mamba2", IN_PROJ, "missing"],
    ),
    "untied without a head": (
        "mamba2",
        tensors_with(lambda t: t.pop("lm_head.weight")),
        ["lm_head.weight", "missing"],
    ),
    "unexpected": (
        "mamba2",
        tensors_with(lambda t: t.update({"extra.weight": torch.ones(2)})),
        ["model.safetensors", "extra.weight", "unexpected"],
    ),
    "misshapen": (
        "mamba2",
        tensors_with(lambda t: t.update({IN_PROJ: t[IN_PROJ].T.contiguous()})),
        ["model.safetensors", IN_PROJ, "shape"],
    ),
    "no embedding": (
        "mamba2",
        tensors_with(lambda t: t.pop("backbone.embeddings.weight")),
        ["backbone.embeddings.weight"],
    ),
    "integers": (
        "mamba2",
        tensors_with(quantized),
        ["model.safetensors", "lm_head.weight", "I8"],
    ),
    # Files
    "json": ("llama", as_text("config.json", "{"), ["config.json", "JSON"]),
    "json list": ("llama", as_text("config.json", "[]"), ["config.json", "object"]),
    "no config": ("llama", lambda d: (d / "config.json").unlink(), ["config.json"]),
    "no weights": ("llama", lambda d: (d / "model.safetensors").unlink(), ["llama"]),
    "truncated": ("llama", truncate("model.safetensors"), ["model.safetensors"]),
    "empty": ("llama", truncate("model.safetensors", 0), ["model.safetensors"]),
    "huge header": ("llama", huge_header, ["model.safetensors"]),
    "truncated bin": ("plain", truncate("pytorch_model.bin"), ["pytorch_model.bin"]),
    "empty bin": ("plain", truncate("pytorch_model.bin", 0), ["pytorch_model.bin"]),
    "pickled code": ("plain", pickle_code, ["pytorch_model.bin", "refused"]),
    "hollow tensor": ("plain", hollow_tensor, ["embedding.weight", "whole tensor"]),
    "shard above": ("llama", shards_at("../loot.safetensors"), ["weight_map", "loot"]),
    "shard at root": ("llama", shards_at("/loot.safetensors"), ["weight_map", "loot"]),
    "shard missing": ("llama", shards_at("none.safetensors"), ["weight_map", "none"]),
    "tokenizer": ("llama", as_text("tokenizer.json", "{}"), ["tokenizer.json"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(source, tmp_path, case):
    name, change, parts = REFUSALS[case]
    shutil.copytree(source(name), tmp_path / "in" / name)
    change(tmp_path / "in" / name)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "in" / name, tmp_path / "out" / "model")
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert str(tmp_path / "in" / name) in message
    assert "\n" not in message and len(message) < 600
    assert list((tmp_path / "out").iterdir()) == []
    assert not (tmp_path / "in" / name / "trap").exists()


ODD_VALUES = [-1, 7, 1.5, 1e308, 1 << 63, math.nan, "x", [-1], {"a": 1}, True]


@pytest.mark.parametrize("name", ["mamba2", "llama", "granite", "options"])
def test_odd_fields_never_crash(source, tmp_path, name):
    """Any field with any value: refused in one line, or of no consequence."""
    shutil.copytree(source(name), tmp_path / name)
    file = tmp_path / name / "config.json"
    opened = open_source(tmp_path / name)
    values, refused = json.loads(file.read_text()), 0
    for holder in (values, values.get("rope_parameters"), values.get("ssm_cfg")):
        for field, value in (holder or {}).items():
            for odd in ODD_VALUES:
                holder[field] = odd
                file.write_text(json.dumps(values))
                try:
                    format, config = read_config(tmp_path / name, opened.tensors)
                    check_tensors(opened, rows_of(format, config), config)
                except CheckpointError as error:
                    refused += 1
                    assert "\n" not in str(error)
            holder[field] = value
    assert refused > 50


def test_destination_must_be_new(source, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("kept")
    for taken in ("there", "file"):
        with pytest.raises(CheckpointError, match=f"{taken}: exists already"):
            convert(source("mamba2"), tmp_path / taken)
    with pytest.raises(CheckpointError, match="no such directory"):
        convert(source("mamba2"), tmp_path / "nowhere" / "model")
    with pytest.raises(CheckpointError, match="no such directory"):
        convert(tmp_path / "nothing", tmp_path / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "there"]
    assert list((tmp_path / "there").iterdir()) == []
    assert (tmp_path / "file").read_text() == "kept"


def test_unreachable_hub_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="nobody/nothing: no such directory, and"):
        stree_jax.load("nobody/nothing")


# Our own directories


OWN_DAMAGE = {
    "version": (lambda v: v.update(version=2), "version"),
    "dtype": (lambda v: v.update(dtype="int4"), "dtype"),
    "no model": (lambda v: v.pop("model"), "model"),
    "unknown field": (lambda v: v["model"].update(extra=1), "model.extra"),
    "type": (lambda v: v["model"].update(d_model="24"), "model.d_model"),
    "negative": (lambda v: v["model"].update(d_model=-24), "model.d_model"),
    "huge": (lambda v: v["model"].update(vocab_size=1 << 60), "model.vocab_size"),
    "taps": (lambda v: v["model"]["mamba"].update(d_conv=1 << 20), "d_conv"),
    "kind": (lambda v: v["model"].update(layers=["rwkv"]), r"model.layers\[0\]"),
    "mismatch": (
        lambda v: v["model"].update(vocab_size=60, num_tokens=60),
        "embedding.*shape",
    ),
    "fewer layers": (lambda v: v["model"]["layers"].pop(), "layers_2/.*shape"),
    "no sizes": (lambda v: v.pop("files"), "files"),
}


@pytest.mark.parametrize("case", OWN_DAMAGE)
def test_damaged_config_of_ours(source, tmp_path, case):
    change, where = OWN_DAMAGE[case]
    convert(source("mamba2"), tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", change)
    with pytest.raises(CheckpointError, match=where) as caught:
        stree_jax.load(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_every_missing_or_cut_file_of_ours(source, tmp_path):
    convert(source("mamba2"), tmp_path / "model")
    params = [f for f in (tmp_path / "model" / "params").rglob("*") if f.is_file()]
    for file in [tmp_path / "model" / "config.json", *params]:
        whole = file.read_bytes()
        for damaged in (whole[:-2], None):
            file.write_bytes(damaged) if damaged is not None else file.unlink()
            if whole:
                with pytest.raises(CheckpointError) as caught:
                    stree_jax.load(tmp_path / "model")
                assert file.name in str(caught.value)
        file.write_bytes(whole)
    stree_jax.load(tmp_path / "model")


ENDLESS = """
import itertools, sys
from pathlib import Path
from stree_jax.convert import convert_checkpoint
print("ready", flush=True)
for i in itertools.count():
    out = Path(sys.argv[2], str(i))
    convert_checkpoint(Path(sys.argv[1]), out, progress=False)
"""


def test_killed_at_any_moment_absent_or_whole(source, tmp_path):
    """Processes that convert without a pause, killed while they do."""
    expected = stree_jax.load(source("mamba2"))
    root = Path(__file__).parents[1]
    running = []
    for i in range(3):
        (tmp_path / str(i)).mkdir()
        command = [sys.executable, "-c", ENDLESS, source("mamba2"), tmp_path / str(i)]
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(command, cwd=root, stdout=pipe, text=True))
    for i, process in enumerate(running):
        with process:
            assert process.stdout.readline() == "ready\n"
            while not (tmp_path / str(i) / "1").exists():
                assert process.poll() is None
                time.sleep(0.01)
            time.sleep(0.05 * (i + 1))
            process.send_signal(signal.SIGKILL)
    for i in range(3):
        made = [d for d in (tmp_path / str(i)).iterdir() if d.name[0] != "."]
        assert len(made) >= 2
        for directory in made:
            assert_same(stree_jax.load(directory), expected)


# Out again


EXPORTED = [name for name in HF_CASES if not name.startswith("zamba2")]


@pytest.mark.parametrize("name", EXPORTED)
def test_export_round_trip(source, tmp_path, name):
    """Tensors bit for bit, and the logits of transformers on both."""
    model = stree_jax.load(source(name))
    export_hf(model.config, model.params, small_tokenizer(), tmp_path / "hf")
    assert_same(stree_jax.load(tmp_path / "hf"), model)
    before = load_file(source(name) / "model.safetensors")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    tokens = torch.arange(40)[None] * 7 % VOCAB
    logits = []
    for directory in (source(name), tmp_path / "hf"):
        other = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            logits.append(other.eval()(tokens).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-6)


def test_export_in_bfloat16(source, tmp_path):
    model = stree_jax.load(source("granite"), dtype="bfloat16")
    export_hf(model.config, model.params, None, tmp_path / "hf")
    assert_same(stree_jax.load(tmp_path / "hf"), model)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == (
        "bfloat16"
    )


def test_export_of_native_as_mamba2(source, tmp_path):
    """The same architecture by another name."""
    model = stree_jax.load(source("plain"))
    export_hf(model.config, model.params, None, tmp_path / "hf")
    again = stree_jax.load(tmp_path / "hf")
    chex.assert_trees_all_equal(again.params, model.params)
    assert again.config.mamba == model.config.mamba
    assert again.config.layers == model.config.layers


@pytest.mark.parametrize(
    "name, option",
    [
        ("options", "d_mlp"),
        ("ungrouped-D", "D_per_channel"),
        ("no-norm", "norm"),
        ("mambainllama", "x_heads"),
    ],
)
def test_export_refuses_what_no_class_has(source, tmp_path, name, option):
    model = stree_jax.load(source(name))
    with pytest.raises(CheckpointError, match=f"cannot express.*{option}"):
        export_hf(model.config, model.params, None, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []
