"""Test loading the compiled kernels, and the variable that restricts them."""

import ctypes
import platform
import re
import runpy
from pathlib import Path

import pytest

import stree_jax
from stree_jax import cpu_kernels
from stree_jax.checkpoints.info import info
from stree_jax.cpu_kernels import library as module
from stree_jax.cpu_kernels.library import LEVELS, VARIABLE, Library
from tests.support.native import INSTRUCTIONS, built, use

ROOT = Path(__file__).parents[2]
SOURCES = [
    file
    for room in ("models", "pallas_kernels", "stree_jax")
    for file in (ROOT / room).rglob("*.py")  # which follows no links
]


def test_off(monkeypatch):
    use(monkeypatch, "off")
    assert cpu_kernels.level() is None
    if INSTRUCTIONS is not None:
        assert cpu_kernels.describe() == f"off ({VARIABLE}=off)"


# CPU flags in Linux for each of `LEVELS` and for the extensions.
FLAGS = {
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "bf16": {"avx512_bf16"},
    "vnni": {"avx512_vnni"},
}


@built
@pytest.mark.skipif(platform.machine() != "x86_64", reason="wants an x86 CPU")
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="wants Linux")
def test_the_instructions_of_the_machine_are_found():
    """Otherwise all tests beyond "portable" would be skipped silently."""
    text = Path("/proc/cpuinfo").read_text()
    flags = set(re.findall(r"^flags\s*: (.*)$", text, re.MULTILINE)[0].split())
    has = {name for name, wanted in FLAGS.items() if wanted <= flags}
    assert INSTRUCTIONS is not None
    best, *more = INSTRUCTIONS
    # AMX also needs permission from Linux and a recent compiler, so it may be missing.
    assert best != "amx" or {"amx_tile", "amx_bf16", "amx_int8"} <= flags
    found = [name for name in ("avx2", "avx512") if LEVELS[name] <= LEVELS[best]]
    assert {*found, *more} == (has if "avx512" in has else has & {"avx2"})


@built
def test_kernels_in_the_library_and_in_decorators_agree():
    """A wrong name in a decorator would fail only when the kernel is called."""
    (file,) = Path(module.__file__).parent.glob("_native*.so")
    list_kernels = ctypes.CDLL(str(file)).stree_kernels
    list_kernels.restype = ctypes.c_char_p
    used = re.findall(
        r'cpu_kernel\(\s*"(stree_\w+)"',
        "\n".join(file.read_text() for file in SOURCES),
    )
    assert sorted(set(used)) == sorted(list_kernels().decode().split())


@built
def test_the_best_instructions_are_the_default(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert INSTRUCTIONS is not None
    assert cpu_kernels.level() == LEVELS[INSTRUCTIONS[0]]
    assert cpu_kernels.describe() == " ".join(INSTRUCTIONS)
    use(monkeypatch, "portable")
    assert cpu_kernels.level() == 0


def test_an_unknown_name_raises(monkeypatch, capsys):
    use(monkeypatch, "avx1024")
    with pytest.raises(ValueError, match=f"{VARIABLE}=avx1024: unknown; known are off"):
        cpu_kernels.level()
    with pytest.raises(ValueError, match=f"^{VARIABLE}=avx1024"):  # no file's fault
        stree_jax.load("demo")
    with pytest.raises(ValueError, match=f"^{VARIABLE}=avx1024"):
        info("demo")
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("stree_jax.cpu_kernels", run_name="__main__")
    assert capsys.readouterr().err.startswith(f"{VARIABLE}=avx1024: unknown")


def test_missing_instructions_raise(monkeypatch):
    monkeypatch.setattr(module, "library", lambda: Library(("avx2",), None))
    use(monkeypatch, "avx512")
    with pytest.raises(ValueError, match="avx512: this machine has avx2 at most"):
        cpu_kernels.level()
    monkeypatch.delenv(VARIABLE)
    assert cpu_kernels.level() == LEVELS["avx2"]


@pytest.mark.parametrize("content", [None, b"no library"])
def test_everything_works_without_a_library(content, tmp_path, monkeypatch):
    """Without it, or if it is for another machine, XLA runs and the reason is shown."""
    if content is not None:
        (tmp_path / "_native.abi3.so").write_bytes(content)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "library.py"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(module, "library", module.library.__wrapped__)
    assert cpu_kernels.level() is None
    reason = r"not built: .*" if content is None else ".+"
    assert re.fullmatch(rf"none \({reason}\)", cpu_kernels.describe())
