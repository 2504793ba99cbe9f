"""The padding of products of a few rows on a CPU."""

SKINNY = 64  # rows up to which a product takes the time to read its weight


def padded_rows(rows: int) -> int:
    """Returns `rows` rounded up as `linear` pads them on a CPU."""
    if rows <= 4 or rows > SKINNY:
        return rows
    return 8 if rows <= 8 else -(-rows // 16) * 16
