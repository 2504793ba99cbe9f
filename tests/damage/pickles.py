"""Pickles that contain code, or other objects in place of tensors."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.damage.sources import HARMFUL, Rng, Useless, read_weights, weight_files


class Code:
    """An object that creates a file if an unsafe reader unpickles it."""

    def __init__(self, canary: Path, rng: Rng) -> None:
        text = f"open({str(canary)!r}, 'w').close()"
        calls = [(open, (str(canary), "w")), (exec, (text,)), (eval, (text,))]
        calls += [(os.system, (f"touch '{canary}'",)), (Path.touch, (canary,))]
        self.call = rng.choice(calls)

    def __reduce__(self) -> Any:
        return self.call


def odd_pickles(tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Returns objects in place of a tensor. None of them is a plain dense tensor."""
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
    """Returns the same tensor in unusual storage."""
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
    copy.note = "x"  # type: ignore[attr-defined]  # the damage: no tensor has it
    return copy


def pickles(directory: Path, rng: Rng) -> str:
    found: dict[Any, Any] = dict(read_weights(directory))
    name, old = rng.choice(list(found)), rng.random() < 0.3
    if found[name].dtype != torch.float32 or not found[name].ndim:
        raise Useless  # some of these need a float32 tensor with axes
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
