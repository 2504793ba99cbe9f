"""Prints an answer as it grows. On a terminal that shows colours, reasoning is dimmed
and calls of tools are written as function calls; other output is the plain text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stree_jax.generation.result import Generation
from stree_jax.sampling.continuation import Decoder, continuation
from stree_jax.sampling.stop_strings import (
    searched_bytes,
    text_so_far,
    token_bytes,
)
from stree_jax.server.chat_answers import added
from stree_jax.server.chat_format import ChatFormat
from stree_jax.server.marks import ends_in_reasoning, showing
from stree_jax.server.split import Parts, Splitter

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DIM, CALL, RESET = "\x1b[2m", "\x1b[36m", "\x1b[0m"


@dataclass
class StyledParts:
    """The parts of an answer, with escape sequences for a terminal.

    Attributes:
      splitter: splits the text.
      decoder: decodes the answer with the special tokens that mark its parts.
      sent: the parts so far.
      open: the part that the text is in: "reasoning", "content", "call 0" and so on.
    """

    splitter: Splitter
    decoder: Decoder
    sent: Parts = Parts()
    open: str = ""

    def grown(self, text: str, final: bool) -> str:
        """Returns the new text of the answer in its style.

        Args:
          text: the whole text so far.
          final: True if the text is complete.
        """
        before, self.sent = self.sent, self.splitter(text, final)
        found = "".join(self._new(before))
        if final and self.open.startswith("call"):
            found, self.open = found + _styled(")", CALL), ""
        return found

    def _new(self, before: Parts) -> Iterator[str]:
        """Yields what the parts have gained."""
        for delta in added(before, self.sent, lambda index, name: name):
            if "tool_calls" in delta:
                (call,) = delta["tool_calls"]
                name, style = f"call {call['index']}", CALL
                text = call["function"]["arguments"]
                if "id" in call:
                    text = f"{call['function']['name']}({text}"
            else:
                ((name, text),) = delta.items()
                style = DIM if name == "reasoning_content" else ""
            if name != self.open:
                yield self._between()
                self.open = name
            yield _styled(text, style)

    def _between(self) -> str:
        """Returns the text between the part that ends here and the next one."""
        end = _styled(")", CALL) if self.open.startswith("call") else ""
        if not self.open:
            return end
        return end + ("\n\n" if self.open == "reasoning_content" else "\n")


def _styled(text: str, style: str) -> str:
    return f"{style}{text}{RESET}" if style and text else text


def styled_parts(
    form: ChatFormat, tokenizer: "Tokenizer", prompt: Sequence[int]
) -> StyledParts | None:
    """Returns the parts of an answer for a terminal, or None if all is content.

    Args:
      form: what the chat template supports.
      tokenizer: the tokenizer.
      prompt: the tokens before the answer.
    """
    if not form.reads_calls and form.reasoning is None:
        return None
    opened = ends_in_reasoning(form, tokenizer, prompt)
    splitter = Splitter(form, {} if form.reads_calls else None, opened)
    marked = showing(tokenizer, form.marks(form.reads_calls))
    return StyledParts(splitter, continuation(marked, prompt))


@dataclass
class Shown:
    """The text of an answer as it grows, and how much of it is printed.

    Attributes:
      tokenizer: the tokenizer.
      prompt: the tokens before the answer.
      text: the whole text so far; what is in it at first is printed already.
      stops: stop strings; text that may begin one is printed later.
      parts: the parts of the answer, or None to print the plain text.
      reply: the tokens of earlier calls of `stream`.
      printed: number of characters of `text` that are printed.
      earlier: the text of `reply`.
    """

    tokenizer: "Tokenizer"
    prompt: Sequence[int]
    text: str = ""
    stops: Sequence[str] = ()
    parts: StyledParts | None = None
    reply: Sequence[int] = ()
    printed: int = 0
    earlier: str = ""
    decoder: Decoder = field(init=False)
    pieces: Sequence[bytes] | None = field(init=False)
    _tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.decoder = continuation(self.tokenizer, self.prompt)
        self.pieces = None
        if self.stops:
            self.pieces = searched_bytes(self.tokenizer, token_bytes(self.tokenizer))
        self.printed, self._tokens = len(self.text), list(self.reply)
        if self.parts is not None and self.text:
            self.parts.grown(self._marked(running=False)[0], False)

    def next_call(self, reply: Sequence[int]) -> None:
        """Prepares for the next call of `stream`, after the tokens of `reply`."""
        self.reply, self.earlier = reply, self.text

    def show(self, part: Generation) -> None:
        """Prints the new text of a stream's item, complete characters only."""
        self._tokens = [*self.reply, *part.tokens[0]]
        stopped = isinstance(part.stop_reasons[0], str)
        if stopped:  # the text is cut at a stop string
            self.text = self.earlier + (part.texts or [""])[0]
            final = len(self.text)
        else:
            found = text_so_far(
                self.decoder,
                self._tokens,
                running=True,
                stops=self.stops,
                pieces=self.pieces,
            )
            self.text, final = found.text, found.final
        if self.parts is None:
            self._print_to(final)
        else:
            text, final = self._marked(running=not stopped)
            print(self.parts.grown(text[:final], False), end="", flush=True)

    def finish(self, complete: bool) -> None:
        """Prints the rest of the text.

        Args:
          complete: False if a later answer may go on with it.
        """
        if self.parts is None:
            self._print_to(len(self.text))
        elif self._tokens:
            text, _ = self._marked(running=False)
            print(self.parts.grown(text, complete), end="", flush=True)

    def _marked(self, running: bool) -> tuple[str, int]:
        """Returns the text with the marks of its parts, and the number of characters
        that further tokens do not change."""
        assert self.parts is not None
        found = text_so_far(
            self.parts.decoder,
            self._tokens,
            running=running,
            stops=self.stops,
            pieces=self.pieces,
        )
        return found.text, found.final

    def _print_to(self, end: int) -> None:
        """Prints the text up to a character."""
        print(self.text[self.printed : end], end="", flush=True)
        self.printed = max(self.printed, end)
