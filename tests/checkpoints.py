"""Tiny random checkpoints, every option off its default, for the tests."""

import json
import math

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)

VOCAB = 61


def randomize(model, seed=0):
    """Give every parameter values under which a mistake shows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(p):
        return torch.randn(p.shape, generator=generator, dtype=p.dtype)

    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.log(8 * normal(p).abs() + 0.5))
            elif name.endswith(("dt_bias", ".D")):
                p.copy_(normal(p))
            elif p.ndim == 1 and "norm" in name:
                p.copy_(1 + 0.3 * normal(p))
            elif p.ndim == 1:
                p.copy_(0.3 * normal(p))
            else:
                p.copy_(normal(p) * p.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.5 * normal(buffer))
    return model.eval()


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
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.2,
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
        "time_step_min": 1e-12,  # the floor that only transformers has
        "tie_word_embeddings": False,
    }
    return randomize(NemotronHForCausalLM(NemotronHConfig(**(defaults | options))))


def zamba(**options):
    defaults = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        # Three calls of two blocks. More of them, which have no residual connections,
        # and random weights take float32 1e-4 away from float64 in transformers too.
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"],
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 3,
        "use_mem_rope": True,
        "vocab_size": VOCAB,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
        "add_bias_linear": True,
        "rms_norm_eps": 1e-4,
        "time_step_min": 1e-12,  # the floor that only transformers has
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
GRANITE_MOE = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 20,
}

HF_CASES = {
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
    "zamba2": zamba,
    "zamba2-plain": lambda: zamba(
        use_shared_attention_adapter=False,
        use_mem_rope=False,
        add_bias_linear=False,
        num_mem_blocks=1,
        num_key_value_heads=2,
        layers_block_type=["hybrid", "mamba", "mamba", "hybrid"],
    ),
    # Without tied embeddings transformers 5.23 does not tie the blocks either.
    "zamba2-untied": lambda: zamba(tie_word_embeddings=False),
    "nemotron-h": nemotron,
    "nemotron-h-moe": lambda: nemotron(**NEMOTRON_MOE),
    "nemotron-h-latent": lambda: nemotron(
        **(NEMOTRON_MOE | {"moe_latent_size": 12, "norm_topk_prob": False})
    ),
}


def _tensor(rng, *shape, scale=None):
    scale = shape[-1] ** -0.5 if scale is None else scale
    return torch.tensor(scale * rng.standard_normal(shape), dtype=torch.float32)


def mixer_tensors(rng, prefix, d, rows, channels, heads, inner, out, taps):
    """Random tensors of one Mamba2 mixer; `inner` is its norm's width, 0 for none."""
    tensors = {
        "in_proj.weight": _tensor(rng, rows, d),
        "conv1d.weight": _tensor(rng, channels, 1, taps),
        "conv1d.bias": _tensor(rng, channels, scale=0.3),
        "dt_bias": _tensor(rng, heads, scale=1.0),
        "A_log": torch.log(8 * _tensor(rng, heads, scale=1.0).abs() + 0.5),
        "D": _tensor(rng, heads, scale=1.0),
        "out_proj.weight": _tensor(rng, d, out),
    }
    if inner:
        tensors["norm.weight"] = 1 + _tensor(rng, inner, scale=0.3)
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


NATIVE_CASES = {
    "plain": {},
    "options": {
        "ssm": {"ngroups": 2, "d_conv": 3, "dt_limit": [0.05, 0.9], "d_ssm": 32},
        "tie_embeddings": False,
    },
    "ungrouped-D": {"ssm": {"D_has_hdim": True, "norm_before_gate": True}},
    "no-norm": {"ssm": {"rmsnorm": False}, "rms_norm": False},
    "biases": {
        "ssm": {
            "bias": True,
            "conv_bias": False,
            "ngroups": 3,
            "norm_before_gate": True,
        }
    },
    "mlp": {"d_intermediate": 100},
    "attention": {
        "attn_layer_idx": [1],
        "attn_cfg": {
            "causal": True,
            "num_heads": 6,
            "num_heads_kv": 2,
            "head_dim": 6,
            "rotary_emb_dim": 4,
            "rotary_emb_base": 500.0,
            "d_conv": 3,
            "mlp_dim": 100,
            "softmax_scale": 0.3,
        },
    },
    "attention-mlp": {
        "attn_layer_idx": [0],
        "d_intermediate": 100,
        "ssm": {"d_conv": 2},
        "attn_cfg": {
            "causal": True,
            "num_heads": 4,
            "num_heads_kv": 4,
            "head_dim": 6,
            "rotary_emb_dim": 6,
            "d_conv": 5,
            "qkv_proj_bias": False,
            "out_proj_bias": False,
        },
    },
}


def attention_tensors(rng, prefix, d, c):
    """Random tensors of a native attention layer."""
    heads, kv_heads, hd = c["num_heads"], c["num_heads_kv"], c["head_dim"]
    qkv, mlp = (heads + 2 * kv_heads) * hd, -(-c.get("mlp_dim", 0) // 256) * 256
    tensors = {
        "in_proj.weight": _tensor(rng, qkv + mlp, d),
        "out_proj.weight": _tensor(rng, d, heads * hd + mlp // 2),
        "conv1d.weight": _tensor(rng, qkv, 1, c["d_conv"]),
        "conv1d.bias": _tensor(rng, qkv, scale=0.3),
    }
    if c.get("qkv_proj_bias", True):
        tensors["in_proj.bias"] = _tensor(rng, qkv + mlp, scale=0.3)
    if c.get("out_proj_bias", True):
        tensors["out_proj.bias"] = _tensor(rng, d, scale=0.3)
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def write_native(directory, *, pickled=True, vocab=VOCAB, ssm=None, **options):
    """A state-spaces checkpoint; vocabulary padded to 64 rows."""
    rng = np.random.default_rng(0)
    ssm_cfg = {"layer": "Mamba2", "headdim": 8, "d_state": 5} | (ssm or {})
    config = {
        "d_model": 24,
        "n_layer": 2,
        "vocab_size": vocab,
        "ssm_cfg": ssm_cfg,
        "attn_layer_idx": [],
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
    } | options
    d, inner = 24, ssm_cfg.get("d_ssm", 48)
    heads, groups, N = inner // 8, ssm_cfg.get("ngroups", 1), ssm_cfg["d_state"]
    channels = inner + 2 * groups * N
    d_mlp = 48 - inner
    d_hidden = -(-config.get("d_intermediate", 0) // 128) * 128
    layer_norm = not config.get("rms_norm", True)
    tensors = {"backbone.embedding.weight": _tensor(rng, 64, d, scale=0.4)}
    for i in range(2):
        layer = f"backbone.layers.{i}"
        attends = i in config["attn_layer_idx"]
        if attends:
            mixer = f"{layer}.mixer"
            tensors |= attention_tensors(rng, mixer, d, config["attn_cfg"])
        tensors |= (
            {}
            if attends
            else mixer_tensors(
                rng,
                f"{layer}.mixer",
                d,
                2 * d_mlp + inner + channels + heads,
                channels,
                heads,
                inner if ssm_cfg.get("rmsnorm", True) else 0,
                inner + d_mlp,
                ssm_cfg.get("d_conv", 4),
            )
        )
        if ssm_cfg.get("bias"):
            for name, rows in (("in_proj", inner + channels + heads), ("out_proj", d)):
                bias = _tensor(rng, rows, scale=0.3)
                tensors[f"{layer}.mixer.{name}.bias"] = bias
        if not ssm_cfg.get("conv_bias", True):
            del tensors[f"{layer}.mixer.conv1d.bias"]
        if ssm_cfg.get("D_has_hdim"):
            tensors[f"{layer}.mixer.D"] = _tensor(rng, inner, scale=1.0)
        norms = ["norm", "norm2"] if d_hidden else ["norm"]
        for norm in norms:
            tensors[f"{layer}.{norm}.weight"] = 1 + _tensor(rng, d, scale=0.3)
            if layer_norm:
                tensors[f"{layer}.{norm}.bias"] = _tensor(rng, d, scale=0.3)
        if d_hidden:
            tensors[f"{layer}.mlp.fc1.weight"] = _tensor(rng, 2 * d_hidden, d)
            tensors[f"{layer}.mlp.fc2.weight"] = _tensor(rng, d, d_hidden)
    tensors["backbone.norm_f.weight"] = 1 + _tensor(rng, d, scale=0.3)
    if layer_norm:
        tensors["backbone.norm_f.bias"] = _tensor(rng, d, scale=0.3)
    head = tensors["backbone.embedding.weight"].clone()
    if not config["tie_embeddings"]:
        head = _tensor(rng, 64, d)
    tensors["lm_head.weight"] = head
    return write_checkpoint(directory, config, tensors, pickled=pickled)


def write_checkpoint(directory, config, tensors, *, pickled):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors")
    return config, {name: t.double().numpy() for name, t in tensors.items()}


def write_mambainllama(directory, *, pickled=False):
    """Three layers, the middle one attention; d_xb narrower than d_inner."""
    rng = np.random.default_rng(1)
    d, heads, kv_heads, hd, hidden = 24, 6, 2, 4, 40
    inner, xb = heads * hd, kv_heads * hd
    teacher = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": d,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 3,
        "rms_norm_eps": 1e-3,
        "rope_theta": 5000.0,
        "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"},
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    }
    mixer = {
        "d_model": d,
        "ssm_cfg": {"expand": 1, "ngroups": heads, "d_state": hd},
        "d_inner": inner,
        "d_xb": xb,
        "attn_layers": [1],
        "n_layer": 3,
        "vocab_size": None,
    }
    tensors = {
        "model.embed_tokens.weight": _tensor(rng, VOCAB, d, scale=0.4),
        "model.norm.weight": 1 + _tensor(rng, d, scale=0.3),
        "lm_head.weight": _tensor(rng, VOCAB, d),
    }
    for i in range(3):
        layer = f"model.layers.{i}"
        if i == 1:
            for name, rows in (("q", inner), ("k", xb), ("v", xb)):
                tensors[f"{layer}.self_attn.{name}_proj.weight"] = _tensor(rng, rows, d)
            tensors[f"{layer}.self_attn.o_proj.weight"] = _tensor(rng, d, inner)
        else:
            channels = inner + 2 * xb
            rows = inner + channels + heads
            tensors |= mixer_tensors(
                rng, f"{layer}.mamba", d, rows, channels, heads, inner, inner, 4
            )
        for name in ("gate", "up"):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = _tensor(rng, hidden, d)
        tensors[f"{layer}.mlp.down_proj.weight"] = _tensor(rng, d, hidden)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = 1 + _tensor(rng, d, scale=0.3)
    read = write_checkpoint(directory, teacher, tensors, pickled=pickled)
    (directory / "mamba_config.json").write_text(json.dumps(mixer))
    return (teacher, mixer), read[1]
