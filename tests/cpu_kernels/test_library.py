"""Loading the compiled kernels, and the variable that restricts them."""

import re

import pytest

import stree_jax
from stree_jax import cpu_kernels
from stree_jax.cpu_kernels import library as module
from stree_jax.cpu_kernels.library import LEVELS, VARIABLE, Library
from tests.support.native import INSTRUCTIONS, built, use


def test_off(monkeypatch):
    use(monkeypatch, "off")
    assert cpu_kernels.level() is None
    if INSTRUCTIONS is not None:
        assert cpu_kernels.describe() == f"off ({VARIABLE}=off)"


@built
def test_the_best_instructions_are_the_default(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert INSTRUCTIONS is not None
    assert cpu_kernels.level() == LEVELS[INSTRUCTIONS[0]]
    assert cpu_kernels.describe() == " ".join(INSTRUCTIONS)
    use(monkeypatch, "portable")
    assert cpu_kernels.level() == 0


def test_a_wrong_name_is_refused(monkeypatch):
    use(monkeypatch, "avx1024")
    with pytest.raises(ValueError, match=f"{VARIABLE}=avx1024: unknown; known are off"):
        cpu_kernels.level()
    with pytest.raises(ValueError, match=f"^{VARIABLE}=avx1024"):  # no file's fault
        stree_jax.load("demo")


def test_instructions_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr(module, "library", lambda: Library(("avx2",), None))
    use(monkeypatch, "avx512")
    with pytest.raises(ValueError, match="avx512: this machine has avx2 at most"):
        cpu_kernels.level()
    monkeypatch.delenv(VARIABLE)
    assert cpu_kernels.level() == LEVELS["avx2"]


@pytest.mark.parametrize("content", [None, b"no library"])
def test_without_a_library_nothing_breaks(content, tmp_path, monkeypatch):
    """Not built, or built for another machine: XLA's path, and a reason."""
    if content is not None:
        (tmp_path / "_native.abi3.so").write_bytes(content)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "library.py"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(module, "library", module.library.__wrapped__)
    assert cpu_kernels.level() is None
    reason = r"not built: .*" if content is None else ".+"
    assert re.fullmatch(rf"none \({reason}\)", cpu_kernels.describe())
