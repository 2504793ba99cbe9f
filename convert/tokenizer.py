"""The tokenizer's files of a checkpoint directory."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from stree_jax.convert.errors import CheckpointError

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
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust library raises plain Exception
        raise CheckpointError(f"{file}: not a tokenizer ({error})") from error


def copy_tokenizer(src: Path, dst: Path) -> None:
    for name in TOKENIZER_FILES:
        if (src / name).is_file():
            shutil.copyfile(src / name, dst / name)
