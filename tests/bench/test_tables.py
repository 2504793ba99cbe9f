"""Test tables: columns of fields and functions, and their cells."""

from bench.method import quartiles_of
from bench.tables import by, equal, quartiles, ratio, table


def test_columns_show_fields_functions_and_absent_values():
    columns = [
        ("a", "a"),
        ("twice", lambda row: 2 * row["a"], ".1f"),
        ("MB", "size", "MB"),
        ("share", "share", ".0%", "none"),
    ]
    rows = [{"a": 1, "size": 1_550_000, "share": None}]
    rows.append({"a": 2, "size": None, "share": 0.25})
    text = table(columns, rows).splitlines()
    assert text[0] == "| a | twice | MB | share |"
    assert text[1] == "| --- | --- | --- | --- |"
    assert text[2:] == ["| 1 | 2.0 | 1.6 | none |", "| 2 | 4.0 | - | 25% |"]


def test_quartiles_are_shown_in_brackets():
    found = quartiles_of("ms", [4.0, 1.0, 2.0, 3.0, 5.0])
    assert found == {"ms": 3.0, "ms_low": 2.0, "ms_high": 4.0}
    none = quartiles_of("ms", [])
    assert none == {"ms": None, "ms_low": None, "ms_high": None}
    text = table([quartiles("ms", "ms", ".1f")], [found, none])
    assert text.splitlines()[0] == "| ms (quartiles) |"
    assert text.splitlines()[2:] == ["| 3.0 (2.0..4.0) |", "| OOM |"]


def test_units_with_equal_tokens_are_counted():
    rows = [{"equal_to_plain": n, "units": 3} for n in (2, None)]
    assert table([equal()], rows).splitlines()[2:] == ["| 2/3 |", "| - |"]


def test_ratios_and_groups():
    assert (ratio(3.0, 2.0), ratio(None, 2.0), ratio(3.0, None)) == (1.5, None, None)
    rows = [{"a": 1, "b": 2}, {"a": 0, "b": 2}, {"a": 1, "b": 2, "c": 3}]
    assert by(rows, lambda row: row["a"]) == {1: [rows[0], rows[2]], 0: [rows[1]]}
    assert by(rows, "a", "b") == {(1, 2): [rows[0], rows[2]], (0, 2): [rows[1]]}
