"""The README's table; `tests/stories/test_snippets.py` runs its examples."""

from pathlib import Path

from stree_jax.convert import supported
from stree_jax.convert.configs import HF_TYPES

README = Path(__file__).parent.parent / "README.md"


def test_the_table_of_formats_is_the_programs():
    """`python -m stree_jax.convert.supported` prints it."""
    assert supported.table() in README.read_text()
    known = {family.name for family in supported.FAMILIES}
    assert set(HF_TYPES) <= known
