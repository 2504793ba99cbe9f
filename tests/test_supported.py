"""The page of supported models has the table that the program prints."""

from pathlib import Path

from stree_jax.convert.families import supported

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "supported-models.md"


def test_the_table_of_formats_is_the_programs():
    """`python -m stree_jax.convert.families.supported` prints it."""
    assert supported.table() in PAGE.read_text("utf-8")
