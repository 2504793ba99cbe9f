"""Test the imports in the sources: allowed directions, no cycles, no hidden modules."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Folders of the package, as in package-dir of pyproject.toml, and of the programs that
# are not installed
FOLDERS = {
    "stree_jax": ROOT / "stree_jax",
    "stree_jax.models": ROOT / "models",
    "stree_jax.cpu_kernels": ROOT / "cpu_kernels",
    "stree_jax.pallas_kernels": ROOT / "pallas_kernels",
    "stree_jax.convert": ROOT / "convert",
    "bench": ROOT / "bench",
    "tools": ROOT / "tools",
}
# The floors of the package and of its larger folders, from the ground up. A module may
# import from its own room and from rooms on lower floors. Rooms on one floor do not
# import each other.
FLOORS = {
    "stree_jax": (
        "common",
        "cpu_kernels",
        "pallas_kernels",
        "models",
        "convert sampling",
        "constraints speculation",
        "checkpoints",
        "sizing",
        "generation",
        "training verify",
        "adapters cost drafters trees",
        "server",
        "cli",
        "__main__",
    ),
    "stree_jax.models": (
        "base",
        "weights",
        "configs",
        "layers",
        "mixers",
        "stack",
        "drafters sharding",
    ),
    "stree_jax.convert": (
        "base",
        "tensors",
        "tokenizers",
        "families",
        "adapters gguf saved",
        "opened drafters",
        "checkpoint",
        "export hub",
        "export_gguf",
    ),
}


def name_of(file):
    """Returns the module name of a file."""
    package, folder = next(
        (name, folder)
        for name, folder in FOLDERS.items()
        if file.is_relative_to(folder)
    )
    parts = file.relative_to(folder).with_suffix("").parts
    return ".".join((package, *(part for part in parts if part != "__init__")))


FILES = {
    name_of(file): file
    for folder in FOLDERS.values()
    for file in sorted(folder.rglob("*.py"))  # rglob does not follow links
}
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def imports_of(file, modules=FILES, deep=True):
    """Returns (line, module) of every import. `deep` includes those inside
    functions."""
    found, todo = [], [ast.parse(file.read_text())]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}:{node.lineno}: a relative import"
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found.append(
                        (node.lineno, inner if inner in modules else node.module)
                    )
            elif deep or not isinstance(node, ast.FunctionDef):
                todo.append(node)
    return sorted(found)


def room(module, package):
    """Returns the file or folder of a package that a module belongs to, or None."""
    inside = module.startswith(f"{package}.")
    return module.removeprefix(f"{package}.").split(".")[0] if inside else None


@pytest.mark.parametrize("package", FLOORS)
def test_every_room_has_a_floor(package):
    rooms = {room(module, package) for module in FILES} - {None}
    on_floors = [name for floor in FLOORS[package] for name in floor.split()]
    assert sorted(on_floors) == sorted(rooms)


@pytest.mark.parametrize("package", FLOORS)
def test_no_import_goes_upward(package):
    floors = enumerate(FLOORS[package])
    floor = {name: height for height, names in floors for name in names.split()}
    wrong = []
    for module, file in FILES.items():
        if (here := room(module, package)) is None:
            continue
        for line, other in imports_of(file):
            there = room(other, package)
            if there not in {None, here} and floor[there] >= floor[here]:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_only_the_table_of_formats_imports_a_weight_format():
    """Other modules use the interface of weights. Benchmarks may time one format.
    `parameters` imports the weights of all formats, so that they are registered."""
    weights = "stree_jax.models.weights"
    one = {f"{weights}.int8", f"{weights}.int8_format"}
    users = {
        module
        for module, file in FILES.items()
        if room(module, "stree_jax") and one & {m for _, m in imports_of(file)}
    }
    assert users - one == {f"{weights}.formats", f"{weights}.parameters"}


def test_modules_do_not_ask_for_the_type_of_a_format():
    """Weight formats answer for themselves, see `Format`."""
    users = {m for m, file in FILES.items() if "KeptFormat" in file.read_text()}
    weights = "stree_jax.models.weights"
    assert users == {f"{weights}.kept", f"{weights}.kept_format"}


def test_imports_have_no_cycles():
    """Considers only imports that run when a module is loaded."""
    graph = {
        name: {m for _, m in imports_of(file, deep=False)} & set(FILES)
        for name, file in FILES.items()
    }
    while graph:
        needed = set.union(*graph.values())
        done = {m for m, needs in graph.items() if not needs or m not in needed}
        assert done, f"they import each other: {sorted(graph)}"
        graph = {m: graph[m] - done for m in graph.keys() - done}


def test_no_module_is_hidden_by_another_object():
    """`import stree_jax.generate` must give the module, not a function of the
    package."""
    for package, file in FILES.items():
        if file.name != "__init__.py":
            continue
        names, nodes = set(), ast.parse(file.read_text()).body
        nodes += [
            inner for node in nodes if isinstance(node, ast.If) for inner in node.body
        ]
        for node in nodes:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.Assign():
                    names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
                case ast.ImportFrom(module=module) if module != package:
                    names |= {alias.asname or alias.name for alias in node.names}
        hidden = {f"{package}.{name}" for name in names} & set(FILES)
        assert not hidden, hidden


def test_the_library_imports_no_programs_beside_it():
    """Only the command `stree-jax bench` imports benchmarks, when it is used."""
    command = "stree_jax.cli.commands.bench"
    for module, file in FILES.items():
        tops = {m.split(".")[0] for _, m in imports_of(file, deep=module != command)}
        assert "tests" not in tops, file
        assert not room(module, "stree_jax") or not tops & {"bench", "tools"}, file


def test_test_modules_are_not_imported():
    """Shared helpers are in `tests/support`, or in a plain module of the folder."""
    modules = {".".join(f.relative_to(ROOT).with_suffix("").parts) for f in TESTS}
    for file in TESTS:
        for line, module in imports_of(file, modules):
            leaf = module.split(".")[-1]
            ours = module in modules and (
                leaf.startswith("test_") or leaf == "conftest"
            )
            where = f"{file.relative_to(ROOT)}:{line}"
            assert not ours, f"{where} imports {module}"


def test_imports_of_test_programs_exist():
    """The programs are run by hand and rarely, so a broken import could go
    unnoticed."""
    programs = [file for file in TESTS if '__name__ == "__main__"' in file.read_text()]
    folders = {file.parent for file in programs} - {ROOT / "tests"}
    files = {*programs, *(f for folder in folders for f in folder.glob("*.py"))}
    for file in sorted(files):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if node.module.split(".")[0] not in ("stree_jax", "bench"):
                continue
            names = {alias.name for alias in node.names}
            submodules = {name for name in names if f"{node.module}.{name}" in FILES}
            missing = {
                name
                for name in names - submodules
                if not hasattr(importlib.import_module(node.module), name)
            }
            assert not missing, f"{file.relative_to(ROOT)}: {node.module} has {missing}"
