"""Checks the tools of a chat, and chooses how its texts are split."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stree_jax.server.chat_format import ChatFormat
from stree_jax.server.constraints import format_of
from stree_jax.server.errors import invalid
from stree_jax.server.marks import ends_in_reasoning
from stree_jax.server.protocol import Request
from stree_jax.server.split import Splitter

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def check_tools(form: ChatFormat, request: Request) -> None:
    """Raises ApiError if a request has tools that the model cannot call."""
    if not request.tool_use.tools:
        return
    problem = None
    if not form.tools:
        problem = "the chat template of this model does not use tools"
    elif not form.reads_calls and request.tool_use.choice != "none":
        problem = "this server cannot read the tool calls of this model's chat template"
    if problem is not None:
        raise invalid(f"tools: {problem}", "tools", "unsupported_value")


def splitter_of(
    form: ChatFormat, tokenizer: "Tokenizer", request: Request, ids: Sequence[int]
) -> Splitter | None:
    """Returns the splitter of a chat's texts, or None if they are all content.

    Args:
      form: the format of the chat template.
      tokenizer: the model's tokenizer.
      request: the request.
      ids: the tokens of the prompt.
    """
    form, use = format_of(request, form), request.tool_use
    if not request.split_reasoning:
        form = replace(form, reasoning=None)
    calls = bool(use.tools) and use.choice != "none" and request.parse_calls
    splits = request.split_reasoning and (form.channels or form.reasoning is not None)
    if not calls and not splits:
        return None
    opened = in_reasoning(form, tokenizer, request, ids)
    several = use.parallel and form.several
    return Splitter(form, use.schemas if calls else None, opened, several)


def in_reasoning(
    form: ChatFormat, tokenizer: "Tokenizer", request: Request, ids: Sequence[int]
) -> bool:
    """Returns whether a prompt ends within reasoning. Arguments as in `splitter_of`."""
    if form.reasoning is None or request.kind != "chat":
        return False
    if request.turn.continues:
        begin, end = form.reasoning
        _, begun, inside = request.messages[-1]["content"].rpartition(begin)
        return bool(begun) and end not in inside
    return ends_in_reasoning(form, tokenizer, ids)
