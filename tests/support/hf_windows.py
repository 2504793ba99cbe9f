"""Tiny random models of transformers' classes that have windows on some layers."""

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LaraMiniConfig,
    LaraMiniForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
)

from tests.support.hf_random import (
    NO_TOKENS,
    VOCAB,
    randomize,
    randomize_offset,
    slower,
)

WINDOW = 6
NEAR, FAR, DELTA = "sliding_attention", "full_attention", "linear_attention"
GEMMA3 = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": [NEAR, FAR, NEAR],
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-3,
    "vocab_size": VOCAB,
    "rope_parameters": {
        NEAR: {"rope_type": "default", "rope_theta": 50.0},
        FAR: {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0},
    },
    **NO_TOKENS,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


def gemma3(**options):
    return randomize_offset(Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA3 | options)))


def gemma3_multimodal(**options):
    """Returns a model with a vision encoder, as the hub has them."""
    text = Gemma3TextConfig(**GEMMA3 | options)
    both = Gemma3Config(text_config=text, vision_config=VISION)
    return randomize_offset(Gemma3ForConditionalGeneration(both))


def lfm3(**options):
    defaults = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "layer_types": [FAR, "conv", NEAR],
        "sliding_window": WINDOW,
        "conv_L_cache": 5,
        "conv_bias": True,
        "norm_eps": 1e-3,
        "vocab_size": VOCAB,
        "rope_parameters": {
            NEAR: {"rope_type": "default", "rope_theta": 50.0},
            FAR: {
                "rope_type": "proportional",
                "rope_theta": 700.0,
                "partial_rotary_factor": 0.5,
            },
        },
        **NO_TOKENS,
    }
    return randomize(Lfm3ForCausalLM(Lfm3Config(**(defaults | options))))


def gpt_oss(**options):
    defaults = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-3,
        "vocab_size": VOCAB,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 700.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
        **NO_TOKENS,
    }
    config = GptOssConfig(**(defaults | options), attn_implementation="eager")
    model = randomize(GptOssForCausalLM(config))
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "experts.gate_up_proj" in name:
                p.mul_(6)  # beyond the clamps
            if name.endswith("_proj_bias"):
                p.copy_(p * p.shape[-1] ** 0.5 / 3)
    return model


def lara_mini(**options):
    defaults = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "num_hidden_layers": 4,
        "layer_types": [DELTA, NEAR, FAR, DELTA],
        "sliding_window": WINDOW,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 3,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
        "attention_bias": True,
        "rms_norm_eps": 1e-3,
        "vocab_size": VOCAB,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        **NO_TOKENS,
    }
    model = LaraMiniForCausalLM(LaraMiniConfig(**(defaults | options)))
    model.set_experts_implementation("eager")
    return slower(randomize(model))


WINDOW_CASES = {
    "gemma3": gemma3,
    "lfm3": lfm3,
    "gpt-oss": gpt_oss,
    "lara-mini": lara_mini,
    "lara-mini-plain": lambda: lara_mini(
        attention_bias=False,
        norm_topk_prob=False,
        tie_word_embeddings=False,
        linear_num_key_heads=4,
    ),
}
