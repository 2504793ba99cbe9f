"""Test Gemma 4 checkpoints as published: fields of their configs, a language model
within a multimodal one, and the fields that are refused."""

import pytest

import stree_jax
from stree_jax.convert import CheckpointError
from stree_jax.convert.families.hf_config import hf_config
from stree_jax.models import (
    AttentionConfig,
    KVReaderConfig,
    MLPConfig,
    MoEConfig,
    PerLayerConfig,
    Rope,
    param_shapes,
)
from stree_jax.models.stack.sizes import state_bytes
from tests.support.checkpoints import assert_same, edit_tensors
from tests.support.hf_gemma4 import gemma4, gemma4_multimodal
from tests.support.published_configs import language_model, parsed

NEAR, FAR = "sliding_attention", "full_attention"
ROPES = {
    FAR: {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
        "rope_type": "proportional",
    },
    NEAR: {"rope_theta": 10000.0, "rope_type": "default"},
}
# Fields of config.json of google/gemma-4-E2B-it and gemma-4-26B-A4B-it.
E2B = {
    "model_type": "gemma4",
    "eos_token_id": [1, 106],
    "text_config": {
        "attention_bias": False,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": [FAR if i % 5 == 4 else NEAR for i in range(35)],
        "max_position_embeddings": 131072,
        "model_type": "gemma4_text",
        "num_attention_heads": 8,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "rms_norm_eps": 1e-06,
        "rope_parameters": ROPES,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
}
A4B = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "rope_parameters": ROPES,
    "sliding_window": 1024,
    "top_k_experts": 8,
    "use_bidirectional_attention": "vision",
}


def read(values, prefix="model."):
    return parsed(values, f"{prefix}embed_tokens.weight", 262144)


def test_fields_of_published_configs():
    config = read(E2B, "model.language_model.")
    options = {"scale": 1.0, "qk_norm_eps": 1e-6, "v_norm": True}
    far, near = Rope(1e6, 512, share=0.25), Rope(1e4, 256)
    assert config.mixers == {
        "attention": AttentionConfig(8, 1, 512, rope=far, **options),
        "attention_near": AttentionConfig(8, 1, 256, rope=near, window=512, **options),
        "attention_reader": KVReaderConfig("attention", 8, 1, 512, 1e-6, far, 1.0),
        "attention_near_reader": KVReaderConfig(
            "attention_near", 8, 1, 256, 1e-6, near, 1.0, 512
        ),
        "mlp": MLPConfig(6144, activation="gelu_tanh"),
        "mlp_wide": MLPConfig(12288, activation="gelu_tanh"),
        "per_layer": PerLayerConfig(256),
    }
    each = list(zip(*[iter(config.kinds)] * 3, strict=True))
    assert each[13] == ("both:attention_near", "both:mlp", "after:per_layer+scaled")
    assert each[14] == ("both:attention", "both:mlp", "after:per_layer+scaled")
    assert [x[0] for x in each[15:17]] == ["both:attention_near_reader"] * 2
    assert each[34][:2] == ("both:attention_reader", "both:mlp_wide")
    assert config.stop_tokens == (1, 106) and config.tie_embeddings
    assert config.embedding_multiplier == 1536**0.5 and config.logits_cap == 30
    shapes = param_shapes(config)
    assert shapes["per_layer", "embedding"] == (262144, 35 * 256)
    experts = read(A4B)
    both = experts.mixers["mlp_moe"]
    assert both.moe == MoEConfig(128, 8, 704, activation="gelu_tanh")
    assert both.mlp == MLPConfig(2112, activation="gelu_tanh") and both.norm_eps == 1e-6
    assert experts.mixers["attention"].num_kv_heads == 2
    assert experts.mixers["attention"].k_is_v
    assert experts.mixers["attention_near"].num_kv_heads == 8
    assert experts.kinds[-2:] == ("both:attention", "after:mlp_moe+scaled")
    for made in (config, experts):
        values = hf_config(made, "bfloat16")
        again = read(values)
        assert again == made


def test_language_model_within_a_multimodal_one(tmp_path):
    said = r"model.vision_tower.\*, model.embed_vision.\* \(.* left out"
    language_model(gemma4_multimodal(), tmp_path / "both", said)


def test_keys_that_no_layer_reads(tmp_path):
    """Published files have keys and values for layers that share those of others."""
    other = gemma4()
    other.save_pretrained(tmp_path / "a")
    model = stree_jax.load(tmp_path / "a")

    def add(tensors):
        for part in ("k_proj", "v_proj", "k_norm"):
            name = f"self_attn.{part}.weight"
            tensors[f"model.layers.4.{name}"] = tensors["model.norm.weight"].clone()

    edit_tensors(tmp_path / "a", add)
    assert_same(stree_jax.load(tmp_path / "a"), model)

    def wrong(tensors):
        extra = tensors["model.norm.weight"].clone()
        tensors["model.layers.1.self_attn.k_bias"] = extra

    edit_tensors(tmp_path / "a", wrong)
    with pytest.raises(CheckpointError, match="unexpected tensor model.layers.1"):
        stree_jax.load(tmp_path / "a")


def test_layers_that_read_others_have_no_cache():
    """E2B has 15 layers with keys and values, of 35: 12 near and 3 far ones."""
    config = read(E2B, "model.language_model.")
    one = 2 * 2 * (12 * 256 + 3 * 512)  # bytes of a token in bfloat16
    empty, full = (state_bytes(config, 1, n, "bfloat16") for n in (0, 100))
    assert full - empty == 100 * one


REFUSED = {
    "attention_bias": True,
    "use_bidirectional_attention": "all",
    "hidden_activation": "gelu",
    "sliding_window": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1.0},
    "layer_types": [FAR],
    "num_kv_shared_layers": 32,
    "final_logit_softcapping": -1.0,
    "vocab_size_per_layer_input": 100,
    "enable_moe_block": True,
    "per_layer_config": {"3": {"intermediate_size": 10}},
    "num_key_value_heads": 3,
    "is_causal": False,
}


@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_are_refused(field):
    text = E2B["text_config"] | {field: REFUSED[field]}
    name = {"enable_moe_block": "use_double_wide_mlp"}.get(field, field)
    with pytest.raises(CheckpointError, match=name):
        read(text)


def test_sizes_by_layer_must_agree():
    sizes = {"04": {"head_dim": 512}, "09": {"head_dim": 256}}
    text = E2B["text_config"] | {"per_layer_config": sizes}
    with pytest.raises(CheckpointError, match="per_layer_config"):
        read(text)


def test_the_unified_class_has_no_inputs_or_experts():
    text = E2B["text_config"] | {"model_type": "gemma4_unified_text"}
    with pytest.raises(CheckpointError, match="hidden_size_per_layer_input"):
        read(text)
