"""Tables by hand."""

from stree_jax.bench.method import quartiles_of
from stree_jax.bench.tables import megabytes, ratio, shown, table, with_quartiles


def test_a_table_is_markdown():
    text = "| a | b |\n| --- | --- |\n| 1 | - |\n| 2 |  |"
    assert table(["a", "b"], [["1", "-"], ["2", ""]]) == text
    assert table(["a"], []) == "| a |\n| --- |"


def test_cells():
    assert (shown(0.0, ".1f"), shown(None, ".1f")) == ("0.0", "-")
    assert shown(None, ".1f", "OOM") == "OOM" and shown(0.25, ".0%") == "25%"
    assert (ratio(3.0, 2.0), ratio(None, 2.0), ratio(3.0, None)) == ("1.50", "-", "-")
    assert (megabytes(1_550_000), megabytes(0), megabytes(None)) == ("1.6", "0.0", "-")


def test_quartiles_are_made_and_shown():
    row = quartiles_of("ms", [4.0, 1.0, 2.0, 3.0, 5.0])
    assert row == {"ms": 3.0, "ms_low": 2.0, "ms_high": 4.0}
    assert with_quartiles(row, "ms", ".1f") == "3.0 (2.0..4.0)"
    none = quartiles_of("ms", [])
    assert none == {"ms": None, "ms_low": None, "ms_high": None}
    assert with_quartiles(none, "ms", ".1f") == "OOM"
