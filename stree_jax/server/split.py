"""Splits generated text into reasoning, content and tool calls.

`split` is a pure function of the text so far. A longer text only adds to its result, so
a stream sends the difference between two results.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from stree_jax.server.calls import MAX_HEAD, Call, Schemas, strict, without_beginning
from stree_jax.server.chat_format import ChatFormat


class Parts(NamedTuple):
    """The parts of a generated text.

    Attributes:
      reasoning: the reasoning before the answer.
      content: the text of the answer.
      calls: the tool calls.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Splitter:
    """Splits the texts of a request.

    Attributes:
      form: the format of the chat template.
      schemas: schemas of the parameters, by function. If None, calls stay in the
        content.
      opened: True if the prompt ends within the reasoning.
      parallel: False if only the first call counts.
    """

    form: ChatFormat
    schemas: Schemas | None
    opened: bool = False
    parallel: bool = True

    def __call__(self, text: str, final: bool) -> Parts:
        """Returns the parts of a text; see `split`."""
        own = self.form, self.schemas
        found = split(text, *own, final=final, opened=self.opened)
        return found if self.parallel else found._replace(calls=found.calls[:1])


def split(
    text: str,
    form: ChatFormat,
    schemas: Schemas | None,
    *,
    final: bool,
    opened: bool = False,
) -> Parts:
    """Splits a generated text.

    Args:
      text: the text so far, with the special tokens of `ChatFormat.marks`.
      form: the format of the chat template.
      schemas: schemas of the parameters, by function. If None, calls stay in the
        content.
      final: True if the text is complete. Otherwise text that may turn out to begin
        a mark is left out.
      opened: True if the prompt ends within the reasoning.
    """
    if form.channels:
        return _of_channels(text, schemas, final)
    reasoning, at = "", 0
    if form.reasoning is not None:
        begin, end = form.reasoning
        start = len(text) - len(text.lstrip())
        if not opened:
            short = len(text) - start < len(begin)
            if short and not final and begin.startswith(text[start:]):
                return Parts()
            opened = text.startswith(begin, start)
            start += len(begin)
        if opened:
            close = text.find(end, start)
            if close < 0:
                rest = text[start:] if final else without_beginning(text[start:], end)
                return Parts(rest.strip())
            reasoning, at = text[start:close].strip(), close + len(end)
            at += len(text[at:]) - len(text[at:].lstrip())
    content, calls = _with_calls(text, at, form, schemas, final)
    return Parts(reasoning, content, calls)


def _with_calls(
    text: str, at: int, form: ChatFormat, schemas: Schemas | None, final: bool
) -> tuple[str, tuple[Call, ...]]:
    """Returns the content and the calls of a text from index `at` on. White space
    around calls is left out."""
    format_ = form.calls
    if schemas is None or format_ is None:
        return text[at:], ()
    contents: list[str] = []
    calls: tuple[Call, ...] = ()
    search, opening = at, format_.opening
    while True:
        begin = text.find(opening, search)
        if format_.at_start and (calls or text[at : max(begin, at)].strip()):
            begin = -1
        if begin < 0:
            rest = text[at:]
            if not final or calls:  # a mark that is cut begins another call, too
                rest = without_beginning(rest, opening).rstrip()
            break
        inside = begin if format_.at_start else begin + len(opening)
        section = format_.read(text, inside, schemas)
        if section is None:  # not a call
            search = begin + len(opening)
            continue
        if section.end is None and not section.calls:
            shown = final and not calls  # after calls, it is another call, which is cut
            rest = text[at:] if shown else text[at:begin].rstrip()
            break
        contents.append(text[at:begin].strip() if calls else text[at:begin].rstrip())
        calls += section.calls
        if section.end is None:
            known = final and section.rest is not None
            rest = text[section.rest :] if known else ""
            break
        at = search = section.end
    contents.append(rest.strip() if calls else rest)
    return "\n".join(filter(None, contents)), calls


_HEAD = re.compile(
    r"\s*(?:<\|start\|>\s*assistant)?(?P<role>[^<]*)"
    r"(?:<\|channel\|>\s*(?P<channel>\w+)(?P<to>[^<]*))?"
    r"(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_TO = re.compile(r"to=(?:functions\.)?([\w.\-]+)")


def _of_channels(text: str, schemas: Schemas | None, final: bool) -> Parts:
    """Splits a text of gpt-oss: its analysis is the reasoning, its messages to
    functions are calls, and the rest is the content."""
    reasoning: list[str] = []
    contents: list[str] = []
    calls: list[Call] = []
    at = 0
    while at < len(text):
        head = _HEAD.match(text, at, at + MAX_HEAD)
        if head is None:
            if final or len(text) - at > MAX_HEAD:  # text outside of channels
                contents.append(text[at:])
            break
        end = _END.search(text, head.end())
        body = text[head.end() : None if end is None else end.start()]
        if end is None and not final:
            body = without_beginning(body, *_ENDS)
        to = _TO.search(head["role"] + (head["to"] or ""))
        if to is not None and schemas is not None:
            calls.append(Call(to[1], strict(body.strip())))
        elif head["channel"] == "analysis":
            reasoning.append(body)
        else:
            contents.append(body)
        if end is None:
            break
        at = end.start() if end[0] in _ENDS[3:] else end.end()
    return Parts("\n".join(reasoning), "\n".join(contents), tuple(calls))
