"""Writes our parameters to a GGUF file for llama.cpp: Mamba2, Granite hybrids, Llama,
Qwen3.5, LFM2.

The file has no tokenizer ("no_vocab"), because the benchmarks pass token ids to
llama.cpp. Keys, tensor names and layouts are those that `convert.gguf` reads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from stree_jax.convert.families.table import Field
from stree_jax.convert.families.tensor_map import Row, split
from stree_jax.convert.families.tensors import rows_of
from stree_jax.convert.gguf.architectures import ARCHITECTURES
from stree_jax.convert.gguf.keys import (
    ATTENTION,
    BLOCKS,
    FEED_FORWARD,
    HEADS,
    INNER,
    KV_HEADS,
    MAMBA,
    MLP,
    MOE,
    ROTATES,
    SCALES,
    SHARED,
    SIZES,
    SOFTMAX_SCALE,
    VALUE_LENGTH,
)
from stree_jax.convert.gguf.lfm2 import CONV
from stree_jax.convert.gguf.qwen import DELTA, RECURRENT, SECTIONS
from stree_jax.convert.gguf.rotary import ROTATED, THETA
from stree_jax.models import (
    AttentionConfig,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    Rope,
    ShortConvConfig,
    by_path,
)
from stree_jax.models.stack.param_table import param_at

KINDS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}  # our dtype -> GGUF's
BLOCK = 32  # numbers that share a scale in Q8_0
CONTEXT = 1 << 20  # context length in the file's metadata; the benchmarks stay below it


def write_gguf(config: ModelConfig, params: Any, dtype: str, path: Path) -> int:
    """Writes a GGUF file with the weights of matrix products as F32, BF16 or Q8_0.

    Args:
      params: float32 or bfloat16 parameters, rounded to nearest if `dtype` has fewer
        bits.
      dtype: "float32", "bfloat16" or "int8".

    Returns:
      The bytes that every forward pass reads: all tensors except an embedding that is
      not also the head.

    Raises:
      ValueError: llama.cpp does not support the architecture, the rows of a matrix
        cannot be divided into blocks of Q8_0, or the package gguf is missing.
    """
    if find_spec("gguf") is None:
        raise ValueError("writing GGUF needs gguf; pip install gguf")
    import gguf

    arch, kind = arch_of(config), gguf.GGMLQuantizationType[KINDS[dtype]]
    plain = gguf.GGMLQuantizationType.F32
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("no_vocab")
    for key, value in metadata(config).items():
        _add(writer, f"{arch}.{key}", value)
    read_bytes = 0
    for row, name, tensor in gguf_tensors(config, params):
        # Only weights of matrix products are quantized: llama.cpp expects all other
        # tensors (norms, biases, convolutions) in float32.
        stored = kind if param_at(config, row.path).quantizable else plain
        if tensor.ndim == 3 and dtype != "float32":  # experts are never quantized here
            stored = gguf.GGMLQuantizationType.BF16
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
    """Returns llama.cpp's name for the architecture of a config.

    Raises:
      ValueError: llama.cpp does not support the architecture, or not with these
        options.
    """
    kinds, others = set(config.kinds[::2]), set(config.kinds[1::2])
    plain = (
        config.embedding_multiplier,
        config.residual_multiplier,
        config.logits_divisor,
    ) == (1, 1, 1)
    norms: tuple[str, ...] = ("rms",)
    if set(config.kinds) == {"mamba"}:
        arch, known = "mamba2", plain and _usual_mixer(config)
    elif kinds == {"attention"}:
        arch, c = "llama", config.mixers.get("attention")
        known = plain and c is not None and c.rope is not None and c.scale is None
        known &= others == {"mlp"} and _usual_attention(config)
    elif "short_conv" in kinds:
        arch, known = "lfm2", plain and _usual_lfm2(config)
        known = known and kinds == {"short_conv", "attention"} and others == {"mlp"}
    elif "delta" in kinds:
        arch = "qwen35moe" if others == {"moe"} else "qwen35"
        norms = ("rms", "rms_float32")
        known = plain and kinds == {"delta", "attention"}
        known = known and len(others) == 1 and _usual_hybrid(config)
    else:
        arch = "granitehybrid"
        known = kinds == {"mamba", "attention"} and others == {"mlp"}
        known = known and _usual_mixer(config) and _usual_attention(config)
    if config.norm not in norms or config.mtp or not known:
        raise ValueError(
            "llama.cpp: want a Mamba2 model, a Granite hybrid without experts, a "
            "Llama, a Qwen3.5, or an LFM2 without experts, with the usual options"
        )
    return arch


def _usual_mixer(config: ModelConfig) -> bool:
    m = config.mixers["mamba"]
    sizes = m.num_heads, m.head_dim, m.d_state, m.n_groups, m.d_conv
    usual = MambaConfig(*sizes, norm_groups=m.n_groups, norm_eps=config.norm_eps)
    return m == usual and m.d_inner == 2 * config.d_model


def _usual_attention(config: ModelConfig) -> bool:
    """True if attention and MLP have only options that llama.cpp supports."""
    a, f = config.mixers["attention"], config.mixers["mlp"]
    heads = a.num_heads, a.num_kv_heads, a.head_dim
    rope = None if a.rope is None else Rope(a.rope.theta, a.head_dim)
    usual = AttentionConfig(*heads, rope=rope, scale=a.scale)
    return a == usual and f == MLPConfig(f.d_hidden)


def _usual_lfm2(config: ModelConfig) -> bool:
    """True if the mixers of an LFM2 have only options that llama.cpp supports."""
    conv, a, f = (config.mixers[name] for name in ("short_conv", "attention", "mlp"))
    usual = AttentionConfig(
        *(a.num_heads, a.num_kv_heads, a.head_dim),
        rope=a.rope and Rope(a.rope.theta, a.head_dim),
        qk_norm_eps=config.norm_eps,
    )
    well = a.rope is not None and a == usual and f == MLPConfig(f.d_hidden)
    return well and conv == ShortConvConfig(config.d_model, conv.d_conv)


def _usual_hybrid(config: ModelConfig) -> bool:
    """True if the mixers of a Qwen3.5 have only options that llama.cpp supports."""
    d, a = config.mixers["delta"], config.mixers["attention"]
    f, moe = config.mixers.get("mlp"), config.mixers.get("moe")
    if a.rope is None or d.key_dim != d.value_dim or d.norm_eps != config.norm_eps:
        return False
    usual = AttentionConfig(
        *(a.num_heads, a.num_kv_heads, a.head_dim),
        rope=Rope(a.rope.theta, a.rope.dim),
        qk_norm_eps=config.norm_eps,
        qk_norm_float32=a.qk_norm_float32,
        gated=True,
    )
    if moe is None:
        return a == usual and f is not None and f == MLPConfig(f.d_hidden)
    sizes = moe.num_experts, moe.top_k, moe.d_hidden
    shared = moe.shared and MLPConfig(moe.shared.d_hidden)
    experts = MoEConfig(*sizes, shared=shared, shared_gate=True)
    return a == usual and shared is not None and moe == experts


def metadata(config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata that llama.cpp needs. Keys lack their first part, the name
    of the architecture."""
    arch, m, a = (
        arch_of(config),
        config.mixers.get("mamba"),
        config.mixers.get("attention"),
    )
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": CONTEXT,
        **_fields(SIZES, config),
    }
    if m is not None:
        values |= _fields(MAMBA, m) | {INNER: m.d_inner}
    if a is None:
        return values | {BLOCKS: len(config.layers), FEED_FORWARD: 0, HEADS.name: 0}
    mixers = config.kinds[::2]
    values |= _fields(ATTENTION, a)
    values |= {BLOCKS: len(mixers), VALUE_LENGTH: a.head_dim, ROTATED: a.head_dim}
    if config.mixers.get("mlp") is not None:
        values |= _fields(MLP, config.mixers["mlp"])
    if a.rope is not None:
        values |= {THETA: a.rope.theta, ROTATED: a.rope.dim}
    if arch == "granitehybrid":
        scaled = replace(a, scale=a.head_dim**-0.5 if a.scale is None else a.scale)
        values |= _fields((*SCALES, SOFTMAX_SCALE), config, scaled)
        # llama.cpp takes a layer with 0 KV heads for a Mamba2 layer.
        heads = [a.num_kv_heads * (kind == "attention") for kind in mixers]
        values |= {KV_HEADS: heads, ROTATES: a.rope is not None}
    if arch == "lfm2":  # a layer with 0 KV heads is a convolution
        heads = [a.num_kv_heads * (kind == "attention") for kind in mixers]
        values |= {KV_HEADS: heads} | _fields(CONV, config.mixers["short_conv"])
    return values | (_hybrid_metadata(config) if "delta" in mixers else {})


def _hybrid_metadata(config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata of a Qwen3.5 that other architectures do not have."""
    d, moe, a = (config.mixers.get(name) for name in ("delta", "moe", "attention"))
    assert d is not None and a is not None and a.rope is not None
    pairs = a.rope.dim // 2
    values = {
        **_fields(DELTA, d),
        INNER: d.d_inner,
        RECURRENT: [kind == "delta" for kind in config.kinds[::2]],
        # Each third pair of channels rotates by the position in time, height or width.
        SECTIONS: [*(len(range(i, pairs, 3)) for i in range(3)), 0],
    }
    if moe is not None:
        values |= _fields(MOE, moe) | _fields(SHARED, moe.shared)
    return values


def _fields(table: Sequence[Field], *parts: Any) -> dict[str, Any]:
    """Returns the metadata of a table's keys. Each value is read from the first of
    `parts` (configs) that has the attribute. `arch_of` has already rejected options
    without a key."""
    values = {}
    for row in (row for row in table if row.name):
        part = next(part for part in parts if hasattr(part, row.attribute))
        values[row.name] = row.write(getattr(part, row.attribute))
    return values


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_array(key, value)


def gguf_tensors(
    config: ModelConfig, params: Any
) -> Iterator[tuple[Row, str, np.ndarray]]:
    """Yields the tensors of a GGUF file.

    Yields:
      The row of the architecture's name table that maps one of our parameters to this
      tensor, the tensor's name in the file, and its values as float32.
    """
    flat = by_path(params)
    for row in rows_of(ARCHITECTURES[arch_of(config)].names, config):
        leaf = np.asarray(flat[row.path]).astype(np.float32)
        for name, tensor in split(row, leaf).items():
            yield row, name, tensor
