"""Reads from the config files of a checkpoint which modules are quantized, and how.

Sources of names: NVIDIA Model Optimizer (`convert_hf_config.py`), vLLM (`modelopt.py`,
`gptq.py`, `gptq_utils.py`, `awq.py`), compressed-tensors (`quant_config.py`,
`quant_args.py`) and transformers (`quantization_config.py`).
"""

import reprlib
from dataclasses import replace
from typing import Any

from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.compressed_tensors import COMPRESSED, compressed
from stree_jax.convert.tensors.dequantize import BLOCKS, SCALES, Blocks, Scheme
from stree_jax.convert.tensors.fields import REQUIRED, ConfigFields
from stree_jax.convert.tensors.gptq import AWQ, auto_round, awq, by_module, gptq
from stree_jax.convert.tensors.mlx import GROUPS, affine
from stree_jax.convert.tensors.recipe import (
    CHANNEL,
    FP8,
    INVERSE,
    NVFP4,
    Modules,
    Recipe,
    read_block,
    read_modules,
)
from stree_jax.convert.tensors.stored_tensors import Tensors

CONFIG, MODELOPT_FILE = "quantization_config", "hf_quant_config.json"
TEXT_CONFIG = "text_config"
# Files of quantizers, in the order in which they are looked for, and the method that
# each stands for. Older versions of AutoGPTQ and AutoAWQ write nothing to config.json.
RECIPE_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": "gptq",
}
MLX_CONFIG = "quantization"  # older versions of mlx-lm write nothing else
OLD_CONFIG = "compression_config"  # the field's name in compressed-tensors before 2025
MODELOPT = {
    "FP8": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": replace(FP8, block=CHANNEL),
    "FP8_PB_WO": replace(FP8, block=(128, 128)),
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
}
MIXED = "MIXED_PRECISION"
MXFP4 = Blocks("mxfp4", "U8", (1, 32), weight=BLOCKS, scale=SCALES, exponents=True)
WEIGHTS = frozenset(s.weight for s in (*COMPRESSED.values(), AWQ, MXFP4))


def read_recipe(source: Tensors, files: CheckpointFiles) -> Recipe | None:
    """Reads the schemes from config.json or from Model Optimizer's own file. Returns
    None if neither mentions quantization."""
    config = files.fields(tensors=source.tensors)
    if all(config.get(name, None) is None for name in (CONFIG, OLD_CONFIG)):
        text = config.object(TEXT_CONFIG)  # of a multimodal model
        config = text if text.get(CONFIG, None) is not None else config
    others = (MLX_CONFIG,) if _is_mlx(config) else ()
    names = [
        n for n in (CONFIG, OLD_CONFIG, *others) if config.get(n, None) is not None
    ]
    if not names:
        return _recipe_of_file(source, files)
    return _recipe(config.object(names[0]))


def _recipe_of_file(source: Tensors, files: CheckpointFiles) -> Recipe | None:
    """Reads the schemes from a file of the quantizer's own, or returns None.

    The files of GPTQ and AWQ are read only if there are such tensors, because they may
    be left over in the directory of a model that was dequantized.
    """
    if files.has(MODELOPT_FILE):
        return _modelopt(files.fields(MODELOPT_FILE))
    if not any(name.endswith(f".{AWQ.weight}") for name in source.tensors):
        return None
    for file, method in RECIPE_FILES.items():
        if files.has(file):
            return _recipe(files.fields(file), method)
    return None


def _is_mlx(fields: ConfigFields) -> bool:
    """True if there are weights in the dtype that only MLX uses for them."""
    return any(info.dtype == "U32" for info in fields.tensors.values())


def _recipe(fields: ConfigFields, usual: Any = REQUIRED) -> Recipe:
    """Reads the schemes from a quantizer's fields. `usual` is the method if they name
    none."""
    if usual is REQUIRED and _is_mlx(fields):
        usual = "mlx"  # the only quantizer that does not name itself
    method = fields.get("quant_method", usual)
    match method:
        case "modelopt" | "modelopt_fp4" | "modelopt_mixed":
            return _modelopt(fields)
        case "compressed-tensors":
            return compressed(fields)
        case "fp8":
            return _fine_grained(fields)
        case "fbgemm_fp8":
            ignored = read_modules(fields, "modules_to_not_convert")
            scheme = replace(FP8, block=CHANNEL)
            return Recipe(fields.file, defaults=(scheme,), ignored=ignored)
        case "gptq":
            return by_module(fields, gptq)
        case "awq":
            return by_module(fields, awq)
        case "auto-round" | "auto_round" | "intel/auto-round":
            return auto_round(fields)
        case "mlx":
            return _mlx(fields)
        case "mxfp4":
            ignored = read_modules(fields, "modules_to_not_convert")
            return Recipe(fields.file, defaults=(MXFP4,), ignored=ignored)
    raise fields.error(
        "quant_method",
        f"weights quantized by {reprlib.repr(method)} are not supported "
        "(known: modelopt, compressed-tensors, fp8, fbgemm_fp8, gptq, awq, auto-round, "
        "mlx, mxfp4); "
        "load the model that it was made of, or a GGUF file",
    )


def _modelopt(fields: ConfigFields) -> Recipe:
    """Reads Model Optimizer's fields: one algorithm for all modules, or one for
    each."""
    if "quantization" in fields.values:
        fields = fields.object("quantization")
    ignored = read_modules(fields, "exclude_modules", "ignore")
    if fields.get("quant_algo", None) is None:  # only the KV cache is quantized
        return Recipe(fields.file, ignored=ignored)
    if fields.get("quant_algo") != MIXED:
        scheme = _algorithm(fields)
        return Recipe(fields.file, defaults=(scheme,), ignored=ignored)
    layers = fields.object("quantized_layers")
    named = {name: _algorithm(layers.object(name)) for name in layers.values}
    return Recipe(fields.file, named, ignored=ignored)


def _algorithm(fields: ConfigFields) -> Scheme:
    """Returns the scheme of `quant_algo` (case-insensitive) and `group_size`."""
    word = fields.get("quant_algo")
    known = word.upper() if isinstance(word, str) else word
    if known not in tuple(MODELOPT):
        raise fields.error(
            "quant_algo",
            f"weights quantized by {reprlib.repr(word)} are not supported "
            f"(known: {', '.join([*MODELOPT, MIXED])})",
        )
    scheme = MODELOPT[known]
    size = fields.size("group_size", scheme.block[1], low=0)
    if scheme.block[1] and size != scheme.block[1]:
        raise fields.wants("group_size", f"{scheme.block[1]}", size)
    return scheme


def _fine_grained(fields: ConfigFields) -> Recipe:
    """Reads the fields of FP8 with scales per block (as in DeepSeek) or per tensor."""
    fields.choice("fmt", "e4m3", ("e4m3",))
    fields.choice("scale_fmt", "float", ("float",))
    fields.choice("expert_dtype", "fp8", ("fp8",))
    ignored = read_modules(fields, "modules_to_not_convert", "ignored_layers")
    scheme = FP8  # as written by AutoFP8
    if fields.get("weight_block_size", None) is not None:
        block = read_block(fields, "weight_block_size")
        scheme = replace(FP8, block=block, scale=INVERSE)
    elif fields.has_tensor(f".{INVERSE}"):  # as written by transformers
        scheme = replace(FP8, scale=INVERSE)
    return Recipe(fields.file, defaults=(scheme,), ignored=ignored)


def _mlx(fields: ConfigFields) -> Recipe:
    """Reads the fields of mlx-lm: common values, and for some modules false or an
    object of their own values."""
    named: dict[str, Scheme] = {}
    floats: list[str] = []
    for name, value in fields.values.items():
        if value is False:
            floats.append(name)
        elif isinstance(value, dict):
            own = fields.object(name)
            own = replace(own, values={"mode": fields.get("mode", None), **own.values})
            named[name] = _affine(own)
    return Recipe(
        fields.file, named, (), (_affine(fields),), Modules(frozenset(floats))
    )


def _affine(fields: ConfigFields) -> Scheme:
    """Returns the scheme of MLX's fields."""
    mode, bits = fields.get("mode", "affine"), fields.size("bits", 4)
    if mode != "affine" or bits not in (4, 8):
        raise fields.error(
            "bits" if mode == "affine" else "mode",
            f"{reprlib.repr(mode)} weights of {bits} bits by MLX are not "
            "supported (known: affine weights of 4 or 8 bits)",
        )
    fields.choice("group_size", 64, GROUPS)
    return affine(bits, fields.size("group_size", 64))
