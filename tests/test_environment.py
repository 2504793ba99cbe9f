"""The page of environment variables lists exactly those that the package reads."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "environment.md"
FOLDERS = ("stree_jax", "models", "convert", "cpu_kernels", "pallas_kernels", "bench")
# Methods of `os.environ` that read or set one variable
OF_ONE = ("get", "pop", "setdefault", "__getitem__", "__contains__")


def is_environ(node):
    """True for the expression `os.environ`."""
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def names_read(source):
    """Returns the variables that a module reads or sets: `os.environ[X]`,
    `os.environ.get(X)` and other methods, `X in os.environ`, `os.getenv(X)`.

    X is a string, or a constant of the module.
    """
    tree = ast.parse(source)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and is_environ(node.value):
            found.append(node.slice)
        elif isinstance(node, ast.Compare) and is_environ(node.comparators[0]):
            found.append(node.left)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            one = is_environ(node.func.value) and node.func.attr in OF_ONE
            if one or node.func.attr == "getenv":
                found.append(node.args[0])
    names = set()
    for node in found:
        name = constants.get(node.id) if isinstance(node, ast.Name) else node.value
        names.add(name)
    return names


def test_the_table_lists_what_the_package_reads():
    read = set()
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            read |= names_read(file.read_text("utf-8"))
    assert len(read) > 5
    table = PAGE.read_text("utf-8").partition("\n## ")[0]
    assert set(re.findall(r"^\| `([A-Z0-9_]+)` \|", table, re.M)) == read


def test_native_code_reads_no_variable():
    for file in (ROOT / "cpu_kernels" / "src").iterdir():
        assert "getenv" not in file.read_text("utf-8"), file


def test_every_way_to_read_a_variable_is_found():
    source = (
        'NAME = "A"\nos.environ.get(NAME, "")\nos.environ["B"] = "1"\n'
        'os.environ.setdefault("C", "0")\nx = "D" not in os.environ\nos.getenv("E")\n'
    )
    assert names_read(source) == set("ABCDE")
