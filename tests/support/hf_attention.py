"""Tiny random models of transformers' classes whose attention differs between layers or
positions, and of Qwen3 with experts."""

from transformers import (
    GraniteMoeSWAConfig,
    GraniteMoeSWAForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.support.hf_random import NO_TOKENS, VOCAB, randomize
from tests.support.hf_windows import FAR, NEAR, WINDOW

SIZES = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-3,
    **NO_TOKENS,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 700.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 700.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 16,
    "patch_size": 4,
}


def qwen3_moe(**options):
    defaults = {
        **SIZES,
        "head_dim": 10,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "rope_parameters": PLAIN_ROPE,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(defaults | options)))
    model.set_experts_implementation("eager")
    return randomize(model)


def smollm3(**options):
    defaults = {
        **SIZES,
        "num_hidden_layers": 5,  # the fourth has no rotary embedding
        "rope_parameters": PLAIN_ROPE,
        "tie_word_embeddings": False,
    }
    return randomize(SmolLM3ForCausalLM(SmolLM3Config(**(defaults | options))))


# Every combination of a window and a rotary embedding.
SMOLLM3_WINDOWS = {
    "num_hidden_layers": 4,
    "no_rope_layers": [0, 1, 1, 0],
    "layer_types": [NEAR, FAR, NEAR, FAR],
    "use_sliding_window": True,
    "sliding_window": WINDOW,
}


def olmo3(**options):
    defaults = {
        **SIZES,
        "num_hidden_layers": 3,
        "layer_types": [NEAR, FAR, NEAR],
        "sliding_window": WINDOW,
        "rope_parameters": {
            NEAR: {"rope_type": "default", "rope_theta": 50.0},
            FAR: YARN,
        },
    }
    return randomize(Olmo3ForCausalLM(Olmo3Config(**(defaults | options))))


def olmo2(**options):
    defaults = {**SIZES, "num_hidden_layers": 2, "rope_parameters": PLAIN_ROPE}
    return randomize(Olmo2ForCausalLM(Olmo2Config(**(defaults | options))))


MINISTRAL3 = {
    **SIZES,
    "head_dim": 10,
    "num_hidden_layers": 2,
    "rope_parameters": {
        **YARN,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "llama_4_scaling_beta": 0.6,
    },
}


def ministral3(**options):
    config = Ministral3Config(**MINISTRAL3 | options)
    return randomize(Ministral3ForCausalLM(config))


def mistral3(text="ministral3", tied=False, **options):
    """Returns a model with a vision encoder, as the hub has them."""
    if text == "ministral3":
        own = Ministral3Config(**MINISTRAL3 | options)
    else:
        own = MistralConfig(
            **SIZES,
            head_dim=10,
            num_hidden_layers=2,
            sliding_window=None,
            rope_parameters=PLAIN_ROPE,
        )
    both = Mistral3Config(
        text_config=own, vision_config=VISION, tie_word_embeddings=tied
    )
    return randomize(Mistral3ForConditionalGeneration(both))


MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
}
GRANITE = {
    **SIZES,
    **MULTIPLIERS,
    "num_hidden_layers": 4,
    "layer_types": [FAR, NEAR, NEAR, FAR],
    "layer_rope_theta": [0, 700.0, 50.0, 50.0],
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
}


def granite_swa(**options):
    config = GraniteSWAConfig(**GRANITE | options, attn_implementation="eager")
    return randomize(GraniteSWAForCausalLM(config))


def granitemoe_swa(**options):
    experts = {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 20,
        "shared_intermediate_size": 28,
    }
    config = GraniteMoeSWAConfig(
        **GRANITE | experts | options, attn_implementation="eager"
    )
    model = GraniteMoeSWAForCausalLM(config)
    model.set_experts_implementation("eager")
    return randomize(model)


ATTENTION_CASES = {
    "qwen3-moe": qwen3_moe,
    "qwen3-moe-free": lambda: qwen3_moe(
        norm_topk_prob=False,
        mlp_only_layers=[],
        decoder_sparse_step=2,
        num_hidden_layers=2,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=WINDOW,
        tie_word_embeddings=True,
    ),
    "smollm3": lambda: smollm3(attention_bias=True, mlp_bias=True),
    "smollm3-windows": lambda: smollm3(**SMOLLM3_WINDOWS, tie_word_embeddings=True),
    "olmo3": olmo3,
    "olmo2": lambda: olmo2(attention_bias=True, tie_word_embeddings=True),
    "ministral3": ministral3,
    "ministral3-window": lambda: ministral3(
        sliding_window=WINDOW, tie_word_embeddings=True
    ),
    "granite-swa": lambda: granite_swa(attention_bias=True, mlp_bias=True),
    "granite-swa-one-base": lambda: granite_swa(
        layer_rope_theta=None, rope_parameters=PLAIN_ROPE, tie_word_embeddings=True
    ),
    "granite-swa-moe": granitemoe_swa,
}
