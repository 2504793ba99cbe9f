"""Reads tool calls in the literals of Python and of Gemma. A call is read once its end
is there."""

import ast
import json
import re
from dataclasses import dataclass

from stree_jax.server.calls import TOOL_NAME, Call, Schemas, Section, dumped

_STRINGS = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.S)


@dataclass(frozen=True)
class PythonCalls:
    """A reader of a Python list of calls, [f(a='x'), g(b=1)].

    Attributes:
      closing: text behind the list.
    """

    closing: str

    def __call__(self, text: str, at: int, schemas: Schemas) -> Section | None:
        end = text.find(self.closing, at)
        if end < 0:  # a longer text may change the last call
            return Section((), None)
        try:
            literal = _STRINGS.sub(_escaped, text[at:end].strip())
            tree = ast.parse(literal, mode="eval").body
            calls = [_python_call(node) for node in getattr(tree, "elts", [tree])]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None
        return Section(tuple(calls), end + len(self.closing))


def _escaped(string: re.Match[str]) -> str:
    """Returns a string literal whose line breaks are escaped. Templates write them as
    they are."""
    return string[0].replace("\r", "\\r").replace("\n", "\\n")


def _python_call(node: ast.AST | None) -> Call:
    """Returns the call of a Python expression; raises ValueError or TypeError if it is
    not a call with JSON values."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    values = {k.arg: ast.literal_eval(_with_names(k.value)) for k in node.keywords}
    if None in values:
        raise ValueError("unpacked arguments")
    name = ast.unparse(node.func)
    if not re.fullmatch(TOOL_NAME, name):
        raise ValueError(f"{name} is not a name")
    return Call(name, dumped(values))


class _Names(ast.NodeTransformer):
    """Replaces JSON's constants, which are names in Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        constants = {"true": True, "false": False, "null": None}
        if node.id not in constants:
            raise ValueError(f"{node.id} is not a value")
        return ast.Constant(constants[node.id])


def _with_names(node: ast.expr) -> ast.expr:
    found: ast.expr = _Names().visit(node)
    return found


@dataclass(frozen=True)
class BracedCalls:
    """A reader of calls such as call:f{a:<|"|>x<|"|>,b:1}.

    Attributes:
      quote: text around strings.
      closing: text behind the call.
    """

    quote: str
    closing: str

    def __call__(self, text: str, at: int, schemas: Schemas) -> Section | None:
        end = text.find(self.closing, at)
        if end < 0:
            return Section((), None)
        head = re.compile(rf"\s*call:({TOOL_NAME})").match(text, at, end)
        if head is None:
            return None
        parts = text[head.end() : end].strip().split(self.quote)
        for i, part in enumerate(parts):
            parts[i] = dumped(part) if i % 2 else _json_part(part)
        try:
            call = Call(head[1], dumped(json.loads("".join(parts))))
        except (ValueError, RecursionError):
            return None
        return Section((call,), end + len(self.closing))


def _json_part(text: str) -> str:
    """Returns the text between strings as JSON: with quoted keys, and JSON's names of
    Python's constants."""
    text = re.sub(r'([{,]\s*)([^\s{},:"\[\]]+)\s*:', r'\1"\2":', text)
    for name, own in (("None", "null"), ("True", "true"), ("False", "false")):
        text = re.sub(rf"([\[:,]\s*){name}\b", rf"\1{own}", text)
    return text
