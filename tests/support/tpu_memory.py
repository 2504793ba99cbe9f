"""Counts what a program compiled for a TPU reads from and writes to the chip's memory.

`cost_analysis` counts every access of every operation, also to on-chip memory (VMEM).
XLA moves weights there ahead of the product that reads them, so it counts them three
times. Here an array counts if its layout names no other memory space. In the text of a
compiled program, `S(1)` in a layout is VMEM.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\](\{[^}]*\})?")
_LINE = re.compile(r"\s*(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([a-z\-]+)\(([^)]*)\)(.*)")
_SLICES = {"slice", "dynamic-slice", "gather"}
_SAME = {"bitcast", "get-tuple-element", "tuple", "parameter", "constant", "after-all"}
_ENDS = {"copy-done", "slice-done", "async-done"}  # counted where they start
_STARTS = {"copy-start": 0, "slice-start": 1}  # which array of the result is new
_CALLS = {"while", "conditional", "call"}  # their computations are counted once


def _arrays(text: str) -> list[tuple[int, bool]]:
    """Returns the bytes of each array of a type, and whether it is in HBM."""
    return [
        (
            _BYTES.get(kind, 4) * prod(int(n) for n in sizes.split(",") if n),
            "S(" not in at,
        )
        for kind, sizes, at in _ARRAY.findall(text)
    ]


def _size(text: str) -> int:
    return sum(size for size, _ in _arrays(text))


def _in_hbm(text: str) -> int:
    return sum(size for size, hbm in _arrays(text) if hbm)


@dataclass
class _Operation:
    name: str
    type: str
    kind: str
    operands: list[str]
    called: list[str]
    root: bool


@dataclass
class _Computation:
    operations: dict[str, _Operation] = field(default_factory=dict)
    parameters: dict[int, str] = field(default_factory=dict)

    @cached_property
    def root(self) -> _Operation:
        return next(o for o in self.operations.values() if o.root)

    def users(self, name: str) -> list[_Operation]:
        return [o for o in self.operations.values() if name in o.operands]


def hbm_bytes(text: str) -> int:
    """Returns the bytes that one run of a compiled program reads from and writes to
    HBM. The body of a loop counts once.

    Args:
      text: `as_text()` of the compiled program.
    """
    program, entry = _parsed(text)
    return _of_computation(program, entry)


def _parsed(text: str) -> tuple[dict[str, _Computation], str]:
    program: dict[str, _Computation] = {}
    entry = ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line):
            current = program.setdefault(head[2], _Computation())
            entry = head[2] if head[1] else entry
        elif found := _LINE.match(line):
            root, name, type_, kind, inside, rest = found.groups()
            called = re.findall(r"(?:calls|body|to_apply)=%([\w.\-]+)", rest)
            if branches := re.search(r"branch_computations=\{([^}]*)\}", rest):
                called += re.findall(r"%([\w.\-]+)", branches[1])
            operands = re.findall(r"%([\w.\-]+)", inside)
            one = _Operation(name, type_, kind, operands, called, bool(root))
            current.operations[name] = one
            if kind == "parameter":
                current.parameters[int(inside)] = name
    return program, entry


def _of_computation(program: dict[str, _Computation], name: str) -> int:
    here = program[name]
    return sum(_of(program, here, o) for o in here.operations.values())


def _of(program: dict[str, _Computation], here: _Computation, op: _Operation) -> int:
    """Returns the bytes of one operation of a computation."""
    if op.kind in _SAME | _ENDS:
        return 0
    if op.kind in _CALLS:
        return sum(_of_computation(program, name) for name in op.called)
    types = [here.operations[n].type for n in op.operands if n in here.operations]
    if op.kind in _STARTS:
        new, hbm = _arrays(op.type)[_STARTS[op.kind]]
        return new * (hbm + bool(_in_hbm(types[0])))
    if op.kind != "fusion":
        if op.kind in _SLICES:
            types = [op.type if _in_hbm(types[0]) else "", *types[1:]]
        return _in_hbm(op.type) + sum(map(_in_hbm, types))
    inner = program[op.called[0]]
    read = sum(
        min(_in_hbm(type_), _read(program, inner, i)) for i, type_ in enumerate(types)
    )
    return read + _written(inner, op.type)


def _read(program: dict[str, _Computation], fused: _Computation, index: int) -> int:
    """Returns how many bytes of a parameter a fusion reads: of a table whose rows are
    looked up, these rows."""
    total, names = 0, [fused.parameters[index]]
    while names:
        name = names.pop()
        if name == fused.root.name:
            total += _size(fused.root.type)
        for user in fused.users(name):
            first = user.operands[0] == name
            if user.kind == "bitcast":
                names.append(user.name)
            elif user.kind in _SLICES and first:
                total += _size(user.type)
            elif user.kind == "fusion":
                inner = program[user.called[0]]
                places = [i for i, n in enumerate(user.operands) if n == name]
                total += sum(_read(program, inner, i) for i in places)
            elif not (user.kind == "dynamic-update-slice" and first):
                total += _size(fused.operations[name].type)
    return total


def _written(fused: _Computation, type_: str) -> int:
    """Returns how many bytes of its results a fusion writes to HBM: of an array that is
    updated in place, the new part."""
    root = fused.root
    names = root.operands if root.kind == "tuple" else [root.name]
    total = 0
    for name, (size, hbm) in zip(names, _arrays(type_), strict=False):
        made = fused.operations[name]
        while made.kind == "bitcast":
            made = fused.operations[made.operands[0]]
        if made.kind == "dynamic-update-slice":
            size = min(size, _size(fused.operations[made.operands[1]].type))
        total += size if hbm else 0
    return total
