"""A sandbox for chat templates whose time and output are limited.

A template comes with the checkpoint. Jinja's sandbox keeps it from files and from the
interpreter; here it cannot hold up a server either: loops and macros look at a clock,
and operators that make huge values in one step are checked.
"""

import time
from collections.abc import Mapping
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_SECONDS = 5.0
MOST_CHARACTERS = 1 << 24  # of a conversation, and of what an operator makes
BITS_COUNT = 1 << 8  # a power may have so many times fewer bits
TICK, CONCAT = "_stree_tick", "_stree_concat"


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates `rendered` can stop."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.globals[CONCAT] = _joined
        del self.globals["lipsum"]  # text of any length in one call

    def _parse(
        self, source: str, name: str | None, filename: str | None
    ) -> nodes.Template:
        """Parse a template, and add a look at the clock to every loop and macro."""
        template = _Joins().visit(super()._parse(source, name, filename))
        for node in template.find_all((nodes.For, nodes.Macro)):
            tick = nodes.Output([_call(TICK, [])]).set_lineno(node.lineno)
            node.body.insert(0, tick)
        return template.set_environment(self)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size(operator, left, right) > MOST_CHARACTERS:
            raise TemplateError(f"{operator} makes a value that is too large")
        return super().call_binop(context, operator, left, right)


class _Joins(NodeTransformer):
    """Replaces the operator ~, which no environment intercepts, by a call."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(CONCAT, node.nodes).set_lineno(node.lineno)


def _call(name: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), args, [], None, None)


def _joined(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > MOST_CHARACTERS:
        raise TemplateError("~ makes a value that is too large")
    return "".join(texts)


def _size(operator: str, left: Any, right: Any) -> int:
    """Returns how large a result is, in characters, items or bits; 0 for numbers that
    are small anyway."""
    if operator == "+":
        return len(left) + len(right) if _sized(left) and _sized(right) else 0
    if operator == "*":
        if isinstance(left, int) and _sized(right):
            left, right = right, left
        return len(left) * right if _sized(left) and isinstance(right, int) else 0
    both = isinstance(left, int) and isinstance(right, int)
    return left.bit_length() * right * BITS_COUNT if both else 0


def _sized(value: Any) -> bool:
    return hasattr(value, "__len__")


def rendered(template: Template, variables: Mapping[str, Any]) -> str:
    """Returns a template's text.

    Raises:
      TemplateError: it takes too long, or makes too much text.
    """
    end = time.monotonic() + MOST_SECONDS

    def tick() -> str:
        if time.monotonic() > end:
            raise TemplateError(f"it takes more than {MOST_SECONDS:g} seconds")
        return ""

    parts, size = [], 0
    for part in template.generate({**variables, TICK: tick}):
        parts.append(part)
        size += len(part)
        if size > MOST_CHARACTERS:
            raise TemplateError(f"it makes more than {MOST_CHARACTERS} characters")
    return "".join(parts)
