"""Tiny random models of transformers' classes of Gemma 4, with every option off its
default."""

import torch
from transformers import (
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
)

from tests.support.hf_random import NO_TOKENS, VOCAB, randomize

WINDOW = 6
NEAR, FAR = "sliding_attention", "full_attention"
PLAIN = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "global_head_dim": 12,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": [NEAR, NEAR, FAR],
    "sliding_window": WINDOW,
    "rms_norm_eps": 1e-3,
    "final_logit_softcapping": 3.0,
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
INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
SHARED = {
    **INPUTS,
    "num_hidden_layers": 6,
    "layer_types": [NEAR, FAR, NEAR, FAR, NEAR, FAR],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
K_IS_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = {
    **K_IS_V,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
}


def prepared(model):
    """Returns the model with random weights, also of the factors that are 1 in a new
    model."""
    randomize(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
                p.copy_(1 + 0.3 * torch.randn(p.shape, generator=generator))
    model.set_experts_implementation("eager")
    return model


def gemma4(**options):
    config = Gemma4TextConfig(**PLAIN | SHARED | options)
    return prepared(Gemma4ForCausalLM(config))


def gemma4_moe(**options):
    config = Gemma4TextConfig(**PLAIN | EXPERTS | options)
    return prepared(Gemma4ForCausalLM(config))


def gemma4_unified(**options):
    config = Gemma4UnifiedTextConfig(**PLAIN | K_IS_V | options)
    return prepared(Gemma4UnifiedForCausalLM(config))


VISION = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}


def gemma4_multimodal(**options):
    """Returns a model with a vision encoder, as the hub has them."""
    text = Gemma4TextConfig(**PLAIN | SHARED | {"pad_token_id": 0} | options)
    both = Gemma4Config(text_config=text, vision_config=VISION, audio_config=None)
    return prepared(Gemma4ForConditionalGeneration(both))


GEMMA4_CASES = {
    "gemma4": gemma4,
    "gemma4-moe": gemma4_moe,
    "gemma4-unified": gemma4_unified,
}
