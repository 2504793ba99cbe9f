"""Test loading onto a mesh: each device gets its part, and no more is read."""

import json
import os
import subprocess
import sys

import pytest

import stree_jax
from tests.mesh_loading import ran
from tests.support.checkpoints import HF_CASES


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Returns the error of each case, from a process with eight devices."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.convert.in_parts", tmp_path_factory.mktemp("in")],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_every_part_is_that_of_the_model_on_one_device(said):
    """Families, formats, dtypes, meshes, reads, errors and warnings."""
    assert {name.split()[0] for name in said} >= HF_CASES.keys()
    wrong = {name: what for name, what in said.items() if what}
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


def test_two_processes(tmp_path):
    """Each has its part, equal from tensors that it divided itself and from our own
    arrays, which were exchanged between devices."""
    HF_CASES["granite"]().save_pretrained(tmp_path / "theirs")
    stree_jax.save(stree_jax.load(tmp_path / "theirs"), tmp_path / "ours")
    theirs, ours = (ran(tmp_path / name, (0, 1), None) for name in ("theirs", "ours"))
    assert [one["process"] for one in theirs + ours] == [0, 1, 0, 1]
    assert [one["digest"] for one in theirs] == [one["digest"] for one in ours]
    assert theirs[0]["digest"] != theirs[1]["digest"]
    assert all(one["share"] < 0.75 * one["whole"] for one in theirs)
