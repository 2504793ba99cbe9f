"""Damage to GGUF files: counts, lengths, types, names and offsets."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.damage.sources import HARMFUL, Rng, Useless

HUGE = (2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1)
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY, INT32, FLOAT32 = 8, 9, 5, 6


def text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


@dataclass
class Tensor:
    name: bytes
    dims: list[int]
    kind: int
    offset: int


@dataclass
class Parts:
    """The parts of a file. `keys` holds names, types and the bytes of values."""

    version: int = 3
    keys: list[tuple[bytes, int, bytes]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    data: bytes = b""
    counts: tuple[int, int] | None = None  # written in place of the true counts


def parse(raw: bytes) -> Parts:
    """Parses a sound file."""
    at = 4

    def take(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(form, raw, at)
        at += struct.calcsize(form)
        if value > len(raw) and form == "<Q":  # after the first of two damages
            raise Useless
        return value

    def skip(count: int) -> bytes:
        nonlocal at
        at += count
        return raw[at - count : at]

    def value(kind: int) -> None:
        if kind == STRING:
            skip(take("<Q"))
        elif kind == ARRAY:
            inner, count = take("<I"), take("<Q")
            for _ in range(count):
                value(inner)
        else:
            skip(WIDTHS[kind])

    parts = Parts(take("<I"))
    tensors, pairs = take("<Q"), take("<Q")
    for _ in range(pairs):
        name = skip(take("<Q"))
        kind, start = take("<I"), at
        value(kind)
        parts.keys.append((name, kind, raw[start:at]))
    for _ in range(tensors):
        name = skip(take("<Q"))
        dims = [take("<Q") for _ in range(take("<I"))]
        parts.tensors.append(Tensor(name, dims, take("<I"), take("<Q")))
    parts.data = raw[-(-at // 32) * 32 :]
    return parts


def build(parts: Parts) -> bytes:
    counts = parts.counts or (len(parts.tensors), len(parts.keys))
    header = b"GGUF" + struct.pack("<IQQ", parts.version, *counts)
    for name, kind, value in parts.keys:
        header += text(name) + struct.pack("<I", kind) + value
    for t in parts.tensors:
        header += text(t.name) + struct.pack("<I", len(t.dims))
        header += struct.pack(f"<{len(t.dims)}QIQ", *t.dims, t.kind, t.offset)
    return header + bytes(-len(header) % 32) + parts.data


def array(kind: int, values: list) -> bytes:
    """Returns the bytes of an array of strings or numbers."""
    begin = struct.pack("<IQ", kind, len(values))
    if kind == STRING:
        return begin + b"".join(text(v.encode()) for v in values)
    return begin + np.array(values, {INT32: "<i4", FLOAT32: "<f4"}[kind]).tobytes()


def some(parts: Parts, rng: Rng, *kinds: int) -> int:
    """Returns the index of a random key with a value of one of these types. If `kinds`
    is empty, any type will do."""
    fit = [i for i, key in enumerate(parts.keys) if not kinds or key[1] in kinds]
    if not fit:
        raise Useless
    return rng.choice(fit)


def two(parts: Parts, rng: Rng) -> list[Tensor]:
    if len(parts.tensors) < 2:  # the last shard may have one tensor
        raise Useless
    return rng.sample(parts.tensors, 2)


Edit = Callable[[Parts, Rng], str]


def counts(parts: Parts, rng: Rng) -> str:
    true = [len(parts.tensors), len(parts.keys)]
    true[rng.randrange(2)] = rng.choice([*HUGE, 2**17])
    parts.counts = true[0], true[1]
    return f"{HARMFUL}counts {true}"


def length(parts: Parts, rng: Rng) -> str:
    i = some(parts, rng, STRING, ARRAY)
    name, kind, value = parts.keys[i]
    at = 0 if kind == STRING else 4
    size = struct.pack("<Q", rng.choice(HUGE))
    parts.keys[i] = name, kind, value[:at] + size + value[at + 8 :]
    return f"{HARMFUL}length of {name!r}"


def nested(parts: Parts, rng: Rng) -> str:
    i, depth = some(parts, rng, ARRAY), rng.choice([1, 2, 5000])
    value = struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", INT32, 0)
    parts.keys[i] = parts.keys[i][0], ARRAY, value
    return f"{HARMFUL}{depth} arrays in each other as {parts.keys[i][0]!r}"


def kind_of_value(parts: Parts, rng: Rng) -> str:
    i, kind = some(parts, rng), rng.choice([*range(14), 255, 2**31])
    parts.keys[i] = parts.keys[i][0], kind, parts.keys[i][2]
    return f"type {kind} of {parts.keys[i][0]!r}"


def nonsense_value(parts: Parts, rng: Rng) -> str:
    i = some(parts, rng)
    name = parts.keys[i][0]
    values = [
        (INT32, struct.pack("<i", rng.choice([-1, 0, 1, 7, 2**31 - 1]))),
        (10, struct.pack("<Q", rng.choice(HUGE))),
        (FLOAT32, struct.pack("<f", rng.choice([0.0, -1.0, np.nan, np.inf, 1e38]))),
        (7, b"\x01"),
        (STRING, text(rng.choice([b"", b"two", b"x" * 5000, b"a\nb"]))),
        (ARRAY, array(INT32, rng.choice([[], [1], [-1] * 9, [2**31 - 1] * 3]))),
        (ARRAY, array(STRING, rng.choice([[], ["a"], ["a", "a", ""], ["a b"] * 3]))),
        (ARRAY, array(FLOAT32, [np.nan] * 4)),
    ]
    kind, value = rng.choice(values)
    parts.keys[i] = name, kind, value
    return f"{name!r} is {value[:20]!r} of type {kind}"


def missing(parts: Parts, rng: Rng) -> str:
    if rng.random() < 0.5:
        tensor = parts.tensors.pop(rng.randrange(len(parts.tensors)))
        harmless = b"output.weight", b"rope_freqs.weight"
        # A bias, or part of an expert's bias, may be optional.
        sure = tensor.name not in harmless and b"bias" not in tensor.name
        return f"{HARMFUL if sure else ''}without {tensor.name!r}"
    name = parts.keys.pop(some(parts, rng))[0]
    return f"without {name!r}"


def twice(parts: Parts, rng: Rng) -> str:
    if rng.random() < 0.5:
        parts.keys.append(rng.choice(parts.keys))
    else:
        one, other = two(parts, rng)
        one.name = other.name
    return f"{HARMFUL}a name twice"


def place(parts: Parts, rng: Rng) -> str:
    tensor, other = two(parts, rng)
    where = [tensor.offset + 1, other.offset, tensor.offset + 2**40, 2**64 - 32]
    tensor.offset = rng.choice(where)
    return f"{HARMFUL}{tensor.name!r} at {tensor.offset}"


def shape(parts: Parts, rng: Rng) -> str:
    tensor = rng.choice(parts.tensors)
    new = rng.choice([[], [0], [4, 0], [1] * 5, [*tensor.dims, 2], [2**60, 2**60]])
    tensor.dims = rng.choice([new, [d * 2 for d in tensor.dims], tensor.dims[::-1]])
    sure = tensor.dims == new
    return f"{HARMFUL if sure else ''}{tensor.name!r} of shape {tensor.dims}"


def kind_of_tensor(parts: Parts, rng: Rng) -> str:
    tensor = rng.choice(parts.tensors)
    tensor.kind = rng.choice([*range(42), 9999, 2**32 - 1])
    return f"{tensor.name!r} of type {tensor.kind}"


def no_text(parts: Parts, rng: Rng) -> str:
    bad = rng.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8abc"])
    if rng.random() < 0.5:
        rng.choice(parts.tensors).name = bad
    else:
        i = some(parts, rng, STRING)
        parts.keys[i] = parts.keys[i][0], STRING, text(bad)
    return f"{HARMFUL}{bad!r} for a text"


def alignment(parts: Parts, rng: Rng) -> str:
    size = rng.choice([0, 3, 33, 2**31, 2**32 - 1])
    parts.keys.append((b"general.alignment", 4, struct.pack("<I", size)))
    return f"{HARMFUL}alignment {size}"


def version(parts: Parts, rng: Rng) -> str:
    parts.version = rng.choice([0, 1, 4, 3 << 24, 2**32 - 1])
    return f"{HARMFUL}version {parts.version}"


EDITS: list[Edit] = [
    counts,
    length,
    nested,
    kind_of_value,
    nonsense_value,
    nonsense_value,
    missing,
    twice,
    place,
    shape,
    kind_of_tensor,
    no_text,
    alignment,
    version,
]


def gguf_edit(directory: Path, rng: Rng) -> str:
    """Applies one of the edits to one of the files."""
    found = [f for f in sorted(directory.glob("*.gguf")) if f.is_file()]
    if not found:
        raise Useless
    file = rng.choice(found)
    parts = parse(file.read_bytes())
    what = rng.choice(EDITS)(parts, rng)
    file.write_bytes(build(parts))
    return what
