"""The README's Python examples run as they stand, one after the other."""

import re
from pathlib import Path

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
