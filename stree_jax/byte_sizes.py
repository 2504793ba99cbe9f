"""Numbers of bytes as people write them."""

import re

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{infix}B": base**power
    for power, prefix in enumerate("KMGT", 1)
    for infix, base in (("", 1000), ("i", 1024))
}


def bytes_named(text: str | int) -> int:
    """A number of bytes: 8GB (of 10^9), 8GiB (of 2^30), 512MB, 8.5 GB, or an int.

    Raises:
      ValueError: anything else, or less than one byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    units = {name.lower(): factor for name, factor in UNITS.items()}
    if isinstance(text, bool) or not found or found[2].lower() not in units:
        raise ValueError(f"memory: want bytes such as 8GB, 8GiB or 512MB, got {text!r}")
    size = int(float(found[1]) * units[found[2].lower()])
    if size < 1:
        raise ValueError(f"memory: want at least 1 byte, got {text!r}")
    return size


def shown_bytes(size: int) -> str:
    """In GB or MB of 10^9 and 10^6."""
    return f"{size / 1e9:.2f} GB" if size >= 10**9 else f"{size / 1e6:.2f} MB"
