"""The wheel's package list, and what importing the package does."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import stree_jax

ROOT = Path(__file__).parent.parent


def test_every_folder_of_code_is_in_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    packages = settings["setuptools"]["packages"]
    folders = settings["setuptools"]["package-dir"]
    assert set(packages) == set(folders)
    rooms = {"stree_jax", "models", "pallas_kernels", "cpu_kernels", "convert", "bench"}
    found = {
        str(file.parent.relative_to(ROOT))
        for room in rooms
        for file in (ROOT / room).rglob("__init__.py")  # which follows no links
    }
    assert set(folders.values()) == found


def test_importing_is_light_and_leaks_no_generic_names():
    code = (
        "import sys, jax, stree_jax, stree_jax.convert, stree_jax.cli.main\n"
        "names = {'models', 'convert', 'cpu_kernels', 'pallas_kernels', 'bench',"
        " 'torch', 'transformers', 'orbax.checkpoint', 'optax'} & set(sys.modules)\n"
        "assert not names, names\n"
        "assert not jax._src.xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT)


def test_public_names_are_the_same_for_type_checkers_and_at_run_time():
    (block,) = (
        node
        for node in ast.parse(inspect.getsource(stree_jax)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    read = {"__version__"}
    for line in block.body:
        assert isinstance(line, ast.ImportFrom) and line.module is not None
        (alias,) = line.names
        assert alias.asname == alias.name  # a re-export
        value = getattr(importlib.import_module(line.module), alias.name)
        assert getattr(stree_jax, alias.name) is value
        read.add(alias.name)
    assert read == set(stree_jax.__all__) == set(dir(stree_jax))
    modules = {module.name for module in pkgutil.iter_modules(stree_jax.__path__)}
    assert not read & modules, "a module that its name would hide"
    assert stree_jax.speculation is sys.modules["stree_jax.speculation"]
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        _ = stree_jax.nope


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--n"]])
def test_help_and_bad_options_do_not_wait_for_jax(arguments):
    code = (
        "import sys\n"
        "from stree_jax.cli.main import main\n"
        "try:\n"
        f"    main({arguments})\n"
        "except SystemExit:\n"
        "    assert not {'jax', 'numpy'} & set(sys.modules)\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
