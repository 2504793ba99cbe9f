"""Docstrings and comments are in plain English, without the project's old idiom.

Docstrings and comments are checked for marks of the idiom, and a function's docstring
must start with a verb, such as "Returns", or with "True if".
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = (
    *("stree_jax", "models", "convert", "cpu_kernels", "pallas_kernels"),
    *("bench", "tools"),
)
# Clauses in place of the name of a thing: "what is no node" is padding.
CLAUSES = re.compile(r"\b[Ww]hat is no\b|\bthat is none\b|\bwhere there is none\b")
# First words that say what a function does: a verb in the third person, or "True if".
VERBS = re.compile(r"[A-Z][a-z]+s\b|True\b")
# Metaphors of people for code, and words whose meaning is not obvious.
IDIOM = re.compile(
    r"\b(is|are) (told|asked)\b|\bhears\b|\bpromises\b|\bnobody\b|\bat hand\b"
    r"|\b[Oo]f what\b|\b[Ww]hat (is|are) (there|given|asked|said|not|of)\b"
    r"|\bas of `|\bNone: |\bbeside\b|\bto be had\b|\bgiven away\b|\bspeaks? of\b"
    r"|\bgoes by\b|\bnews\b|\bno bit\b|\bsame bits\b|\bwhatever stands\b"
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources():
    return [f for name in FOLDERS for f in sorted((ROOT / name).rglob("*.py"))]


def is_property(node):
    names = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
    return not names.isdisjoint(("property", "cached_property"))


def faults(source):
    """(line, text) of every docstring and comment that is not in plain English."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            continue
        if not (text := ast.get_docstring(node)):
            continue
        function = isinstance(node, FUNCTIONS) and not is_property(node)
        idiom = IDIOM.search(text) or CLAUSES.search(text)
        if idiom or (function and not VERBS.match(text)):
            found.append((getattr(node, "lineno", 1), text.partition("\n")[0]))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and IDIOM.search(token.string):
            found.append((token.start[0], token.string))
    return found


def name_of(file):
    return file.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("file", sources(), ids=name_of)
def test_docstrings_and_comments_have_no_idiom(file):
    found = faults(file.read_text("utf-8"))
    lines = "\n".join(f"{name_of(file)}:{line}: {text}" for line, text in found)
    assert not found, f"write plain English, a function's verb first:\n{lines}"


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ('def f():\n    """Returns the bytes."""', False),
        ('def f():\n    """True if it fits."""', False),
        ('def f():\n    """The bytes."""', True),
        ('def f():\n    """Whether it fits."""', True),
        ('def f():\n    """Drops what is no node."""', True),
        ('def f():\n    """Returns rows; a group that is none has scale NaN."""', True),
        ('@property\ndef f(self):\n    """The bytes."""', False),
        ('class A:\n    """A policy that is told of steps."""', True),
        ('class A:\n    """A policy that observes steps."""', False),
        ("x = 1  # None: no limit", True),
        ("x = 1  # If None, there is no limit", False),
    ],
)
def test_marks_are_found(source, refused):
    assert bool(faults(source)) == refused
