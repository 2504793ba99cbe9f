"""The tokenizer of a checkpoint: files of a directory, or part of a GGUF file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stree_jax.convert.errors import CheckpointError
from stree_jax.convert.fields import ConfigFields
from stree_jax.convert.files import MOST_TOKENIZER, check_readable
from stree_jax.convert.gguf.header import is_gguf, read_header
from stree_jax.convert.gguf.vocabulary import read_vocabulary, settings
from stree_jax.convert.source import is_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SETTINGS = "tokenizer_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    SETTINGS,
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def read_tokenizer(
    directory: Path, warn: Callable[[str], object] | None = None
) -> "Tokenizer | None":
    """The tokenizer, or None where there is no tokenizer.json.

    Args:
      directory: or a GGUF file.
      warn: called with one line if a GGUF file's is of an unknown kind.
    """
    from tokenizers import Tokenizer

    if is_gguf(directory):
        return read_vocabulary(read_header(directory), warn)
    file = directory / "tokenizer.json"
    if not is_file(file):
        return None
    check_readable(file, MOST_TOKENIZER)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust library raises plain Exception
        raise CheckpointError(f"{file}: not a tokenizer ({error})") from error


def has_tokenizer(directory: Path) -> bool:
    """Whether `read_tokenizer` gives one; of a directory, nothing is read."""
    if is_gguf(directory):
        return read_tokenizer(directory) is not None
    return (directory / "tokenizer.json").is_file()


def tokenizer_files(directory: Path) -> list[Path]:
    """Those that are there; refuses what is there and no file."""
    return [directory / n for n in TOKENIZER_FILES if is_file(directory / n)]


def tokenizer_settings(directory: Path) -> ConfigFields:
    """tokenizer_config.json, or what a GGUF file says in its place; nothing if none."""
    if is_gguf(directory):
        return ConfigFields(directory, settings(read_header(directory)))
    file = directory / SETTINGS
    return ConfigFields.read(file) if is_file(file) else ConfigFields(file, {})


def copy_tokenizer(src: Path, dst: Path) -> None:
    """The tokenizer's files of a directory; of a GGUF file, files that say the same."""
    if is_gguf(src):
        if (tokenizer := read_tokenizer(src)) is not None:
            tokenizer.save(str(dst / "tokenizer.json"))
        said = {"tokenizer_class": "PreTrainedTokenizerFast"}
        said |= tokenizer_settings(src).values
        (dst / SETTINGS).write_text(json.dumps(said, indent=2) + "\n")
        return
    for file in tokenizer_files(src):
        shutil.copyfile(file, dst / file.name)
