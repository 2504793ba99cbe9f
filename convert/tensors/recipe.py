"""The schemes of a checkpoint's modules, and what quantizers' files share."""

import fnmatch
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stree_jax.convert.tensors.dequantize import Scheme
from stree_jax.convert.tensors.fields import ConfigFields

FP8 = Scheme("fp8", "F8_E4M3")
INT8 = Scheme("int8", "I8", signed_scales=True)
NVFP4 = Scheme("nvfp4", "U8", (1, 16), global_scale="weight_scale_2")
CHANNEL = (1, 0)  # a scale for each row
INVERSE = "weight_scale_inv"  # a factor, too: the inverse of the quantizer's scale


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


def strings(fields: ConfigFields, *names: str) -> list[str]:
    """Returns the list of strings in the first of these fields that is present."""
    name = first(fields, *names)
    value = fields.get(name, [])
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise fields.wants(name, "a list of names", value)
    return value


def read_modules(fields: ConfigFields, *names: str) -> Modules:
    """Reads the list of module names in the first of these fields that is present.

    Names with the wildcards *, ? or [] become patterns, which are matched when
    `Modules` looks up a module; they are not expanded here.

    Args:
      fields: the quantization config.
      *names: names of the field in different versions of the format.
    """
    values = strings(fields, *names)
    wild = {value for value in values if any(c in value for c in "*?[")}
    patterns = tuple(re.compile(fnmatch.translate(value)) for value in sorted(wild))
    return Modules(frozenset(values) - wild, patterns, below=True)


def read_block(fields: ConfigFields, name: str) -> tuple[int, int]:
    """Returns the rows and columns of a block."""
    value = fields.get(name)
    whole = isinstance(value, list) and len(value) == 2
    if not whole or not all(type(n) is int and 0 < n <= 2**20 for n in value):
        raise fields.wants(name, "[rows, columns]", value)
    return value[0], value[1]


def first(fields: ConfigFields, *names: str) -> str:
    """Returns the first of several field names that the config has, or the first name
    if it has none of them."""
    return next((n for n in names if fields.get(n, None) is not None), names[0])


def group_size(fields: ConfigFields) -> int:
    """Returns the number of columns that share a scale. 0 means all."""
    name = first(fields, "group_size", "q_group_size")
    return 0 if fields.get(name, 128) == -1 else fields.size(name, 128)


# What a pattern of names may not have: a group that repeats, or too many repetitions.
# Python's matching could take hours with either. Escapes and classes are removed first.
LITERAL = re.compile(r"\\.|\[\^?\]?[^\]]*\]")
REPEATED_GROUP, REPETITION = re.compile(r"\)[*+{]"), re.compile(r"[*+]|\{\d*,")
MOST_REPETITIONS = 5


def read_pattern(fields: ConfigFields, name: str, target: str) -> re.Pattern[str]:
    """Reads a regular expression for names of modules.

    Raises:
      CheckpointError: it is not a valid expression, or could take very long to match.
    """
    plain = LITERAL.sub("x", target)
    count = len(REPETITION.findall(plain))
    if REPEATED_GROUP.search(plain) or count > MOST_REPETITIONS:
        what = "repeats a group, or has too many repetitions"
        raise fields.error(name, f"{reprlib.repr(target)}: {what}")
    try:
        return re.compile(target.removeprefix("re:"))
    except (re.error, OverflowError, RecursionError) as error:
        raise fields.error(name, f"{reprlib.repr(target)}: {error}") from error
