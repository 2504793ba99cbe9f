"""Converts generated tokens to text on the host, piece by piece, and finds its end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from stree_jax.result import FINISH_REASONS, text_so_far
from stree_jax.sampling.continuation import Continuation, continuation
from stree_jax.sampling.stop_strings import HIT, byte_automaton, follow
from stree_jax.server.batch import RowUpdate
from stree_jax.speculation.decoding import RUNNING, STOP_STRING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MIN_LOGPROB = -9999.0  # replaces -inf, which JSON cannot represent


@dataclass(frozen=True)
class Reader:
    """A converter of a model's tokens to text.

    Attributes:
      tokenizer: the model's tokenizer.
      pieces: the bytes of each token. None if they cannot be derived from this kind of
        tokenizer.
    """

    tokenizer: "Tokenizer"
    pieces: Sequence[bytes] | None

    def bytes_of(self, token: int, place: Continuation) -> bytes:
        """Returns the bytes that a token adds to the text after `place`. For tokens
        that never add text, such as special ones, returns the token's name."""
        piece = b""
        if self.pieces is None:
            piece = place.decode([token]).encode()
        elif token < len(self.pieces):
            piece = self.pieces[token]
        if b" " in piece and not place.before:
            text = place.decode([token])  # decoding may strip spaces at the start
            if text != piece.decode("utf-8", "replace"):
                return text.encode()
        return piece or (self.tokenizer.id_to_token(token) or "").encode()


@dataclass(frozen=True)
class Choice:
    """A token with its log-probability, and the likeliest tokens with theirs."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True)
class Piece:
    """A new piece of a text.

    Attributes:
      text: new characters. They are complete, and cannot become part of a stop string.
      tokens: number of new tokens.
      logprobs: log-probabilities of these tokens, empty if not requested.
      finish_reason: "stop" or "length" for the last piece, else None.
    """

    text: str
    tokens: int
    logprobs: tuple[Choice, ...]
    finish_reason: str | None


@dataclass
class Writer:
    """A generated text, which is extended by the updates of its row.

    Attributes:
      reader: converts tokens to text.
      stops: the stop strings.
      top: number of likeliest tokens to return with log-probabilities.
      after: decodes tokens after the prompt. If None, the text starts without a prompt.
      tokens: the tokens so far.
      shown: number of characters that were returned.
      state: state of the automaton of the stop strings.
      steps: transition table of the automaton, or None without stop strings.
      decoder: decodes the text.
      place: decodes the next token whose log-probability is returned.
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
    place: Continuation = field(init=False)

    def __post_init__(self) -> None:
        self.decoder = self.after or continuation(self.reader.tokenizer, ())
        self.place = self.decoder
        if self.stops:
            self.steps = byte_automaton(self.stops)

    def write(self, update: RowUpdate) -> Piece:
        """Adds new tokens and returns the new piece of the text.

        After a stop string the text is finished, even if its row continues."""
        count, finish = self._kept(update)
        self.tokens += update.tokens[:count]
        text, final, _ = text_so_far(
            self.decoder, self.tokens, finish, self.stops, self.reader.pieces
        )
        new, self.shown = text[self.shown : final], max(self.shown, final)
        ended = None if finish == RUNNING else FINISH_REASONS[finish]
        return Piece(new, count, self._choices(update, count), ended)

    def _kept(self, update: RowUpdate) -> tuple[int, int]:
        """Returns the number of new tokens up to the first stop string, and the
        `Decoding.finish` after them."""
        if self.steps is None:
            return len(update.tokens), update.finish
        pieces = self.reader.pieces
        assert pieces is not None  # checked by `text_requests`
        for i, token in enumerate(update.tokens):
            piece = pieces[token] if token < len(pieces) else b""
            self.state = follow(self.steps, self.state, piece)
            if self.state == HIT:
                return i + 1, STOP_STRING
        return len(update.tokens), update.finish

    def _choices(self, update: RowUpdate, count: int) -> tuple[Choice, ...]:
        """Returns the log-probabilities of the first `count` new tokens, empty if not
        requested."""
        raw, top, likeliest = update.raw, update.top, update.top_tokens
        if raw is None or top is None or likeliest is None:
            return ()
        choices = []
        for i, token in enumerate(update.tokens[:count]):
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
    """Returns a log-probability that JSON can represent."""
    return float(logprob) if np.isfinite(logprob) else MIN_LOGPROB
