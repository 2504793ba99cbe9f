"""GGUF files of Gemma 4, laid out as by llama.cpp's converter."""

import gguf
import numpy as np

from tests.support.hf_gemma4 import FAR, NEAR, gemma4, gemma4_moe, gemma4_unified

# llama.cpp wants the last two layers with keys of their own to be a near and a far one.
GEMMA4_GGUF = {
    "gemma4": ("gemma4", lambda: gemma4(num_kv_shared_layers=2)),
    "gemma4-moe": ("gemma4", gemma4_moe),
    "gemma4-moe-apart": ("gemma4", gemma4_moe),
    "gemma4-unified": ("gemma4", gemma4_unified),
}


def describe_gemma4(writer, c):
    """Writes metadata keys from a config.json."""
    types, count = c["layer_types"], c["num_hidden_layers"]
    far = next(iter(c["per_layer_config"].values()))
    kv, width = c["num_key_value_heads"], c["intermediate_size"]
    ropes, shared = c["rope_parameters"], c["num_kv_shared_layers"]
    writer.add_vocab_size(c["vocab_size"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(count)
    writer.add_head_count(c["num_attention_heads"])
    heads = {NEAR: kv, FAR: far.get("num_key_value_heads", kv)}
    writer.add_head_count_kv([heads[kind] for kind in types])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_key_length(far["head_dim"])
    writer.add_value_length(far["head_dim"])
    writer.add_key_length_swa(c["head_dim"])
    writer.add_value_length_swa(c["head_dim"])
    writer.add_rope_dimension_count(far["head_dim"])
    writer.add_rope_dimension_count_swa(c["head_dim"])
    writer.add_rope_freq_base(ropes[FAR]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes[NEAR]["rope_theta"])
    writer.add_sliding_window(c["sliding_window"])
    writer.add_sliding_window_pattern([kind == NEAR for kind in types])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(c.get("hidden_size_per_layer_input", 0))
    writer.add_final_logit_softcapping(c["final_logit_softcapping"])
    wide = 2 if c["use_double_wide_mlp"] else 1
    own = count - shared
    writer.add_feed_forward_length([width] * own + [wide * width] * shared)
    if c.get("enable_moe_block"):
        writer.add_expert_count(c["num_experts"])
        writer.add_expert_used_count(c["top_k_experts"])
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])


def gemma4_layout(c, tensors, apart):
    """Yields names and float32 arrays of a GGUF file's tensors. `apart` is True to
    store gate and up of the experts as two tensors."""
    count = c["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, count)
    for name, tensor in tensors.items():
        array, block = tensor.float().numpy(), f"blk.{name.split('.')[2]}."
        if name.endswith("router.scale"):
            yield f"{block}ffn_gate_inp.scale", array
        elif name.endswith("per_expert_scale"):
            yield f"{block}ffn_down_exps.scale", array
        elif name.endswith("gate_up_proj") and apart:
            gate, up = np.split(array, 2, axis=1)
            yield f"{block}ffn_gate_exps.weight", gate
            yield f"{block}ffn_up_exps.weight", up
        else:
            plain = name.endswith(("layer_scalar", "gate_up_proj", "experts.down_proj"))
            whole = f"{name}.weight" if plain else name
            found = names.get_name(whole, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            yield found, array
    pairs = next(iter(c["per_layer_config"].values()))["head_dim"] // 2
    turning = int(c["rope_parameters"][FAR]["partial_rotary_factor"] * pairs)
    factors = [1.0] * turning + [1e30] * (pairs - turning)
    yield "rope_freqs.weight", np.array(factors, np.float32)
