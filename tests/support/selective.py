"""Tiny random models of the classes with Mamba-1, with every option off its default."""

from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from tests.support.hf_random import NO_TOKENS, VOCAB, randomize, slower

PURE = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "time_step_rank": 3,
    "state_size": 5,
    "conv_kernel": 3,
    "num_hidden_layers": 3,
    "vocab_size": VOCAB,
    "layer_norm_epsilon": 1e-3,
    "use_bias": True,
    "tie_word_embeddings": False,
    **NO_TOKENS,
}


def mamba(**options):
    config = MambaConfig(**PURE | options)
    return slower(randomize(MambaForCausalLM(config)))


def falcon_mamba(**options):
    config = FalconMambaConfig(**PURE | {"mixer_rms_eps": 1e-2} | options)
    return slower(randomize(FalconMambaForCausalLM(config)))


def jamba(**options):
    defaults = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 0,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
        "mamba_expand": 3,
        "mamba_dt_rank": 3,
        "mamba_proj_bias": True,
        "rms_norm_eps": 1e-3,
        "vocab_size": VOCAB,
        **NO_TOKENS,
    }
    model = JambaForCausalLM(JambaConfig(**(defaults | options)))
    model.set_experts_implementation("eager")
    return slower(randomize(model))


SELECTIVE_CASES = {
    "mamba1": mamba,
    "mamba1-tied": lambda: mamba(
        tie_word_embeddings=True,
        use_bias=False,
        use_conv_bias=False,
        intermediate_size=48,
        time_step_rank="auto",
    ),
    "falcon-mamba": falcon_mamba,
    "jamba": jamba,
    "jamba-dense": lambda: jamba(
        num_experts=1,
        mamba_proj_bias=False,
        mamba_conv_bias=False,
        mamba_dt_rank="auto",
        tie_word_embeddings=True,
    ),
}
