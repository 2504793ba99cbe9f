"""Checkpoints in 4-bit integers and MXFP4 in every published layout, with their exact
weights.

Written from the public descriptions of the formats, without code of `convert`: numbers
are put into words one by one, and scales are applied element by element.
"""

import numpy as np

from tests.support import hf_checkpoints as hf
from tests.support.quantized import (
    BF16,
    bits_of,
    compressed_config,
    e2m1,
    largest,
    spread,
)

MODELS = {
    "llama without biases": lambda: hf.llama(
        hidden_size=32, intermediate_size=32, attention_bias=False, mlp_bias=False
    ),
    "llama": lambda: hf.llama(hidden_size=64, head_dim=16, intermediate_size=128),
    "nemotron-h": lambda: hf.nemotron(
        **hf.NEMOTRON_MOE
        | {
            "hidden_size": 64,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64,
            "n_routed_experts": 6,
        }
    ),
}
F16 = np.float16


def with_experts():
    """Returns a model whose experts may be in one tensor for each layer."""
    return hf.qwen3_5_moe(
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        moe_intermediate_size=32,
    )


def groups_of(k, size, ordered=False):
    """Returns the group of each column; in a random order if `ordered`."""
    groups = np.arange(k) // (size or k)
    if ordered:
        groups = np.random.default_rng(k).permutation(groups)
    return groups.astype(np.int32)


def int4(w, groups, symmetric=False, dtype=F16):
    """Returns numbers q of 0..15 [m, k], scales and zero points [m, groups], and the
    exact weight: scale * (q - zero)."""
    m, k = w.shape
    count = groups.max() + 1
    scale, zero = np.zeros((m, count), dtype), np.zeros((m, count), np.int64)
    for g in range(count):
        some = w[:, groups == g]
        low, high = np.minimum(some.min(1), 0), np.maximum(some.max(1), 0)
        if symmetric:
            scale[:, g] = (np.abs(some).max(1) / 7.5).astype(dtype)
            zero[:, g] = 8
        else:
            scale[:, g] = ((high - low) / 15).astype(dtype)
            zero[:, g] = np.rint(-low / scale[:, g].astype(np.float64))
    scale[0, 0] *= -1  # some quantizers choose the sign, too
    each = scale.astype(np.float64)[:, groups]
    q = np.clip(np.rint(w / each) + zero[:, groups], 0, 15).astype(np.int64)
    return q, scale, np.clip(zero, 0, 15), each * (q - np.clip(zero, 0, 15)[:, groups])


def words(numbers, axis, places=range(8)):
    """Puts each 8 numbers along an axis into an int32. Number places[i] of the eight
    has the bits 4 i to 4 i + 3."""
    numbers = np.moveaxis(np.asarray(numbers), axis, -1)
    short = -numbers.shape[-1] % 8
    padded = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, short)])
    result = np.zeros((*padded.shape[:-1], padded.shape[-1] // 8), np.uint32)
    for i, place in enumerate(places):
        result |= padded[..., place::8].astype(np.uint32) << np.uint32(4 * i)
    return np.ascontiguousarray(np.moveaxis(result, -1, axis)).view(np.int32)


def gptq(
    size=32,
    symmetric=True,
    ordered=False,
    less_one=1,
    with_groups=True,
    with_biases=False,
):
    def store(module, w):
        groups = groups_of(w.shape[1], size, ordered)
        q, scale, zero, exact = int4(w, groups, symmetric)
        if less_one:  # a zero point of 0 cannot be stored
            zero = np.maximum(zero, 1)
            exact = scale.astype(np.float64)[:, groups] * (q - zero[:, groups])
        tensors = {
            "qweight": words(q.T, 0),
            "qzeros": words((zero - less_one).T, 1),
            "scales": scale.T,
        }
        if with_groups:
            tensors["g_idx"] = groups
        if with_biases:
            tensors["bias"] = np.zeros(len(w), F16)
        return tensors, exact

    return store


def awq(size, symmetric=False):
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def store(module, w):
        if len(w) % 8:
            return None
        q, scale, zero, exact = int4(w, groups_of(w.shape[1], size), symmetric)
        qweight, qzeros = words(q.T, 1, order), words(zero.T, 1, order)
        return {"qweight": qweight, "qzeros": qzeros, "scales": scale.T}, exact

    return store


def compressed(size, symmetric=True, groups=None):
    """`groups`: "none", to store that columns are in order, or "ordered"."""

    def store(module, w):
        of_columns = groups_of(w.shape[1], size, groups == "ordered")
        q, scale, zero, exact = int4(w, of_columns, symmetric, BF16)
        shape = np.array(w.shape, np.int64)
        tensors = {"weight_packed": words(q, 1), "weight_scale": scale}
        tensors["weight_shape"] = shape
        if not symmetric:
            tensors["weight_zero_point"] = words(zero, 0)
        if groups is not None:
            none = np.full_like(of_columns, -1)
            tensors["weight_g_idx"] = none if groups == "none" else of_columns
        return tensors, exact

    return store


def mlx(size, bits=4):
    """MLX's affine weights: scale * q + bias, with numbers from the lowest bits on."""

    def store(module, w):
        if w.shape[1] % size:
            return None
        groups = groups_of(w.shape[1], size)
        scale = np.zeros((len(w), groups.max() + 1), BF16)
        bias = np.zeros_like(scale)
        for g in range(groups.max() + 1):
            some = w[:, groups == g]
            scale[:, g] = ((some.max(1) - some.min(1)) / (2**bits - 1)).astype(BF16)
            bias[:, g] = some.min(1).astype(BF16)
        bias[0, 0] = w[0, groups == 0].max()
        scale[0, 0] *= -1  # as MLX does where the largest weight is exact
        each, low = (a.astype(np.float64)[:, groups] for a in (scale, bias))
        q = np.clip(np.rint((w - low) / each), 0, 2**bits - 1).astype(np.uint32)
        per_word = 32 // bits
        packed = np.zeros((len(w), w.shape[1] // per_word), np.uint32)
        for i in range(per_word):
            packed |= q[:, i::per_word] << np.uint32(bits * i)
        return {"weight": packed, "scales": scale, "biases": bias}, each * q + low

    return store


def mlx_by_module(module, w):
    if module == "lm_head":
        return None
    return (mlx(64, 8) if module.endswith("down_proj") else mlx(32))(module, w)


def mxfp4(w):
    """Returns codes [m, k], exponents plus 127 [m, k / 32], and the exact weight."""
    exponents = np.floor(np.log2(largest(w, (1, 32)))).astype(np.int64) - 2
    each = spread(2.0**exponents, w.shape, (1, 32))
    codes = bits_of(w / each)
    exact = np.vectorize(e2m1)(codes) * each
    return codes, (exponents + 127).astype(np.uint8), exact


def compressed_mxfp4(module, w):
    codes, exponents, exact = mxfp4(w)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": exponents}, exact


def gptq_config(**others):
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "damp_percent": 0.01,
        "desc_act": False,
        "sym": True,
        "true_sequential": True,
        "model_file_base_name": "model",
        **others,
    }


def awq_config(size, **others):
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
        **others,
    }


def auto_round_config(packing, **others):
    return {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "data_type": "int",
        "block_name_to_quantize": "model.layers",
        "autoround_version": "0.16.1",
        **others,
    }


def packed_config(size, **others):
    strategy = {"strategy": "group", "group_size": size} if size else {}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
    weights |= strategy or {"strategy": "channel"}
    return compressed_config("pack-quantized", weights | others)


# Fields that publishers write, beside those of `gptq_config` and so on.
OPTIMUM = {
    "batch_size": 1,
    "block_name_to_quantize": None,
    "dataset": None,
    "exllama_config": {"version": 1},
    "modules_in_block_to_quantize": None,
    "tokenizer": None,
    "use_exllama": True,
}
GPTQMODEL = {
    "checkpoint_format": "gptq",
    "format": "gptq",
    "lm_head": True,
    "pack_dtype": "int32",
    "hyb_act": False,
    "meta": {"quantizer": ["gptqmodel:5.0.0"], "damp_percent": 0.05},
}
LLM_COMPRESSOR = {
    "actorder": None,
    "block_structure": None,
    "observer": "minmax",
    "observer_kwargs": {},
    "scale_dtype": None,
    "zp_dtype": None,
}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 32}
DYNAMIC = {  # of GPTQModel: the first pattern that matches counts
    r"-:.*lm_head": {},
    r"+:.*\.down_proj": {"group_size": 64, "sym": False},
    r".*\.o_proj": {"desc_act": True},
}


EXTRA = {  # of AutoRound
    "lm_head": {"bits": 16},
    ".*down_proj.*": {"group_size": 64, "sym": False, "act_bits": 16},
    "model.layers.1.self_attn.o_proj": {"group_size": 16},
}


def auto_round_by_module(module, w):
    if module == "lm_head":
        return None
    if module.endswith("down_proj"):
        return gptq(64, False, with_groups=False)(module, w)
    size = 16 if module.endswith("layers.1.self_attn.o_proj") else 32
    return gptq(size, with_groups=False)(module, w)


def gptq_by_module(module, w):
    if module == "lm_head":
        return None
    if module.endswith("down_proj"):
        return gptq(64, False)(module, w)
    return gptq(ordered=module.endswith("o_proj"))(module, w)


SPELLINGS = {
    "gptq": (gptq(), gptq_config(**OPTIMUM)),
    "gptq without groups": (
        gptq(64, with_groups=False),
        gptq_config(group_size=64, checkpoint_format="gptq"),
    ),
    "gptq asymmetric": (gptq(symmetric=False), gptq_config(sym=False)),
    "gptq in order of activations": (
        gptq(symmetric=False, ordered=True),
        gptq_config(sym=False, desc_act=True),
    ),
    "gptq v2": (
        gptq(32, False, less_one=0),
        gptq_config(**GPTQMODEL | {"sym": False, "checkpoint_format": "gptq_v2"}),
    ),
    "gptq v2 called v1": (gptq(less_one=0), gptq_config(**GPTQMODEL)),
    "gptq v1 called v2": (gptq(), gptq_config(format="gptq_v2")),
    "gptq by channel": (gptq(0), gptq_config(group_size=-1)),
    "gptq by 16": (gptq(16, False), gptq_config(group_size=16, sym=False)),
    "gptq with biases": (gptq(with_biases=True), gptq_config()),
    "gptq by module": (gptq_by_module, gptq_config(dynamic=DYNAMIC, lm_head=False)),
    "awq": (awq(32), awq_config(32)),
    "awq symmetric": (awq(32, True), awq_config(32, zero_point=False, sym=True)),
    "auto-round": (
        gptq(with_groups=False),
        auto_round_config("auto_round:auto_gptq"),
    ),
    "auto-round asymmetric": (
        awq(32),
        auto_round_config("auto_round:auto_awq", sym=False),
    ),
    "auto-round symmetric awq": (awq(32, True), auto_round_config("auto_round:awq")),
    "auto-round gptqmodel": (
        gptq(32, False, less_one=0),
        auto_round_config("auto_round:gptqmodel", sym=False),
    ),
    "auto-round by module": (
        auto_round_by_module,
        auto_round_config("auto_round:auto_gptq", extra_config=EXTRA),
    ),
    "auto-round mxfp4": (
        compressed_mxfp4,
        auto_round_config(
            "auto_round:llm_compressor", data_type="mx_fp", quant_method="auto_round"
        ),
    ),
    "mlx": (mlx(64), {"group_size": 64, "bits": 4, "mode": "affine"}),
    "mlx of 8 bits": (mlx(64, 8), {"group_size": 64, "bits": 8}),
    "mlx by module": (
        mlx_by_module,
        {
            "group_size": 32,
            "bits": 4,
            "lm_head": False,
            "model.layers.0.mlp.down_proj": {"group_size": 64, "bits": 8},
            "model.layers.1.mlp.down_proj": {"group_size": 64, "bits": 8},
        },
    ),
    "awq by 64": (awq(64), awq_config(64, version="GEMM")),
    "compressed int4": (compressed(32), packed_config(32, **LLM_COMPRESSOR)),
    "compressed int4 by channel": (compressed(0), packed_config(0)),
    "compressed int4 asymmetric": (
        compressed(32, False),
        packed_config(32, symmetric=False, actorder="weight"),
    ),
    "compressed int4 in order of activations": (
        compressed(32, False, "ordered"),
        packed_config(32, symmetric=False, actorder="group"),
    ),
    "compressed int4 with unused groups": (
        compressed(64, groups="none"),
        packed_config(64, actorder="static"),
    ),
    "compressed mxfp4": (
        compressed_mxfp4,
        compressed_config("mxfp4-pack-quantized", FLOAT4 | {"strategy": "group"}),
    ),
}
