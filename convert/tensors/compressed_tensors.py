"""Reads the fields of compressed-tensors."""

import re
from dataclasses import replace

from stree_jax.convert.tensors.dequantize import Scheme
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.convert.tensors.int4 import Int4
from stree_jax.convert.tensors.recipe import (
    CHANNEL,
    FP8,
    INT8,
    NVFP4,
    Modules,
    Recipe,
    read_block,
    read_pattern,
    strings,
)

NVFP4_PACKED = replace(
    NVFP4, weight="weight_packed", global_scale="weight_global_scale", reciprocal=True
)
# Schemes of compressed-tensors, by format, type and bits of the weights.
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
FORMATS = tuple(dict.fromkeys(format for format, _, _ in COMPRESSED))
BY_GROUP, IN_ORDER = (True, "group", "dynamic"), (False, "weight", "static")  # actorder


def compressed(fields: ConfigFields) -> Recipe:
    """Reads the quantization schemes of compressed-tensors. A config has groups of
    modules with one scheme each, and lists a group's modules by name, by pattern
    ("re:...") or by class.

    A module may be in several groups. compressed-tensors 0.20 looks for a group with
    the module's name, then for a pattern in alphabetical order, then for a class. If
    two groups have the same target, the last one counts. Some published files were made
    with other rules. So the schemes are only compared with the stored tensors in this
    order; see `quantized`.
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
        for target in strings(group, "targets"):
            if target.startswith("re:"):
                patterned.append((read_pattern(group, "targets", target), scheme))
            elif "." in target or target == "lm_head":
                named.setdefault(target, scheme)
            else:  # a class, such as Linear, means all other quantized modules
                classes.append((target, scheme))
    ignored = strings(fields, "ignore")
    plain = frozenset(name for name in ignored if not name.startswith("re:"))
    patterns = (read_pattern(fields, "ignore", n) for n in ignored if n not in plain)
    modules = Modules(plain, tuple(patterns))
    patterned.sort(key=lambda entry: entry[0].pattern)
    defaults = tuple(
        scheme for _, scheme in sorted(classes, key=lambda entry: entry[0])
    )
    return Recipe(
        fields.file, named, tuple(patterned), defaults, modules, overlaps=True
    )


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
    """Returns how many matrix rows and columns share a scale, from the `strategy` of a
    group of modules. 0 means all."""
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
            return read_block(weights, "block_structure")
    if scheme.stored == "U8" and size != scheme.block[1]:
        raise weights.wants("group_size", f"{scheme.block[1]}", size)
    return 1, weights.size("group_size")
