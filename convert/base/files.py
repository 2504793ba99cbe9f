"""Reads whole files, with limits on their size. Only regular files are accepted."""

import os
import stat
from pathlib import Path

from stree_jax.convert.base.errors import CheckpointError

Index = tuple[slice, ...]  # a slice of each axis of a tensor; () means the whole tensor
MOST_TEXT = 2**26  # bytes; limit for prompts, templates and configs
MAX_TOKENIZER_BYTES = 2**28  # the largest published tokenizer.json has 2**25
POINTER = b"version https://git-lfs"  # first bytes of a Git LFS pointer file


def check_readable(path: Path, most: int) -> None:
    """Checks that a path is a regular file of at most `most` bytes.

    Reading anything else may never end: a pipe, a terminal, or a device such as
    /dev/zero.

    Raises:
      CheckpointError: it is not a regular file, or too large.
      OSError: it does not exist.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    if found.st_size > most:
        raise CheckpointError(f"{path}: {found.st_size} bytes; want at most {most}")


def read_file(path: Path, most: int = MOST_TEXT, pipe: bool = False) -> bytes:
    """Reads a whole file.

    Args:
      path: the file.
      most: largest allowed size in bytes.
      pipe: True to also accept a pipe that something writes to, such as bash's
        `<(command)`. A pipe without a writer is an error.

    Raises:
      CheckpointError: the file is too large, or not a regular file.
      OSError: it cannot be opened or read.
    """
    is_pipe = pipe and stat.S_ISFIFO(path.stat().st_mode)
    if not is_pipe:
        check_readable(path, most)
    # Non-blocking: the file may have been replaced by a pipe, whose opening would
    # block.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
        if not is_pipe and not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        os.set_blocking(opened.fileno(), True)
        body = opened.read(most + 1)
    if len(body) > most:  # files in /proc report size 0
        raise CheckpointError(f"{path}: more than {most} bytes")
    if is_pipe and not body:
        raise CheckpointError(
            f"{path}: not a regular file; a pipe that nothing wrote to"
        )
    return body


def read_text(path: Path, most: int = MOST_TEXT, pipe: bool = False) -> str:
    """Reads a file of UTF-8 text; see `read_file`.

    Line ends become newlines. A byte order mark, which some editors write, is removed.

    Raises:
      CheckpointError: the file is too large, not a regular file, or not UTF-8.
    """
    try:
        text = read_file(path, most, pipe).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text ({error.reason})") from error
    if text.startswith(POINTER.decode()):
        check_fetched(path)
    return universal(text)


def check_fetched(path: Path) -> None:
    """Raises CheckpointError if a file is only a Git LFS pointer, as `git clone` leaves
    it without Git LFS. The message says how to download the file."""
    try:
        check_readable(path, MAX_TOKENIZER_BYTES)
        with path.open("rb") as opened:
            if opened.read(len(POINTER)) != POINTER:
                return
    except (OSError, CheckpointError):
        return  # the caller reports the error when it reads the file
    raise CheckpointError(
        f"{path}: only a Git LFS pointer, not the file itself; fetch it with git lfs "
        "pull, or the whole model with hf download"
    )


def universal(text: str) -> str:
    """Converts all line ends to newlines, as Python's text files do."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
