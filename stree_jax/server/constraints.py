"""The constraint of an answer: its structure, and the tool calls that it must make."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stree_jax.constraints.constraint import Constraint, escaped
from stree_jax.constraints.free_text import FreeText
from stree_jax.constraints.json_schema import json_mode_regex, schema_regex
from stree_jax.constraints.reasoning import Reasoning
from stree_jax.constraints.strings import SPECIAL
from stree_jax.server.calls import JsonCalls
from stree_jax.server.chat_format import ChatFormat
from stree_jax.server.errors import ApiError, invalid
from stree_jax.server.formats import Format
from stree_jax.server.protocol import Request

# Calls that are demanded have this form where the template's own is not JSON.
PLAIN_CALL = Format("{", JsonCalls(known_only=True), at_start=True)
DEMANDS = "required", "function"  # values of `ToolUse.choice` that demand a call
ANYTHING = r"[\s\S]*"


def format_of(request: Request, form: ChatFormat) -> ChatFormat:
    """Returns the format in which an answer is read. Where calls are demanded, but the
    template's format is not JSON, calls are JSON objects."""
    if request.tool_use.choice not in DEMANDS:
        return form
    if form.calls is not None and isinstance(form.calls.read, JsonCalls):
        return form
    return replace(form, calls=PLAIN_CALL, channels=False)


def constraint_of(
    request: Request,
    form: ChatFormat,
    opened: bool,
    special: frozenset[str],
    is_token: Callable[[str], bool],
) -> Constraint | None:
    """Returns the constraint on the text of an answer, or None if it has none.

    With `tool_choice` "required" or a named function, the answer is a call whose
    arguments are valid for the function's schema; a `response_format` is then for the
    content, which is empty. With a structure and "auto", the answer is the structure,
    or calls. With "auto" and a strict tool, calls are valid for the schemas, and other
    text is free. Reasoning that the prompt opened is free, up to
    `thinking_budget`.

    Args:
      request: the request.
      form: the format of the chat template.
      opened: True if the prompt ends within reasoning.
      special: texts of the special tokens of the tokenizer.
      is_token: returns True for texts that are one token.

    Raises:
      ApiError: a schema of a tool cannot be enforced, or the demands do not fit each
        other. It names the field.
    """
    use, structure = request.tool_use, request.structure
    demanded = use.choice in DEMANDS
    before = _reasoning(request, form, opened, is_token)
    if not demanded and structure is None:
        calls = _strict_calls(request, form, opened, special, before)
        if calls is not None or before is None:
            return calls
        return Constraint(None, "thinking_token_budget", reasoning=before)
    if demanded and structure and not structure.name.startswith("response_format"):
        problem = 'cannot be combined with tool_choice "required" or a function'
        raise invalid(f"{structure.name}: {problem}", structure.name)
    form = format_of(request, form)
    marks = _Marks(special)
    if demanded:
        assert form.calls is not None  # set by `format_of`
        text, name = _calls(request, form.calls, marks, several=False), "tools"
    else:
        assert structure is not None
        text, name = structure.regex or "", structure.name
        if use.tools and use.choice == "auto" and form.reads_calls:
            if form.calls is None or form.calls.opening in ("", "{"):
                problem = "cannot be combined with tools, for this chat template"
                raise invalid(f"{name}: {problem}", name)
            several = use.parallel and form.several
            text = f"(?:{text}|{_calls(request, form.calls, marks, several=several)})"
    if before is not None:
        text = rf"\s{{0,2}}(?:{text})"
    elif opened and form.reasoning is not None:  # its end takes several tokens
        end = marks.of(form.reasoning[1])
        others = "".join(SPECIAL)
        reasoning = rf"(?:[^<\[{others}]|[<\[][^/|{others}])*"
        text = rf"{reasoning}{end}\s{{0,2}}(?:{text})"
    return Constraint(text, name, tuple(marks.special), reasoning=before)


def _reasoning(
    request: Request, form: ChatFormat, opened: bool, is_token: Callable[[str], bool]
) -> Reasoning | None:
    """Returns the reasoning before the text of an answer, or None if the answer has no
    reasoning, its end is not one token, or neither a structure nor a budget needs it.
    """
    budget, where = request.thinking_budget, "thinking_token_budget"
    constrained = request.structure or request.tool_use.choice in DEMANDS
    if request.kind != "chat" or not (budget is not None or (opened and constrained)):
        return None
    begin, end = (text.strip() for text in form.reasoning or ("", ""))
    if not end or not is_token(end):
        if budget is None:
            return None
        problem = "this model does not mark the end of its reasoning by a token"
        raise invalid(f"{where}: {problem}", where, "unsupported_value")
    if opened:
        return Reasoning(budget, end)
    return Reasoning(budget, end, begin) if is_token(begin) else None


def _strict_calls(
    request: Request,
    form: ChatFormat,
    opened: bool,
    special: frozenset[str],
    before: Reasoning | None,
) -> Constraint | None:
    """Returns the constraint of calls behind free text, if a tool is strict and the
    template's calls are JSON behind a text that opens them. Arguments as in
    `constraint_of`; `before` is the reasoning, if its tokens are limited."""
    use, format_ = request.tool_use, form.calls
    strict = use.choice == "auto" and any(tool.get("strict") for tool in use.tools)
    if not strict or not request.parse_calls or format_ is None or format_.at_start:
        return None
    if not isinstance(format_.read, JsonCalls):
        return None
    marks = _Marks(special)
    opening, closing = marks.spelled(format_.opening), format_.read.closing
    reasoning = None
    if before is None and request.split_reasoning and form.reasoning is not None:
        reasoning = marks.spelled(form.reasoning[0]), marks.spelled(form.reasoning[1])
    free = FreeText(opening, reasoning, opened and reasoning is not None)
    call, several = _call(request, format_), use.parallel and form.several
    listed = rf"\[{call}(?:, ?{call})*\]" if several else rf"\[{call}\]"
    if closing and several:
        call = rf"{call}(?:[ \n]{{0,2}}{call})*"
    text = rf"[ \n]?(?:{listed}|{call})"
    if closing:
        text = rf"{text}[ \n]?{marks.of(closing)}"
    special_texts = tuple(marks.special)
    return Constraint(text, "tools", special_texts, free, reasoning=before)


class _Marks:
    """Writes texts of a template as expressions, with its special tokens.

    Attributes:
      special: the special tokens so far, see `Constraint.special`.
    """

    def __init__(self, special: frozenset[str]) -> None:
        self._known, self.special = special, list[str]()

    def of(self, text: str) -> str:
        """Returns the expression of a text."""
        return escaped(self.spelled(text))

    def spelled(self, text: str) -> str:
        """Returns a text, or the character that stands for it as a special token."""
        if text not in self._known:
            return text
        if text not in self.special:
            self.special.append(text)
        return SPECIAL[self.special.index(text)]


def _calls(request: Request, format_: Format, marks: _Marks, *, several: bool) -> str:
    """Returns the expression of calls of the tools that a request allows. Where the
    template's format is not JSON, calls only begin as calls do.

    Args:
      request: the request.
      format_: the format of the calls.
      marks: writes texts of the template.
      several: True if there may be several calls.
    """
    read, opening = format_.read, marks.of(format_.opening)
    if not isinstance(read, JsonCalls):
        return rf"{opening}{ANYTHING}"
    call = _call(request, format_)
    if format_.at_start:
        return call
    if not read.closing:
        more = rf"(?:, {call})*" if several else ""
        return rf"{opening}\[{call}{more}\]"
    text = rf"{opening}\n?{call}\n?{marks.of(read.closing)}"
    return rf"{text}(?:\n?{text})*" if several else text


def _call(request: Request, format_: Format) -> str:
    """Returns the expression of one call in JSON of the tools that a request allows."""
    use, options = request.tool_use, []
    key = (
        "parameters" if format_ is not PLAIN_CALL and format_.at_start else "arguments"
    )
    for i, tool in enumerate(use.tools):
        if use.choice == "function" and tool["name"] != use.name:
            continue
        where = f"tools.[{i}].function.parameters"
        try:
            arguments = _arguments(where, tool["parameters"])
        except ApiError:
            if use.choice != "auto" or (not request.structure and tool.get("strict")):
                raise
            arguments = json_mode_regex(spaces=True)
        head = escaped(f'{{"name": "{tool["name"]}", "{key}": ')
        options.append(rf"{head}{arguments}\}}")
    return f"(?:{'|'.join(options)})"


def _arguments(where: str, schema: Any) -> str:
    """Returns the expression of arguments that are valid for a schema."""
    try:
        return schema_regex(schema | {"type": "object"}, name=where, spaces=True)
    except ValueError as error:
        raise invalid(str(error), where) from None
