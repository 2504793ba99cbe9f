"""Test loading the compiled kernels, and the variable that restricts them."""

import ctypes
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stree_jax
from stree_jax import cpu_kernels
from stree_jax.checkpoints.info import info
from stree_jax.cpu_kernels import library as module
from stree_jax.cpu_kernels.library import LEVELS, PLATFORM_VARIABLES, VARIABLE, Library
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


@pytest.mark.parametrize(
    ("variable", "value", "only"),
    [
        ("JAX_PLATFORMS", "cpu", True),
        ("JAX_PLATFORMS", "cuda,cpu", False),
        ("JAX_PLATFORM_NAME", "cuda", False),
        ("PJRT_NAMES_AND_LIBRARY_PATHS", "x:/x.so", False),
        (VARIABLE, "off", False),  # a plugin is installed
    ],
)
def test_jax_is_asked_unless_only_a_cpu_is_possible(variable, value, only, monkeypatch):
    for name in ("JAX_PLATFORMS", *PLATFORM_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(module.metadata, "entry_points", lambda group: ["plugin"])
    assert module._only_cpu.__wrapped__() is only


@pytest.mark.parametrize("content", [None, b"no library"])
def test_everything_works_without_a_library(content, tmp_path, monkeypatch):
    """Without it, or if it is for another machine, XLA runs and the reason is shown."""
    if content is not None:
        (tmp_path / "_native.abi3.so").write_bytes(content)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "library.py"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(module, "library", module.library.__wrapped__)
    assert cpu_kernels.level() is None
    reason = r"not built when stree-jax was installed; .*" if content is None else ".+"
    assert re.fullmatch(rf"none \({reason}\)", cpu_kernels.describe())


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone whose kernels were never built: the files that Python imports first."""
    root = tmp_path_factory.mktemp("clone").resolve()
    (root / "stree_jax").mkdir()
    for file in ("__init__.py", "__init__.pyi"):
        shutil.copy(ROOT / "stree_jax" / file, root / "stree_jax")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    common = root / "stree_jax" / "common"
    shutil.copytree(ROOT / "stree_jax" / "common", common, ignore=ignored)
    shutil.copytree(ROOT / "cpu_kernels", root / "cpu_kernels", ignore=ignored)
    (root / "stree_jax" / "cpu_kernels").symlink_to("../cpu_kernels")
    return root


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of packages with an installed copy that has kernels."""
    root = tmp_path_factory.mktemp("site").resolve()
    kernels = root / "stree_jax" / "cpu_kernels"
    kernels.mkdir(parents=True)
    (kernels / "_native.abi3.so").touch()
    return root


def python(clone, *args, path=None, **options):
    """Runs Python in the clone. Returns (standard output, lines of standard error)."""
    env = os.environ | {"PYTHONPATH": str(path or "")} | options.pop("env", {})
    env.setdefault(VARIABLE, "")
    done = subprocess.run(
        [sys.executable, *args],
        cwd=clone,
        env=env,
        text=True,
        capture_output=True,
        check=True,
        **options,
    )
    return done.stdout, done.stderr.splitlines()


USED_TWICE = """
from stree_jax import cpu_kernels
print(cpu_kernels.available(), cpu_kernels.available())
"""


@pytest.mark.parametrize("how", ["-c", "a file as standard input"])
def test_a_clone_that_hides_an_installed_package_warns_once(how, clone, site):
    """`pip install .` builds kernels elsewhere, and Python imports the clone."""
    args, text = (["-c", USED_TWICE], None) if how == "-c" else (["-"], USED_TWICE)
    out, err = python(clone, *args, path=site, input=text)
    assert out == "False False\n"
    (line,) = err
    assert f"not built in the source folder {clone}" in line
    assert f"instead of the package in {site}" in line
    assert f"`pip install -e {clone}`" in line


def test_the_module_says_why_a_clone_has_no_kernels(clone, site):
    """It blamed a missing compiler."""
    for path in (None, site):
        out, err = python(clone, "-m", "stree_jax.cpu_kernels", path=path)
        assert err == []
        assert out.startswith(
            f"CPU kernels: none (not built in the source folder {clone}"
        )
        assert f"pip install -e {clone}" in out
        assert (str(site) in out) == (path is site)


def test_kernels_that_are_switched_off_are_no_reason_to_warn(clone, site):
    out, err = python(clone, "-c", USED_TWICE, path=site, env={VARIABLE: "off"})
    assert (out, err) == ("False False\n", [])


@built
def test_a_clone_with_kernels_does_not_warn():
    assert python(ROOT, "-c", USED_TWICE) == ("True True\n", [])


def test_an_installed_package_without_kernels_does_not_warn(clone, tmp_path):
    """There was no compiler, which is not a mistake."""
    ignored = shutil.ignore_patterns("src")
    shutil.copytree(clone / "stree_jax", tmp_path / "stree_jax", ignore=ignored)
    assert python(tmp_path, "-c", USED_TWICE) == ("False False\n", [])
    out, _ = python(tmp_path, "-m", "stree_jax.cpu_kernels")
    assert out.startswith("CPU kernels: none (not built when stree-jax was installed")
