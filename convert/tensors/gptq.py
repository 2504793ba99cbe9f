"""Reads the fields of GPTQ, AWQ and AutoRound."""

import re
import reprlib
from collections.abc import Callable
from dataclasses import replace

from stree_jax.convert.tensors.compressed_tensors import COMPRESSED, NVFP4_PACKED
from stree_jax.convert.tensors.dequantize import Scheme
from stree_jax.convert.tensors.fields import REQUIRED, ConfigFields
from stree_jax.convert.tensors.int4 import Int4
from stree_jax.convert.tensors.recipe import (
    CHANNEL,
    FP8,
    INVERSE,
    Modules,
    Recipe,
    first,
    group_size,
    read_block,
    read_modules,
    read_pattern,
)

# Scales may be negative: some quantizers choose the sign of a group's scale so that the
# group's extreme values are stored as the integers 0 and 15.
AWQ = Int4(
    "int4",
    "I32",
    weight="qweight",
    scale="scales",
    zero_point="qzeros",
    signed_scales=True,
    layout="awq",
)
GPTQ = replace(AWQ, groups="g_idx", layout="gptq", adds_biases=True)
# AutoRound's names of packing formats, without the prefix "auto_round:". Formats in the
# first tuple store each zero point minus 1, as GPTQ's first format does. Those in the
# second tuple store the zero point itself, as GPTQ's second format does.
AUTO_ROUND_GPTQ = ("auto_gptq", "gptq")
AUTO_ROUND_GPTQ_V2 = ("gptqmodel", "exllamav2", "tritonv2", "")
AUTO_ROUND_FLOATS = {
    "fp": FP8,
    "mx_fp": COMPRESSED["mxfp4-pack-quantized", "float", 4],
    "nv_fp": NVFP4_PACKED,
}


def by_module(fields: ConfigFields, scheme: Callable[[ConfigFields], Scheme]) -> Recipe:
    """Reads the quantization schemes of a checkpoint in GPTQ or AWQ.

    The field "dynamic", which GPTQModel writes, has other settings for some modules.
    Its keys are patterns of the modules' names. Modules that match a pattern beginning
    with "-:" are not quantized.

    Args:
      fields: the quantization config.
      scheme: function that returns the scheme of a module, from the settings that apply
        to the module.
    """
    dynamic = fields.object("dynamic")
    patterned: list[tuple[re.Pattern[str], Scheme | None]] = []
    for name in dynamic.values:
        pattern = read_pattern(dynamic, name, re.sub(r"^[+-]:", "", name))
        own = dynamic.object(name)
        merged = replace(own, values={**fields.values, **own.values})
        patterned.append((pattern, None if name.startswith("-:") else scheme(merged)))
    ignored = read_modules(fields, "modules_to_not_convert")
    return Recipe(fields.file, {}, tuple(patterned), (scheme(fields),), ignored)


def gptq(fields: ConfigFields) -> Scheme:
    """Returns the quantization scheme that a config of GPTQ describes (AutoGPTQ,
    GPTQModel)."""
    fields.choice("bits", REQUIRED, (4,))
    fields.choice("pack_dtype", "int32", ("int32",))
    fields.choice("is_marlin_format", False, (False,))
    name = first(fields, "checkpoint_format", "format")
    version = fields.choice(name, "gptq", ("gptq", "gptq_v2"))
    ordered = fields.flag("desc_act", False)
    return replace(
        GPTQ,
        block=(1, group_size(fields)),
        symmetric=fields.flag("sym", True),
        less_one=version == "gptq",
        optional=frozenset() if ordered else frozenset({"groups"}),
    )


def awq(fields: ConfigFields) -> Scheme:
    """Returns the quantization scheme that a config of AWQ describes (AutoAWQ,
    GPTQModel)."""
    fields.choice(first(fields, "bits", "w_bit"), REQUIRED, (4,))
    # Symmetric files (of AutoRound) have zero points of 8, too.
    has_zeros = fields.flag("zero_point", True)
    if fields.get("backend", None) == "llm-awq":
        raise fields.error("backend", "the layout of 'llm-awq' is not supported")
    name = first(fields, "version", "format", "checkpoint_format")
    fields.choice(name, "gemm", ("gemm", "GEMM"))
    return replace(
        AWQ,
        block=(1, group_size(fields)),
        optional=frozenset() if has_zeros else frozenset({"zero_point"}),
    )


def auto_round(fields: ConfigFields) -> Recipe:
    """Reads the quantization schemes of a checkpoint that AutoRound wrote.

    The weights are stored in the layout of another library, which the field
    `packing_format` names. The field `extra_config` has other settings for some
    modules, by name or by regular expression. A module with 16 bits is not quantized.
    """
    if fields.get("rotation_config", None):
        raise fields.error("rotation_config", "rotated weights are not supported")
    extra = fields.object("extra_config")
    named: dict[str, Scheme] = {}
    patterned: list[tuple[re.Pattern[str], Scheme | None]] = []
    floats: list[str] = []
    for name in extra.values:
        own = extra.object(name)
        merged = replace(own, values={**fields.values, **own.values})
        floating = merged.size("bits", REQUIRED) == 16
        scheme = None if floating else _auto_round_scheme(merged)
        if re.fullmatch(r"[\w.]+", name) is None:
            patterned.append((read_pattern(extra, name, name), scheme))
        elif scheme is None:
            floats.append(name)
        else:
            named[name] = scheme
    ignored = Modules(frozenset(floats))
    return Recipe(
        fields.file, named, tuple(patterned), (_auto_round_scheme(fields),), ignored
    )


def _auto_round_scheme(fields: ConfigFields) -> Scheme:
    """Returns the quantization scheme that a config of AutoRound describes.

    The default "auto_round:auto_gptq" is GPTQ's first format, which stores each zero
    point minus 1. "auto_round" and "auto_round:gptqmodel" store the zero point itself.
    """
    name = first(fields, "packing_format", "backend")
    packing = fields.get(name, "auto_round:auto_gptq")
    word = (
        packing.removeprefix("auto_round").lstrip(":")
        if isinstance(packing, str)
        else ""
    )
    kind = fields.choice("data_type", "int", tuple(AUTO_ROUND_FLOATS) + ("int",))
    if kind != "int" and word in ("fp8", "llm_compressor"):
        key = kind, fields.size("bits"), word
        if key == ("fp", 8, "fp8"):
            fields.choice("fmt", "e4m3", ("e4m3",))
            if fields.get("weight_block_size", None) is None:
                return replace(FP8, block=CHANNEL)
            return replace(
                FP8, block=read_block(fields, "weight_block_size"), scale=INVERSE
            )
        if key[1:] == (4, "llm_compressor") and kind in ("mx_fp", "nv_fp"):
            return AUTO_ROUND_FLOATS[kind]
    elif kind == "int" and word in ("auto_awq", "awq"):
        fields.choice("bits", REQUIRED, (4,))
        return replace(AWQ, block=(1, group_size(fields)))
    elif kind == "int" and word in (*AUTO_ROUND_GPTQ, *AUTO_ROUND_GPTQ_V2):
        fields.choice("bits", REQUIRED, (4,))
        return replace(
            GPTQ,
            block=(1, group_size(fields)),
            symmetric=fields.flag("sym", True),
            less_one=word in AUTO_ROUND_GPTQ,
            optional=frozenset({"groups"}),
        )
    raise fields.error(
        name,
        f"{reprlib.repr(packing)} with {kind} weights is not supported (known: "
        "auto_round:auto_gptq, auto_round:auto_awq, auto_round:gptqmodel, "
        "auto_round:fp8, auto_round:llm_compressor with mx_fp or nv_fp)",
    )
