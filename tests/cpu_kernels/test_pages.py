"""Test that weights move to large pages if the system has them, with equal values."""

import platform
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.checkpoints import load as checkpoint
from stree_jax.cpu_kernels import pages


def large_kb(array):
    """Returns the kB on large pages in the mapping of the array's middle."""
    middle = array.unsafe_buffer_pointer() + array.nbytes // 2
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            holds = int(found[1], 16) <= middle < int(found[2], 16)
        elif holds and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    raise AssertionError("no mapping holds it")


def test_large_arrays_move_and_keep_their_values():
    x = jnp.arange(2**22, dtype=jnp.float32) + 1  # 16 MB
    before, address = np.array(x), x.unsafe_buffer_pointer()
    thread = pages.to_large_pages([x, jnp.zeros(3)])
    if thread is None:
        pytest.skip("this system has no large pages, or is told not to use them")
    thread.join()
    assert x.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(x, before)
    if tuple(map(int, platform.release().split(".")[:2])) < (6, 1):
        pytest.skip("this kernel moves no pages when it is asked to")
    assert large_kb(x) >= 12 * 1024  # all but its ends


def test_small_arrays_and_systems_without_large_pages(monkeypatch, tmp_path):
    assert pages.to_large_pages([jnp.zeros(3)]) is None
    large = jnp.zeros(2**20)
    setting = tmp_path / "enabled"
    for text in (None, "always madvise [never]\n"):
        if text is not None:
            setting.write_text(text)
        monkeypatch.setattr(pages, "SETTING", setting)
        assert pages.to_large_pages([large]) is None
    monkeypatch.setattr(pages, "SETTING", pages.SETTING)
    monkeypatch.setattr(pages.sys, "platform", "win32")
    assert pages.to_large_pages([large]) is None


def test_loaded_weights_are_moved(monkeypatch):
    given = []
    monkeypatch.setattr(checkpoint, "to_large_pages", given.extend)
    model = stree_jax.load("demo-drafter")
    assert {id(x) for x in given} == {id(x) for x in jax.tree.leaves(model.params)}
