"""Cases of `gguf_files` whose attention differs between layers or positions, laid out
as by llama.cpp's converter (`olmo.py`, `mistral3.py`, `granite.py`)."""

import gguf

from tests.support.hf_attention import (
    PLAIN_ROPE,
    YARN,
    granite_swa,
    granitemoe_swa,
    ministral3,
    olmo2,
    olmo3,
    qwen3_moe,
    smollm3,
)
from tests.support.hf_windows import FAR, NEAR

OLMO3_ROPE = {NEAR: PLAIN_ROPE, FAR: YARN}
MISTRAL3_ROPE = {  # queries grow within the texts of the tests
    **YARN,
    "original_max_position_embeddings": 5,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "llama_4_scaling_beta": 0.6,
}


def granite(make, *thetas):
    """Returns a function that makes a Granite model with these bases. llama.cpp has one
    base, which some layers do not use."""
    options = {"layer_rope_theta": list(thetas), "rope_parameters": PLAIN_ROPE}
    return lambda: make(**options)


ATTENTION_CASES = {
    # llama.cpp has experts in all layers, and their weights add up to 1.
    "qwen3-moe": ("qwen3moe", lambda: qwen3_moe(mlp_only_layers=[])),
    "smollm3": ("smollm3", lambda: smollm3(tie_word_embeddings=True)),
    "olmo2": ("olmo2", olmo2),
    "olmo3": ("olmo2", lambda: olmo3(rope_parameters=OLMO3_ROPE)),
    "mistral3": ("mistral3", lambda: ministral3(rope_parameters=MISTRAL3_ROPE)),
    "granite-swa": ("granite_swa", granite(granite_swa, 0, 700.0, 700.0, 700.0)),
    "granite-swa-moe": ("granite_swa", granite(granitemoe_swa, 700.0, 700.0, 0, 700.0)),
}
ATTENTION = {arch for arch, _ in ATTENTION_CASES.values()}
# Tensors of Granite with windows that the `gguf` package has no names for.
GRANITE_SWA = {
    "self_attn.sinks": "attn_sinks",
    "block_sparse_moe.router.weight": "ffn_gate_inp",
    "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "shared_mlp.input_linear.weight": "ffn_up_shexp",
    "shared_mlp.output_linear.weight": "ffn_down_shexp",
}


def granite_tensors(tensors):
    """Removes the tensors of `GRANITE_SWA`, and yields their GGUF names and arrays."""
    for name in list(tensors):
        _, _, number, module = [*name.split(".", 3), "", ""][:4]
        if module in GRANITE_SWA:
            array = tensors.pop(name).float().numpy()
            yield f"blk.{number}.{GRANITE_SWA[module]}.weight", array


def describe_attention(writer, arch, c, layers, rope):
    """Writes the metadata keys of these architectures.

    Args:
      layers: the type of each layer.
      rope: parameters of the rotary embedding of layers without a window.
    """
    if rope.get("rope_type") == "yarn":
        describe_yarn(writer, arch, rope)
    if arch == "qwen3moe":
        writer.add_expert_count(c.get("num_experts") or c["num_local_experts"])
        writer.add_expert_used_count(c["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    if arch in ("olmo2", "granite_swa") and "sliding_window" in c:
        writer.add_sliding_window(c["sliding_window"])
        writer.add_sliding_window_pattern([kind == NEAR for kind in layers])
    if arch == "granite_swa":
        turns = [theta != 0 for theta in c["layer_rope_theta"]]
        writer.add_array(f"{arch}.attention.rope_pattern", turns)


def describe_yarn(writer, arch, rope):
    """Writes the keys of YaRN."""
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "attention_factor" in rope:
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
