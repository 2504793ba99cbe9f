"""Tiny random checkpoints in the formats of state-spaces and MambaInLlama."""

import json

import numpy as np
import torch
from safetensors.torch import save_file

from tests.support.hf_checkpoints import LLAMA3, VOCAB


def _tensor(rng, *shape, scale=None):
    scale = shape[-1] ** -0.5 if scale is None else scale
    return torch.tensor(scale * rng.standard_normal(shape), dtype=torch.float32)


def mixer_tensors(rng, prefix, d, rows, channels, heads, inner, out, taps):
    """Returns random tensors of one Mamba2 mixer.

    Args:
      inner: width of its norm. If 0, it has no norm.
    """
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
    """Returns random tensors of a native attention layer."""
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


def write_native(directory, *, pickled=True, vocab=VOCAB, rows=64, ssm=None, **options):
    """Writes a state-spaces checkpoint whose embedding is padded to `rows` rows."""
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
    tensors = {"backbone.embedding.weight": _tensor(rng, rows, d, scale=0.4)}
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
            for name, width in (("in_proj", inner + channels + heads), ("out_proj", d)):
                bias = _tensor(rng, width, scale=0.3)
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
        head = _tensor(rng, rows, d)
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
    """Writes three layers, the middle one attention, with d_xb smaller than d_inner."""
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
