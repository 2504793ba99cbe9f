"""Our parameters as a GGUF file, for llama.cpp: of Mamba2 models and Granite hybrids.

The file has no tokenizer ("no_vocab"): it is for programs that are given token ids.
Names and layouts are those that llama.cpp reads: a matrix [rows, columns] as here, A
itself in place of its logarithm, gate and up apart, and the channels of q and k in the
order of its rotary embedding, which turns neighbours.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from stree_jax.models import AttentionConfig, MambaConfig, MLPConfig, ModelConfig, Rope
from stree_jax.models.config import given

KINDS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}  # by dtype of ours
BLOCK = 32  # numbers that share a scale in Q8_0
CONTEXT = 1 << 20  # tokens; nothing here depends on it
# Weights of products; what else there is stays in float32, as llama.cpp wants it.
PRODUCTS = {
    *("token_embd", "output", "ssm_in", "ssm_out", "attn_q", "attn_k", "attn_v"),
    *("attn_output", "ffn_gate", "ffn_up", "ffn_down"),
}

Named = Iterator[tuple[str, np.ndarray]]


def write_gguf(config: ModelConfig, params: Any, dtype: str, path: Path) -> int:
    """Write a file, weights of products as F32, BF16 or Q8_0.

    Args:
      params: float32 or bfloat16; rounded to the nearest where `dtype` has fewer bits.
      dtype: "float32", "bfloat16" or "int8".

    Returns:
      bytes that a pass reads whole: all but an embedding that is not also the head.

    Raises:
      ValueError: llama.cpp has no such architecture, rows of Q8_0 are no whole blocks,
        or the package is missing.
    """
    if find_spec("gguf") is None:
        raise ValueError("writing GGUF files needs gguf; pip install gguf")
    import gguf

    arch, kind = arch_of(config), gguf.GGMLQuantizationType[KINDS[dtype]]
    writer = gguf.GGUFWriter(path, arch)
    _describe(writer, config)
    read_bytes = 0
    for name, tensor in gguf_tensors(config, params):
        product = name.removesuffix(".weight").rpartition(".")[2] in PRODUCTS
        stored = kind if product else gguf.GGMLQuantizationType.F32
        if stored == gguf.GGMLQuantizationType.Q8_0 and tensor.shape[-1] % BLOCK:
            rows = tensor.shape[-1]
            raise ValueError(f"{name}: rows of {rows} are no whole blocks of {BLOCK}")
        data = gguf.quants.quantize(np.ascontiguousarray(tensor), stored)
        writer.add_tensor(name, data, raw_dtype=stored)
        if name != "token_embd.weight" or config.tie_embeddings:
            read_bytes += data.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_bytes


def arch_of(config: ModelConfig) -> str:
    """llama.cpp's name of an architecture.

    Raises:
      ValueError: it has none for this one, or not with these options.
    """
    m, a, f = config.mamba, config.attention, config.mlp
    mixers, others = config.layers[::2], config.layers[1::2]
    wrong = config.norm != "rms" or config.mtp != () or m is None
    if m is not None:
        sizes = m.num_heads, m.head_dim, m.d_state, m.n_groups, m.d_conv
        usual = MambaConfig(*sizes, norm_groups=m.n_groups, norm_eps=config.norm_eps)
        wrong |= m != usual or m.d_inner != 2 * config.d_model
    if set(config.layers) == {"mamba"}:
        scales = config.embedding_multiplier, config.residual_multiplier
        arch = "mamba2"
        wrong |= (*scales, config.logits_divisor) != (1, 1, 1)
    else:
        arch = "granitehybrid"
        wrong |= set(mixers) != {"mamba", "attention"} or set(others) != {"mlp"}
        if a is not None:
            heads = a.num_heads, a.num_kv_heads, a.head_dim
            wrong |= a != AttentionConfig(*heads, rope=a.rope, scale=a.scale)
            if a.rope is not None:
                wrong |= a.rope != Rope(a.rope.theta, a.head_dim)
        wrong |= f is None or f != MLPConfig(f.d_hidden)
    if wrong:
        raise ValueError(
            "llama.cpp: want a Mamba2 model, or a Granite hybrid without experts, with "
            "the usual options"
        )
    return arch


def _describe(writer: Any, config: ModelConfig) -> None:
    """What llama.cpp asks for beside the tensors."""
    m, a, f = given(config.mamba), config.attention, config.mlp
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.d_model)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_ssm_conv_kernel(m.d_conv)
    writer.add_ssm_inner_size(m.d_inner)
    writer.add_ssm_state_size(m.d_state)
    writer.add_ssm_time_step_rank(m.num_heads)
    writer.add_ssm_group_count(m.n_groups)
    if a is None or f is None:
        writer.add_block_count(len(config.layers))
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        return
    mixers = config.layers[::2]
    writer.add_block_count(len(mixers))
    writer.add_feed_forward_length(f.d_hidden)
    writer.add_head_count(a.num_heads)
    # A layer without heads of keys is one of Mamba2.
    writer.add_head_count_kv([a.num_kv_heads * (k == "attention") for k in mixers])
    writer.add_key_length(a.head_dim)
    writer.add_value_length(a.head_dim)
    writer.add_attention_scale(a.head_dim**-0.5 if a.scale is None else a.scale)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_divisor)
    writer.add_rope_scaling_finetuned(a.rope is not None)  # whether it turns at all
    writer.add_rope_dimension_count(a.head_dim)
    if a.rope is not None:
        writer.add_rope_freq_base(a.rope.theta)


def gguf_tensors(config: ModelConfig, params: Any) -> Named:
    """Every tensor by its name in the file, in float32."""
    arch = arch_of(config)
    yield "token_embd.weight", _array(params["embedding"])
    yield "output_norm.weight", _array(params["norm"]["scale"])
    if not config.tie_embeddings:
        yield "output.weight", _array(params["lm_head"])
    for i, kind in enumerate(config.layers):
        layer = params[f"layers_{i}"]
        block = f"blk.{i if arch == 'mamba2' else i // 2}."
        norm = "ffn_norm" if kind == "mlp" else "attn_norm"
        yield f"{block}{norm}.weight", _array(layer["norm"]["scale"])
        parts = {"mamba": _mamba, "attention": _attention, "mlp": _mlp}[kind]
        for name, tensor in parts(config, layer[kind]):
            yield block + name, tensor


def _mamba(config: ModelConfig, p: Any) -> Named:
    yield "ssm_in.weight", _array(p["in_proj"])
    yield "ssm_conv1d.weight", _array(p["conv_weight"])
    yield "ssm_conv1d.bias", _array(p["conv_bias"])
    yield "ssm_dt.bias", _array(p["dt_bias"])
    yield "ssm_a", -np.exp(_array(p["A_log"]))[:, None]
    yield "ssm_d", _array(p["D"])[:, None]
    yield "ssm_norm.weight", _array(p["norm"]).reshape(given(config.mamba).n_groups, -1)
    yield "ssm_out.weight", _array(p["out_proj"])


def _attention(config: ModelConfig, p: Any) -> Named:
    a = given(config.attention)
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    q, k, v = np.split(_array(p["qkv"]), (queries, queries + keys))
    if a.rope is not None:
        q, k = _neighbours(q, a.num_heads), _neighbours(k, a.num_kv_heads)
    yield "attn_q.weight", q
    yield "attn_k.weight", k
    yield "attn_v.weight", v
    yield "attn_output.weight", _array(p["out"])


def _mlp(config: ModelConfig, p: Any) -> Named:
    gate, up = np.split(_array(p["gate_up"]), 2)
    yield "ffn_gate.weight", gate
    yield "ffn_up.weight", up
    yield "ffn_down.weight", _array(p["down"])


def _neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows so that channels i and i + hd / 2 of a head, which turn together, are
    neighbours."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _array(leaf: Any) -> np.ndarray:
    return np.asarray(leaf).astype(np.float32)
