"""Reads and prints numbers of bytes such as 8GB."""

import math
import re

from stree_jax.common.checks import as_real, shown

MOST_BYTES = 1e18

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{infix}B": base**power
    for power, prefix in enumerate("KMGT", 1)
    for infix, base in (("", 1000), ("i", 1024))
}


def bytes_named(text: str | int | float) -> int:
    """Parses a number of bytes: 8GB (10^9), 8GiB (2^30), 512MB, 8.5 GB, or a number.

    Raises:
      ValueError: anything else, less than one byte, or more than any machine has.
    """
    wrong = f"memory: want bytes such as 8GB, 8GiB or 512MB, got {shown(text)}"
    if isinstance(text, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
        units = {name.lower(): factor for name, factor in UNITS.items()}
        if not found or found[2].lower() not in units:
            raise ValueError(wrong)
        size = float(found[1]) * units[found[2].lower()]
    else:
        number = as_real(text)
        if number is None or math.isnan(number):
            raise ValueError(wrong)
        size = number
    if not 1 <= size < MOST_BYTES:
        bound = "least 1 byte" if size < 1 else f"most {MOST_BYTES:.0e} bytes"
        raise ValueError(f"memory: want at {bound}, got {shown(text)}")
    return int(size)


def shown_bytes(size: int) -> str:
    """Formats bytes in GB (10^9) or MB (10^6)."""
    return f"{size / 1e9:.2f} GB" if size >= 10**9 else f"{size / 1e6:.2f} MB"
