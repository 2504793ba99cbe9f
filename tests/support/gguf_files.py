"""Tiny Hugging Face checkpoints as GGUF files, laid out as by llama.cpp's converter.

They are written from a reading of that converter, with the key and tensor names of the
`gguf` package, and share no code with `stree_jax.convert.gguf`. `python -m
tests.gguf_peers` checks that llama.cpp itself can read the files.
"""

import json
import tempfile
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.support.gguf_attention import (
    ATTENTION,
    ATTENTION_CASES,
    describe_attention,
    granite_tensors,
)
from tests.support.gguf_gemma4 import GEMMA4_GGUF, describe_gemma4, gemma4_layout
from tests.support.gguf_qwen import (
    QWEN,
    QWEN_CASES,
    describe_qwen,
    mtp_tensors,
    qwen35,
    qwen_layout,
)
from tests.support.hf_checkpoints import (
    GRANITE_MOE,
    NEMOTRON_MOE,
    PLAIN_ROPE,
    falcon,
    granite,
    kimi_linear,
    lfm2,
    lfm2_moe,
    llama,
    mamba2,
    nemotron,
    qwen2,
    qwen3,
)
from tests.support.hf_windows import FAR, NEAR, gemma3
from tests.support.selective import falcon_mamba, jamba, mamba
from tests.support.vocabularies import byte_level, write_byte_level

NO_LIMITS = {"time_step_limit": (0.0, float("inf"))}
MIXER = {**NO_LIMITS, "mamba_proj_bias": False, "mamba_conv_bias": True}
NEMOTRON = {"use_bias": False, "use_conv_bias": True}
# GGUF files of Nemotron-H have no expert groups.
EXPERTS = NEMOTRON | NEMOTRON_MOE | {"n_group": 1, "topk_group": 1}

# Name of a case -> its architecture, and a function that makes the model.
# llama.cpp norms q and k with the epsilon of all norms, and always renormalizes.
KIMI = {"rms_norm_eps": 1e-6, "moe_renormalize": True, "linear_num_heads": 4}
GEMMA3 = {
    "num_hidden_layers": 7,
    "layer_types": [*[NEAR] * 5, FAR, NEAR],
    "query_pre_attn_scalar": 10,
    "rope_parameters": {
        NEAR: {"rope_type": "default", "rope_theta": 10000.0},
        FAR: {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0},
    },
}
TWICE = {"intermediate_size": 48}  # llama.cpp wants twice the model's width
GGUF_CASES = {
    "llama": ("llama", llama),
    "llama-tied": (
        "llama",
        lambda: llama(
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=True,
            rope_parameters=PLAIN_ROPE,
        ),
    ),
    "qwen2": ("qwen2", qwen2),
    "qwen3": ("qwen3", qwen3),
    "mamba2": (
        "mamba2",
        lambda: mamba2(use_bias=False, use_conv_bias=True, **NO_LIMITS),
    ),
    "mamba2-one-group": (
        "mamba2",
        lambda: mamba2(
            use_bias=False,
            use_conv_bias=True,
            n_groups=1,
            tie_word_embeddings=True,
            **NO_LIMITS,
        ),
    ),
    "granite": (
        "granite",
        lambda **options: granite(
            layer_types=["attention"] * 3, attention_bias=False, **options
        ),
    ),
    "granite-moe": (
        "granitemoe",
        lambda: granite(
            layer_types=["attention"] * 3, attention_bias=False, **GRANITE_MOE
        ),
    ),
    "granite-hybrid": (
        "granitehybrid",
        lambda: granite(
            attention_bias=False,
            position_embedding_type="nope",
            tie_word_embeddings=False,
            **MIXER,
        ),
    ),
    "granite-hybrid-moe": (
        "granitehybrid",
        lambda: granite(
            attention_bias=False,
            position_embedding_type="nope",
            **(MIXER | GRANITE_MOE),
        ),
    ),
    "falcon-h1": (
        "falcon-h1",
        lambda: falcon(
            attention_bias=False,
            mlp_bias=False,
            projectors_bias=False,
            mamba_norm_before_gate=False,
            **MIXER,
        ),
    ),
    "falcon-h1-no-norm": (
        "falcon-h1",
        lambda: falcon(
            attention_bias=False,
            mlp_bias=False,
            projectors_bias=False,
            mamba_rms_norm=False,
            **MIXER,
        ),
    ),
    "nemotron-h": ("nemotron_h", lambda: nemotron(**NEMOTRON)),
    "nemotron-h-moe": ("nemotron_h_moe", lambda: nemotron(**EXPERTS)),
    "nemotron-h-latent": (
        "nemotron_h_moe",
        lambda: nemotron(**EXPERTS, moe_latent_size=12),
    ),
    "lfm2": ("lfm2", lambda: lfm2(conv_bias=False, tie_word_embeddings=True)),
    "lfm2-moe": ("lfm2moe", lambda: lfm2_moe(routed_scaling_factor=1.0)),
    "mamba1": ("mamba", lambda: mamba(use_bias=False, **TWICE)),
    "falcon-mamba": (
        "mamba",
        lambda: falcon_mamba(
            use_bias=False, mixer_rms_eps=1e-3, tie_word_embeddings=True, **TWICE
        ),
    ),
    "jamba": ("jamba", lambda: jamba(mamba_proj_bias=False, mamba_expand=2)),
    "kimi-linear": ("kimi-linear", lambda: kimi_linear(**KIMI)),
    "kimi-linear-joined": ("kimi-linear", lambda: kimi_linear(**KIMI)),
    # llama.cpp knows which layers have windows, and the base of their positions.
    "gemma3": ("gemma3", lambda: gemma3(**GEMMA3)),
    **ATTENTION_CASES,
    **GEMMA4_GGUF,
    **QWEN_CASES,
}
# The converter reorders q and k of these architectures, for a rotary embedding that
# rotates neighbouring channels.
PAIRED = ("llama", "granite", "granitemoe", "granitehybrid")
PAIRED += ("nemotron_h", "nemotron_h_moe", "smollm3", "mistral3", "granite_swa")


def write_gguf(directory, name, file, kind="F32", extra=None, shards=0):
    """Writes the checkpoint of a case in `directory` as a GGUF file.

    Args:
      kind: type of matrices, as the `gguf` package names it.
      extra: function of the writer that adds keys.
      shards: tensors in each shard. If 0, there is one file.
    """
    arch = GGUF_CASES[name][0]
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=shards)
    if arch in QWEN:
        tensors |= mtp_tensors(config) if name.endswith("-mtp") else {}
        describe_qwen(writer, arch, config, int("mtp.fc.weight" in tensors))
        placed = qwen_layout(arch, config, tensors)
    elif arch == "gemma4":
        describe_gemma4(writer, config)
        placed = gemma4_layout(config, tensors, name.endswith("-apart"))
    else:
        config["joined"] = name.endswith("-joined")
        describe(writer, arch, config)
        own = granite_tensors(tensors) if arch == "granite_swa" else ()
        placed = [*own, *layout(arch, config, tensors)]
    if extra is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        extra(writer)
    stored = gguf.GGMLQuantizationType[kind]
    for tensor, values in placed:
        plain = gguf.GGMLQuantizationType.F32
        matrix = values.ndim > 1 and not any(s in tensor for s in ("ssm_", "_inp"))
        matrix |= "ssm_in" in tensor or "ssm_out" in tensor
        how = stored if matrix else plain
        data = gguf.quants.quantize(np.ascontiguousarray(values), how)
        writer.add_tensor(tensor, data, raw_dtype=how)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_predicting(file):
    """Writes a file of a tiny Qwen3.5 with an MTP layer and a tokenizer."""
    tokenizer = byte_level("qwen35")
    model = qwen35(vocab_size=tokenizer.get_vocab_size() + 1)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        extra = write_byte_level(tokenizer, "qwen35", add_bos_token=False)
        return write_gguf(Path(folder), "qwen35-mtp", file, extra=extra)


def describe(writer, arch, c):
    """Writes metadata keys from a config.json."""
    layers = c.get("layers_block_type") or c.get("layer_types") or jamba_layers(c)
    count = c.get("num_hidden_layers") or len(layers)
    heads = c.get("num_attention_heads", 0)
    kv = c.get("num_key_value_heads", 0)
    writer.add_vocab_size(c["vocab_size"])
    writer.add_context_length(c.get("max_position_embeddings", 4096))
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(count)
    writer.add_head_count(heads)
    eps = c.get("rms_norm_eps") or c.get("layer_norm_epsilon") or c.get("norm_eps")
    writer.add_layer_norm_rms_eps(eps)
    if arch.startswith("nemotron"):
        writer.add_layer_norm_eps(eps)
    rope = c.get("rope_parameters") or {}
    if arch == "gemma3":
        rope = rope["full_attention"]
        writer.add_sliding_window(c["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    rope = rope.get(FAR, rope)
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if heads and arch != "kimi-linear":
        size = c.get("head_dim") or c["hidden_size"] // heads
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_rope_dimension_count(size)
    if arch == "kimi-linear":
        describe_kimi(writer, c, layers)
    elif arch in (
        "granitehybrid",
        "nemotron_h",
        "nemotron_h_moe",
        "lfm2",
        "lfm2moe",
        "jamba",
    ):
        attention = [k in ("attention", "full_attention") for k in layers]
        writer.add_head_count_kv([kv * there for there in attention])
    elif kv:
        writer.add_head_count_kv(kv)
    if arch.startswith("nemotron"):
        describe_nemotron(writer, c, layers)
    elif arch in ("mamba", "mamba2"):
        writer.add_feed_forward_length(0)
    else:
        dense = c.get("shared_intermediate_size")
        dense = c["intermediate_size"] if c.get("num_local_experts") else dense
        writer.add_feed_forward_length(dense or c["intermediate_size"])
    if arch.startswith("granite"):
        describe_granite(writer, c, arch)
    if arch.startswith("lfm2"):
        describe_lfm2(writer, c)
    if arch in ("mamba", "jamba"):
        describe_selective(writer, c)
        return
    if arch.startswith(("lfm2", "kimi")):
        return
    if arch in ATTENTION:
        describe_attention(writer, arch, c, layers, rope)
        return
    if arch not in ("llama", "qwen2", "qwen3", "gemma3", "granite", "granitemoe"):
        describe_mixer(writer, c)


def jamba_layers(c):
    """Returns the names of Jamba's layers; None for other models."""
    if "attn_layer_period" not in c:
        return None
    period, offset = c["attn_layer_period"], c["attn_layer_offset"]
    names = ("mamba", "attention")
    return [names[i % period == offset] for i in range(c["num_hidden_layers"])]


def describe_selective(writer, c):
    inner = c["hidden_size"] * c.get("mamba_expand", 1)
    writer.add_ssm_conv_kernel(c.get("mamba_d_conv") or c["conv_kernel"])
    writer.add_ssm_inner_size(inner if "mamba_expand" in c else c["intermediate_size"])
    writer.add_ssm_state_size(c.get("mamba_d_state") or c["state_size"])
    writer.add_ssm_time_step_rank(c.get("mamba_dt_rank") or c["time_step_rank"])
    writer.add_ssm_dt_b_c_rms("mixer_rms_eps" in c)
    if c.get("num_experts", 1) > 1:
        writer.add_expert_count(c["num_experts"])
        writer.add_expert_used_count(c["num_experts_per_tok"])


def describe_kimi(writer, c, layers):
    kv = c["num_attention_heads"] if c["joined"] else 1
    writer.add_head_count_kv([kv * (kind == "full_attention") for kind in layers])
    writer.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(c["linear_head_dim"])
    rank, rope = c["kv_lora_rank"], c["qk_rope_head_dim"]
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rope)
    own = c["qk_nope_head_dim"] + rope, c["v_head_dim"]
    writer.add_key_length(own[0] if c["joined"] else rank + rope)
    writer.add_value_length(own[1] if c["joined"] else rank)
    writer.add_key_length_mla(own[0])
    writer.add_value_length_mla(own[1])
    writer.add_expert_count(c["num_experts"])
    writer.add_expert_used_count(c["num_experts_per_token"])
    writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    writer.add_expert_shared_count(c["num_shared_experts"])
    writer.add_expert_weights_scale(c["routed_scaling_factor"])
    writer.add_expert_weights_norm(c["moe_renormalize"])
    writer.add_expert_group_count(c["num_expert_group"])
    writer.add_expert_group_used_count(c["topk_group"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(c["mlp_layer_types"].count("dense"))


def describe_lfm2(writer, c):
    writer.add_shortconv_l_cache(c["conv_L_cache"])
    if "num_experts" in c:
        writer.add_expert_count(c["num_experts"])
        writer.add_expert_used_count(c["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
        writer.add_leading_dense_block_count(c["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def describe_granite(writer, c, arch):
    writer.add_attention_scale(c["attention_multiplier"])
    writer.add_embedding_scale(c["embedding_multiplier"])
    writer.add_residual_scale(c["residual_multiplier"])
    writer.add_logit_scale(c["logits_scaling"])
    # Without this key, attention uses rotary embeddings.
    if arch not in ("granitemoe", "granite_swa"):
        writer.add_rope_scaling_finetuned(arch != "granitehybrid")
    if c.get("num_local_experts"):
        writer.add_expert_count(c["num_local_experts"])
        writer.add_expert_used_count(c["num_experts_per_tok"])
        writer.add_expert_shared_feed_forward_length(c["shared_intermediate_size"])


def describe_nemotron(writer, c, layers):
    second = "moe" if "moe" in layers else "mlp"
    width = c["moe_intermediate_size" if second == "moe" else "intermediate_size"]
    writer.add_feed_forward_length([width * (kind == second) for kind in layers])
    if second == "moe":
        writer.add_expert_count(c["n_routed_experts"])
        writer.add_expert_used_count(c["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(width)
        shared = c["moe_shared_expert_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(shared)
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_norm(c["norm_topk_prob"])
        writer.add_expert_weights_scale(c["routed_scaling_factor"])
        writer.add_expert_group_count(c["n_group"])
        if c.get("moe_latent_size"):
            writer.add_moe_latent_size(c["moe_latent_size"])


def mixer_sizes(c):
    """Returns (heads, head dim, groups, state size, taps), whatever the fields are
    called."""

    def first(*names):
        return next(c[n] for n in names if c.get(n) is not None)

    return (
        first("mamba_n_heads", "mamba_num_heads", "num_heads"),
        first("mamba_d_head", "mamba_head_dim", "head_dim"),
        first("mamba_n_groups", "n_groups"),
        first("mamba_d_state", "ssm_state_size", "state_size"),
        first("mamba_d_conv", "conv_kernel"),
    )


def describe_mixer(writer, c):
    heads, size, groups, state, taps = mixer_sizes(c)
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_inner_size(heads * size)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)


def layout(arch, c, tensors):
    """Yields names and float32 arrays of a GGUF file's tensors, from a checkpoint's."""
    layers = c.get("layers_block_type") or c.get("layer_types") or []
    count = c.get("num_hidden_layers") or len(layers)
    known = "granite" if arch == "granite_swa" else arch
    number = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == known)
    names = gguf.get_tensor_name_map(number, count)
    if arch == "falcon-h1":
        multiply(c, tensors)
    stacked = {}
    for name, tensor in sorted(tensors.items(), key=expert_number):
        if ".experts." in name:  # these checkpoints store experts one by one
            before, _, after = name.partition(".experts.")
            block, module = before.split(".")[-2], after.split(".")[1]
            module = LFM2_WORDS.get(module, module)
            key = f"model.layers.{block}.mlp.experts.{module}.weight"
            stacked.setdefault(key, []).append(tensor)
    experts = {name: torch.stack(each) for name, each in stacked.items()}
    rest = {name: t for name, t in tensors.items() if ".experts." not in name}
    for name, tensor in (rest | experts).items():
        convert = one_of_kimi if arch == "kimi-linear" else one
        for theirs, array in convert(arch, c, name, tensor.float().numpy()):
            known = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
            assert known is not None, theirs
            yield known, array
    rope = c.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_factors(c, rope)


LFM2_WORDS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def expert_number(item):
    """A sort key that puts experts in numerical order (10 after 2)."""
    _, _, after = item[0].partition(".experts.")
    return int(after.split(".")[0]) if after else 0


def one_of_kimi(arch, c, name, w):
    """The same as `one`, for Kimi-Linear."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if ".block_sparse_moe." in name and "experts" not in name:
        module = "mlp" if "_proj." in name else "block_sparse_moe"
        name = name.replace("block_sparse_moe", module)
    if name.endswith("conv1d.weight"):
        w = w.reshape(1, len(w), 1, -1)
    if name.endswith("A_log"):
        w = -np.exp(w)
    if name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    if name.endswith("kv_b_proj.weight") and not c.get("joined"):
        heads, nope = c["num_attention_heads"], c["qk_nope_head_dim"]
        kv = w.reshape(heads, -1, w.shape[1])
        before = name.removesuffix("kv_b_proj.weight")
        k, v = np.ascontiguousarray(kv[:, :nope].swapaxes(1, 2)), kv[:, nope:]
        yield f"{before}k_b_proj.weight", k
        yield f"{before}v_b_proj.weight", np.ascontiguousarray(v)
        return
    yield name, w


def one(arch, c, name, w):
    """Yields the GGUF tensors of one checkpoint tensor: names that gguf maps, and
    arrays."""
    if name.endswith(("q_proj.weight", "q_proj.bias")) and arch in PAIRED:
        w = paired(w, c["num_attention_heads"])
    if name.endswith(("k_proj.weight", "k_proj.bias")) and arch in PAIRED:
        w = paired(w, c["num_key_value_heads"])
    if name.endswith(("conv1d.weight", ".conv.conv.weight")):
        w = w.squeeze(1)
    if name.endswith("norm.weight") and arch == "gemma3":
        w = w + 1
    selective = arch in ("mamba", "jamba")
    if name.endswith("A_log"):
        w = -np.exp(w) if selective else -np.exp(w)[:, None]
    if name.endswith((".mixer.D", ".mamba.D")) and not selective:
        w = w[:, None]
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        w = w.reshape(mixer_sizes(c)[2], -1)
    if name.endswith("dt_bias"):
        module = "dt" if ".mixer." in name else "dt_proj"
        name = name.replace("dt_bias", f"{module}.bias")
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = name.replace(".expert_bias", ".expert_bias.bias")
    number = next((part for part in name.split(".") if part.isdigit()), "")
    block, ending = f"blk.{number}.", name.rpartition(".")[2]
    if "shared_mlp.input_linear" in name or "moe.input_linear" in name:
        gate, up = np.split(w, 2, axis=-2)
        kind = "_shexp" if c["num_local_experts"] else ""
        kind = kind if "shared" in name else "_exps"
        yield f"{block}ffn_gate{kind}.{ending}", gate
        yield f"{block}ffn_up{kind}.{ending}", up
        return
    if "shared_mlp.output_linear" in name and not c["num_local_experts"]:
        name = f"{block}ffn_down.{ending}"
    yield name, w


def paired(w, heads):
    """Reorders channels so that i and i + half of each head are neighbours."""
    size = len(w) // heads
    order = [i // 2 + size // 2 * (i % 2) for i in range(size)]
    return w[[h * size + i for h in range(heads) for i in order]]


def multiply(c, tensors):
    """Multiplies Falcon-H1's multipliers into its weights, in place."""
    heads, size, groups, state, _ = mixer_sizes(c)
    widths = [heads * size, heads * size, groups * state, groups * state, heads]
    parts = torch.tensor(c["ssm_multipliers"]).repeat_interleave(torch.tensor(widths))
    gate, down = c["mlp_multipliers"]
    into = c["attention_in_multiplier"]
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "q_proj": into,
        "k_proj": into * c["key_multiplier"],
        "v_proj": into,
        "o_proj": c["attention_out_multiplier"],
        "out_proj": c["ssm_out_multiplier"],
        "in_proj": c["ssm_in_multiplier"] * parts[:, None],
        "lm_head": c["lm_head_multiplier"],
        "embed_tokens": c["embedding_multiplier"],
    }
    for name in tensors:
        module = name.split(".")[-2]
        if module in factors:
            tensors[name] = tensors[name] * factors[module]


def llama3_factors(c, rope):
    """Returns the divisors of the rotary frequencies under llama3 scaling."""
    size = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    old, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((old / waves - low) / (high - low), 0, 1)
    return (1 / (smooth + (1 - smooth) / factor)).astype(np.float32)


def written(root):
    """Returns a function: name of a case -> its directory, its GGUF file, the model."""

    @cache
    def make(name):
        model = GGUF_CASES[name][1]()
        model.save_pretrained(root / name)
        file = write_gguf(root / name, name, root / f"{name}.gguf")
        return root / name, file, model

    return make
