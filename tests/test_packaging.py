"""The wheel's package list, and what importing the package does."""

import ast
import importlib
import inspect
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import stree_jax
from stree_jax import cpu_kernels
from stree_jax.cli.main import build_parser

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, CIBUILDWHEEL = PYPROJECT["project"], PYPROJECT["tool"]["cibuildwheel"]
EXTRAS = PROJECT["optional-dependencies"]
# Each is a part of "all".
FOR_USERS = ("train", "torch", "gguf", "bench", "serve", "constraints")
CODE = ("stree_jax", "models", "convert", "cpu_kernels", "pallas_kernels")  # installed
BESIDE = ("bench", "tools")  # run from a clone
# `--verify` and `bench --transformers` say how to install transformers; llama_cpp is
# imported by another Python, `bench --llama-python`.
UNDECLARED = {"transformers", "llama_cpp"}
# A process of its own imports it, see `constraints.expression`.
IN_A_PROCESS = {"outlines_core"}
NEEDED_BY_ORBAX = {"prometheus_client"}


def modules_of(requirements):
    """The top-level modules of requirements, here named like their packages."""
    names = (re.match(r"[\w-]+", text)[0] for text in requirements)
    special = {"orbax-checkpoint": "orbax"}
    return {special.get(name, name.replace("-", "_")) for name in names}


def test_every_folder_of_code_is_in_the_wheel():
    settings = PYPROJECT["tool"]["setuptools"]
    packages, folders = settings["packages"], settings["package-dir"]
    assert set(packages) == set(folders)
    found = {
        str(file.parent.relative_to(ROOT))
        for room in CODE
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


LAZY = ("stree_jax", "stree_jax.convert", "stree_jax.cpu_kernels", "stree_jax.models")


@pytest.mark.parametrize("name", LAZY)
def test_public_names_are_found_when_they_are_used(name):
    package = importlib.import_module(name)
    for public in package.__all__:
        assert getattr(package, public) is not None
    assert set(package.__all__) == set(dir(package))
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    hidden = {public for public in set(package.__all__) & modules}
    assert all(inspect.ismodule(getattr(package, public)) for public in hidden)
    with pytest.raises(AttributeError, match="attribute nope"):
        _ = package.nope


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


def imported_modules():
    """The top-level modules outside the standard library that code imports."""
    found = set()
    for folder in (*CODE, *BESIDE):
        for file in (ROOT / folder).rglob("*.py"):  # which follows no links
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"stree_jax", *BESIDE}


def test_every_import_is_declared_and_every_dependency_is_imported():
    optional = modules_of(text for name in FOR_USERS for text in EXTRAS[name])
    mandatory = modules_of(PROJECT["dependencies"])
    comes_with_jax = {"jaxlib"}
    imported = imported_modules() | IN_A_PROCESS
    assert imported - UNDECLARED - comes_with_jax == mandatory | optional
    assert not mandatory & optional


def test_the_extra_all_is_every_extra_for_users():
    assert EXTRAS["all"] == [f"stree-jax[{','.join(FOR_USERS)}]"]
    assert set(EXTRAS) - {"all", "test", "docs"} == set(FOR_USERS)


WITHOUT_EXTRAS = """
import sys
from pathlib import Path
for name in {blocked}:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
from stree_jax.cli.main import main

def refused(package, extra, *words):
    assert main(list(words)) == 2, words
    print(package, extra, file=sys.stderr)

assert main(["generate", "def f(", "--max-new-tokens", "4"]) == 0
assert main(["info", "demo"]) == 0
assert main(["convert", "demo", "ours"]) == 0
assert main(["generate", "def f(", "--model", "ours", "--max-new-tokens", "4"]) == 0
assert main(["export", "ours", "exported"]) == 0
Path("text").write_text("def f(x): return x " * 999)
assert not {blocked} & {{name for name, module in sys.modules.items() if module}}

refused("uvicorn", "serve", "serve")
refused("matplotlib", "bench", "bench", "forward", "--figure", "f.svg")
training = ["--text", "text", "--out", "o", "--work", "w"]
refused("optax", "train", "train", *training)
for command in ("distill", "heads"):
    refused("optax", "train", command, "--target", "demo", *training)
"""


def test_core_commands_run_without_extras_and_others_name_theirs(tmp_path):
    every = modules_of(text for name in EXTRAS for text in EXTRAS[name])
    mandatory = modules_of(PROJECT["dependencies"])
    blocked = every - {"stree_jax"} - NEEDED_BY_ORBAX - mandatory
    assert "optax" in blocked and "torch" in blocked
    code = WITHOUT_EXTRAS.format(blocked=blocked)
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    for extra in ("serve", "bench", "train"):
        ends = [i for i, line in enumerate(lines) if line.endswith(f" {extra}")]
        assert ends
        for i in ends:
            package = lines[i].partition(" ")[0]
            assert package in lines[i - 1]
            # By name: the package itself may come from a clone, a wheel or an index
            advice = lines[i - 1].partition("pip install ")[2].split()
            wanted = {"matplotlib"} if extra == "bench" else modules_of(EXTRAS[extra])
            assert modules_of(advice) == wanted


def test_the_commands_that_test_a_published_wheel_work():
    """They run only in a release."""
    for command in CIBUILDWHEEL["test-command"]:
        program, *words = shlex.split(command)
        if program == "stree-jax":
            build_parser().parse_args(words)
            continue
        assert (program, words[0]) == ("python", "-c")
        for node in ast.walk(ast.parse(words[1])):
            if isinstance(node, ast.Attribute):
                assert hasattr(cpu_kernels, node.attr)


def test_no_message_or_page_names_the_package_on_an_index():
    """There may be no release: clones and packages' own names always work."""
    folders = [ROOT / folder for folder in (*CODE, *BESIDE, "docs", "examples")]
    pages = [file for folder in folders for file in folder.rglob("*.*")]
    for page in [*pages, ROOT / "README.md", ROOT / "Dockerfile"]:
        if page.suffix in (".py", ".md", ".ipynb", ""):
            assert not re.search(r"pip install '?stree-jax", page.read_text("utf-8")), (
                page
            )


def test_metadata_is_what_package_indexes_show():
    labels = PROJECT["classifiers"]
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {oldest}" in labels
    assert not any(label.startswith("License ::") for label in labels), "PEP 639"
    urls = PROJECT["urls"]
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= set(urls)
    assert all(url.startswith("https://") for url in urls.values())


def test_version_changelog_and_citation_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    version = re.search(r"^version: (\S+)$", citation, re.M)[1]
    date = re.search(r"^date-released: (\S+)$", citation, re.M)[1]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## \[(\d[^\]]*)\] - (\S+)$", changelog, re.M)
    assert releases[0] == (version, date)
    assert version == stree_jax.__version__
    license_name = re.search(r"^license: (\S+)$", citation, re.M)[1]
    assert license_name == PROJECT["license"]
