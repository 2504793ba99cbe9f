"""Test Qwen3 with experts, SmolLM3, Olmo 3, Ministral 3 and Granite with windows as
published: fields of older configs, spellings of tensors, multimodal files, refusals."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import stree_jax
from stree_jax.convert import CheckpointError
from stree_jax.convert.export import export_hf
from stree_jax.models import Rope
from stree_jax.models.configs.rope import Temperature, Yarn
from stree_jax.models.layers.rope import temperatures
from tests.support.checkpoints import assert_same, edit_json, edit_tensors
from tests.support.hf_attention import (
    YARN,
    granite_swa,
    granitemoe_swa,
    ministral3,
    mistral3,
    olmo3,
    qwen3_moe,
    smollm3,
)
from tests.support.hf_windows import FAR, NEAR
from tests.support.published_configs import close, language_model, parsed, theirs_of

# Fields of published config.json files.
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
SMOLLM3_3B = {
    "model_type": "smollm3",
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": [FAR] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
}
OLMO3_7B = {
    "model_type": "olmo3",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": [NEAR, NEAR, NEAR, FAR] * 8,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
}
MINISTRAL3_3B = {
    "model_type": "mistral3",
    "text_config": {
        "model_type": "ministral3",
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 26,
        "num_key_value_heads": 8,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    "tie_word_embeddings": True,
}
GRANITE_SWA = {
    "model_type": "granite_swa",
    "num_hidden_layers": 4,
    "layer_rope_theta": [0, 10000.0, 10000.0, 10000.0],
}
GRANITE_MOE_SWA = {
    "model_type": "granitemoe_swa",
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
}


def test_fields_of_published_configs():
    qwen = parsed(QWEN3_30B)
    assert qwen.kinds == ("attention", "moe") * 48 and qwen.stop_tokens == (151645,)
    c, moe = qwen.mixers["attention"], qwen.mixers["moe"]
    assert (c.rope, c.window, c.qk_norm_eps) == (Rope(1e6, 128), 0, 1e-6)
    assert (moe.num_experts, moe.top_k, moe.d_hidden, moe.normalize) == (
        *(128, 8, 768),
        True,
    )
    smol = parsed(SMOLLM3_3B)
    nope = [i for i, kind in enumerate(smol.kinds[::2]) if kind == "attention_nope"]
    assert nope == [*range(3, 36, 4)] and smol.tie_embeddings
    assert smol.mixers["attention"].rope == Rope(5e6, 128)
    assert smol.mixers["attention_nope"].rope is None
    olmo = parsed(OLMO3_7B)
    assert set(olmo.kinds[1::2]) == {"after:mlp"}
    assert olmo.kinds[:8:2] == (*["after:attention_near"] * 3, "after:attention")
    far, near = olmo.mixers["attention"], olmo.mixers["attention_near"]
    assert far.rope.yarn == Yarn(8.0, 8192, attention_factor=1.2079441541679836)
    assert (near.rope, near.window) == (Rope(500000.0, 128), 4096)
    assert far.qk_norm_whole and near.qk_norm_whole and far.qk_norm_eps == 1e-6
    own = parsed(MINISTRAL3_3B, "language_model.model.embed_tokens.weight")
    c = own.mixers["attention"]
    assert c.temperature == Temperature(0.1, 16384.0) and own.tie_embeddings
    assert c.rope == Rope(1e6, 128, yarn=Yarn(16.0, 16384.0))
    granite = parsed(GRANITE_SWA)
    assert granite.kinds[::2] == ("attention_nope", *["attention_near"] * 3)
    assert granite.mixers["attention_near"].window == 128
    assert all(granite.mixers[kind].sinks for kind in granite.kinds[::2])


def packed(tensors):
    """Joins the experts of each layer, in files with tensors for each expert."""
    for layer in (0, 2):
        experts = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}{e}.{w}.weight") for e in range(6)])
            for w in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{experts}gate_up_proj"] = torch.cat([gate, up], 1)
        tensors[f"{experts}down_proj"] = down


def test_experts_one_by_one_and_packed(tmp_path):
    other = qwen3_moe()
    for name in ("published", "packed"):
        other.save_pretrained(tmp_path / name)
    names = load_file(tmp_path / "published" / "model.safetensors")
    assert "model.layers.2.mlp.experts.5.down_proj.weight" in names
    edit_tensors(tmp_path / "packed", packed)
    model = stree_jax.load(tmp_path / "published")
    assert_same(stree_jax.load(tmp_path / "packed"), model)
    edit_json(
        tmp_path / "packed" / "config.json",
        lambda values: values.update(
            num_local_experts=values.pop("num_experts", None)
            or values["num_local_experts"]
        ),
    )
    assert_same(stree_jax.load(tmp_path / "packed"), model)


def test_older_fields_of_olmo3(tmp_path):
    """One base for all layers, and scaling of those without a window."""
    same = {NEAR: {"rope_type": "default", "rope_theta": 500000.0}}
    same[FAR] = YARN | {"rope_theta": 500000.0}
    other = olmo3(rope_parameters=same)
    other.save_pretrained(tmp_path)
    model = stree_jax.load(tmp_path)
    close(model, theirs_of(other))
    scaling = {name: YARN[name] for name in YARN if name != "rope_theta"}
    older = {"rope_parameters": None, "rope_theta": 500000.0, "rope_scaling": scaling}
    edit_json(tmp_path / "config.json", lambda values: values.update(older))
    assert_same(stree_jax.load(tmp_path), model)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    close(model, theirs_of(again))


def test_rotary_layers_of_smollm3_by_interval(tmp_path):
    other = smollm3(no_rope_layer_interval=2)
    other.save_pretrained(tmp_path)
    model = stree_jax.load(tmp_path)
    kinds = [kind == "attention" for kind in model.config.kinds[::2]]
    assert kinds == [True, False, True, False, True]
    changes = {"no_rope_layers": None, "layer_types": None}
    edit_json(tmp_path / "config.json", lambda values: values.update(changes))
    assert_same(stree_jax.load(tmp_path), model)
    close(model, theirs_of(other))


@pytest.mark.parametrize(
    ("text", "tied"),
    [("ministral3", False), ("ministral3", True), ("mistral", False)],
)
def test_language_model_within_a_multimodal_one(tmp_path, text, tied):
    other = mistral3(text, tied)
    said = r"\(the vision encoder\) is left out"
    model = language_model(other, tmp_path / "both", said)
    assert model.config.tie_embeddings == tied
    assert model.config.family == "mistral3"

    def rename(tensors):  # the names of published files
        for name in list(tensors):
            new = name.removeprefix("model.")
            new = new.replace("language_model.", "language_model.model.")
            new = f"language_model.{name}" if name.startswith("lm_head") else new
            if not name.startswith("language_model."):
                tensors[new] = tensors.pop(name)

    other.save_pretrained(tmp_path / "published")
    edit_tensors(tmp_path / "published", rename)
    with pytest.warns(UserWarning, match="left out"):
        assert_same(stree_jax.load(tmp_path / "published"), model)
    export_hf(model.config, model.params, None, tmp_path / "alone")
    values = json.loads((tmp_path / "alone" / "config.json").read_text())
    assert values["model_type"] == {"mistral": "llama"}.get(text, text)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "alone")
    np.testing.assert_allclose(theirs_of(alone), theirs_of(other), rtol=0, atol=1e-6)


def test_queries_grow_only_after_the_length_of_the_training():
    """Positions below the length have the factor 1, exactly."""
    c = parsed(MINISTRAL3_3B, "language_model.model.embed_tokens.weight")
    places = np.array([[0, 16383, 16384, 49152]], np.int32)
    found = np.asarray(temperatures(places, c.mixers["attention"].temperature))[0]
    assert found[0] == found[1] == 1
    np.testing.assert_allclose(found[2:], 1 + 0.1 * np.log([2, 4]), rtol=1e-6)


NESTED = MINISTRAL3_3B["text_config"]
# By family and field: a value, and what the error says.
REFUSED = [
    (QWEN3_30B, "hidden_act", "gelu", "hidden_act: 'gelu'"),
    (QWEN3_30B, "mlp_only_layers", [48], "mlp_only_layers: want numbers in 0..47"),
    (QWEN3_30B, "decoder_sparse_step", 0, "decoder_sparse_step: want 1.."),
    (QWEN3_30B, "num_experts_per_tok", 0, "num_experts_per_tok: want 1.."),
    (QWEN3_30B, "num_experts_per_tok", 129, "cannot choose 129 experts"),
    (QWEN3_30B, "norm_topk_prob", 1, "norm_topk_prob: want true or false, got 1"),
    (QWEN3_30B, "num_key_value_heads", 5, "num_key_value_heads: 5 does not divide 32"),
    (SMOLLM3_3B, "no_rope_layers", [1] * 35, "no_rope_layers: want a list of 36"),
    (SMOLLM3_3B, "no_rope_layers", [2] * 36, "no_rope_layers: want a list of 36"),
    (SMOLLM3_3B, "layer_types", [NEAR] * 36, "layer_types: .*no window is in use"),
    (SMOLLM3_3B, "layer_types", ["mamba"] * 36, "layer_types: unknown layer type"),
    (SMOLLM3_3B, "rope_scaling", {"rope_type": "dynamic"}, "rope_type: 'dynamic'"),
    (OLMO3_7B, "layer_types", [NEAR], "layer_types: want a list of 32 layer types"),
    (OLMO3_7B, "sliding_window", 0, "sliding_window: want 1.."),
    (OLMO3_7B, "sliding_window", None, "sliding_window: want a number of tokens"),
    (OLMO3_7B, "rope_parameters", YARN, "rope_parameters.rope_type: want an object"),
    (OLMO3_7B, "hidden_act", "gelu", "hidden_act: 'gelu'"),
    (NESTED, "sliding_window", 512, None),
    (NESTED, "head_dim", 7, "head_dim: 7 of 7 channels rotate"),
    (
        NESTED,
        "rope_parameters",
        YARN | {"llama_4_scaling_beta": "0.1"},
        "rope_parameters.llama_4_scaling_beta: want a number, got '0.1'",
    ),
    (MINISTRAL3_3B, "text_config", None, "text_config: is missing"),
    (
        MINISTRAL3_3B,
        "text_config",
        {"model_type": "mistral4"},
        "text_config.model_type: 'mistral4' is not supported",
    ),
    (GRANITE_SWA, "layer_rope_theta", [1e4], "layer_rope_theta: want a list of 4"),
    (GRANITE_SWA, "layer_rope_theta", [1e4, "a", 0, 0], "layer_rope_theta: want a nu"),
    (GRANITE_SWA, "layer_rope_theta", [-1, 0, 0, 0], "layer_rope_theta: want 0 or nu"),
    (GRANITE_SWA, "sliding_window", 0, "sliding_window: want 1.."),
    (GRANITE_SWA, "sliding_window", None, "sliding_window: want a number of tokens"),
    (GRANITE_SWA, "layer_types", [FAR], "layer_types: want a list of 4 layer types"),
    (GRANITE_SWA, "logits_scaling", 0, "logits_scaling: want a positive number"),
    (GRANITE_MOE_SWA, "num_local_experts", 0, "num_local_experts: want 1.."),
    (GRANITE_MOE_SWA, "shared_intermediate_size", -1, "shared_intermediate_size: want"),
]


@pytest.mark.parametrize(("config", "field", "value", "said"), REFUSED)
def test_fields_that_are_refused(config, field, value, said):
    name = "model.embed_tokens.weight"
    assert parsed(config, name)  # without the change
    if said is None:  # read, not refused
        assert parsed(config | {field: value}, name).mixers["attention"].window == value
        return
    with pytest.raises((CheckpointError, ValueError), match=said) as caught:
        parsed(config | {field: value}, name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [ministral3, granite_swa, granitemoe_swa, smollm3])
def test_a_missing_or_unexpected_tensor_is_named(tmp_path, make):
    make().save_pretrained(tmp_path)
    name = "model.layers.1.self_attn.o_proj.weight"
    kept = {}

    def without(tensors):
        kept[name] = tensors.pop(name)

    edit_tensors(tmp_path, without)
    with pytest.raises(CheckpointError, match=f"tensor {name} .* is missing"):
        stree_jax.load(tmp_path)
    more = "model.layers.1.self_attn.q_norm.weight"
    edit_tensors(
        tmp_path, lambda tensors: tensors.update({**kept, more: torch.ones(6)})
    )
    with pytest.raises(CheckpointError, match=f"unexpected tensor {more}"):
        stree_jax.load(tmp_path)
