"""Damage to tensors, and to the shards and index that hold them."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.damage.fields import write_json
from tests.damage.sources import (
    HARMFUL,
    Rng,
    Tensors,
    Useless,
    layout_of,
    read_weights,
    write_weights,
)

DTYPES = [
    *(torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8),
    *(torch.bool, torch.uint8, torch.uint16, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]
NAMES = ["", "x", "a\nb", "a\r\nb", "é\u2028", "__metadata__x", "x" * 9000, "../x"]
NAMES += ["lm_head.weight", "mtp.x", "a.rotary_emb.inv_freq", "\x00", "model.norm.bias"]


def tensor_changes(t: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Returns functions that change the shape or the numbers of a tensor."""
    return {
        "transposed": lambda: t.mT.contiguous() if t.ndim > 1 else t.flip(0),
        "flat": lambda: t.reshape(-1).clone(),
        "one more axis": lambda: t[None].clone(),
        "many axes": lambda: t.reshape(*t.shape, *(1,) * 40),
        "scalar": lambda: t.new_zeros(()),
        "empty": lambda: t.new_zeros((0, *t.shape[1:])),
        "empty, huge": lambda: t.new_zeros((0, 1 << 40)),
        "fewer rows": lambda: t[: len(t) // 2].clone(),
        "more rows": lambda: torch.cat([t, t]),
        "NaN": lambda: filled(t, float("nan")),
        "infinite": lambda: filled(t, float("inf")),
    }


def filled(t: torch.Tensor, value: float) -> torch.Tensor:
    """Returns a tensor of the same dtype filled with `value`, if the dtype is
    floating."""
    full = torch.full(t.shape, value)
    return full.to(t.dtype) if t.is_floating_point() else full


def tensors(directory: Path, rng: Rng) -> str:
    """Changes names, shapes or dtypes of one to three tensors."""
    found, layout = read_weights(directory), layout_of(directory)
    what = ""
    for _ in range(rng.choice([1, 1, 1, 3])):
        name = rng.choice(list(found))
        if "lm_head.weight" in found and rng.random() < 0.2:
            name = "lm_head.weight"
        what += change_tensor(found, name, rng)
    with contextlib.suppress(ValueError):  # a name that safetensors does not accept
        write_weights(directory, found, layout)
        return what
    raise Useless


def change_tensor(found: Tensors, name: str, rng: Rng) -> str:
    match rng.choice(["drop", "add", "rename", "swap", "dtype", "dtype", "as"]):
        case "drop" if len(found) > 1:
            del found[name]
            return f"{name} dropped; "
        case "add" | "drop":
            other = rng.choice(NAMES)
            found[other] = found[name].clone()
            return f"{name} as {other[:30]!r} too; "
        case "rename":
            other = rng.choice([*NAMES, name.upper(), f"module.{name}", name + " "])
            found[other] = found.pop(name)
            return f"{name} renamed {other[:30]!r}; "
        case "swap":
            other = rng.choice(list(found))
            found[name], found[other] = found[other], found[name]
            return f"{name} swapped with {other[:30]!r}; "
        case "dtype":
            dtype = rng.choice(DTYPES)
            found[name] = found[name].to(torch.float32).to(dtype)
            return f"{name} {dtype}; "
        case _:
            changes = tensor_changes(found[name])
            what = rng.choice(list(changes))
            if found[name].ndim:
                found[name] = changes[what]()
            return f"{name} {what}; "


def shards(directory: Path, rng: Rng) -> str:
    """Puts a tensor in two shards, removes a shard, or breaks the index."""
    found = read_weights(directory)
    layout = rng.choice(["safetensors shards", "bin shards"])
    write_weights(directory, found, layout)
    suffix = layout.split()[0]
    first, second = sorted(directory.glob(f"*.{suffix}"))
    index = next(directory.glob("*.index.json"))
    what = rng.choice(["missing", "same", "index lists one", "both", "extra", "others"])
    match what:
        case "missing":
            rng.choice([first, second]).unlink()
            what = HARMFUL + what
        case "same":
            shutil.copyfile(first, second)
            what = HARMFUL + what
        case "index lists one":
            values = json.loads(index.read_text())
            values["weight_map"] = dict.fromkeys(found, first.name)
            write_json(index, values)
            what = HARMFUL + what
        case "both":  # a single file takes precedence over shards
            (directory / "model.safetensors").write_bytes(first.read_bytes())
        case "extra":
            shutil.copyfile(first, directory / f"zzz.{suffix}")
        case "others":  # the index of the other file type
            other = "model" if suffix == "bin" else "pytorch_model"
            ending = "safetensors" if suffix == "bin" else "bin"
            index.rename(directory / f"{other}.{ending}.index.json")
    return f"{what} ({suffix})"


OUTSIDE = "outside"  # a shard outside the checkpoint, which must not be read
SHARD_NAMES: list[Any] = [
    *("/etc/passwd", "a/b", "", ".", "..", "/", "config.json", "~/x.bin", "nul\0.bin"),
    *(
        "a\nb.safetensors",
        "\ud800.bin",
        "x" * 9000 + ".bin",
        "x" * 200 + ".safetensors",
    ),
    *("file:///etc/passwd", "C:\\x.bin", None, 5, True, [], {}, ["a.bin"], 1e308),
]


def paths(directory: Path, rng: Rng) -> str:
    """Makes the index name other paths. Every file that they could mean exists."""
    suffix = rng.choice(["safetensors", "bin"])
    write_weights(directory, read_weights(directory), f"{suffix} shards")
    index = next(directory.glob("*.index.json"))
    shard = rng.choice(sorted(directory.glob(f"*.{suffix}")))
    outside = directory.parent / f"{OUTSIDE}.{suffix}"
    (directory / "sub").mkdir()
    for copy in (outside, directory / "sub" / shard.name):
        shutil.copyfile(shard, copy)
    leading: list[Any] = [f"../{outside.name}", str(outside), f"sub/{shard.name}"]
    leading += [f"./{shard.name}", str(shard), f"{shard.name}/", f"sub/../{shard.name}"]
    name = rng.choice(leading if rng.random() < 0.4 else SHARD_NAMES)
    values = json.loads(index.read_text())
    for tensor, file in values["weight_map"].items():
        if file == shard.name:
            values["weight_map"][tensor] = name
    write_json(index, values)
    return f"{HARMFUL}shard {str(name)[:40]!r}"
