"""Tiny random models of transformers' classes, with every option off its default."""

import math

from transformers import (
    BailingHybridConfig,
    BailingHybridForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)

from tests.support.hf_attention import ATTENTION_CASES
from tests.support.hf_gemma4 import GEMMA4_CASES
from tests.support.hf_minimax import minimax
from tests.support.hf_random import (
    NO_TOKENS,
    VOCAB,
    randomize,
    randomize_offset,
    slower,
)
from tests.support.hf_windows import WINDOW_CASES
from tests.support.hf_zaya import ZAYA_CASES
from tests.support.selective import SELECTIVE_CASES


def mamba2(**options):
    defaults = {
        "hidden_size": 24,
        "num_heads": 6,
        "head_dim": 8,
        "expand": 2,
        "state_size": 5,
        "n_groups": 3,
        "conv_kernel": 3,
        "use_bias": True,
        "use_conv_bias": False,
        "layer_norm_epsilon": 1e-3,
        "time_step_limit": (0.05, 0.9),
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    }
    return randomize(Mamba2ForCausalLM(Mamba2Config(**(defaults | options))))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def llama(**options):
    defaults = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-4,
        "rope_parameters": LLAMA3,
    }
    return randomize(LlamaForCausalLM(LlamaConfig(**(defaults | options))))


PLAIN_ROPE = {"rope_type": "default", "rope_theta": 700.0}


def dense(classes, options):
    """Returns a model of a class that is like llama and has no fields of its own."""
    defaults = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-4,
        "rope_parameters": PLAIN_ROPE,
    }
    config, model = classes
    return randomize(model(config(**(defaults | options))))


def qwen2(**options):
    return dense((Qwen2Config, Qwen2ForCausalLM), options)


def qwen3(**options):
    return dense((Qwen3Config, Qwen3ForCausalLM), {"head_dim": 10} | options)


QWEN_DELTA = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,  # the last one has attention
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 700.0,
        "partial_rotary_factor": 0.5,
    },
    "pad_token_id": None,
}
QWEN_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}
SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}


def with_sections(options):
    """Returns options whose rotary embedding is that of a multimodal model."""
    options = QWEN_DELTA | options
    return options | {"rope_parameters": options["rope_parameters"] | SECTIONS}


def qwen3_next(**options):
    defaults = QWEN_DELTA | QWEN_MOE | {"intermediate_size": 40, "mlp_only_layers": [1]}
    return randomize_offset(Qwen3NextForCausalLM(Qwen3NextConfig(**defaults | options)))


def qwen3_5(**options):
    options = {"intermediate_size": 40} | with_sections(options)
    return randomize_offset(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**options)))


def qwen3_5_moe(**options):
    options = QWEN_MOE | with_sections(options)
    return randomize_offset(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**options)))


VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}


def qwen3_5_multimodal(experts=False, tied=False, **options):
    """Returns a model with a vision encoder, as the hub has them."""
    own = QWEN_MOE if experts else {"intermediate_size": 40}
    text = own | with_sections(options) | {"tie_word_embeddings": tied}
    config, model = Qwen3_5Config, Qwen3_5ForConditionalGeneration
    if experts:
        config, model = Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
    tokens = {"image_token_id": 1, "video_token_id": 2, "tie_word_embeddings": tied}
    both = config(text_config=text, vision_config=VISION, **tokens)
    return randomize_offset(model(both))


def mistral(**options):
    plain = {"sliding_window": None}
    return dense((MistralConfig, MistralForCausalLM), plain | options)


MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20}


def granite3(**options):
    return dense((GraniteConfig, GraniteForCausalLM), MULTIPLIERS | options)


def granitemoe(**options):
    classes = (GraniteMoeConfig, GraniteMoeForCausalLM)
    return dense(classes, MULTIPLIERS | EXPERTS | options)


def granitemoeshared(**options):
    classes = (GraniteMoeSharedConfig, GraniteMoeSharedForCausalLM)
    shared = {"shared_intermediate_size": 28}
    return dense(classes, MULTIPLIERS | EXPERTS | shared | options)


def granite(**options):
    defaults = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "shared_intermediate_size": 40,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "vocab_size": VOCAB,
        "attention_bias": True,
        "rms_norm_eps": 1e-4,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 5,
        "mamba_d_conv": 5,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        **MULTIPLIERS,
        "tie_word_embeddings": True,
        "time_step_limit": (0.05, 0.9),
    }
    config = GraniteMoeHybridConfig(**(defaults | options))
    return randomize(GraniteMoeHybridForCausalLM(config))


def bamba(**options):
    defaults = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "vocab_size": VOCAB,
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-4,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "tie_word_embeddings": True,
        "time_step_limit": (0.05, 0.9),
    }
    return randomize(BambaForCausalLM(BambaConfig(**(defaults | options))))


def falcon(**options):
    defaults = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-4,
        "mamba_d_ssm": 48,
        "mamba_n_heads": 6,
        "mamba_d_head": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "mamba_conv_bias": False,
        "time_step_limit": (0.05, 0.9),
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.6,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.7,
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 1.3,
        "key_multiplier": 0.4,
        "mlp_multipliers": [0.9, 0.6],
        "ssm_multipliers": [0.35, 1.25, 0.7, 1.5, 0.9],
    }
    return randomize(FalconH1ForCausalLM(FalconH1Config(**(defaults | options))))


def nemotron(**options):
    defaults = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"],
        "vocab_size": VOCAB,
        "mamba_num_heads": 8,
        "mamba_head_dim": 6,
        "ssm_state_size": 5,
        "n_groups": 2,
        "conv_kernel": 3,
        "use_bias": True,
        "use_conv_bias": False,
        "mlp_bias": True,
        "layer_norm_epsilon": 1e-4,
        "time_step_min": 1e-12,  # a lower bound that only transformers applies
        "tie_word_embeddings": False,
    }
    return randomize(NemotronHForCausalLM(NemotronHConfig(**(defaults | options))))


def zamba(**options):
    defaults = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        # Three calls of two blocks. The blocks have no residual connections: with more
        # calls and random weights, float32 is 1e-4 off float64 in transformers too.
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"],
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 3,
        "use_mem_rope": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        "vocab_size": VOCAB,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
        "add_bias_linear": True,
        # With 1e-4, float32 is up to 1.7e-4 off float64 in transformers and up to
        # 1.6e-4 here, because norms enlarge small numbers and their rounding errors.
        "rms_norm_eps": 1e-1,
        "time_step_min": 1e-12,  # a lower bound that only transformers applies
        "tie_word_embeddings": True,
    }
    return randomize(Zamba2ForCausalLM(Zamba2Config(**(defaults | options))))


NEMOTRON_MOE = {
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "mlp_bias": False,
}
GRANITE_MOE = EXPERTS


def lfm2(**options):
    defaults = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_bias": True,
        "conv_L_cache": 4,
        "norm_eps": 1e-3,
        "vocab_size": VOCAB,
        "rope_parameters": PLAIN_ROPE,
        "tie_word_embeddings": False,
        **NO_TOKENS,
    }
    return randomize(Lfm2ForCausalLM(Lfm2Config(**(defaults | options))))


def lfm2_moe(**options):
    defaults = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "moe_intermediate_size": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.7,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_bias": False,
        "norm_eps": 1e-3,
        "vocab_size": VOCAB,
        "rope_parameters": PLAIN_ROPE,
        **NO_TOKENS,
    }
    model = Lfm2MoeForCausalLM(Lfm2MoeConfig(**(defaults | options)))
    model.set_experts_implementation("eager")
    return randomize(model)


def olmo_hybrid(**options):
    defaults = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 3,
        "rms_norm_eps": 1e-3,
        "attention_bias": True,
        "vocab_size": VOCAB,
        "rope_parameters": PLAIN_ROPE,
        **NO_TOKENS,
    }
    return randomize(OlmoHybridForCausalLM(OlmoHybridConfig(**(defaults | options))))


KDA = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "layer_types": [
        "linear_attention",
        "linear_attention",
        "full_attention",
        "linear_attention",
    ],
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "num_experts_per_tok": 2,
    "moe_renormalize": False,
    "n_shared_experts": 2,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-3,
}


def kimi_linear(**options):
    defaults = {
        **KDA,
        **NO_TOKENS,
        "linear_head_dim": 8,
        "linear_num_heads": 3,
        "linear_conv_kernel_dim": 3,
        "num_local_experts": 6,
        "n_group": 2,
        "first_k_dense_replace": 2,
    }
    model = KimiLinearForCausalLM(KimiLinearConfig(**(defaults | options)))
    model.set_experts_implementation("eager")
    return slower(randomize(model))


def bailing_hybrid(**options):
    defaults = {
        **KDA,
        **NO_TOKENS,
        "head_dim": 8,
        "num_local_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "kda_lower_bound": -3.0,
        "rope_theta": 700.0,
        "routed_scaling_factor": 1.7,
    }
    model = BailingHybridForCausalLM(BailingHybridConfig(**(defaults | options)))
    model.set_experts_implementation("eager")
    return randomize(model)


HF_CASES = {
    **SELECTIVE_CASES,
    "mamba2": mamba2,
    "mamba2-tied": lambda: mamba2(
        tie_word_embeddings=True,
        use_bias=False,
        use_conv_bias=True,
        n_groups=2,
        conv_kernel=4,
        time_step_limit=(0.0, math.inf),
    ),
    "llama": llama,
    "llama-plain": lambda: llama(
        attention_bias=False,
        mlp_bias=False,
        head_dim=6,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
    ),
    "qwen2": qwen2,
    "qwen3": lambda: qwen3(attention_bias=True, tie_word_embeddings=True),
    "qwen3-next": qwen3_next,
    "qwen3-next-moe": lambda: qwen3_next(
        mlp_only_layers=[], attention_bias=True, tie_word_embeddings=True
    ),
    "qwen3-5": lambda: qwen3_5(tie_word_embeddings=True),
    "qwen3-5-moe": lambda: qwen3_5_moe(linear_num_key_heads=4),
    "mistral": lambda: mistral(head_dim=10),
    "granite-3": lambda: granite3(attention_bias=True, tie_word_embeddings=True),
    "granite-3-moe": granitemoe,
    "granite": granite,
    "granite-nope": lambda: granite(
        position_embedding_type="nope",
        attention_bias=False,
        mamba_proj_bias=False,
        mamba_conv_bias=True,
        tie_word_embeddings=False,
        mamba_n_groups=1,
    ),
    "granite-attention": lambda: granite(layer_types=["attention"] * 3),
    "granite-moe": lambda: granite(**GRANITE_MOE),
    "bamba": bamba,
    "bamba-plain": lambda: bamba(
        attention_bias=False,
        mlp_bias=False,
        mamba_proj_bias=False,
        mamba_conv_bias=True,
        tie_word_embeddings=False,
        attn_layer_indices=[0, 2],
    ),
    "falcon-h1": falcon,
    "falcon-h1-gate-first": lambda: falcon(
        mamba_norm_before_gate=False, projectors_bias=False, mamba_conv_bias=True
    ),
    "falcon-h1-no-norm": lambda: falcon(
        mamba_rms_norm=False, mamba_proj_bias=False, attention_bias=False
    ),
    "olmo-hybrid": olmo_hybrid,
    "olmo-hybrid-nope": lambda: olmo_hybrid(
        attention_bias=False,
        linear_allow_neg_eigval=False,
        rope_parameters={"rope_theta": None},
        tie_word_embeddings=True,
    ),
    "lfm2": lfm2,
    "lfm2-adjusted": lambda: lfm2(
        block_auto_adjust_ff_dim=True,
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.3,
        conv_bias=False,
        tie_word_embeddings=True,
    ),
    "lfm2-moe": lfm2_moe,
    "lfm2-moe-unbiased": lambda: lfm2_moe(use_expert_bias=False),
    "kimi-linear": kimi_linear,
    "kimi-linear-dense": lambda: kimi_linear(
        mlp_layer_types=["dense"] * 4, linear_num_heads=4
    ),
    "bailing-hybrid": bailing_hybrid,
    "bailing-hybrid-unbounded": lambda: bailing_hybrid(
        kda_safe_gate=False, norm_topk_prob=True, mlp_layer_types=["sparse"] * 4
    ),
    "minimax": lambda: randomize(minimax(VOCAB)),
    "minimax-window": lambda: randomize(
        minimax(
            *(VOCAB,),
            sliding_window=7,
            num_attention_heads=3,  # slopes of a number that is no power of 2
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
    ),
    "zamba2": zamba,
    "zamba2-plain": lambda: zamba(
        use_shared_attention_adapter=False,
        use_mem_rope=False,
        add_bias_linear=False,
        num_mem_blocks=1,
        num_key_value_heads=2,
        mamba_expand=3,
        hidden_act="silu",
        layers_block_type=["hybrid", "mamba", "mamba", "hybrid"],
    ),
    # If embeddings are not tied, transformers 5.24 does not share the blocks either.
    "zamba2-untied": lambda: zamba(tie_word_embeddings=False),
    **WINDOW_CASES,
    **ATTENTION_CASES,
    **GEMMA4_CASES,
    **ZAYA_CASES,
    "nemotron-h": nemotron,
    "nemotron-h-moe": lambda: nemotron(**NEMOTRON_MOE),
    "nemotron-h-latent": lambda: nemotron(
        **(NEMOTRON_MOE | {"moe_latent_size": 12, "norm_topk_prob": False})
    ),
}
