"""Damage to files: their bytes, length and type."""

import os
import shutil
import stat
from pathlib import Path

from tests.damage.sources import Rng, Useless


def files_of(directory: Path) -> list[Path]:
    """Returns files sorted by size, because orbax chooses some names at random."""
    files = [f for f in directory.rglob("*") if f.is_file()]
    return sorted(files, key=lambda f: (f.stat().st_size, str(f)))


def some_file(directory: Path, rng: Rng) -> Path:
    if not (files := files_of(directory)):
        raise Useless
    return rng.choice(files)


def flip(directory: Path, rng: Rng) -> str:
    file = some_file(directory, rng)
    data = bytearray(file.read_bytes())
    if not data:
        raise Useless
    near = min(len(data), rng.choice([8, 200, 2000, len(data)]))
    start = rng.choice([0, len(data) - near])
    for _ in range(rng.choice([1, 1, 3, 16])):
        data[start + rng.randrange(near)] ^= rng.choice([1, 32, 128, 255])
    file.write_bytes(data)
    return f"bytes of {file.name} from {start}"


def arrays(directory: Path, rng: Rng) -> str:
    """Changes bytes below params/, most of which orbax would accept as weights."""
    return flip(directory / "params", rng)


def header_text(directory: Path, rng: Rng) -> str:
    """Changes JSON characters of a safetensors header, or its length."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise Useless
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        raise Useless
    if rng.random() < 0.3:
        other = rng.choice(
            [0, 1, length - 1, length + 1, len(data), 1 << 40, 2**64 - 1]
        )
        data[:8] = other.to_bytes(8, "little")
        file.write_bytes(data)
        return f"header of {file.name}: {other} long"
    for _ in range(rng.choice([1, 2, 5])):
        data[8 + rng.randrange(length)] = rng.choice(b'0123456789"{}[],:-e. ')
    file.write_bytes(data)
    return f"header of {file.name}"


def cut(directory: Path, rng: Rng) -> str:
    file = some_file(directory, rng)
    data, other = file.read_bytes(), some_file(directory, rng).read_bytes()
    changed = {
        "cut": data[: rng.randrange(len(data) + 1)],
        "shorter by one": data[:-1],
        "emptied": b"",
        "zeros": bytes(len(data)),
        "noise": rng.randbytes(len(data)),
        "longer": data + rng.randbytes(rng.choice([1, 8, 4096])),
        "twice": data * 2,
        "half zeros": data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
        "other file": other,
    }
    what = rng.choice(list(changed))
    file.write_bytes(changed[what])
    return f"{file.name}: {what}"


def put_special(place: Path, what: str, rng: Rng) -> None:
    """Puts something other than a regular file at an empty place."""
    match what:
        case "directory" | "full directory":
            place.mkdir()
            if what == "full directory":
                (place / place.name).write_bytes(rng.randbytes(9))
        case "pipe":
            os.mkfifo(place)
        case "socket":
            os.mknod(place, stat.S_IFSOCK | 0o600)
        case "two loops":
            other = place.with_name(f"{place.name}~")
            place.symlink_to(other.name)
            other.symlink_to(place.name)
        case _:
            targets = {
                "dangling": place.parent / "nothing",
                "loop": place,
                "folder": place.parent,
                "device": Path("/dev/null"),
                "other": Path("/etc/passwd"),
            }
            place.symlink_to(targets[what])


SPECIAL = ["directory", "full directory", "pipe", "pipe", "pipe", "socket", "two loops"]
SPECIAL += ["dangling", "loop", "folder", "device", "other"]


def replace_file(directory: Path, rng: Rng) -> str:
    """Removes a file, or replaces it by something other than a regular file."""
    file = some_file(directory, rng)
    place = rng.choice([file, file, file.parent]) if file.parent != directory else file
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    what = rng.choice(["missing", "missing", *SPECIAL])
    if what != "missing":
        put_special(place, what, rng)
    return f"{place.name}: {what}"


KNOWN = (
    "config.json mamba_config.json model.safetensors model.safetensors.index.json "
    "pytorch_model.bin pytorch_model.bin.index.json tokenizer.json vocab.json "
    "tokenizer_config.json special_tokens_map.json generation_config.json merges.txt "
    "chat_template.jinja zzz.safetensors params"
)


def add_special(directory: Path, rng: Rng) -> str:
    """Adds something other than a regular file under a name that a reader may look
    for."""
    name = rng.choice(KNOWN.split())
    if os.path.lexists(directory / name):
        raise Useless
    what = rng.choice(SPECIAL)
    put_special(directory / name, what, rng)
    return f"{name}: {what} added"
