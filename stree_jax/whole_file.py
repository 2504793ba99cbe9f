"""Files that are whole whenever they are there."""

import os
import tempfile
from pathlib import Path


def write_whole(dst: Path, body: bytes) -> None:
    """Write a file, or put it in place of another, at once; all may read it.

    Raises:
      OSError: it cannot be written; nothing is left then.
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
