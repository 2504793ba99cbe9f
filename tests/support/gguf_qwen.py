"""Tiny Qwen3-Next and Qwen3.5 checkpoints as GGUF files, with and without MTP layers.

Like `gguf_files`, which calls it, this is written from a reading of llama.cpp's
converter and shares no code with `stree_jax.convert.gguf`.
"""

import numpy as np
import torch
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.support.hf_checkpoints import VOCAB, randomize

# Three value heads per key head: with two of two, tiling would be its own inverse.
# llama.cpp wants heads of k and v of one size, and normalizes q and k with the epsilon
# of all norms, which is 1e-6 in transformers.
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "vocab_size": VOCAB,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 700.0,
        "partial_rotary_factor": 0.5,
    },
}
MROPE = {**SIZES["rope_parameters"], "mrope_section": [2, 1, 1]}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
}
QWEN = ("qwen3next", "qwen35", "qwen35moe")


def made(config, model, options):
    """Returns a random model whose memory lasts for several tokens."""
    found = randomize(model(config(**(SIZES | options))))
    found.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in found.named_parameters():
            if name.endswith("A_log"):
                normal = torch.randn(p.shape, generator=generator)
                p.copy_(torch.log(normal.abs() + 0.1))
            elif "norm" in name and "linear_attn" not in name:
                p.sub_(1)  # the scale is 1 + p
    return found


def qwen3next(**options):
    return made(Qwen3NextConfig, Qwen3NextForCausalLM, EXPERTS | options)


def qwen35(**options):
    rope = {"rope_parameters": MROPE}
    return made(Qwen3_5TextConfig, Qwen3_5ForCausalLM, rope | options)


def qwen35moe(**options):
    options = {"rope_parameters": MROPE} | EXPERTS | options
    return made(Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, options)


EQUAL = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
TYPES = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
# Name of a case -> its architecture, and a function that makes the model. Files of the
# cases named "mtp" also have the layer of `mtp_tensors`.
QWEN_CASES = {
    "qwen3next": ("qwen3next", qwen3next),
    "qwen35": ("qwen35", qwen35),
    "qwen35-equal": (
        "qwen35",
        lambda: qwen35(layer_types=TYPES, tie_word_embeddings=True, **EQUAL),
    ),
    "qwen35-mtp": ("qwen35", qwen35),
    "qwen35moe": ("qwen35moe", qwen35moe),
    "qwen35moe-mtp": ("qwen35moe", qwen35moe),
}


def mtp_tensors(c):
    """Returns the MTP tensors of a checkpoint with config.json `c`, which transformers
    does not have."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def scale(size):
        return 0.3 * torch.randn(size, generator=generator)

    d, layer = c["hidden_size"], "mtp.layers.0."
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    size = c["head_dim"]
    tensors = {
        "mtp.fc.weight": normal(d, 2 * d),
        "mtp.pre_fc_norm_embedding.weight": scale(d),
        "mtp.pre_fc_norm_hidden.weight": scale(d),
        "mtp.norm.weight": scale(d),
        f"{layer}input_layernorm.weight": scale(d),
        f"{layer}post_attention_layernorm.weight": scale(d),
        f"{layer}self_attn.q_proj.weight": normal(2 * heads * size, d),
        f"{layer}self_attn.k_proj.weight": normal(kv * size, d),
        f"{layer}self_attn.v_proj.weight": normal(kv * size, d),
        f"{layer}self_attn.o_proj.weight": normal(d, heads * size),
        f"{layer}self_attn.q_norm.weight": scale(size),
        f"{layer}self_attn.k_norm.weight": scale(size),
    }

    def mlp(module, width):
        for name in ("gate_proj", "up_proj"):
            tensors[f"{module}{name}.weight"] = normal(width, d)
        tensors[f"{module}down_proj.weight"] = normal(d, width)

    if "num_experts" not in c:
        mlp(f"{layer}mlp.", c["intermediate_size"])
        return tensors
    for e in range(c["num_experts"]):
        mlp(f"{layer}mlp.experts.{e}.", c["moe_intermediate_size"])
    mlp(f"{layer}mlp.shared_expert.", c["shared_expert_intermediate_size"])
    tensors[f"{layer}mlp.gate.weight"] = normal(c["num_experts"], d)
    tensors[f"{layer}mlp.shared_expert_gate.weight"] = normal(1, d)
    return tensors


def describe_qwen(writer, arch, c, mtp):
    """Writes metadata keys from a config.json; `mtp` is the number of MTP layers."""
    rope, size = c["rope_parameters"], c["head_dim"]
    writer.add_vocab_size(c["vocab_size"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"] + mtp)
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(size * rope["partial_rotary_factor"]))
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if "num_experts" in c:
        writer.add_expert_count(c["num_experts"])
        writer.add_expert_used_count(c["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
        shared = c["shared_expert_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(shared)
    else:
        writer.add_feed_forward_length(c["intermediate_size"])
    heads = c["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(c["linear_key_head_dim"])
    writer.add_ssm_group_count(c["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(c["linear_value_head_dim"] * heads)
    if c["layer_types"] == TYPES:
        flags = [kind == "linear_attention" for kind in TYPES] + [False] * mtp
        writer.add_array(f"{arch}.attention.recurrent_layers", flags)
    else:
        writer.add_full_attention_interval(4)
    if mtp:
        writer.add_nextn_predict_layers(mtp)


MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
NEXTN = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head_norm",
}


def qwen_layout(arch, c, tensors):
    """Yields names and float32 arrays of a GGUF file's tensors, from a checkpoint's."""
    count, experts = c["num_hidden_layers"], {}
    for name, tensor in tensors.items():
        w = tensor.float().numpy()
        if "norm" in name and "linear_attn" not in name:
            w = w + 1
        module = name.removesuffix(".weight")
        if module in OUTSIDE:
            yield f"{OUTSIDE[module]}.weight", w
        elif module in NEXTN:
            yield f"blk.{count}.nextn.{NEXTN[module]}.weight", w
        else:
            before, _, rest = name.partition("layers.")
            number, _, module = rest.removesuffix(".weight").partition(".")
            block = f"blk.{int(number) + count * before.startswith('mtp')}."
            if ".experts." in module:
                _, _, expert, module = module.split(".")
                part = module.removesuffix("_proj")
                each = experts.setdefault(f"{block}ffn_{part}_exps.weight", {})
                each[int(expert)] = w
            else:
                yield from layer_tensors(arch, c, block, module, w)
    for name, each in experts.items():
        yield name, np.stack([each[e] for e in range(len(each))])


def layer_tensors(arch, c, block, module, w):
    """Yields the GGUF tensors of one tensor of a layer, except experts."""
    keys, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    size, many = c["linear_value_head_dim"], heads // keys
    key = keys * c["linear_key_head_dim"]
    part = module.removeprefix("linear_attn.")
    if arch != "qwen3next" and keys != heads and module.startswith("linear_attn."):
        if part in ("in_proj_qkv", "conv1d"):
            w = np.concatenate([w[: 2 * key], tiled(w[2 * key :], keys, many, size)])
        elif part == "in_proj_z":
            w = tiled(w, keys, many, size)
        elif part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
            w = tiled(w, keys, many, 1)
        elif part == "out_proj":
            w = tiled(w.T, keys, many, size).T
    if part == "A_log":
        yield f"{block}ssm_a", -np.exp(w)
    elif part == "dt_bias":
        yield f"{block}ssm_dt.bias", w
    elif part == "in_proj_qkvz":
        width = many * size
        sizes = c["linear_key_head_dim"], c["linear_key_head_dim"], width, width
        each = w.reshape(keys, sum(sizes), -1)
        split = np.split(each, np.cumsum(sizes)[:-1], axis=1)
        q, k, v, z = (x.reshape(-1, w.shape[1]) for x in split)
        yield f"{block}attn_qkv.weight", np.concatenate([q, k, v])
        yield f"{block}attn_gate.weight", z
    else:
        yield f"{block}{MODULES[module]}.weight", w.squeeze()


def tiled(w, keys, many, size):
    """Reorders value heads from those of one key head after another to the first of
    every key head, then the second of every key head."""
    heads = w.reshape(keys, many, size, -1)
    return heads.swapaxes(0, 1).reshape(w.shape)
