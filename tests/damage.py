"""Random damage to checkpoints: refused in one line, or of no consequence.

    python -m tests.damage --count 2000 --kills 50 --seed 0

A case copies a tiny checkpoint, damages it once or twice and passes it to `convert`,
`load`, `info` and, every fourth time, the command. Each of them works, or raises a
ValueError or OSError of one line that names the directory; nothing is left at the
destination or beside it, the source stays as it was, no code of a pickle runs, and
memory and time stay small. What was accepted must agree: `load` of the source with
`load` of what `convert` made of it. A failure names its case: `--one NUMBER` runs it.

Kills: processes that convert without a pause get SIGKILL at random moments. Each
destination must be absent or whole.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import gc
import io
import itertools
import json
import logging
import math
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

import stree_jax
from stree_jax import cli
from stree_jax.checkpoint import info
from stree_jax.convert import CheckpointError, convert_checkpoint
from tests.checkpoints import HF_CASES, NATIVE_CASES, write_mambainllama, write_native

ROOT = Path(__file__).parents[1]
OWN = {"own-mamba2": "mamba2", "own-granite-moe": "granite-moe", "own-llama": "llama"}
NATIVES = {f"native-{name}": name for name in NATIVE_CASES}
SOURCES = [*HF_CASES, *NATIVES, "mambainllama", *OWN]
LAYOUTS = ("safetensors", "safetensors shards", "bin", "bin shards")
SLOW, STUCK = 20.0, 120.0  # seconds: a failure; the program ends and says where
MORE_MEMORY = 500 << 20  # of the whole run
LONGEST = 1000  # characters of a message
LONG = 300_000  # items of a list, layers of a pattern
MOST_PLACES = 10_000  # in a JSON file
CLI_EVERY = 4
HARMFUL = "!"  # a damage whose description begins so must be refused

Rng = random.Random
Tensors = dict[str, torch.Tensor]


class Useless(Exception):
    """A damage that does not apply to this checkpoint; another one is drawn."""


@dataclass
class Tally:
    cases: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    interrupted: int = 0
    whole: int = 0
    slowest: tuple[float, str] = (0.0, "none")
    longest: tuple[int, str] = (0, "none")
    memory: int = 0
    abandoned: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{self.cases} cases: {self.refused.total()} refused, "
            f"{self.accepted.total()} accepted, {len(self.failures)} failures"
        ]
        for kind in sorted(self.refused | self.accepted):
            refused, accepted = self.refused[kind], self.accepted[kind]
            lines.append(f"  {kind:10} {refused:5} refused {accepted:5} accepted")
        lines += [
            f"slowest: {self.slowest[0]:.2f} s, {self.slowest[1]}",
            f"longest message: {self.longest[0]} characters, {self.longest[1]}",
            f"memory: {self.memory / 2**20:.0f} MiB more than at the start",
            f"{self.abandoned} exceptions in coroutines that orbax abandoned",
            f"{self.kills} kills, {self.interrupted} of them within a conversion; "
            f"{self.whole} whole directories",
        ]
        return "\n".join(lines)


# Sources.


def write_tokenizer(directory: Path) -> None:
    words = {"a": 0, "b": 1, "<|endoftext|>": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.save(str(directory / "tokenizer.json"))


def write_weights(directory: Path, tensors: Tensors, layout: str) -> None:
    """The tensors in one file or two and an index; older weights go."""
    for file in weight_files(directory):
        file.unlink()
    suffix = layout.split()[0]
    name = "pytorch_model" if suffix == "bin" else "model"
    save: Callable[..., Any] = torch.save if suffix == "bin" else save_file
    if "shards" not in layout:
        save(tensors, directory / f"{name}.{suffix}")
        return
    weight_map = {}
    for i in range(2):
        shard = f"{name}-{i + 1:05}-of-00002.{suffix}"
        part = dict(list(tensors.items())[i::2])
        save(part, directory / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / f"{name}.{suffix}.index.json").write_text(json.dumps(index))


def weight_files(directory: Path) -> list[Path]:
    patterns = "*.safetensors", "*.bin", "*.index.json"
    return [file for pattern in patterns for file in sorted(directory.glob(pattern))]


def read_weights(directory: Path) -> Tensors:
    """All tensors of a sound checkpoint of another library."""
    tensors: Tensors = {}
    for file in weight_files(directory):
        if not file.is_file() or file.suffix == ".json":
            continue
        try:
            safe = file.suffix == ".safetensors"
            tensors |= load_file(file) if safe else torch.load(file)
        except Exception as error:  # the first damage of two
            raise Useless from error
    if not tensors:
        raise Useless
    return tensors


def layout_of(directory: Path) -> str:
    files = weight_files(directory)
    suffix = "bin" if any(file.suffix == ".bin" for file in files) else "safetensors"
    return suffix + (" shards" if any(f.suffix == ".json" for f in files) else "")


def write_source(directory: Path, name: str) -> None:
    if name in HF_CASES:
        disable_progress_bar()
        HF_CASES[name]().save_pretrained(directory)
    elif name in NATIVES:
        write_native(directory, **NATIVE_CASES[NATIVES[name]])
    else:
        write_mambainllama(directory)
    write_tokenizer(directory)


def source(folder: Path, name: str, layout: str) -> Path:
    """A sound checkpoint, made when it is first wanted."""
    directory = folder / f"{name}, {layout}"
    if directory.is_dir():
        return directory
    if name in OWN:
        convert_checkpoint(
            source(folder, OWN[name], LAYOUTS[0]), directory, None, False
        )
        return directory
    write_source(directory, name)
    write_weights(directory, read_weights(directory), layout)
    return directory


# Damage to files.


def files_of(directory: Path) -> list[Path]:
    """By size: orbax draws some of its names."""
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


def header_text(directory: Path, rng: Rng) -> str:
    """A character of a safetensors header that JSON minds, or its length."""
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


def replace_file(directory: Path, rng: Rng) -> str:
    """Gone, or something other than a file."""
    file = some_file(directory, rng)
    place = rng.choice([file, file, file.parent]) if file.parent != directory else file
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    targets = {
        "dangling": directory / "nothing",
        "loop": place,
        "folder": directory,
        "device": Path("/dev/null"),
        "other": Path("/etc/passwd"),
    }
    what = rng.choice(["missing", "directory", "full directory", *targets])
    match what:
        case "missing":
            pass
        case "directory" | "full directory":
            place.mkdir()
            if what == "full directory":
                (place / place.name).write_bytes(rng.randbytes(9))
        case _:
            place.symlink_to(targets[what])
    return f"{place.name}: {what}"


# Damage to JSON.


def json_files(directory: Path) -> list[Path]:
    def is_object(file: Path) -> bool:
        try:
            return isinstance(json.loads(file.read_text()), dict)
        except (ValueError, RecursionError):
            return False

    return [file for file in files_of(directory) if is_object(file)]


def some_json(directory: Path, rng: Rng) -> Path:
    """The config one time in two, others the rest."""
    files = json_files(directory)
    if not files:
        raise Useless
    configs = [file for file in files if file.name.endswith("config.json")]
    return rng.choice(configs if configs and rng.random() < 0.5 else files)


def places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    if isinstance(values, dict | list):
        keys = list(values) if isinstance(values, dict) else range(len(values))
        for key in keys:
            yield values, key
            yield from places(values[key])


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def plain_odds() -> list[Any]:
    retyped = ["", "x", "7", "a\nb", "\ud800", "é" * 5000, None, True, False, [], {}]
    retyped += [[1, 2], ["mamba"], [None], {"a": {"b": 1}}, nested(200), nested(900)]
    huge = [10**9, 2**24, 2**24 + 1, 2**31, 2**63, 2**64, 10**400, 1e308, 1e30]
    floats = [float("nan"), float("inf"), float("-inf"), 0.5, 1e-308, -0.0, 1e-45]
    return [*retyped, *huge, *floats, 0, 1, 2, 3, 7, 64, 1024, -1, -(2**63), -1e9]


ODDS = plain_odds()


def odd_value(value: Any, rng: Rng) -> Any:
    near = []
    if isinstance(value, int | float) and not isinstance(value, bool):
        near = [value + 1, value - 1, -value, 2 * value, float(value), str(value)]
    elif isinstance(value, list | str) and value:
        flat = not any(isinstance(item, dict | list) for item in value)
        times = max(1, LONG // len(value)) if flat else 1
        near = [value[1:], value[::-1], value + value, value * times]
    elif isinstance(value, dict) and value:
        near = [{}, list(value), {**value, "extra": 1}, {"a": value}]
    return rng.choice(near if near and rng.random() < 0.4 else ODDS)


def fields(directory: Path, rng: Rng) -> str:
    """One to four fields of a JSON file removed, of another type or size."""
    file = some_json(directory, rng)
    values = json.loads(file.read_text())
    changed = []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        if not (found := list(itertools.islice(places(values), MOST_PLACES))):
            break
        holder, key = rng.choice(found)
        if rng.random() < 0.2:
            del holder[key]
            changed.append(f"{key} gone")
            continue
        holder[key] = odd_value(holder[key], rng)
        changed.append(f"{key}={str(holder[key])[:30]!r}")
    write_json(file, values)
    return f"{file.name}: {', '.join(changed)}"


def write_json(file: Path, values: Any) -> None:
    file.write_text(json.dumps(values), encoding="utf-8", errors="surrogatepass")


FOREIGN = (
    "quantization_config rope_scaling rope_parameters model_type ssm_cfg format "
    "attn_layer_idx d_intermediate mamba_d_head mamba_d_ssm mamba_expand expand "
    "num_local_experts layer_types layers_block_type hybrid_override_pattern head_dim "
    "partial_rotary_factor rope_theta eos_token_id tie_word_embeddings vocab_size "
    "time_step_limit time_step_min moe_latent_size n_group topk_group stop_tokens "
    "attn_layer_indices"
)
NAMED = ["llama", "mamba2", "mamba", "stree-jax", "nemotron_h", "llama3", "M*E-" * 9]


def foreign(directory: Path, rng: Rng) -> str:
    """A field that this format reads by another name, or does not expect."""
    files = [file for file in json_files(directory) if "config" in file.name]
    if not files:
        raise Useless
    file, name = rng.choice(files), rng.choice(FOREIGN.split())
    values = json.loads(file.read_text())
    objects = [v for v in values.values() if isinstance(v, dict)]
    values_of = rng.choice([values, values, *objects])
    values_of[name] = rng.choice(["M" * LONG, ["mamba"] * LONG, *NAMED, *ODDS])
    write_json(file, values)
    return f"{file.name}: {name}={str(values_of[name])[:30]!r} added"


def nonsense(directory: Path, rng: Rng) -> str:
    file = some_json(directory, rng)
    text = file.read_bytes()
    depth = rng.choice([100, 900, 3000, 200_000])
    changed = {
        "nested lists": b'{"a": ' + b"[" * depth + b"]" * depth + b"}",
        "nested objects": b'{"a":' * depth + b"1" + b"}" * depth,
        "open": b"[" * depth,
        "duplicate": text.rstrip()[:-1] + b', "model_type": "x", "format": "x"}',
        "duplicate before": b'{"model_type": "x", "format": 3,' + text.lstrip()[1:],
        "no object": rng.choice([b"[]", b"3", b'"x"', b"null", b"true", b"{}", b" "]),
        "invalid UTF-8": text.replace(b'"', b'"\xff\xfe', 1),
        "UTF-16": text.decode("utf-8", "replace").encode("utf-16"),
        "BOM": b"\xef\xbb\xbf" + text,
        "long number": text.rstrip()[:-1] + b', "a": ' + b"1" * 9999 + b"}",
        "comments": b"// config\n" + text,
        "trailing": text + b"{}",
        "single quotes": text.replace(b'"', b"'"),
        "null bytes": text.replace(b" ", b"\0"),
        "long": b" " * 3_000_000 + text,
    }
    what = rng.choice(list(changed))
    file.write_bytes(changed[what])
    return f"{file.name}: {what}"


# Damage to tensors.

DTYPES = [
    *(torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8),
    *(torch.bool, torch.uint8, torch.uint16, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]
NAMES = ["", "x", "a\nb", "a\r\nb", "é\u2028", "__metadata__x", "x" * 9000, "../x"]
NAMES += ["lm_head.weight", "mtp.x", "a.rotary_emb.inv_freq", "\x00", "model.norm.bias"]


def tensor_changes(t: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Other shapes and numbers."""
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
        "NaN": lambda: torch.full_like(t, float("nan")),
        "infinite": lambda: torch.full_like(t, float("inf")),
    }


def tensors(directory: Path, rng: Rng) -> str:
    """One to three tensors of other names, shapes or dtypes."""
    found, layout = read_weights(directory), layout_of(directory)
    what = ""
    for _ in range(rng.choice([1, 1, 1, 3])):
        name = rng.choice(list(found))
        if "lm_head.weight" in found and rng.random() < 0.2:
            name = "lm_head.weight"
        what += change_tensor(found, name, rng)
    with contextlib.suppress(ValueError):  # a name that safetensors does not take
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
    """A tensor in two shards, a shard missing, and indexes that do not fit."""
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
        case "both":  # a whole file beside them wins
            (directory / "model.safetensors").write_bytes(first.read_bytes())
        case "extra":
            shutil.copyfile(first, directory / f"zzz.{suffix}")
        case "others":  # the index of the other kind
            other = "model" if suffix == "bin" else "pytorch_model"
            ending = "safetensors" if suffix == "bin" else "bin"
            index.rename(directory / f"{other}.{ending}.index.json")
    return f"{what} ({suffix})"


OUTSIDE = "outside"  # a shard beside the checkpoint: a reader must not get there
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
    """Names in the index that lead elsewhere; every file they could mean is there."""
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


# Pickles.


class Code:
    """Unpickled by anything but a careful reader, it makes a file."""

    def __init__(self, canary: Path, rng: Rng) -> None:
        text = f"open({str(canary)!r}, 'w').close()"
        calls = [(open, (str(canary), "w")), (exec, (text,)), (eval, (text,))]
        calls += [(os.system, (f"touch '{canary}'",)), (Path.touch, (canary,))]
        self.call = rng.choice(calls)

    def __reduce__(self) -> Any:
        return self.call


def odd_pickles(tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Things in place of a tensor, none of which is one in plain numbers."""
    wide = tensor.reshape(-1)[:1]
    return {
        "sparse": tensor.to_sparse,
        "compressed": lambda: tensor.reshape(1, -1).to_sparse_csr(),
        "meta": lambda: tensor.to("meta"),
        "expanded": lambda: wide.expand(1 << 40),
        "list": tensor.tolist,
        "array": lambda: tensor.float().numpy(),
        "storage": tensor.untyped_storage,
        "none": lambda: None,
        "dictionary": lambda: {"weight": tensor},
        "quantized": lambda: torch.quantize_per_tensor(
            tensor.float(), 0.1, 0, torch.qint8
        ),
        "nested": lambda: torch.nested.nested_tensor([tensor, tensor]),
    }


def harmless_pickles(tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The same tensor, but not as it is usually stored."""
    rows = torch.cat([tensor, tensor])
    return {
        "view": lambda: rows[len(tensor) :],
        "strided": lambda: torch.stack([tensor, tensor], dim=-1)[..., 0],
        "parameter": lambda: torch.nn.Parameter(tensor),
        "conjugate": lambda: torch.complex(tensor, -tensor).conj().imag,
        "attributes": lambda: with_attributes(tensor),
    }


def with_attributes(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.nn.Parameter(tensor.clone())
    copy.note = "x"  # type: ignore[attr-defined]
    return copy


def pickles(directory: Path, rng: Rng) -> str:
    found: dict[Any, Any] = dict(read_weights(directory))
    name, old = rng.choice(list(found)), rng.random() < 0.3
    canary, what = directory.parent / "canary", rng.choice(["code", "odd", "view"])
    if what == "code":
        place = rng.choice(["value", "key", "root", "plain", "disguised"])
        found = code_in(found, name, Code(canary, rng), place)
        what = f"{HARMFUL}code as {place}"
    else:
        makers = {"odd": odd_pickles, "view": harmless_pickles}[what](found[name])
        kind = rng.choice(list(makers))
        found[name] = makers[kind]()
        what = f"{HARMFUL if what == 'odd' else ''}{name} {kind}"
    for file in weight_files(directory):
        file.unlink()
    file = directory / "pytorch_model.bin"
    if "plain" in what or "disguised" in what:
        if "disguised" in what:
            file = directory / "model.safetensors"
        file.write_bytes(pickle.dumps(found, rng.choice([2, 4])))
    else:
        torch.save(found, file, _use_new_zipfile_serialization=not old)
    return what + (" (old)" if old else "")


def code_in(found: dict[Any, Any], name: str, code: Code, place: str) -> Any:
    match place:
        case "value":
            return found | {name: code}
        case "key":
            return found | {code: found[name]}
        case _:
            return code


# Cases.

Damage = Callable[[Path, Rng], str]
DAMAGES: dict[str, Damage] = {
    "bytes": flip,
    "header": header_text,
    "cut": cut,
    "replaced": replace_file,
    "fields": fields,
    "foreign": foreign,
    "nonsense": nonsense,
    "tensors": tensors,
    "shards": shards,
    "paths": paths,
    "pickles": pickles,
}
WEIGHTS = [2, 2, 2, 2, 6, 2, 2, 4, 1, 2, 2]
OWN_DAMAGES = [*("bytes", "cut", "replaced", "fields", "fields", "foreign", "nonsense")]


@dataclass(frozen=True)
class Case:
    """A damaged copy in `folder / "src"`; destinations go to `folder / "out"`."""

    name: str
    kind: str
    what: tuple[str, ...]
    folder: Path

    @property
    def src(self) -> Path:
        return self.folder / "src"

    @property
    def own(self) -> bool:
        return self.name in OWN

    @property
    def harmful(self) -> bool:
        return self.what[-1].startswith(HARMFUL)


def once(directory: Path, kind: str, rng: Rng, again: bool) -> str | None:
    """What was done; None where nothing was, or it failed on damage before it."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return DAMAGES[kind](directory, rng)
    except Exception as error:
        if again or isinstance(error, Useless):
            return None
        raise


def true_sizes(directory: Path) -> None:
    """What is damaged below params/ gets the size that config.json wants."""
    config, folder = directory / "config.json", directory / "params"
    if config not in json_files(directory):
        return
    values = json.loads(config.read_text())
    if isinstance(values.get("files"), dict):
        for name in values["files"]:
            if (folder / name).is_file():
                values["files"][name] = (folder / name).stat().st_size
        write_json(config, values)


def make_case(seed: int, number: int, sources: Path, folder: Path) -> Case:
    rng = Rng(f"{seed}.{number}")
    name = rng.choice(SOURCES if rng.random() < 0.8 else list(OWN))
    own = name in OWN
    layout = rng.choice(LAYOUTS)
    shutil.copytree(source(sources, name, "own" if own else layout), folder / "src")
    (folder / "out").mkdir()
    kinds = OWN_DAMAGES if own else rng.choices(list(DAMAGES), WEIGHTS, k=20)
    done: list[tuple[str, str]] = []
    wanted = rng.choice([1, 1, 1, 2])
    for kind in rng.choices(kinds, k=100):
        if len(done) == wanted:
            break
        if what := once(folder / "src", kind, rng, bool(done)):
            done.append((kind, what))
    if own and rng.random() < 0.5:
        true_sizes(folder / "src")
    described = name if own else f"{name} ({layout})"
    kind = done[0][0] if len(done) == 1 else "two"
    what = tuple(what for _, what in done)
    return Case(name, ("own " if own else "") + kind, (described, *what), folder)


# Checks. Each yields what is wrong.


@dataclass
class Outcome:
    """What one way in did with a case."""

    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0
    warned: tuple[warnings.WarningMessage, ...] = ()


def attempt(call: Callable[[], Any]) -> Outcome:
    outcome, began = Outcome(), time.perf_counter()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            outcome.value = call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # Rust panics are no Exceptions
            outcome.error = error
    outcome.seconds = time.perf_counter() - began
    outcome.warned = tuple(warned)
    return outcome


def check_message(case: Case, text: str) -> Iterator[str]:
    if len(text.splitlines()) != 1:
        yield f"more than one line: {text!r}"
    if str(case.src) not in text:
        yield f"the message does not name the directory: {text!r}"
    if len(text) > LONGEST:
        yield f"a message of {len(text)} characters: {text[:200]!r}"


def check_outcome(case: Case, outcome: Outcome) -> Iterator[str]:
    error = outcome.error
    if isinstance(error, CheckpointError | ValueError | OSError):
        yield from check_message(case, str(error))
    elif error is not None:
        yield f"{type(error).__name__}: {str(error)[:300]!r}"
    if outcome.seconds > SLOW:
        yield f"took {outcome.seconds:.0f} s"
    for warned in outcome.warned:
        late = "was never awaited" in str(warned.message)  # orbax, of another case
        if not late and not Path(warned.filename).is_relative_to(ROOT):
            yield f"warning: {warned.category.__name__}: {str(warned.message)[:200]}"


def listing(directory: Path) -> list[tuple[str, int]]:
    def item(file: Path) -> tuple[str, int]:
        return str(file.relative_to(directory)), file.lstat().st_mtime_ns

    return sorted(item(file) for file in directory.rglob("*"))


def same(a: Any, b: Any) -> bool:
    """Models of equal configs and, bit for bit, parameters."""
    if a.config != b.config:
        return False
    mine, theirs = (jax.tree_util.tree_leaves_with_path(m.params) for m in (a, b))
    if [path for path, _ in mine] != [path for path, _ in theirs]:
        return False
    pairs = [
        (np.asarray(x), np.asarray(y))
        for (_, x), (_, y) in zip(mine, theirs, strict=True)
    ]
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)


def run_cli(arguments: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(arguments)
    return code, err.getvalue()


def check_cli(case: Case, accepted: dict[str, bool], number: int) -> Iterator[str]:
    dst = case.folder / "out" / "by command"
    command = ["convert", "info"][number // CLI_EVERY % 2]
    arguments = [command, str(case.src), *([str(dst)] if command == "convert" else [])]
    outcome = attempt(lambda: run_cli(arguments))
    if outcome.error is not None:
        yield f"{type(outcome.error).__name__}: {str(outcome.error)[:300]!r}"
        return
    yield from check_outcome(case, outcome)
    code, err = outcome.value
    if code != (0 if accepted[command] else 2):
        yield f"exit code {code}, but called from Python: {accepted[command]}"
    if code:  # a progress bar may come before
        last = err.rstrip("\n").replace("\r", "\n").rsplit("\n", 1)[-1]
        if not last.startswith("stree-jax: "):
            yield f"stderr: {err[-300:]!r}"
        yield from check_message(case, last)
    if dst.exists() != (code == 0 and command == "convert"):
        yield f"exit code {code}, destination there: {dst.exists()}"


def numbers_of(config: Any) -> Iterator[float]:
    values = dataclasses.astuple(config)
    while values:
        yield from (value for value in values if isinstance(value, float))
        values = tuple(v for part in values if isinstance(part, tuple) for v in part)


def check_config(config: Any) -> Iterator[str]:
    """No model means these; generation would fail or be nonsense."""
    if any(map(math.isnan, numbers_of(config))):
        yield "accepted NaN in the config"
    if not 0 < config.num_tokens <= config.vocab_size:
        yield f"accepted {config.num_tokens} tokens of {config.vocab_size}"
    if not (0 < config.norm_eps < math.inf and config.logits_divisor):
        yield f"accepted eps {config.norm_eps}, divisor {config.logits_divisor}"
    low, high = config.mamba.dt_limit if config.mamba else (0, 1)
    if not 0 <= low <= high:
        yield f"accepted dt between {low} and {high}"


def check_agreement(case: Case, outcomes: dict[str, Outcome]) -> Iterator[str]:
    """What convert and load accept is the same; info may know less."""
    loaded, converted = outcomes["load"], outcomes["convert"]
    if not case.own and (loaded.error is None) != (converted.error is None):
        yield f"load: {loaded.error!r}, convert: {converted.error!r}"
    if loaded.error is None and outcomes["info"].error is not None:
        yield f"loaded, but info: {outcomes['info'].error!r}"
    if case.harmful and loaded.error is None:
        yield "accepted, but this damage is never harmless"
    if loaded.error is None:
        yield from check_config(loaded.value.config)
    if converted.error is None and loaded.error is None:
        made = attempt(lambda: stree_jax.load(case.folder / "out" / "dst"))
        if made.error is not None:
            yield f"converted, but: {made.error!r}"
        elif not same(made.value, loaded.value):
            yield "converted to something else than is loaded"


def check_leftovers(case: Case, before: list, converted: bool) -> Iterator[str]:
    if (case.folder / "canary").exists():
        yield "code of a pickle ran"
    left = sorted(file.name for file in (case.folder / "out").iterdir())
    if left != (["dst"] if converted else []):
        yield f"left at the destination: {left}"
    beside = {file.name.split(".")[0] for file in case.folder.iterdir()}
    if beside - {"src", "out", OUTSIDE, "canary"}:
        yield f"left beside: {sorted(beside)}"
    if listing(case.src) != before:
        yield "the source was changed"


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def check_case(case: Case, number: int, tally: Tally) -> Iterator[str]:
    before, memory = listing(case.src), peak()
    dst = case.folder / "out" / "dst"
    ways: dict[str, Callable[[], Any]] = {
        "convert": lambda: convert_checkpoint(case.src, dst, progress=False),
        "load": lambda: stree_jax.load(case.src),
        "info": lambda: info(case.src),
    }
    outcomes = {}
    for way, call in ways.items():
        outcome = outcomes[way] = attempt(call)
        yield from (f"{way}: {wrong}" for wrong in check_outcome(case, outcome))
        where = f"case {number}, {way}"
        tally.slowest = max(tally.slowest, (outcome.seconds, where))
        length = len(str(outcome.error or ""))
        tally.longest = max(tally.longest, (length, where))
    accepted = {way: outcome.error is None for way, outcome in outcomes.items()}
    yield from check_agreement(case, outcomes)
    yield from check_leftovers(case, before, accepted["convert"])
    if number % CLI_EVERY == 0:
        wrongs = check_cli(case, accepted, number)
        yield from (f"command: {wrong}" for wrong in wrongs)
    if peak() - memory > MORE_MEMORY // 2:
        yield f"memory grew by {(peak() - memory) >> 20} MiB"
    (tally.accepted if accepted["load"] else tally.refused)[case.kind] += 1


# Kills.

ENDLESS = """
import itertools, sys
from pathlib import Path
from stree_jax.convert import convert_checkpoint
print("ready", flush=True)
for i in itertools.count():
    convert_checkpoint(Path(sys.argv[1]), Path(sys.argv[2], str(i)), progress=False)
"""
KILLED = ["llama", "mamba2", "granite-moe", "native-plain"]
STARTED = 2  # processes at a time
LATEST = 1.5  # seconds after the start of the first conversion


def start(src: Path, out: Path) -> subprocess.Popen:
    out.mkdir()
    command = [sys.executable, "-c", ENDLESS, str(src), str(out)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen, delay: float) -> str:
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        time.sleep(delay)
        ended = process.poll()
        process.send_signal(signal.SIGKILL)
    return "" if line == "ready\n" and ended is None else f"ended before: {ended}"


def check_killed(src: Path, out: Path, tally: Tally) -> Iterator[str]:
    expected = stree_jax.load(src)
    for directory in sorted(out.iterdir()):
        if directory.name.startswith("."):
            tally.interrupted += 1
            continue
        made = attempt(lambda made=directory: stree_jax.load(made))
        if made.error is not None:
            yield f"killed: {directory.name} is not whole: {made.error!r}"
        elif not same(made.value, expected):
            yield f"killed: {directory.name} holds something else"
        tally.whole += 1


def run_kills(count: int, seed: int, folder: Path, tally: Tally, quiet: bool) -> None:
    rng = Rng(f"{seed}.kills")
    for first in tqdm(range(0, count, STARTED), unit="pair of kills", disable=quiet):
        batch = []
        for k in range(first, min(first + STARTED, count)):
            src = source(folder, rng.choice(KILLED), rng.choice(LAYOUTS))
            batch.append((src, folder / f"killed {k}", rng.uniform(0, LATEST)))
        processes = [start(src, out) for src, out, _ in batch]
        for process, (src, out, delay) in zip(processes, batch, strict=True):
            wrong = kill(process, delay)
            found = [*filter(None, [wrong]), *check_killed(src, out, tally)]
            tally.failures += [f"{found} ({src.name}, after {delay:.3f} s)"] * bool(
                found
            )
            tally.kills += 1
            shutil.rmtree(out)


# All together.


@contextlib.contextmanager
def abandoned(tally: Tally) -> Iterator[None]:
    """Counts coroutines that orbax leaves with an exception when it gives up."""

    def count(_: Any) -> None:
        tally.abandoned += 1

    old, sys.unraisablehook = sys.unraisablehook, count
    try:
        yield
        gc.collect()
    finally:
        sys.unraisablehook = old


def run_cases(
    seed: int, numbers: list[int], sources: Path, tally: Tally, quiet: bool
) -> None:
    bar = tqdm(numbers, unit="case", disable=quiet)
    for number in bar:
        bar.set_postfix_str(f"case {number}, {len(tally.failures)} failures")
        if not quiet:
            faulthandler.dump_traceback_later(STUCK, exit=True)
        with tempfile.TemporaryDirectory(prefix="damage-") as folder:
            case = make_case(seed, number, sources, Path(folder))
            start = f"python -m tests.damage --seed {seed} --one {number}"
            begin = f"{start}  # {case.kind}, {'; '.join(case.what)}: "
            wrong = "; ".join(check_case(case, number, tally)).replace(folder, "")
        if wrong:
            tally.failures.append(begin + wrong)
            bar.write(tally.failures[-1], file=sys.stderr)
        tally.cases += 1
        if len(numbers) == 1:
            print(begin)
    faulthandler.cancel_dump_traceback_later()


def run(seed: int, numbers: list[int], kills: int = 0, *, quiet: bool = False) -> Tally:
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="damage-sources-") as folder:
        sources = Path(folder)
        stree_jax.load(source(sources, "own-llama", "own"))  # what any run imports
        before = peak()
        with abandoned(tally):
            run_cases(seed, numbers, sources, tally, quiet)
        tally.memory = peak() - before
        if tally.memory > MORE_MEMORY:
            tally.failures.append(f"memory grew by {tally.memory >> 20} MiB in all")
        run_kills(kills, seed, sources, tally, quiet)
    return tally


def damage(count: int, seed: int) -> list[str]:
    """What failed in `count` cases."""
    return run(seed, list(range(count)), quiet=True).failures


def kills(count: int, seed: int) -> Tally:
    """What became of `count` processes."""
    return run(seed, [], count, quiet=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="damaged checkpoints, checked")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", type=int, metavar="NUMBER", help="only this case")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    faulthandler.enable()
    numbers = list(range(args.count)) if args.one is None else [args.one]
    tally = run(args.seed, numbers, args.kills if args.one is None else 0)
    print(*tally.failures, sep="\n", end="\n" if tally.failures else "")
    print(tally)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
