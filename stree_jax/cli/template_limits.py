"""A sandbox for chat templates whose time and output are limited.

A template comes with the checkpoint, so it is not trusted. Jinja's sandbox denies it
files and the interpreter. This module also keeps it from blocking a server: loops and
macros check a time limit, and operators that can create huge values in one step check
the size of their result.
"""

import time
from collections.abc import Mapping
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0
MAX_CHARACTERS = 1 << 24  # length limit of a conversation, and of an operator's result
BITS_WEIGHT = 1 << 8  # characters that one bit of a power counts as
TICK, CONCAT = "_stree_tick", "_stree_concat"


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates can be stopped by `rendered`."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.globals[CONCAT] = _joined
        del self.globals["lipsum"]  # returns text of any length in one call

    def _parse(
        self, source: str, name: str | None, filename: str | None
    ) -> nodes.Template:
        """Parses a template, and adds a check of the time to every loop and macro."""
        template = _Joins().visit(super()._parse(source, name, filename))
        for node in template.find_all((nodes.For, nodes.Macro)):
            tick = nodes.Output([_call(TICK, [])]).set_lineno(node.lineno)
            node.body.insert(0, tick)
        return template.set_environment(self)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size(operator, left, right) > MAX_CHARACTERS:
            raise TemplateError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


class _Joins(NodeTransformer):
    """Replaces the operator ~, which an environment cannot intercept, by a call."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(CONCAT, node.nodes).set_lineno(node.lineno)


def _call(name: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), args, [], None, None)


def _joined(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > MAX_CHARACTERS:
        raise TemplateError("the result of ~ is too large")
    return "".join(texts)


def _size(operator: str, left: Any, right: Any) -> int:
    """Returns the size of a result in characters or items; bits of a power count
    `BITS_WEIGHT` times. 0 for results that are always small."""
    if operator == "+":
        return len(left) + len(right) if _sized(left) and _sized(right) else 0
    if operator == "*":
        if isinstance(left, int) and _sized(right):
            left, right = right, left
        return len(left) * right if _sized(left) and isinstance(right, int) else 0
    both = isinstance(left, int) and isinstance(right, int)
    return left.bit_length() * right * BITS_WEIGHT if both else 0


def _sized(value: Any) -> bool:
    return hasattr(value, "__len__")


def rendered(template: Template, variables: Mapping[str, Any]) -> str:
    """Returns the text that a template renders.

    Raises:
      TemplateError: rendering takes too long, or the text is too long.
    """
    end = time.monotonic() + MAX_SECONDS

    def tick() -> str:
        if time.monotonic() > end:
            raise TemplateError(f"rendering takes more than {MAX_SECONDS:g} seconds")
        return ""

    parts, size = [], 0
    for part in template.generate({**variables, TICK: tick}):
        parts.append(part)
        size += len(part)
        if size > MAX_CHARACTERS:
            raise TemplateError(f"its text has more than {MAX_CHARACTERS} characters")
    return "".join(parts)
