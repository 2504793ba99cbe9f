"""A text as it grows: what of it can be shown, and where it ends, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from stree_jax.result import FINISH_REASONS, text_so_far
from stree_jax.sampling.continuation import Continuation, continuation
from stree_jax.sampling.stop_strings import HIT, byte_automaton, follow
from stree_jax.server.batch import News
from stree_jax.speculation.decoding import RUNNING, STOP_STRING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LEAST = -9999.0  # stands for the logarithm of 0, which JSON has no number for


@dataclass(frozen=True)
class Reader:
    """What turns a model's tokens into text.

    Attributes:
      pieces: bytes of each token; None where the tokenizer's kind does not say them.
    """

    tokenizer: "Tokenizer"
    pieces: Sequence[bytes] | None

    def bytes_of(self, token: int, place: Continuation) -> bytes:
        """Returns what a token adds to the text at a place.

        A token that adds nothing wherever it stands, as a special one, has its name.
        """
        piece = b""
        if self.pieces is None:
            piece = place.decode([token]).encode()
        elif token < len(self.pieces):
            piece = self.pieces[token]
        if b" " in piece and not place.before:
            text = place.decode([token])  # the start of a text may lose its spaces
            if text != piece.decode("utf-8", "replace"):
                return text.encode()
        return piece or (self.tokenizer.id_to_token(token) or "").encode()


@dataclass(frozen=True)
class Choice:
    """A token's log-probability, beside those of the likeliest ones."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True)
class Piece:
    """What is new of a text.

    Attributes:
      text: whole characters that no stop string can begin in any more.
      tokens: how many.
      logprobs: of these tokens, if they were asked for.
      finish_reason: "stop" or "length" of the last piece, else None.
    """

    text: str
    tokens: int
    logprobs: tuple[Choice, ...]
    finish_reason: str | None


@dataclass
class Writer:
    """A generated text; `write` takes the device's updates and returns what is new.

    Attributes:
      top: how many of the likeliest tokens to return with log-probabilities.
      after: decodes what follows the prompt; if None, there is no prompt.
    """

    reader: Reader
    stops: Sequence[str] = ()
    top: int = 0
    after: Continuation | None = None
    tokens: list[int] = field(default_factory=list)
    shown: int = 0
    state: int = 0
    steps: np.ndarray | None = None
    decoder: Continuation = field(init=False)
    place: Continuation = field(init=False)  # of the next log-probability

    def __post_init__(self) -> None:
        self.decoder = self.after or continuation(self.reader.tokenizer, ())
        self.place = self.decoder
        if self.stops:
            self.steps = byte_automaton(self.stops)

    def write(self, news: News) -> Piece:
        """The next piece. A text that is cut at a stop string is finished, whatever its
        row goes on to say."""
        count, finish = self._kept(news)
        self.tokens += news.tokens[:count]
        text, final, _ = text_so_far(
            self.decoder, self.tokens, finish, self.stops, self.reader.pieces
        )
        new, self.shown = text[self.shown : final], max(self.shown, final)
        ended = None if finish == RUNNING else FINISH_REASONS[finish]
        return Piece(new, count, self._choices(news, count), ended)

    def _kept(self, news: News) -> tuple[int, int]:
        """Returns the number of new tokens to keep, and why the text ended, if it
        did."""
        if self.steps is None:
            return len(news.tokens), news.finish
        pieces = self.reader.pieces
        assert pieces is not None  # or the stop strings would have been refused
        for i, token in enumerate(news.tokens):
            piece = pieces[token] if token < len(pieces) else b""
            self.state = follow(self.steps, self.state, piece)
            if self.state == HIT:
                return i + 1, STOP_STRING
        return len(news.tokens), news.finish

    def _choices(self, news: News, count: int) -> tuple[Choice, ...]:
        raw, top, likeliest = news.raw, news.top, news.top_tokens
        if raw is None or top is None or likeliest is None:
            return ()
        choices = []
        for i, token in enumerate(news.tokens[:count]):
            others = tuple(
                (self._name(int(likeliest[i, k])), _finite(top[i, k]))
                for k in range(self.top)
            )
            choices.append(Choice(self._name(token), _finite(raw[i]), others))
            self.place = self.place.after([token])
        return tuple(choices)

    def _name(self, token: int) -> bytes:
        return self.reader.bytes_of(token, self.place)


def _finite(logprob: np.floating) -> float:
    return float(logprob) if np.isfinite(logprob) else LEAST
