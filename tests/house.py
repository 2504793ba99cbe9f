"""Counts rooms, floors and imports of the package and inside its larger folders.

    python tests/house.py [FOLDER OF A CLONE]

A room is a file or a folder, an arrow an import between two rooms. A room stands one
floor above the highest room that it imports. Where rooms import each other in a circle,
the fewest arrows that have to be left out to break it are counted as upward. Imports
for type checkers only are left out. An `__init__.py` that only hands on names is no
room: an import from it counts as one of the modules that define the names.
"""

import ast
import sys
from itertools import permutations
from pathlib import Path

FOLDERS = ("models", "convert", "cpu_kernels", "pallas_kernels")


def modules(root):
    """Returns {module name: file} of the package `stree_jax` in a clone."""
    files = {}
    for top in ("stree_jax", *FOLDERS):
        for file in sorted((root / top).rglob("*.py")):  # rglob does not follow links
            parts = list(file.relative_to(root).with_suffix("").parts)
            if top != "stree_jax":
                parts.insert(0, "stree_jax")
            if parts[-1] == "__init__":
                parts.pop()
            files[".".join(parts)] = file
    return files


def imported(tree):
    """Yields (module, name or None) of a file's imports, except for type checkers'."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo.extend(node.orelse)
            continue
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        todo.extend(ast.iter_child_nodes(node))


def imports(root):
    """Returns {(importing module, imported module)} of the package in a clone."""
    files = modules(root)
    trees = {name: ast.parse(file.read_text("utf-8")) for name, file in files.items()}
    names = {name: list(imported(tree)) for name, tree in trees.items()}

    def defining(module, name):
        """Returns the module in which a name of a module is defined."""
        if f"{module}.{name}" in files:
            return f"{module}.{name}"
        if files[module].name == "__init__.py" and name is not None:
            for source, other in names[module]:
                if other == name and source in files and source != module:
                    return defining(source, name)
        return module

    return {
        (importer, target)
        for importer, found in names.items()
        for module, name in found
        if module in files and (target := defining(module, name)) != importer
    }


def is_face(file):
    """True if an `__init__.py` defines nothing but names that it imports."""
    if file.name != "__init__.py":
        return False
    body = ast.parse(file.read_text("utf-8")).body
    defines = (ast.FunctionDef, ast.ClassDef)
    return not any(isinstance(node, defines) for node in body)


def rooms(files, inside):
    """Returns {module: its room}, where a room is a file or folder within a package."""
    room_of = {}
    for name in files:
        if name == inside or not name.startswith(inside + "."):
            continue
        room_of[name] = name.removeprefix(inside + ".").split(".")[0]
    return room_of


def circles(arrows):
    """Returns the sets of rooms that import each other in a circle."""
    below = {}
    for a, b in arrows:
        below.setdefault(a, set()).add(b)

    def reached(room):
        seen, todo = set(), [room]
        while todo:
            for other in below.get(todo.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        return seen

    reach = {room: reached(room) for arrow in arrows for room in arrow}
    found = {
        frozenset(b for b in reach[a] if a in reach[b]) for a in reach if a in reach[a]
    }
    return [circle for circle in found if len(circle) > 1]


def upward(arrows):
    """Returns the arrows to leave out so that no circle is left: the fewest that an
    exchange of neighbours in an order of the rooms finds."""
    left_out = set()
    for circle in circles(arrows):
        within = {(a, b) for a, b in arrows if a in circle and b in circle}

        def against(order, within=within):
            place = {room: i for i, room in enumerate(order)}
            return {(a, b) for a, b in within if place[a] < place[b]}

        if len(circle) <= 7:
            best = min(permutations(sorted(circle)), key=lambda o: len(against(o)))
        else:
            best = sorted(circle)
            better = True
            while better:
                better = False
                for i in range(len(best)):
                    rest = best[:i] + best[i + 1 :]
                    tries = [rest[:j] + [best[i]] + rest[j:] for j in range(len(best))]
                    first = min(tries, key=lambda o: len(against(o)))
                    if len(against(first)) < len(against(best)):
                        best, better = first, True
        left_out |= against(best)
    return left_out


def count(root, inside):
    """Returns (rooms, floors, arrows, upward arrows) within a package."""
    files = modules(root)
    room_of = rooms(files, inside)
    shown = {room_of[name] for name in room_of if not is_face(files[name])}
    arrows = {
        (room_of[a], room_of[b])
        for a, b in imports(root)
        if a in room_of and b in room_of and room_of[a] != room_of[b]
    }
    up = upward(arrows)
    down = arrows - up
    floor = {room: 1 for room in shown}
    for _ in shown:
        for a, b in down:
            floor[a] = max(floor.get(a, 1), floor.get(b, 1) + 1)
    return len(shown), max(floor.values()), len(arrows), len(up)


def main():
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    print("package, rooms, floors, arrows, upward")
    for inside in ("stree_jax", "stree_jax.models", "stree_jax.convert"):
        print(inside, *count(root, inside))


if __name__ == "__main__":
    main()
