"""Sound checkpoints of every format and layout, to be damaged."""

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers.utils.logging import disable_progress_bar

from stree_jax.convert import convert_checkpoint
from tests.support import quantized, quantized_int4
from tests.support.gguf_files import GGUF_CASES, write_gguf
from tests.support.hf_checkpoints import HF_CASES
from tests.support.native_checkpoints import (
    NATIVE_CASES,
    write_mambainllama,
    write_native,
)
from tests.support.vocabularies import (
    byte_level,
    pieces,
    write_byte_level,
    write_pieces,
)

OWN = {"own-mamba2": "mamba2", "own-granite-moe": "granite-moe", "own-llama": "llama"}
NATIVES = {f"native-{name}": name for name in NATIVE_CASES}
QUANTIZED = {  # a model and a layout of `quantized` or `quantized_int4`
    "quantized-nvfp4": ("nemotron-h", "modelopt mixed"),
    "quantized-reciprocal": ("llama", "compressed nvfp4"),
    "quantized-int8": ("mamba2", "compressed int8 packed"),
    "quantized-fp8": ("granite", "fp8"),
    "quantized-gptq": ("llama", "gptq in order of activations"),
    "quantized-awq": ("llama", "awq"),
    "quantized-int4": ("llama", "compressed int4 in order of activations"),
}
# A case of `gguf_files`, the type of its matrices, and tensors per shard (0: one file).
GGUF = {
    "gguf-llama": ("llama", "Q8_0", 0),
    "gguf-mamba2": ("mamba2", "BF16", 0),
    "gguf-granite": ("granite-hybrid-moe", "F32", 0),
    "gguf-falcon": ("falcon-h1", "F16", 9),
    "gguf-nemotron": ("nemotron-h-moe", "F32", 0),
    "gguf-qwen": ("qwen35moe", "F32", 0),
}
SOURCES = [*HF_CASES, *NATIVES, "mambainllama", *QUANTIZED, *GGUF, *OWN]
LAYOUTS = ("safetensors", "safetensors shards", "bin", "bin shards")
HARMFUL = "!"  # prefix of descriptions: this damage must be refused

Rng = random.Random
Tensors = dict[str, torch.Tensor]


class Useless(Exception):
    """A damage does not apply to this checkpoint, and another one is drawn."""


def write_tokenizer(directory: Path) -> None:
    words = {"a": 0, "b": 1, "<|endoftext|>": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.save(str(directory / "tokenizer.json"))


def write_weights(directory: Path, tensors: Tensors, layout: str) -> None:
    """Writes tensors to one file, or to two and an index, in place of older weights."""
    for file in weight_files(directory):
        file.unlink()
    suffix = layout.split()[0]
    name = "pytorch_model" if suffix == "bin" else "model"
    save: Callable[..., Any] = torch.save if suffix == "bin" else save_file
    if "shards" not in layout:
        save(tensors, directory / f"{name}.{suffix}")
        return
    weight_map: dict[str, str] = {}
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
    """Reads all tensors of a sound checkpoint of another library."""
    tensors: Tensors = {}
    for file in weight_files(directory):
        if not file.is_file() or file.suffix == ".json":
            continue
        try:
            safe = file.suffix == ".safetensors"
            tensors |= load_file(file) if safe else torch.load(file)
        except Exception as error:  # after the first of two damages
            raise Useless from error
    if not tensors:
        raise Useless
    return tensors


def layout_of(directory: Path) -> str:
    files = weight_files(directory)
    suffix = "bin" if any(file.suffix == ".bin" for file in files) else "safetensors"
    return suffix + (" shards" if any(f.suffix == ".json" for f in files) else "")


def write_gguf_source(directory: Path, name: str) -> None:
    """Writes only GGUF files, with a byte-level or SentencePiece vocabulary."""
    case, kind, shards = GGUF[name]
    extra = write_byte_level(byte_level("smollm"), "smollm", "{{ messages }}")
    if name in ("gguf-mamba2", "gguf-granite"):
        extra = write_pieces(*pieces())
    # For types stored in blocks, rows must be whole blocks.
    wide = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 32}
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as plain:
        model = GGUF_CASES[case][1](**(wide if kind == "Q8_0" else {}))
        model.save_pretrained(plain)
        directory.mkdir(parents=True)
        file = directory / "model.gguf"
        write_gguf(Path(plain), case, file, kind, extra, shards)


def write_source(directory: Path, name: str) -> None:
    if name in HF_CASES:
        disable_progress_bar()
        HF_CASES[name]().save_pretrained(directory)
    elif name in QUANTIZED:
        disable_progress_bar()
        model, spelling = QUANTIZED[name]
        int4 = spelling in quantized_int4.SPELLINGS
        support = quantized_int4 if int4 else quantized
        with tempfile.TemporaryDirectory() as plain:
            support.MODELS[model]().bfloat16().save_pretrained(plain)
            quantized.write(Path(plain), directory, spelling, support.SPELLINGS)
    elif name in NATIVES:
        write_native(directory, **NATIVE_CASES[NATIVES[name]])
    else:
        write_mambainllama(directory)
    write_tokenizer(directory)


def source(folder: Path, name: str, layout: str) -> Path:
    """Returns a sound checkpoint, which is made when it is first needed."""
    if name in QUANTIZED:
        layout = layout.replace("bin", "safetensors")
    if name in GGUF:
        layout = "gguf"
    directory = folder / f"{name}, {layout}"
    if directory.is_dir():
        return directory
    if name in GGUF:
        write_gguf_source(directory, name)
        return directory
    if name in OWN:
        convert_checkpoint(
            source(folder, OWN[name], LAYOUTS[0]), directory, None, False
        )
        return directory
    write_source(directory, name)
    write_weights(directory, read_weights(directory), layout)
    return directory
