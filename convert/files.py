"""Reading whole files: regular ones, and no more of them than they can hold."""

import os
import stat
from pathlib import Path

from stree_jax.convert.errors import CheckpointError

MOST_TEXT = 2**26  # bytes of a prompt, a template or a config: beyond any real one
MOST_TOKENIZER = 2**28  # the largest published tokenizer.json has 2**25
POINTER = b"version https://git-lfs"  # what Git LFS has in place of a large file


def check_readable(path: Path, most: int) -> None:
    """Refuses what is there and is not a regular file of at most so many bytes: a pipe
    or a terminal may never end, a device such as /dev/zero never does.

    Raises:
      CheckpointError: one line that names the file.
      OSError: it is not there.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    if found.st_size > most:
        raise CheckpointError(f"{path}: {found.st_size} bytes; want at most {most}")


def read_file(path: Path, most: int = MOST_TEXT, pipe: bool = False) -> bytes:
    """Reads a whole file.

    Args:
      most: bytes that it may have.
      pipe: whether it may be a pipe that something writes to, as bash's `<(command)`
        is one. A pipe without a writer is refused instead of waited for.

    Raises:
      CheckpointError: one line saying that it is too large or not a regular file.
      OSError: it cannot be opened or read.
    """
    is_pipe = pipe and stat.S_ISFIFO(path.stat().st_mode)
    if not is_pipe:
        check_readable(path, most)
    # Non-blocking: another file may have taken its place, and opening a pipe waits.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as opened:
        if not is_pipe and not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        os.set_blocking(opened.fileno(), True)
        body = opened.read(most + 1)
    if len(body) > most:  # files of /proc have no size
        raise CheckpointError(f"{path}: more than {most} bytes")
    if is_pipe and not body:
        raise CheckpointError(
            f"{path}: not a regular file; a pipe that nothing wrote to"
        )
    return body


def read_text(path: Path, most: int = MOST_TEXT, pipe: bool = False) -> str:
    """Reads a file of UTF-8 text, in which line ends become newlines; see `read_file`.

    The byte order mark that some editors write is left out.

    Raises:
      CheckpointError: also if it is not UTF-8.
    """
    try:
        text = read_file(path, most, pipe).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text ({error.reason})") from error
    if text.startswith(POINTER.decode()):
        check_fetched(path)
    return universal(text)


def check_fetched(path: Path) -> None:
    """Refuses a file that `git clone` has left on the server.

    Raises:
      CheckpointError: one line that says how to fetch it.
    """
    try:
        check_readable(path, MOST_TOKENIZER)
        with path.open("rb") as opened:
            if opened.read(len(POINTER)) != POINTER:
                return
    except (OSError, CheckpointError):
        return  # reading the file reports the error
    raise CheckpointError(
        f"{path}: only the place of a file that Git LFS keeps; fetch it with git lfs "
        "pull, or the whole model with hf download"
    )


def universal(text: str) -> str:
    """Makes every line end a newline, as Python's text files do."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
