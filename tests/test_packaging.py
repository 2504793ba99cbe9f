"""The wheel's package list, and what importing the package does."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_folder_of_code_is_in_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    packages = settings["setuptools"]["packages"]
    folders = settings["setuptools"]["package-dir"]
    assert set(packages) == set(folders)
    rooms = {"stree_jax", "models", "pallas_kernels", "convert", "bench"}
    found = {
        str(file.parent.relative_to(ROOT))
        for room in rooms
        for file in (ROOT / room).rglob("__init__.py")  # which follows no links
    }
    assert set(folders.values()) == found


def test_importing_is_light_and_leaks_no_generic_names():
    code = (
        "import sys, jax, stree_jax, stree_jax.convert, stree_jax.cli.main\n"
        "names = {'models', 'convert', 'pallas_kernels', 'bench', 'torch',"
        " 'transformers', 'orbax.checkpoint', 'optax'} & set(sys.modules)\n"
        "assert not names, names\n"
        "assert not jax._src.xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT)
