"""Writes files atomically."""

import os
import tempfile
from pathlib import Path


def write_whole(dst: Path, body: bytes) -> None:
    """Writes or replaces a file atomically, readable by everybody.

    Raises:
      OSError: the file cannot be written; nothing is left behind.
    """
    handle, temporary = tempfile.mkstemp(dir=dst.parent, prefix=f".{dst.name[:50]}")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body)
        os.chmod(temporary, 0o644)
        os.replace(temporary, dst)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
