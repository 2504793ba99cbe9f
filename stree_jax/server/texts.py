"""Converts generated tokens to text on the host, piece by piece, and finds its end."""

import codecs
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stree_jax.generation.result import FINISH_REASONS
from stree_jax.sampling.continuation import Continuation, continuation
from stree_jax.sampling.stop_strings import (
    HIT,
    TextSoFar,
    byte_automaton,
    follow,
    text_so_far,
)
from stree_jax.server.rows import RowUpdate
from stree_jax.speculation.decoding import RUNNING, STOP_STRING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MIN_LOGPROB = -9999.0  # replaces -inf, which JSON cannot represent


class Token(NamedTuple):
    """A token, with the bytes that it adds to a text.

    Attributes:
      id: the token id.
      data: the bytes that it adds to the text, empty for special tokens.
      name: these bytes, or the name of a token that adds none.
    """

    id: int
    data: bytes
    name: bytes


@dataclass(frozen=True)
class Reader:
    """A converter of a model's tokens to text.

    Attributes:
      tokenizer: the model's tokenizer.
      pieces: the bytes that each token adds to texts. None if they cannot be derived
        from this kind of tokenizer.
      searched: the bytes of each token in which stop strings are searched: `pieces`
        with the texts of special tokens.
    """

    tokenizer: "Tokenizer"
    pieces: Sequence[bytes] | None = None
    searched: Sequence[bytes] | None = None

    def token(self, token: int, place: Continuation) -> Token:
        """Returns a token with the bytes that it adds to the text after `place`."""
        data = self._bytes(token, place)
        name = data or (self.tokenizer.id_to_token(token) or "").encode()
        return Token(token, data, name)

    def _bytes(self, token: int, place: Continuation) -> bytes:
        piece = b""
        if self.pieces is None:
            piece = place.decode([token]).encode()
        elif token < len(self.pieces):
            piece = self.pieces[token]
        if b" " in piece and not place.before:
            text = place.decode([token])  # decoding may strip spaces at the start
            if text != piece.decode("utf-8", "replace"):
                return text.encode()
        return piece


@dataclass(frozen=True)
class Choice:
    """A token with its log-probability, and the likeliest tokens with theirs."""

    token: Token
    logprob: float
    top: tuple[tuple[Token, float], ...]


class Proposed(NamedTuple):
    """The characters of a token, and what proposed it.

    Attributes:
      text: the characters that the token completes.
      origin: an index into `draft.ORIGINS`.
    """

    text: str
    origin: int


@dataclass(frozen=True)
class Piece:
    """A new piece of a generated text, as it is sent to the client.

    Attributes:
      text: new characters. They are complete, and cannot become part of a stop string.
      tokens: number of new tokens.
      logprobs: log-probabilities of tokens, empty if not requested. They may belong to
        other tokens than `text`: a token that may be part of a stop string comes with a
        later piece. Tokens of a stop string are left out.
      finish_reason: "stop" or "length" for the last piece, else None.
      stop: the stop string that ended the text, or None.
      origins: the tokens whose characters are all returned, empty if not requested.
        The tokens of all pieces, joined, are the text.
    """

    text: str
    tokens: int
    logprobs: tuple[Choice, ...]
    finish_reason: str | None
    stop: str | None = None
    origins: tuple[Proposed, ...] = ()


@dataclass
class Writer:
    """A generated text, which is extended by the updates of its row.

    Attributes:
      reader: converts tokens to text.
      stops: the stop strings.
      top: number of likeliest tokens to return with log-probabilities.
      after: decodes tokens after the prompt. If None, the text starts without a prompt.
      least: number of tokens before the first one in which a stop string may start.
      by_origin: True if pieces list what proposed their tokens.
      tokens: the tokens so far.
      shown: number of characters that were returned.
      state: state of the automaton of the stop strings.
      steps: transition table of the automaton, or None without stop strings.
      decoder: decodes the text.
      place: decodes the next token whose log-probability or origin is requested.
      choices: log-probabilities of the tokens so far, empty if not requested.
      returned: number of `choices` that were returned.
      unshown: tokens with characters that were not returned yet, each as the number of
        these characters and its origin. Empty if origins are not requested.
      unlisted: the returned characters of the first of these tokens.
      characters: decodes the bytes of these tokens.
    """

    reader: Reader
    stops: Sequence[str] = ()
    top: int = 0
    after: Continuation | None = None
    least: int = 0
    by_origin: bool = False
    tokens: list[int] = field(default_factory=list)
    shown: int = 0
    state: int = 0
    steps: np.ndarray | None = None
    decoder: Continuation = field(init=False)
    place: Continuation = field(init=False)
    choices: list[Choice] = field(default_factory=list)
    returned: int = 0
    unshown: deque[tuple[int, int]] = field(default_factory=deque)
    unlisted: str = ""
    characters: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

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
        found = text_so_far(
            self.decoder,
            self.tokens,
            running=finish == RUNNING,
            stops=self.stops,
            pieces=self.reader.searched,
            begin=self.least,
        )
        new = found.text[self.shown : found.final]
        self.shown = max(self.shown, found.final)
        ended = None if finish == RUNNING else FINISH_REASONS[finish]
        self._receive(update, count)
        origins = tuple(self._origins(new, ended is not None))
        return Piece(new, count, self._ready(found), ended, found.stop, origins)

    def _kept(self, update: RowUpdate) -> tuple[int, int]:
        """Returns the number of new tokens up to the first stop string, and the
        `Decoding.finish` after them."""
        if self.steps is None:
            return len(update.tokens), update.finish
        first = max(0, self.least - len(self.tokens))
        for i, token in enumerate(update.tokens[first:], first):
            piece = _searched(self.reader, token)
            self.state = follow(self.steps, self.state, piece)
            if self.state == HIT:
                return i + 1, STOP_STRING
        return len(update.tokens), update.finish

    def _receive(self, update: RowUpdate, count: int) -> None:
        """Adds the log-probabilities of the first `count` new tokens to `choices`, and
        their origins to `unshown`, if requested."""
        if update.raw is None and not self.by_origin:
            return
        for i, token in enumerate(update.tokens[:count]):
            chosen = self.reader.token(token, self.place)
            if self.by_origin:
                self.unshown.append((self._size(chosen), int(update.origins[i])))
            self._choose(update, i, chosen)
            self.place = self.place.after([token])

    def _choose(self, update: RowUpdate, i: int, chosen: Token) -> None:
        """Adds the log-probabilities of new token i to `choices`, if requested."""
        raw, top, likeliest = update.raw, update.top, update.top_tokens
        if raw is None or top is None or likeliest is None:
            return
        others = tuple(
            (self.reader.token(int(likeliest[i, k]), self.place), _finite(top[i, k]))
            for k in range(self.top)
        )
        self.choices.append(Choice(chosen, _finite(raw[i]), others))

    def _size(self, token: Token) -> int:
        """Returns the number of characters that the next token completes. Special
        tokens that the text shows have no bytes."""
        if token.data:
            return len(self.characters.decode(token.data))
        return len(self.place.decode([token.id]))

    def _origins(self, new: str, final: bool) -> Iterator[Proposed]:
        """Yields the tokens whose characters are all returned, and removes them from
        `unshown`.

        Args:
          new: the new characters.
          final: True if the text is finished, so that no characters follow.
        """
        if not self.by_origin:
            return
        self.unlisted += new
        while self.unshown and (final or self.unshown[0][0] <= len(self.unlisted)):
            size, origin = self.unshown.popleft()
            end = None if final and not self.unshown else size
            yield Proposed(self.unlisted[:end], origin)
            self.unlisted = self.unlisted[size:]

    def _ready(self, text: TextSoFar) -> tuple[Choice, ...]:
        """Returns the log-probabilities of tokens whose text is final and that were not
        returned before."""
        ready = self.choices[self.returned : text.place.tokens]
        self.returned += len(ready)
        if text.stop is not None and text.place.bytes and self.choices:
            # Only the beginning of this token belongs to the text.
            last = self.choices[text.place.tokens]
            cut = len(_searched(self.reader, last.token.id)) - text.place.bytes
            if data := last.token.data[: max(0, len(last.token.data) - cut)]:
                token = Token(last.token.id, data, data)
                ready.append(Choice(token, last.logprob, last.top))
        return tuple(ready)


def _searched(reader: Reader, token: int) -> bytes:
    """Returns a token's bytes in which stop strings are searched."""
    assert reader.searched is not None  # checked by `text_requests`
    return reader.searched[token] if token < len(reader.searched) else b""


def _finite(logprob: np.floating) -> float:
    """Returns a log-probability that JSON can represent."""
    return float(logprob) if np.isfinite(logprob) else MIN_LOGPROB
