"""Docstrings are in plain English: a few marks of the project's old idiom are refused.

`EXEMPT` lists the files that may have some. It only shrinks.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("stree_jax", "models", "convert", "cpu_kernels", "pallas_kernels", "bench")
EXEMPT: set[str] = set()
# First words of a function's docstring that leave open what the function does.
OPENINGS = re.compile(r"(Of|What|Whether|Who|How many|How much|Where)\b")
# Clauses in place of the name of a thing: "what is no node" is padding.
CLAUSES = re.compile(r"\b[Ww]hat is no\b|\bthat is none\b|\bwhere there is none\b")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources():
    return [f for name in FOLDERS for f in sorted((ROOT / name).rglob("*.py"))]


def faults(source):
    """(line, text) of every docstring of a module's source that has a mark."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            continue
        text = ast.get_docstring(node) or ""
        opening = isinstance(node, FUNCTIONS) and OPENINGS.match(text)
        if opening or CLAUSES.search(text):
            found.append((getattr(node, "lineno", 1), text.partition("\n")[0]))
    return found


def name_of(file):
    return file.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("file", sources(), ids=name_of)
def test_docstrings_are_in_plain_english(file):
    found = faults(file.read_text("utf-8"))
    if name_of(file) in EXEMPT:
        assert found, f"{name_of(file)} is clean: take it off EXEMPT"
    else:
        lines = "\n".join(f"{name_of(file)}:{line}: {text}" for line, text in found)
        assert not found, f"write what the function does, verb first:\n{lines}"


def test_every_exempt_file_exists():
    assert {name_of(file) for file in sources()} >= EXEMPT


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("Returns the bytes of all parameters.", False),
        ("Of all parameters of a model.", True),
        ("What a pass reads.", True),
        ("Whether it fits.", True),
        ("Often the longest is first.", False),
        ("Drop what is no node.", True),
        ("Returns rows; a group that is none has scale NaN.", True),
    ],
)
def test_marks_are_found(text, refused):
    assert bool(faults(f'def f():\n    """{text}"""\n')) == refused
