"""Writes files atomically."""

import os
import tempfile
from pathlib import Path

PRIVATE = 0o600  # mode of files with texts of users


def write_whole(dst: Path, body: bytes, mode: int = 0o644) -> None:
    """Writes or replaces a file atomically.

    Args:
      dst: the file.
      body: its content.
      mode: its permissions; by default everybody may read it.

    Raises:
      OSError: the file cannot be written; nothing is left behind.
    """
    handle, temporary = tempfile.mkstemp(dir=dst.parent, prefix=f".{dst.name[:50]}")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body)
        os.chmod(temporary, mode)
        os.replace(temporary, dst)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
