"""Quantized checkpoints in every published layout, with their exact weights.

Written from the public descriptions of the formats, without code of `convert`: E2M1 and
E4M3 from their bits, scales applied element by element, products exact in float64.
"""

import json
import re
import shutil
from functools import cache

import ml_dtypes
import numpy as np
import safetensors.torch
import torch
from safetensors.numpy import save_file

from tests.support import hf_checkpoints as hf
from tests.support.hf_windows import lara_mini

# Widths that are multiples of the group size 16, but not of the block size 24 x 20.
MODELS = {
    "mamba2": lambda: hf.mamba2(hidden_size=32, num_heads=8, n_groups=2),
    "llama": lambda: hf.llama(hidden_size=32, head_dim=8, intermediate_size=48),
    "granite": lambda: hf.granite(shared_intermediate_size=48),
    "nemotron-h": lambda: hf.nemotron(
        **hf.NEMOTRON_MOE
        | {
            "head_dim": 8,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 48,
            "n_routed_experts": 6,
        }
    ),
    "qwen3-next": lambda: hf.qwen3_next(
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        intermediate_size=48,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
    ),
    "lara-mini": lambda: lara_mini(
        hidden_size=32, head_dim=8, shared_expert_intermediate_size=48
    ),
}
LINEAR = re.compile(
    r".*\.(in_proj(?:_qkvz?|_z)?|out_proj|[qkvo]_proj|up_proj|down_proj|gate_proj"
    r"|input_linear|output_linear)|lm_head"
)
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}


def load_file(file):
    """Returns tensors by name. E4M3 is read with torch, because NumPy cannot read
    it."""
    tensors = {}
    for name, tensor in safetensors.torch.load_file(file).items():
        odd = {torch.float8_e4m3fn: E4M3, torch.bfloat16: BF16}.get(tensor.dtype)
        if odd is None:
            tensors[name] = tensor.numpy()
        else:
            bits = torch.uint8 if odd == E4M3 else torch.int16
            tensors[name] = tensor.view(bits).numpy().view(odd)
    return tensors


def e2m1(code):
    """Returns the value of a 4-bit code: sign, two exponent bits (bias 1), one mantissa
    bit."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def bits_of(numbers):
    """Returns the nearest E2M1 codes [..] of numbers. Ties may go either way."""
    known = np.array([e2m1(code) for code in range(16)])
    return np.abs(numbers[..., None] - known).argmin(-1).astype(np.uint8)


def spread(scales, matrix, block):
    """Returns a scale for each element: the one at [i // rows, j // columns]."""
    i, j = np.indices(matrix)
    return np.asarray(scales, np.float64)[i // block[0], j // block[1]]


def largest(w, block):
    """Returns the largest magnitude of each block. The last blocks may be smaller."""
    grid = [-(-n // size) for n, size in zip(w.shape, block, strict=True)]
    padded = np.zeros([g * size for g, size in zip(grid, block, strict=True)])
    padded[: w.shape[0], : w.shape[1]] = np.abs(w)
    cut = padded.reshape(grid[0], block[0], grid[1], block[1])
    return np.maximum(cut.max((1, 3)), 1e-3)


def fp8(w, block, dtype=np.float32):
    """Returns E4M3 numbers, scales by block, and their exact product."""
    scale = (largest(w, block) / 448).astype(dtype)
    each = spread(scale, w.shape, block)
    stored = np.clip(w / each, -448, 448).astype(E4M3)
    return stored, scale, stored.astype(np.float64) * each


def int8(w, block, dtype=np.float32, zeros=None):
    scale = (largest(w, block) / 120).astype(dtype)
    scale[0, 0] *= -1  # some quantizers choose the sign, too
    each = spread(scale, w.shape, block)
    zero = 0 if zeros is None else spread(zeros, w.shape, block)
    stored = np.clip(np.rint(w / each) + zero, -128, 127).astype(np.int8)
    return stored, scale, (stored.astype(np.float64) - zero) * each


def nvfp4(w, reciprocal):
    """Returns bytes [out, in / 2], E4M3 scales for 16 columns each, a float32 scale of
    the whole tensor, and the exact weight."""
    top = np.abs(w).max()
    factor = np.float32(448 * 6 / top if reciprocal else top / (448 * 6))
    real = 1 / float(factor) if reciprocal else float(factor)
    scale = np.clip(largest(w, (1, 16)) / 6 / real, 2**-9, 448).astype(E4M3)
    each = spread(scale, w.shape, (1, 16))
    codes = bits_of(w / each / real)
    numbers = np.vectorize(e2m1)(codes) * each  # exact: six significant bits
    exact = numbers / float(factor) if reciprocal else numbers * float(factor)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale, factor, exact


# Layouts: functions of a module's name and its float64 weight. They return its tensors,
# by the last word of their names, and the exact weight; or None for a weight that the
# layout cannot hold.


def modelopt_fp8(module, w):
    stored, scale, exact = fp8(w, w.shape)
    one = np.array(0.03, np.float32)
    return {
        "weight": stored,
        "weight_scale": scale.reshape(()),
        "input_scale": one,
    }, exact


def modelopt_channel(module, w):
    stored, scale, exact = fp8(w, (1, w.shape[1]))
    return {"weight": stored, "weight_scale": scale[:, 0]}, exact


def modelopt_block(module, w):
    stored, scale, exact = fp8(w, (128, 128))
    return {"weight": stored, "weight_scale": scale[:, None, :, None]}, exact


def modelopt_nvfp4(module, w):
    packed, scale, factor, exact = nvfp4(w, False)
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": factor}
    return {**tensors, "input_scale": np.array(0.01, np.float32)}, exact


def modelopt_mixed(module, w):
    experts = "experts" in module or "mlp" in module
    return (modelopt_nvfp4 if experts else modelopt_fp8)(module, w)


def compressed_tensor(module, w):
    stored, scale, exact = fp8(w, w.shape, BF16)
    return {"weight": stored, "weight_scale": scale.reshape(1)}, exact


def compressed_channel(module, w):
    stored, scale, exact = fp8(w, (1, w.shape[1]), BF16)
    return {"weight": stored, "weight_scale": scale}, exact


def compressed_block(module, w):
    stored, scale, exact = fp8(w, (24, 20))
    return {"weight": stored, "weight_scale": scale}, exact


def compressed_nvfp4(module, w):
    packed, scale, factor, exact = nvfp4(w, True)
    tensors = {"weight_packed": packed, "weight_scale": scale}
    tensors["weight_global_scale"] = factor.reshape(1)
    return {**tensors, "input_global_scale": np.ones(1, np.float32)}, exact


def compressed_int8(module, w):
    stored, scale, exact = int8(w, (1, w.shape[1]), BF16)
    return {"weight": stored, "weight_scale": scale}, exact


def compressed_groups(module, w):
    stored, scale, exact = int8(w, (1, 8))
    return {"weight": stored, "weight_scale": scale}, exact


def compressed_zeros(module, w):
    zeros = (np.arange(len(w)) % 9 - 4).astype(np.int8)[:, None]
    stored, scale, exact = int8(w, (1, w.shape[1]), zeros=zeros)
    names = {"weight": stored, "weight_scale": scale, "weight_zero_point": zeros}
    return names, exact


def compressed_packed(module, w):
    stored, scale, exact = int8(w, (1, 16), BF16)
    bits = stored.astype(np.int64) + 128
    words = sum(bits[:, i::4] << 8 * i for i in range(4)).astype(np.uint32)
    shape = np.array(w.shape, np.int64)
    return {
        "weight_packed": words.view(np.int32),
        "weight_scale": scale,
        "weight_shape": shape,
    }, exact


def compressed_mixed(module, w):
    by_pattern = re.match(r".*\.(in|out|[qkvo])_proj$", module)
    return (compressed_channel if by_pattern else compressed_nvfp4)(module, w)


def fine_grained(module, w):
    stored, scale, exact = fp8(w, (24, 20))
    return {"weight": stored, "weight_scale_inv": scale}, exact


def per_tensor(module, w):
    stored, scale, exact = fp8(w, w.shape)
    return {"weight": stored, "weight_scale_inv": scale.reshape(())}, exact


def compressed_config(format, weights, **others):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["re:.*conv1d$"],
        "kv_cache_scheme": None,
        **others,
    }


def modelopt_config(algorithm, **others):
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["*.conv1d", "backbone.layers.0.mixer.conv1d*"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        **others,
    }


MIXED = object()  # its config names every module
CHANNEL, BLOCK = {"strategy": "channel"}, {"strategy": "block"}
BLOCK["block_structure"] = [24, 20]
SPELLINGS = {
    "modelopt fp8": (modelopt_fp8, modelopt_config("FP8")),
    "modelopt fp8 by channel": (
        modelopt_channel,
        modelopt_config("FP8_PER_CHANNEL_PER_TOKEN"),
    ),
    "modelopt fp8 by block": (modelopt_block, modelopt_config("fp8_pb_wo")),
    "modelopt nvfp4": (modelopt_nvfp4, modelopt_config("NVFP4")),
    "modelopt nvfp4 weights": (modelopt_nvfp4, modelopt_config("W4A16_NVFP4")),
    "modelopt mixed": (modelopt_mixed, MIXED),
    "compressed fp8": (
        compressed_tensor,
        compressed_config("float-quantized", FLOAT8 | {"strategy": "tensor"}),
    ),
    "compressed fp8 by channel": (
        compressed_channel,
        compressed_config("naive-quantized", FLOAT8 | CHANNEL),
    ),
    "compressed fp8 by block": (
        compressed_block,
        compressed_config("float-quantized", FLOAT8 | BLOCK),
    ),
    "compressed nvfp4": (
        compressed_nvfp4,
        compressed_config(
            "nvfp4-pack-quantized",
            FLOAT4 | {"strategy": "tensor_group", "group_size": 16},
        ),
    ),
    "compressed int8": (
        compressed_int8,
        compressed_config("int-quantized", INT8 | CHANNEL),
    ),
    "compressed int8 by group": (
        compressed_groups,
        compressed_config("naive-quantized", INT8 | {"group_size": 8}),
    ),
    "compressed int8 with zeros": (
        compressed_zeros,
        compressed_config("int-quantized", INT8 | CHANNEL | {"symmetric": False}),
    ),
    "compressed int8 packed": (
        compressed_packed,
        compressed_config("pack-quantized", INT8 | {"group_size": 16}),
    ),
    "compressed mixed": (
        compressed_mixed,
        compressed_config(
            "mixed-precision",
            None,
            config_groups={
                "group_0": {
                    "targets": ["Linear"],
                    "weights": FLOAT4 | {"group_size": 16},
                    "format": "nvfp4-pack-quantized",
                },
                "group_1": {
                    "targets": ["re:.*\\.(in|out|[qkvo])_proj$"],
                    "weights": FLOAT8 | CHANNEL,
                    "format": "float-quantized",
                },
                "cache": {"targets": ["LlamaAttention"], "weights": None},
            },
        ),
    ),
    "fp8": (
        fine_grained,
        {"quant_method": "fp8", "weight_block_size": [24, 20], "fmt": "e4m3"},
    ),
    "fp8 by tensor": (
        modelopt_fp8,
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "fp8 by tensor, inverse": (
        per_tensor,
        {"quant_method": "fp8", "weight_block_size": None},
    ),
    "auto-round fp8": (
        fine_grained,
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:fp8",
            "bits": 8,
            "data_type": "fp",
            "group_size": [24, 20],
            "weight_block_size": [24, 20],
            "fmt": "e4m3",
        },
    ),
    "fbgemm_fp8": (compressed_channel, {"quant_method": "fbgemm_fp8"}),
}


def mixed_config(modules):
    layers = {
        m: {"quant_algo": "NVFP4", "group_size": 16}
        if "experts" in m or "mlp" in m
        else {"quant_algo": "FP8"}
        for m in modules
    }
    # As published: one entry for all experts of a layer.
    short = {re.sub(r"(\.experts)\..*", r"\1", m): v for m, v in layers.items()}
    return modelopt_config("MIXED_PRECISION", quantized_layers=short)


def write(source, directory, spelling, spellings=SPELLINGS):
    """Quantizes the linear layers of a one-file checkpoint.

    Returns:
      Every tensor of the model by name, in float64 where it is quantized.
    """
    store, config = spellings[spelling]
    shutil.copytree(source, directory)
    tensors, exact = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        exact[name] = tensor
        stored = None
        if module != name and tensor.ndim == 2 and LINEAR.fullmatch(module):
            stored = store(module, tensor.astype(np.float64))
        if stored is not None:
            parts, exact[name] = stored
            found = {f"{module}.{word}": part for word, part in parts.items()}
            tensors |= {name: np.array(part, order="C") for name, part in found.items()}
            if module.endswith(("k_proj", "v_proj")):
                tensors[f"{module}.{module[-6]}_scale"] = np.ones((), np.float32)
        else:
            tensors[name] = tensor
    file = directory / "config.json"
    values = json.loads(file.read_text())
    modules = [n.removesuffix(".weight") for n, t in exact.items() if t.dtype == "f8"]
    values["quantization_config"] = mixed_config(modules) if config is MIXED else config
    file.write_text(json.dumps(values))
    save_file(tensors, directory / "model.safetensors")
    return exact


def nearest(numbers, dtype):
    """Rounds float64 to the nearest float32 or bfloat16, ties to even, by comparing
    both neighbours."""
    if dtype == np.float32:
        return numbers.astype(np.float32)
    cut = numbers.astype(np.float32).view(np.uint32) >> 16
    around = np.stack([cut - (cut & 0x7FFF != 0), cut, cut + 1]).astype(np.uint16)
    values = around.view(BF16).astype(np.float64)
    off = np.abs(values - numbers)
    off[~np.isfinite(values)] = np.inf
    even = np.where(around % 2 == 0, 0, 1)
    best = np.lexsort((even, off), axis=0)[:1]
    return np.take_along_axis(around, best, 0)[0].view(BF16)


def plain_models(root, models=MODELS):
    """Returns a function: name of a model -> its directory in bfloat16."""

    @cache
    def make(name):
        models[name]().bfloat16().save_pretrained(root / name)
        return root / name

    return make


def quantized_llamas(root, models=MODELS, spellings=SPELLINGS):
    """Returns a function: a quantization format -> a tiny Llama in it."""
    plain = plain_models(root / "plain", models)

    @cache
    def make(spelling):
        write(plain("llama"), root / spelling, spelling, spellings)
        return root / spelling

    return make
