"""Test that invalid checkpoints raise one line with file and field, and leave no
files."""

import json
import math
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import stree_jax
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.families.configs import read_config
from stree_jax.convert.families.tensors import check_tensors, rows_of
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.tensor_files import open_source
from tests.support.checkpoints import edit_json, edit_tensors, sources

convert = partial(convert_checkpoint, progress=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return sources(tmp_path_factory.mktemp("sources"))


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
    """Writes an index that points outside the directory, or to a missing file."""

    def change(directory):
        (directory / "model.safetensors").rename(directory.parent / "loot.safetensors")
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))

    return change


def index_of_more(directory):
    """Writes an index with a tensor that is missing in its shard."""
    file = directory / "model.safetensors"
    weight_map = dict.fromkeys(["extra.weight", *load_file(file)], "a.safetensors")
    file.rename(directory / "a.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (self.file.touch, ())


def pickle_code(directory):
    trap = Touch(directory / "trap")
    torch.save({"lm_head.weight": trap}, directory / "pytorch_model.bin")


def hollow_tensor(directory):
    """Returns a huge tensor that is one number, expanded a hundred million times."""

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
    "unknown": (
        "mamba2",
        config_with(model_type="gpt_neox"),
        ["config.json", "model_type", "gpt_neox", "mamba2", "llama"],
    ),
    **{
        kind: ("mamba2", config_with(model_type=kind), ["model_type", kind, meaning])
        for kind, meaning in (
            ("qwen4_exp", "hyper-connections and sparse attention"),
            ("qwen4_exp_text", "hyper-connections and sparse attention"),
            ("glm5_next", "sparse attention"),
            ("deepseek_v32", "an indexer"),
            ("glm_moe_dsa", "an indexer"),
            ("qwen3_5_vision", "vision encoder without a language model"),
        )
    },
    "multimodal without text": (
        "qwen3-5",
        config_with(model_type="qwen3_5"),
        ["config.json", "text_config", "missing"],
    ),
    "text of another family": (
        "qwen3-5",
        config_with(model_type="qwen3_5", text_config={"model_type": "llama"}),
        ["config.json", "text_config.model_type", "llama"],
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
    "experts of Qwen": (
        "qwen3-5-moe",
        config_with(num_experts_per_tok=7),
        ["config.json", "moe: cannot choose 7 experts per token from"],
    ),
    "experts": (
        "granite",
        config_with(num_local_experts=4, num_experts_per_tok=5),
        ["config.json", "moe: cannot choose 5 experts per token from"],
    ),
    "quantized": (
        "llama",
        config_with(quantization_config={"bits": 4}),
        ["config.json", "quantization_config"],
    ),
    "rope type": (
        "llama",
        config_with(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        ["config.json", "rope_parameters.rope_type", "longrope"],
    ),
    "old rope type": (
        "llama",
        config_with(
            rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2}
        ),
        ["config.json", "rope_scaling.type", "dynamic"],
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
            ("qwen3-5", "linear_num_value_heads", 3),
            ("qwen3-5", "layer_types", ["linear_attention"]),
            ("qwen3-5", "layer_types", ["mamba"] * 4),
            ("qwen3-5", "attn_output_gate", False),
            ("qwen3-5", "output_gate_type", "sigmoid"),
            ("qwen3-5", "indexer_n_heads", 4),
            ("qwen3-5", "hc_count", 4),
            ("qwen3-next", "norm_topk_prob", False),
            ("qwen3-next", "decoder_sparse_step", 0),
            ("qwen3-next", "mlp_only_layers", [4]),
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
    "index of more": ("llama", index_of_more, ["index", "extra.weight", "no shard"]),
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


NAMES_OF_FIELDS = ["mamba2", "llama", "granite", "options", "qwen3-next"]


@pytest.mark.parametrize("name", NAMES_OF_FIELDS)
def test_odd_fields_never_crash(source, tmp_path, name):
    """Any field with any value: an error of one line, or no effect."""
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
                    family, config = read_config(
                        CheckpointFiles(tmp_path / name), opened.tensors
                    )
                    check_tensors(opened, rows_of(family.names, config), config)
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
