"""Tables as Markdown, and the numbers in their cells."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

OUT_OF_MEMORY = "OOM"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The lines of a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def shown(value: float | None, form: str, absent: str = "-") -> str:
    """A number as `form` has it, or `absent`."""
    return absent if value is None else format(value, form)


def ratio(a: float | None, b: float | None) -> str:
    return "-" if a is None or b is None else f"{a / b:.2f}"


def megabytes(size_bytes: int | None) -> str:
    return shown(None if size_bytes is None else size_bytes / 1e6, ".1f")


def with_quartiles(row: Mapping[str, Any], name: str, form: str) -> str:
    """A median that `quartiles_of` made, or that memory did not suffice for it."""
    if row[name] is None:
        return OUT_OF_MEMORY
    low, high = (format(row[f"{name}_{end}"], form) for end in ("low", "high"))
    return f"{row[name]:{form}} ({low}..{high})"
