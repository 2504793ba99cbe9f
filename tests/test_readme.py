"""The README's Python examples run as they stand, one after the other."""

import re
from pathlib import Path

from stree_jax.convert import supported
from stree_jax.convert.configs import HF_TYPES

README = Path(__file__).parent.parent / "README.md"


def test_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) >= 3
    names = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    out = capsys.readouterr().out
    assert out.count("\n") > 8
    greedy = names["result"].tokens[2:]  # two samples of the row at temperature 0
    assert greedy[0] == greedy[1]


def test_the_table_of_formats_is_the_programs():
    """`python -m stree_jax.convert.supported` prints it."""
    assert supported.table() in README.read_text()
    known = {family.name for family in supported.FAMILIES}
    assert set(HF_TYPES) <= known
