"""Finds stop strings token by token, with an automaton that fits into one table.

The host prepares `token_table` once; the loop on the device then follows every token
with `state = table[which, state, token]` and ends when the state is `HIT`. Matching is
on bytes, because a token can end within a character. The host cuts the text afterwards.

Special tokens are left out of texts, but stop strings may contain them: the bytes that
are searched (`searched_bytes`) include the texts of special tokens.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stree_jax.sampling.continuation import UNFINISHED, Decoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HIT = -1  # the state after a token that completes a stop string

_STATE_MULTIPLE = 16  # states are rounded up, so that similar tables share programs
_SPACE_MARK = "\u2581"  # sentencepiece's visible space

# Decoders whose output is the concatenation of the tokens' bytes, in order of steps.
_BYTE_LEVEL = re.compile(r"ByteLevel( Fuse)?")
_SENTENCEPIECE = re.compile(r"(Replace|Metaspace)( ByteFallback)?( Fuse( Strip)?)?")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: "Tokenizer") -> list[bytes]:
    """Returns the bytes that each id, from 0 to the largest, adds to decoded text.

    Special tokens, which decoding leaves out, and unused ids add none. For any ids,
    `b"".join(pieces[i] for i in ids)` is `tokenizer.decode(ids)` in UTF-8, malformed
    sequences replaced. A sentencepiece tokenizer departs from this in the space it
    strips off the start of the text, and writes more replacement characters than Python
    does for a run of byte tokens that is malformed somewhere.
    """
    decoder = tokenizer.decoder
    state = None if decoder is None else json.loads(decoder.__getstate__())
    convert = _converter(state)
    added = tokenizer.get_added_tokens_decoder()
    pieces = []
    for token_id in range(max(tokenizer.get_vocab().values(), default=-1) + 1):
        token = tokenizer.id_to_token(token_id)
        special = token_id in added and added[token_id].special
        pieces.append(b"" if token is None or special else convert(token))
    return pieces


def searched_bytes(tokenizer: "Tokenizer", pieces: Sequence[bytes]) -> list[bytes]:
    """Returns the bytes of each id in which stop strings are searched.

    Args:
      tokenizer: the tokenizer.
      pieces: result of `token_bytes`, to which the texts of special tokens are added.
    """
    found = list(pieces)
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if token.special:
            found[token_id] = token.content.encode("utf-8")
    return found


def token_table(
    pieces: Sequence[bytes], stop_sets: Sequence[Sequence[str]], vocab_size: int
) -> np.ndarray:
    """Returns the state after each token, int32 [R, S, V], for R sets of stop strings.

    A sequence starts in state 0. The entry is `HIT` if a stop string ends anywhere in
    the token. S is the same for all sets, and larger than the number of states: the
    rows left over are `HIT`, so that index -1 stays there. An empty set is never hit:
    its entries are all 0. Tokens without bytes and ids beyond `pieces` change nothing.
    """
    automata = [byte_automaton(stops) for stops in stop_sets]
    largest = max(map(len, automata), default=1)
    size = -(-(largest + 1) // _STATE_MULTIPLE) * _STATE_MULTIPLE
    table = np.full((len(automata), size, vocab_size), HIT, np.int32)
    for rows, stops, steps in zip(table, stop_sets, automata, strict=True):
        if stops:
            rows[: len(steps)] = _follow(steps, pieces[:vocab_size], vocab_size)
        else:
            rows[:] = 0
    return table


def byte_automaton(stops: Sequence[str]) -> np.ndarray:
    """Returns the state after each byte, from state 0 on: int32 [states, 256].

    For `follow`, which finds stop strings on the host. The result is cached and shared,
    so it must not be modified.
    """
    return _kept_automaton(tuple(_encode(stops)))


@lru_cache(maxsize=16)
def _kept_automaton(stops: tuple[bytes, ...]) -> np.ndarray:
    table = _automaton(stops)
    table.flags.writeable = False
    return table


def follow(steps: np.ndarray, state: int, data: bytes) -> int:
    """Runs a `byte_automaton` over bytes and returns its state after them.

    Args:
      steps: the automaton's table.
      state: the state before the bytes. In state `HIT`, a stop string is complete, and
        further bytes are ignored.
      data: the bytes.
    """
    for byte in data:
        if state == HIT:
            break
        state = int(steps[state, byte])
    return state


def find_stop(
    pieces: Sequence[bytes], tokens: Sequence[int], stops: Sequence[str]
) -> tuple[int, str] | None:
    """Finds the stop string that the last token completes, or returns None.

    Of several, it is the one that starts first, and of those the longest. Returned with
    it is the number of bytes from its start to the end of the tokens.
    """
    data = b"".join(_piece(pieces, token) for token in tokens)
    last = len(_piece(pieces, tokens[-1])) if tokens else 0
    found = []
    for stop, key in zip(stops, _encode(stops), strict=True):
        start = data.find(key, max(0, len(data) - last - len(key) + 1))
        if start >= 0:
            found.append((len(data) - start, len(key), stop))
    if not found:
        return None
    cut, _, stop = max(found)
    return cut, stop


def unfinished_stop(
    pieces: Sequence[bytes], tokens: Sequence[int], stops: Sequence[str]
) -> int:
    """Returns the number of bytes at the end of the tokens that may become a stop
    string: the longest proper beginning of one. 0 if there is none."""
    keys = _encode(stops)
    longest = max(map(len, keys), default=1) - 1
    start, size = len(tokens), 0
    while start > 0 and size < longest:
        start -= 1
        size += len(_piece(pieces, tokens[start]))
    data = b"".join(_piece(pieces, token) for token in tokens[start:])
    for size in range(min(longest, len(data)), 0, -1):
        if any(len(key) > size and key.startswith(data[-size:]) for key in keys):
            return size
    return 0


class Place(NamedTuple):
    """A place within a list of tokens.

    Attributes:
      tokens: number of whole tokens before the place.
      bytes: number of bytes of the next token before the place.
    """

    tokens: int
    bytes: int = 0


def place_before(pieces: Sequence[bytes], tokens: Sequence[int], size: int) -> Place:
    """Returns the place before the last `size` bytes of the tokens."""
    end = len(tokens)
    while size > 0:
        end -= 1
        size -= len(_piece(pieces, tokens[end]))
    return Place(end, -size)


def text_before(
    decoder: Decoder, pieces: Sequence[bytes], tokens: Sequence[int], place: Place
) -> str:
    """Returns the text of the tokens before a place where a stop string starts.

    Args:
      decoder: decodes the tokens, without special tokens.
      pieces: result of `searched_bytes`.
      tokens: the generated token ids.
      place: the place.
    """
    before = decoder.decode(list(tokens[: place.tokens]))
    if place.bytes == 0:
        return before
    # The stop string starts within a token. It starts with a whole character, so the
    # characters before it are the same with and without it.
    text = decoder.decode(list(tokens[: place.tokens + 1]))
    if text == before:
        return before  # a special token
    rest = pieces[tokens[place.tokens]][place.bytes :]
    surplus = len(rest.decode("utf-8", "replace"))
    return text[: max(0, len(text) - surplus)]


class TextSoFar(NamedTuple):
    """The text of the tokens that a row has generated so far.

    Attributes:
      text: the text, cut before a stop string.
      final: number of its characters that further tokens do not change. The others may
        be the start of a stop string, or of an unfinished character.
      place: the end of the tokens that belong to the text: where a stop string starts,
        or may start.
      stop: the stop string that ended the text, or None.
    """

    text: str
    final: int
    place: Place
    stop: str | None


def text_so_far(
    decoder: Decoder,
    tokens: Sequence[int],
    *,
    running: bool,
    stops: Sequence[str] = (),
    pieces: Sequence[bytes] | None = None,
    begin: int = 0,
) -> TextSoFar:
    """Decodes generated tokens and cuts the text before a stop string.

    Args:
      decoder: the `Continuation` of the row's prompt.
      tokens: the generated token ids.
      running: True if more tokens follow, False if a stop string may be complete. Only
        the last token can complete one.
      stops: the stop strings.
      pieces: result of `searched_bytes`; None if there are no stop strings.
      begin: index of the first token in which a stop string may start.
    """
    tokens, place, stop = list(tokens), Place(len(tokens)), None
    if stops and pieces is not None:
        if not running and (found := find_stop(pieces, tokens[begin:], stops)):
            size, stop = found
            place = place_before(pieces, tokens, size)
        elif running:
            size = unfinished_stop(pieces, tokens[begin:], stops)
            place = place_before(pieces, tokens, size)
    text = before = decoder.decode(tokens)
    if place.tokens < len(tokens):
        before = text_before(decoder, pieces or (), tokens, place)
    if not running:
        return TextSoFar(before, len(before), place, stop)
    # Characters behind an unfinished one make it final: it is malformed.
    behind = text[len(before) :] if text.startswith(before) else ""
    final = before if behind.strip(UNFINISHED) else before.rstrip(UNFINISHED)
    return TextSoFar(text, len(final), place, None)


def _encode(stops: Sequence[str]) -> list[bytes]:
    """Returns the bytes of stop strings; raises ValueError for empty or broken text."""
    if not all(stops):
        raise ValueError("stop_strings: a stop string is empty")
    try:
        return [stop.encode("utf-8") for stop in stops]
    except UnicodeEncodeError as error:
        raise ValueError(f"stop_strings: not UTF-8 text ({error})") from error


def _piece(pieces: Sequence[bytes], token: int) -> bytes:
    """Returns a token's bytes; models have ids that their tokenizers do not use."""
    return pieces[token] if token < len(pieces) else b""


def _converter(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """Returns the function from a token to its bytes for a serialised decoder."""
    parts = [decoder] if decoder else []
    if decoder and decoder["type"] == "Sequence":
        parts = decoder["decoders"]
    names = " ".join(part["type"] for part in parts)
    if _BYTE_LEVEL.fullmatch(names):
        return _byte_level()
    if _SENTENCEPIECE.fullmatch(names) and all(map(_keeps_bytes, parts)):
        mark = parts[0].get("replacement", _SPACE_MARK)
        return _sentencepiece(mark, byte_tokens="ByteFallback" in names)
    raise ValueError(
        f"decoder {names or 'missing'}: stop strings need a byte-level or "
        "sentencepiece tokenizer"
    )


def _keeps_bytes(part: dict[str, Any]) -> bool:
    """True if a decoder has the options of sentencepiece tokenizers."""
    if part["type"] == "Replace":
        return (part["pattern"], part["content"]) == ({"String": _SPACE_MARK}, " ")
    if part["type"] == "Strip":
        return part["content"] == " " and part["start"] <= 1 and part["stop"] == 0
    return True


def _byte_level() -> Callable[[str], bytes]:
    """Returns the conversion of tokens that spell each byte as a visible character."""
    visible = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = sorted(set(range(256)) - set(visible))
    byte_of = {chr(byte): byte for byte in visible}
    byte_of |= {chr(256 + place): byte for place, byte in enumerate(others)}

    def convert(token: str) -> bytes:
        # Added tokens are plain text, which shows if one character spells no byte.
        if all(char in byte_of for char in token):
            return bytes(byte_of[char] for char in token)
        return token.encode("utf-8")

    return convert


def _sentencepiece(mark: str, *, byte_tokens: bool) -> Callable[[str], bytes]:
    """Returns the conversion of tokens with marked spaces and perhaps byte tokens."""

    def convert(token: str) -> bytes:
        if byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.replace(mark, " ").encode("utf-8")

    return convert


def _automaton(stops: Sequence[bytes]) -> np.ndarray:
    """Returns the state after each byte, int32 [states, 256] (Aho and Corasick).

    A state is the longest end of the bytes so far that a stop string starts with.
    """
    starts = {stop[:size] for stop in stops for size in range(len(stop))} | {b""}
    reachable = (p for p in starts if not any(stop in p for stop in stops))
    states = sorted(reachable, key=lambda prefix: (len(prefix), prefix))
    index = {prefix: state for state, prefix in enumerate(states)}
    steps = np.zeros((len(states), 256), np.int32)
    shorter = [0] * len(states)  # the state of the bytes without the first one
    for state, prefix in enumerate(states):
        if len(prefix) > 1:
            shorter[state] = int(steps[shorter[index[prefix[:-1]]], prefix[-1]])
        steps[state] = steps[shorter[state]]
        for stop in stops:
            if stop.startswith(prefix):
                # A prefix that contains a stop string is not a state. If adding the
                # next byte gives such a prefix, a stop string ends at this byte.
                size = len(prefix)
                steps[state, stop[size]] = index.get(stop[: size + 1], HIT)
    return steps


def _follow(steps: np.ndarray, pieces: Sequence[bytes], vocab_size: int) -> np.ndarray:
    """Returns the state after each token's bytes from each state: int32 [states, V]."""
    sizes = np.zeros(vocab_size, np.int64)
    sizes[: len(pieces)] = [len(piece) for piece in pieces]
    data = np.frombuffer(b"".join(pieces), np.uint8)
    order = np.argsort(-sizes, kind="stable")  # those with bytes left come first
    places = (np.cumsum(sizes) - sizes)[order]
    left = np.searchsorted(-sizes[order], -np.arange(sizes.max(initial=0)))
    # State -1 (`HIT`) indexes this last row, which leads to `HIT` again.
    flat = np.vstack([steps, np.full((1, 256), HIT, np.int32)]).reshape(-1)
    after = np.repeat(np.arange(len(steps), dtype=np.int32)[:, None], vocab_size, 1)
    for place, count in enumerate(left):
        after[:, :count] = flat[after[:, :count] * 256 + data[places[:count] + place]]
    result = np.empty_like(after)
    result[:, order] = after
    return result
