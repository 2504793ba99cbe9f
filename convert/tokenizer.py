"""The tokenizer's files of a checkpoint directory."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from stree_jax.convert.errors import CheckpointError
from stree_jax.convert.source import is_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def read_tokenizer(directory: Path) -> "Tokenizer | None":
    """The tokenizer, or None where there is no tokenizer.json."""
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    if not is_file(file):
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust library raises plain Exception
        raise CheckpointError(f"{file}: not a tokenizer ({error})") from error


def tokenizer_files(directory: Path) -> list[Path]:
    """Those that are there; refuses what is there and no file."""
    return [directory / n for n in TOKENIZER_FILES if is_file(directory / n)]


def copy_tokenizer(src: Path, dst: Path) -> None:
    for file in tokenizer_files(src):
        shutil.copyfile(file, dst / file.name)
