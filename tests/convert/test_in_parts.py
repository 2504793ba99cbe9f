"""Loading onto a mesh: each device gets its part, and no more is read."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.checkpoints import HF_CASES


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What was wrong with each case, by a process with eight devices."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.convert.in_parts", tmp_path_factory.mktemp("in")],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_every_part_is_that_of_the_model_on_one_device(said):
    """Families, formats, dtypes and meshes; by hand; what is read, refused and told."""
    assert {name.split()[0] for name in said} >= HF_CASES.keys()
    wrong = {name: what for name, what in said.items() if what}
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
