"""The constraint of an answer: its structure, and the tool calls that it must make."""

from dataclasses import replace
from typing import Any

from stree_jax.constraints.constraint import Constraint, escaped
from stree_jax.constraints.json_schema import schema_regex
from stree_jax.constraints.strings import SPECIAL
from stree_jax.server.calls import JsonCalls
from stree_jax.server.chat_format import ChatFormat
from stree_jax.server.errors import invalid
from stree_jax.server.formats import Format
from stree_jax.server.protocol import Request

# Calls that are demanded have this form where the template's own is not JSON.
PLAIN_CALL = Format("{", JsonCalls(known_only=True), at_start=True)
ANYTHING = r"[\s\S]*"


def format_of(request: Request, form: ChatFormat) -> ChatFormat:
    """Returns the format in which an answer is read. Where calls are demanded, but the
    template's format is not JSON, calls are JSON objects."""
    if request.tool_use.choice not in ("required", "function"):
        return form
    if form.calls is not None and isinstance(form.calls.read, JsonCalls):
        return form
    return replace(form, calls=PLAIN_CALL, channels=False)


def constraint_of(
    request: Request, form: ChatFormat, opened: bool, special: frozenset[str]
) -> Constraint | None:
    """Returns the constraint on the text of an answer, or None if it has none.

    With `tool_choice` "required" or a named function, the answer is a call whose
    arguments are valid for the function's schema. With a structure and "auto", it is
    the structure, or begins a call. Reasoning that the prompt opened is not
    constrained.

    Args:
      request: the request.
      form: the format of the chat template.
      opened: True if the prompt ends within reasoning.
      special: texts of the special tokens of the tokenizer.

    Raises:
      ApiError: a schema of a tool cannot be enforced, or the demands do not fit each
        other. It names the field.
    """
    use, structure = request.tool_use, request.structure
    demanded = use.choice in ("required", "function")
    if not demanded and structure is None:
        return None
    if demanded and structure is not None:
        problem = 'cannot be combined with tool_choice "required" or a function'
        raise invalid(f"{structure.name}: {problem}", structure.name)
    form = format_of(request, form)
    marks = _Marks(special)
    if demanded:
        assert form.calls is not None  # set by `format_of`
        text, name = _call(request, form.calls, marks), "tools"
    else:
        assert structure is not None
        text, name = structure.regex, structure.name
        if use.tools and use.choice == "auto" and form.reads_calls:
            opening = "" if form.calls is None else form.calls.opening
            if opening in ("", "{"):
                problem = "cannot be combined with tools, for this chat template"
                raise invalid(f"{name}: {problem}", name)
            text = f"(?:{text}|{marks.of(opening)}{ANYTHING})"
    if opened and form.reasoning is not None:
        end = marks.of(form.reasoning[1])
        others = "".join(SPECIAL)
        reasoning = rf"(?:[^<\[{others}]|[<\[][^/|{others}])*"
        text = rf"{reasoning}{end}\s{{0,2}}(?:{text})"
    return Constraint(text, name, tuple(marks.special))


class _Marks:
    """Writes texts of a template as expressions, with its special tokens.

    Attributes:
      special: the special tokens so far, see `Constraint.special`.
    """

    def __init__(self, special: frozenset[str]) -> None:
        self._known, self.special = special, list[str]()

    def of(self, text: str) -> str:
        """Returns the expression of a text."""
        if text not in self._known:
            return escaped(text)
        if text not in self.special:
            self.special.append(text)
        return SPECIAL[self.special.index(text)]


def _call(request: Request, format_: Format, marks: _Marks) -> str:
    """Returns the expression of one call of the tools that a request allows."""
    use, options = request.tool_use, []
    key = (
        "parameters" if format_ is not PLAIN_CALL and format_.at_start else "arguments"
    )
    for i, tool in enumerate(use.tools):
        if use.choice == "function" and tool["name"] != use.name:
            continue
        where = f"tools.[{i}].function.parameters"
        arguments = _arguments(where, tool["parameters"])
        head = escaped(f'{{"name": "{tool["name"]}", "{key}": ')
        options.append(rf"{head}{arguments}\}}")
    text = f"(?:{'|'.join(options)})"
    if format_.at_start:
        return text
    read = format_.read
    assert isinstance(read, JsonCalls)  # see `format_of`
    opening = marks.of(format_.opening)
    if not read.closing:
        return rf"{opening}\[{text}\]"
    return rf"{opening}\n?{text}\n?{marks.of(read.closing)}"


def _arguments(where: str, schema: Any) -> str:
    """Returns the expression of arguments that are valid for a schema."""
    try:
        return schema_regex({"type": "object"} | schema, name=where, spaces=True)
    except ValueError as error:
        raise invalid(str(error), where) from None
