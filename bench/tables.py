"""Writes Markdown tables of rows of values; each column says which value it shows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

OUT_OF_MEMORY = "OOM"

Row = Mapping[str, Any]
Value = str | Callable[[Any], Any]  # a field of a row, or a function of it


def value_of(row: Any, value: Value) -> Any:
    return row[value] if isinstance(value, str) else value(row)


class Column(NamedTuple):
    """A column of a table.

    Attributes:
      head: its name.
      value: a field of the row, or a function of it.
      form: how to format the value; "MB" shows bytes as megabytes. A value with
        "median", "low" and "high" is shown with its quartiles.
      absent: shown where the value is None.
    """

    head: str
    value: Value
    form: str = ""
    absent: str = "-"

    def cell(self, row: Any) -> str:
        value = value_of(row, self.value)
        if isinstance(value, dict):
            low, median, high = (
                format(value[name], self.form) for name in ("low", "median", "high")
            )
            return f"{median} ({low}..{high})"
        if value is not None and self.form == "MB":
            return f"{value / 1e6:.1f}"
        return self.absent if value is None else format(value, self.form)


def table(columns: Sequence[tuple[Any, ...]], rows: Iterable[Any]) -> str:
    """Returns a table of Markdown.

    Args:
      columns: the arguments of `Column`.
    """
    made = [Column(*column) for column in columns]
    lines = [[c.head for c in made], ["---"] * len(made)]
    lines += [[c.cell(row) for c in made] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def by(rows: Iterable[Any], *values: Value) -> dict[Any, list[Any]]:
    """Groups rows by a value, or several, in the order of the first rows."""
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        key = tuple(value_of(row, value) for value in values)
        groups.setdefault(key[0] if len(key) == 1 else key, []).append(row)
    return groups


def quartiles(
    head: str, name: str, form: str, absent: str = OUT_OF_MEMORY
) -> tuple[Any, ...]:
    """Returns a column that shows a value of `quartiles_of` with its quartiles."""

    def value(row: Mapping[str, Any]) -> dict[str, float] | None:
        if row[name] is None:
            return None
        ends = {end: row[f"{name}_{end}"] for end in ("low", "high")}
        return {"median": row[name], **ends}

    return f"{head} (quartiles)", value, form, absent


def equal(name: str = "equal_to_plain") -> tuple[Any, ...]:
    """Returns a column that counts the units whose tokens are plain decoding's."""

    def value(row: Mapping[str, Any]) -> str | None:
        return None if row[name] is None else f"{row[name]}/{row['units']}"

    return "equal", value


def ratio(a: float | None, b: float | None) -> float | None:
    """Returns a / b, or None if one of them is None."""
    return None if a is None or b is None else a / b
