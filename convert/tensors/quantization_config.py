"""Reads from the config files of a checkpoint which modules are quantized, and how.

Sources of names: NVIDIA Model Optimizer (`convert_hf_config.py`), vLLM (`modelopt.py`,
`gptq.py`, `gptq_utils.py`, `awq.py`), compressed-tensors (`quant_config.py`,
`quant_args.py`) and transformers (`quantization_config.py`).
"""

import fnmatch
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.dequantize import BLOCKS, SCALES, Blocks, Scheme
from stree_jax.convert.tensors.fields import REQUIRED, ConfigFields
from stree_jax.convert.tensors.int4 import Int4
from stree_jax.convert.tensors.mlx import GROUPS, affine
from stree_jax.convert.tensors.source import Source

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
FP8 = Scheme("fp8", "F8_E4M3")
INT8 = Scheme("int8", "I8", signed_scales=True)
NVFP4 = Scheme("nvfp4", "U8", (1, 16), global_scale="weight_scale_2")
CHANNEL = (1, 0)  # a scale for each row
INVERSE = "weight_scale_inv"  # a factor, too: the inverse of the quantizer's scale
MODELOPT = {
    "FP8": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": replace(FP8, block=CHANNEL),
    "FP8_PB_WO": replace(FP8, block=(128, 128)),
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
}
MIXED = "MIXED_PRECISION"
# Schemes of compressed-tensors, by format, type and bits of the weights.
NVFP4_PACKED = replace(
    NVFP4, weight="weight_packed", global_scale="weight_global_scale", reciprocal=True
)
COMPRESSED = {
    ("float-quantized", "float", 8): FP8,
    ("naive-quantized", "float", 8): FP8,
    ("naive-quantized", "int", 8): INT8,
    ("int-quantized", "int", 8): INT8,
    ("pack-quantized", "int", 8): replace(
        INT8, stored="I32", weight="weight_packed", shape="weight_shape"
    ),
    ("pack-quantized", "int", 4): Int4(
        "int4",
        "I32",
        weight="weight_packed",
        shape="weight_shape",
        groups="weight_g_idx",
        optional=frozenset({"groups"}),
        signed_scales=True,
        layout="compressed",
    ),
    ("nvfp4-pack-quantized", "float", 4): NVFP4_PACKED,
    ("mxfp4-pack-quantized", "float", 4): Scheme(
        "mxfp4", "U8", (1, 32), weight="weight_packed", exponents=True
    ),
}
BY_GROUP, IN_ORDER = (True, "group", "dynamic"), (False, "weight", "static")  # actorder
MXFP4 = Blocks("mxfp4", "U8", (1, 32), weight=BLOCKS, scale=SCALES, exponents=True)
# Some quantizers choose the sign of a scale, so that 0 and 15 are the extremes.
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
# AutoRound's packing formats after "auto_round:", by GPTQ's format of the zero points.
AUTO_ROUND_GPTQ = ("auto_gptq", "gptq")
AUTO_ROUND_GPTQ_V2 = ("gptqmodel", "exllamav2", "tritonv2", "")
AUTO_ROUND_FLOATS = {
    "fp": FP8,
    "mx_fp": COMPRESSED["mxfp4-pack-quantized", "float", 4],
    "nv_fp": NVFP4_PACKED,
}
WEIGHTS = frozenset(s.weight for s in (*COMPRESSED.values(), AWQ, MXFP4))
FORMATS = tuple(dict.fromkeys(format for format, _, _ in COMPRESSED))


@dataclass(frozen=True)
class Modules:
    """A set of modules, by names and by patterns of the whole name.

    Attributes:
      names: names of modules.
      patterns: regular expressions for names.
      below: True if a name also stands for all modules below it, and for modules whose
        names end in it.
    """

    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    below: bool = False

    def has(self, module: str) -> bool:
        found = module in self.names or any(p.match(module) for p in self.patterns)
        if found or not self.below:
            return found
        words = module.split(".")
        ends = (".".join(words[i:]) for i in range(1, len(words)))
        return not self.names.isdisjoint(_above(module)) or any(
            end in self.names for end in ends
        )


@dataclass(frozen=True)
class Recipe:
    """The quantization schemes of all modules, from a config file.

    Attributes:
      file: the config file.
      named: schemes by module; they also apply to the modules below it.
      patterned: schemes by pattern of the module's name, or None for a module that is
        not quantized. The first pattern that matches counts; `named` takes precedence.
      defaults: schemes of all other quantized modules. If empty, there are no others.
      ignored: modules that are not quantized.
      overlaps: True if a module may be in several groups. Its stored tensors then
        decide which of their schemes it has.
    """

    file: Path
    named: Mapping[str, Scheme] = field(default_factory=dict)
    patterned: tuple[tuple[re.Pattern[str], Scheme | None], ...] = ()
    defaults: tuple[Scheme, ...] = ()
    ignored: Modules = Modules()
    overlaps: bool = False

    def has_schemes(self) -> bool:
        return bool(self.named or self.patterned or self.defaults)

    def schemes(self, module: str) -> tuple[Scheme, ...]:
        """Returns the schemes that a quantized module may have, the most specific
        first. Unless groups may overlap, there is at most one."""
        above = (module, *_above(module))
        found: list[Scheme | None] = [
            *(self.named[name] for name in above if name in self.named),
            *(scheme for p, scheme in self.patterned if p.match(module)),
            *self.defaults,
        ]
        chosen = found if self.overlaps else found[:1]
        return tuple(dict.fromkeys(scheme for scheme in chosen if scheme is not None))


def _above(module: str) -> Iterator[str]:
    """Yields the names of the modules that contain a module, innermost first."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def read_recipe(source: Source, files: CheckpointFiles) -> Recipe | None:
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


def _recipe_of_file(source: Source, files: CheckpointFiles) -> Recipe | None:
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
            return _compressed(fields)
        case "fp8":
            return _fine_grained(fields)
        case "fbgemm_fp8":
            ignored = _modules(fields, "modules_to_not_convert")
            scheme = replace(FP8, block=CHANNEL)
            return Recipe(fields.file, defaults=(scheme,), ignored=ignored)
        case "gptq":
            return _by_module(fields, _gptq)
        case "awq":
            return _by_module(fields, _awq)
        case "auto-round" | "auto_round" | "intel/auto-round":
            return _auto_round(fields)
        case "mlx":
            return _mlx(fields)
        case "mxfp4":
            ignored = _modules(fields, "modules_to_not_convert")
            return Recipe(fields.file, defaults=(MXFP4,), ignored=ignored)
    raise fields.error(
        "quant_method",
        f"weights quantized by {reprlib.repr(method)} are not supported "
        "(known: modelopt, compressed-tensors, fp8, fbgemm_fp8, gptq, awq, auto-round, "
        "mlx, mxfp4); "
        "load the model that it was made of, or a GGUF file",
    )


def _strings(fields: ConfigFields, *names: str) -> list[str]:
    """Returns the list of strings in the first of these fields that is present."""
    name = _first(fields, *names)
    value = fields.get(name, [])
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise fields.wants(name, "a list of names", value)
    return value


def _modules(fields: ConfigFields, *names: str) -> Modules:
    """Reads the list of module names in the first of these fields that is present.

    Names with the wildcards *, ? or [] become patterns, which are matched when
    `Modules` looks up a module; they are not expanded here.

    Args:
      fields: the quantization config.
      *names: names of the field in different versions of the format.
    """
    values = _strings(fields, *names)
    wild = {value for value in values if any(c in value for c in "*?[")}
    patterns = tuple(re.compile(fnmatch.translate(value)) for value in sorted(wild))
    return Modules(frozenset(values) - wild, patterns, below=True)


def _modelopt(fields: ConfigFields) -> Recipe:
    """Reads Model Optimizer's fields: one algorithm for all modules, or one for
    each."""
    if "quantization" in fields.values:
        fields = fields.object("quantization")
    ignored = _modules(fields, "exclude_modules", "ignore")
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
    ignored = _modules(fields, "modules_to_not_convert", "ignored_layers")
    scheme = FP8  # as written by AutoFP8
    if fields.get("weight_block_size", None) is not None:
        block = _block(fields, "weight_block_size")
        scheme = replace(FP8, block=block, scale=INVERSE)
    elif fields.has_tensor(f".{INVERSE}"):  # as written by transformers
        scheme = replace(FP8, scale=INVERSE)
    return Recipe(fields.file, defaults=(scheme,), ignored=ignored)


def _block(fields: ConfigFields, name: str) -> tuple[int, int]:
    """Returns the rows and columns of a block."""
    value = fields.get(name)
    whole = isinstance(value, list) and len(value) == 2
    if not whole or not all(type(n) is int and 0 < n <= 2**20 for n in value):
        raise fields.wants(name, "[rows, columns]", value)
    return value[0], value[1]


def _by_module(
    fields: ConfigFields, scheme: Callable[[ConfigFields], Scheme]
) -> Recipe:
    """Reads the fields of GPTQ or AWQ.

    GPTQModel has other values for some modules in "dynamic", by pattern of the name. A
    pattern that begins with "-:" names modules that are not quantized.

    Args:
      fields: the quantization config.
      scheme: returns the scheme of a module, from the fields that apply to it.
    """
    dynamic = fields.object("dynamic")
    patterned: list[tuple[re.Pattern[str], Scheme | None]] = []
    for name in dynamic.values:
        pattern = _pattern(dynamic, name, re.sub(r"^[+-]:", "", name))
        own = dynamic.object(name)
        merged = replace(own, values={**fields.values, **own.values})
        patterned.append((pattern, None if name.startswith("-:") else scheme(merged)))
    ignored = _modules(fields, "modules_to_not_convert")
    return Recipe(fields.file, {}, tuple(patterned), (scheme(fields),), ignored)


def _gptq(fields: ConfigFields) -> Scheme:
    """Returns the scheme of GPTQ's fields (AutoGPTQ, GPTQModel)."""
    fields.choice("bits", REQUIRED, (4,))
    fields.choice("pack_dtype", "int32", ("int32",))
    fields.choice("is_marlin_format", False, (False,))
    name = _first(fields, "checkpoint_format", "format")
    version = fields.choice(name, "gptq", ("gptq", "gptq_v2"))
    ordered = fields.flag("desc_act", False)
    return replace(
        GPTQ,
        block=(1, _group_size(fields)),
        symmetric=fields.flag("sym", True),
        less_one=version == "gptq",
        optional=frozenset() if ordered else frozenset({"groups"}),
    )


def _awq(fields: ConfigFields) -> Scheme:
    """Returns the scheme of AWQ's fields (AutoAWQ, GPTQModel)."""
    fields.choice(_first(fields, "bits", "w_bit"), REQUIRED, (4,))
    # Symmetric files (of AutoRound) have zero points of 8, too.
    has_zeros = fields.flag("zero_point", True)
    if fields.get("backend", None) == "llm-awq":
        raise fields.error("backend", "the layout of 'llm-awq' is not supported")
    name = _first(fields, "version", "format", "checkpoint_format")
    fields.choice(name, "gemm", ("gemm", "GEMM"))
    return replace(
        AWQ,
        block=(1, _group_size(fields)),
        optional=frozenset() if has_zeros else frozenset({"zero_point"}),
    )


def _auto_round(fields: ConfigFields) -> Recipe:
    """Reads AutoRound's own fields.

    The weights are in the layout of another library, which `packing_format` names.
    `extra_config` has other values for some modules, by name or by regular expression;
    16 bits mean that a module is not quantized.
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
            patterned.append((_pattern(extra, name, name), scheme))
        elif scheme is None:
            floats.append(name)
        else:
            named[name] = scheme
    ignored = Modules(frozenset(floats))
    return Recipe(
        fields.file, named, tuple(patterned), (_auto_round_scheme(fields),), ignored
    )


def _auto_round_scheme(fields: ConfigFields) -> Scheme:
    """Returns the scheme of AutoRound's fields.

    "auto_round:auto_gptq" is GPTQ's first format and the default. "auto_round" and
    "auto_round:gptqmodel" have its zero points without the offset of 1.
    """
    name = _first(fields, "packing_format", "backend")
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
                FP8, block=_block(fields, "weight_block_size"), scale=INVERSE
            )
        if key[1:] == (4, "llm_compressor") and kind in ("mx_fp", "nv_fp"):
            return AUTO_ROUND_FLOATS[kind]
    elif kind == "int" and word in ("auto_awq", "awq"):
        fields.choice("bits", REQUIRED, (4,))
        return replace(AWQ, block=(1, _group_size(fields)))
    elif kind == "int" and word in (*AUTO_ROUND_GPTQ, *AUTO_ROUND_GPTQ_V2):
        fields.choice("bits", REQUIRED, (4,))
        return replace(
            GPTQ,
            block=(1, _group_size(fields)),
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


def _first(fields: ConfigFields, *names: str) -> str:
    """Returns the first of these names that is present, or else the first name."""
    return next((n for n in names if fields.get(n, None) is not None), names[0])


def _group_size(fields: ConfigFields) -> int:
    """Returns the number of columns that share a scale. 0 means all."""
    name = _first(fields, "group_size", "q_group_size")
    return 0 if fields.get(name, 128) == -1 else fields.size(name, 128)


def _compressed(fields: ConfigFields) -> Recipe:
    """Reads compressed-tensors' groups of modules, which are given by name, pattern
    ("re:...") or class.

    A module may be in several groups. compressed-tensors 0.20 takes names first, then
    patterns in alphabetical order, then classes, and of two groups with the same target
    the last. Since files with other orders are published, this is only the order in
    which the schemes are compared with the stored tensors.
    """
    if fields.get("transform_config", None):
        raise fields.error("transform_config", "transformed weights are not supported")
    sparsity = fields.object("sparsity_config")
    sparsity.choice("format", "dense", ("dense",))
    groups = fields.object("config_groups")
    named: dict[str, Scheme] = {}
    patterned: list[tuple[re.Pattern[str], Scheme | None]] = []
    classes: list[tuple[str, Scheme]] = []
    for name in reversed(list(groups.values)):
        group = groups.object(name)
        if group.get("weights", None) is None:  # only activations are quantized
            continue
        scheme = _weights(group, fields)
        for target in _strings(group, "targets"):
            if target.startswith("re:"):
                patterned.append((_pattern(group, "targets", target), scheme))
            elif "." in target or target == "lm_head":
                named.setdefault(target, scheme)
            else:  # a class, such as Linear, means all other quantized modules
                classes.append((target, scheme))
    ignored = _strings(fields, "ignore")
    plain = frozenset(name for name in ignored if not name.startswith("re:"))
    patterns = (_pattern(fields, "ignore", n) for n in ignored if n not in plain)
    modules = Modules(plain, tuple(patterns))
    patterned.sort(key=lambda entry: entry[0].pattern)
    defaults = tuple(
        scheme for _, scheme in sorted(classes, key=lambda entry: entry[0])
    )
    return Recipe(
        fields.file, named, tuple(patterned), defaults, modules, overlaps=True
    )


def _pattern(fields: ConfigFields, name: str, target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix("re:"))
    except (re.error, OverflowError, RecursionError) as error:
        raise fields.error(name, f"{reprlib.repr(target)}: {error}") from error


def _weights(group: ConfigFields, fields: ConfigFields) -> Scheme:
    """Returns the scheme of a group, from its weights and its format, or else the
    common format."""
    weights = group.object("weights")
    own = group.get("format", None) is not None
    format = (group if own else fields).choice("format", "", FORMATS)
    kind = weights.choice("type", "int", ("int", "float"))
    bits = weights.size("num_bits", 8)
    if (format, kind, bits) not in COMPRESSED:
        raise weights.error("num_bits", f"{bits}-bit {kind} {format} is not supported")
    scheme = COMPRESSED[format, kind, bits]
    weights.choice("dynamic", False, (False,))
    is_int4 = isinstance(scheme, Int4)
    orders = IN_ORDER + BY_GROUP if is_int4 else IN_ORDER
    if weights.choice("actorder", False, orders) in BY_GROUP:
        scheme = replace(scheme, optional=frozenset())
    if not weights.flag("symmetric", True):
        if scheme != INT8 and not is_int4:
            wanted = f"false is not supported for {bits}-bit {format}"
            raise weights.error("symmetric", wanted)
        scheme = replace(scheme, zero_point="weight_zero_point")
    return replace(scheme, block=_shared(weights, scheme))


def _shared(weights: ConfigFields, scheme: Scheme) -> tuple[int, int]:
    """Returns the rows and columns that share a scale, from a group's strategy."""
    size = weights.get("group_size", None)  # -1 means a whole row
    if size not in (None, -1):
        size = weights.size("group_size")
    guess = "tensor" if size is None else "channel" if size == -1 else "group"
    strategies: tuple[str, ...] = ("tensor", "channel", "group", "block")
    if isinstance(scheme, Int4):
        strategies = ("channel", "group")
    elif scheme.stored == "U8":
        strategies = ("tensor_group", "group")
    match weights.choice("strategy", guess, strategies):
        case "tensor":
            return 0, 0
        case "channel":
            return CHANNEL
        case "block":
            return _block(weights, "block_structure")
    if scheme.stored == "U8" and size != scheme.block[1]:
        raise weights.wants("group_size", f"{scheme.block[1]}", size)
    return 1, weights.size("group_size")
