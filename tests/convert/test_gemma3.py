"""Test Gemma 3 checkpoints as published: fields that older configs leave out, and a
language model within a multimodal one."""

import pytest

import stree_jax
from stree_jax.convert import CheckpointError
from stree_jax.convert.families.hf_config import hf_config
from stree_jax.models import AttentionConfig, Rope
from tests.support.checkpoints import assert_same, edit_json, edit_tensors
from tests.support.hf_windows import FAR, NEAR, gemma3, gemma3_multimodal
from tests.support.published_configs import close, language_model, parsed, theirs_of

# config.json of google/gemma-3-4b-it and gemma-3-1b-it, as transformers 4 wrote them.
PUBLISHED_4B = {
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
PUBLISHED_1B = {
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}


def read(values, prefix="model."):
    return parsed(values, f"{prefix}embed_tokens.weight", 262208)


def test_fields_of_published_configs():
    config = read(PUBLISHED_4B, "language_model.model.")
    far, near = config.mixers["attention"], config.mixers["attention_near"]
    options = {"scale": 1 / 16, "qk_norm_eps": 1e-6, "qk_norm_float32": True}
    wanted = AttentionConfig(8, 4, 256, **options)
    assert far.rope == Rope(1e6, 256, linear=8.0) and far.window == 0
    assert near.rope == Rope(1e4, 256) and near.window == 1024
    assert {**vars(far), "rope": None} == vars(wanted)
    assert {**vars(near), "rope": None, "window": 0} == vars(wanted)
    turns = [i for i, kind in enumerate(config.kinds[::2]) if "near" not in kind]
    assert turns == [5, 11, 17, 23, 29]
    assert config.stop_tokens == (1, 106) and config.tie_embeddings
    assert config.embedding_multiplier == 2560**0.5
    small = read(PUBLISHED_1B)
    assert small.mixers["attention"].rope == Rope(1e6, 256)
    assert small.mixers["attention_near"].window == 512
    values = hf_config(small, "bfloat16")
    again = read(values)
    assert again == small


def test_language_model_within_a_multimodal_one(tmp_path):
    other = gemma3_multimodal()
    said = r"vision_tower.\*, multi_modal_projector.\* \(.* left out"
    model = language_model(other, tmp_path / "both", said)

    def rename(tensors):  # the names of transformers 5 within a model
        for name in list(tensors):
            new = name.replace("language_model.model.", "model.language_model.")
            new = new if new != name else f"model.{name}"
            tensors[new] = tensors.pop(name)

    newer = tmp_path / "newer"
    other.save_pretrained(newer)
    edit_tensors(newer, rename)
    with pytest.warns(UserWarning, match="left out"):
        assert_same(stree_jax.load(newer), model)


def test_untied_with_biases_and_older_fields(tmp_path):
    """As transformers 4 wrote them."""
    pattern = {"layer_types": [NEAR, FAR, NEAR, FAR], "num_hidden_layers": 4}
    rope = {NEAR: {"rope_theta": 50.0}, FAR: {"rope_theta": 700.0, "factor": 4.0}}
    for kind, name in ((NEAR, "default"), (FAR, "linear")):
        rope[kind]["rope_type"] = name
    other = gemma3(**pattern, tie_word_embeddings=False, attention_bias=True)
    other.save_pretrained(tmp_path / "a")
    older = {
        "layer_types": None,
        "sliding_window_pattern": 2,
        "rope_parameters": None,
        "rope_theta": 700.0,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    model = stree_jax.load(tmp_path / "a")
    edit_json(tmp_path / "a" / "config.json", lambda values: values.update(older))
    assert_same(stree_jax.load(tmp_path / "a"), model)
    close(model, theirs_of(other))


REFUSED = {
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "use_bidirectional_attention": True,
    "hidden_activation": "gelu",
    "sliding_window": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1.0},
    "layer_types": ["full_attention"],
}


@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_are_refused(field):
    values = PUBLISHED_1B | {field: REFUSED[field]}
    with pytest.raises(CheckpointError, match=field):
        read(values)
