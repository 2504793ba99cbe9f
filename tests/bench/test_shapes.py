"""Test that shapes of published models match the configs read from their
checkpoints.
"""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from bench import budgets, shapes
from stree_jax.convert.families.configs import read_config
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.source import TensorInfo
from stree_jax.models import init_records, init_state
from stree_jax.models.stack.memory import size_of, weight_bytes


def configs(directory, config, tensors, mixer=None):
    (directory / "config.json").write_text(json.dumps(config))
    if mixer is not None:
        (directory / "mamba_config.json").write_text(json.dumps(mixer))
    found = {n: TensorInfo(Path("x"), shape, "BF16") for n, shape in tensors.items()}
    return replace(read_config(CheckpointFiles(directory), found)[1], stop_tokens=())


def test_the_mambainllama_shape_matches_its_checkpoint(tmp_path):
    # Fields as the authors' training code writes them for Llama-3-8B, with half of the
    # layers replaced: ssm_layers 0, 2, 4, ...
    teacher = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128009,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }
    mixer = {
        "d_model": 4096,
        "ssm_cfg": {"expand": 1, "ngroups": 32, "d_state": 128},
        "rms_norm_eps": 1e-05,
        "vocab_size": None,
        "d_inner": 4096,
        "d_xb": 1024,
        "intermediate_size": 14336,
        "hidden_act": "silu",
        "n_layer": 32,
        "attn_layers": list(range(1, 32, 2)),
    }
    tensors = {
        "model.embed_tokens.weight": (128256, 4096),
        "model.layers.0.mamba.in_proj.weight": (10272, 4096),
        "model.layers.0.mamba.conv1d.bias": (6144,),
        "model.layers.1.self_attn.q_proj.weight": (4096, 4096),
    }
    read = configs(tmp_path, teacher, tensors, mixer)
    assert read == shapes.config_of("mambainllama-8b")
    mamba = read.mixers["mamba"]
    assert mamba.d_in_proj == 10272 and mamba.d_xBC == 6144


def test_the_llama_135m_shape_matches_its_checkpoint(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
    tensors = {"model.embed_tokens.weight": (49152, 576)}
    assert configs(tmp_path, config, tensors) == shapes.config_of("llama-135m")


@pytest.mark.parametrize("name", shapes.MAMBA2_SIZES)
def test_the_mamba2_shapes_match_their_checkpoints(tmp_path, name):
    d_model, n_layer = shapes.MAMBA2_SIZES[name]
    config = {
        "d_model": d_model,
        "d_intermediate": 0,
        "n_layer": n_layer,
        "vocab_size": 50277,
        "ssm_cfg": {"layer": "Mamba2"},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
    }
    tensors = {
        "backbone.embedding.weight": (50288, d_model),
        "backbone.layers.0.mixer.conv1d.bias": (2 * d_model + 256,),
        "backbone.layers.0.mixer.in_proj.weight": (
            4 * d_model + 256 + 2 * d_model // 64,
            d_model,
        ),
    }
    assert configs(tmp_path, config, tensors) == shapes.config_of(name)


@pytest.mark.parametrize("name", shapes.QWEN35_SIZES)
def test_the_qwen35_shapes_match_their_checkpoints(tmp_path, name):
    size, config = shapes.QWEN35_SIZES[name], shapes.config_of(name)
    fields = {
        "model_type": "qwen3_5_text" if size.mlp else "qwen3_5_moe_text",
        "hidden_size": size.d_model,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": 256,
        "linear_num_value_heads": size.value_heads,
        "vocab_size": 248320,
        "tie_word_embeddings": size.tied,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
        "full_attention_interval": 4,
    }
    if size.mlp:
        fields["intermediate_size"] = size.mlp
    tensors = {"model.embed_tokens.weight": (248320, size.d_model)}
    assert configs(tmp_path, fields, tensors) == config
    assert shapes.config_of(name, mtp=True) == replace(
        config, mtp=("attention", "mlp" if size.mlp else "moe")
    )


@pytest.mark.parametrize(
    ("name", "state", "window", "record", "billions"),
    [
        ("qwen3.5-0.8b", 1_048_576, 36_864, 24_704, 0.75),
        ("qwen3.5-9b", 2_097_152, 49_152, 37_056, 8.95),
        ("qwen3.5-27b", 3_145_728, 61_440, 49_408, 26.9),
        ("qwen3.5-35b-a3b", 2_097_152, 49_152, 37_056, 34.7),
    ],
)
def test_bytes_of_a_delta_layer(name, state, window, record, billions):
    """Computed by hand: H P N floats, 3 rows of 2 G N + H P 16-bit inputs; and of each
    node H P + H + G floats, and G N + 2 G N + H P 16-bit numbers."""
    config = shapes.config_of(name)
    mixer = jax.eval_shape(lambda: init_state(config, 1, 1, jnp.bfloat16)).layers[0]
    assert size_of(mixer["delta"].ssm) == state
    assert size_of(mixer["delta"].conv) == window
    records = jax.eval_shape(lambda: init_records(config, 1, 1, jnp.bfloat16))
    assert size_of(records[0]) == record
    assert weight_bytes(config, jnp.bfloat16) / 2e9 == pytest.approx(billions, rel=5e-3)


def test_budgets_of_shapes_with_mtp_layers():
    subject = budgets.subject_of("qwen3.5-0.8b", 4 * 10**9)
    rows = budgets.breakdown(subject, (16,))
    (row,) = [r for r in rows if (r["axis"], r["value"]) == ("nodes", 16)]
    assert row["parts"]["drafter's weights"] > 2e7
    assert row["parts"]["SSM and convolution state"] > 18 * (1_048_576 + 36_864)
