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

MOST_SECONDS = 5.0
MOST_CHARACTERS = 1 << 24  # of a conversation, and of what an operator makes
MOST_BITS = 1 << 16  # of a power
TICK = "_stree_tick"


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates `rendered` can stop."""

    intercepted_binops = frozenset(("*", "**"))

    def _parse(
        self, source: str, name: str | None, filename: str | None
    ) -> nodes.Template:
        """Parse a template, and add a look at the clock to every loop and macro."""
        template = super()._parse(source, name, filename)
        for node in template.find_all((nodes.For, nodes.Macro)):
            call = nodes.Call(nodes.Name(TICK, "load"), [], [], None, None)
            tick = nodes.Output([call]).set_lineno(node.lineno)
            node.body.insert(0, tick.set_environment(self))
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = 0
        if operator == "*":
            pairs = ((left, right), (right, left))
            for many, times in pairs:
                if isinstance(times, int) and hasattr(many, "__len__"):
                    size = len(many) * times
        elif isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right * (MOST_CHARACTERS // MOST_BITS)
        if size > MOST_CHARACTERS:
            raise TemplateError(f"{operator} makes a value that is too large")
        return super().call_binop(context, operator, left, right)


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
    for part in template.generate(**{**variables, TICK: tick}):
        parts.append(part)
        size += len(part)
        if size > MOST_CHARACTERS:
            raise TemplateError(f"it makes more than {MOST_CHARACTERS} characters")
    return "".join(parts)
