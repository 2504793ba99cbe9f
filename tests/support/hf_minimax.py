"""Tiny models of MiniMaxForCausalLM, with every option off its default."""

from transformers import MiniMaxConfig, MiniMaxForCausalLM

# Factors are such that both terms of every residual sum matter.
FACTORS = {
    "linear_attn_alpha_factor": 1.4,
    "linear_attn_beta_factor": 0.8,
    "full_attn_alpha_factor": 0.7,
    "full_attn_beta_factor": 1.3,
    "mlp_alpha_factor": 1.2,
    "mlp_beta_factor": 0.6,
}


def minimax(vocab, **options):
    """Returns a model whose parameters are not randomized yet."""
    kinds = ["linear_attention", "full_attention"]
    defaults = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 20,
        "num_hidden_layers": 4,
        "layer_types": [kinds[i == 2] for i in range(4)],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 0.1,  # beside which the 1e-6 of lightning attention shows
        "vocab_size": vocab,
        "block_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        **FACTORS,
    }
    model = MiniMaxForCausalLM(MiniMaxConfig(**(defaults | options)))
    model.set_experts_implementation("eager")
    return model
