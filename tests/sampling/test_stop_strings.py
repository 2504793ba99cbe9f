"""Test finding stop strings in tokens, and cutting and streaming texts."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from stree_jax.sampling.stop_strings import (
    HIT,
    find_stop,
    searched_bytes,
    text_so_far,
    token_bytes,
    token_table,
    unfinished_stop,
)
from stree_jax.training.corpus import train_tokenizer
from tests.support.pieces import spelled

STOPS = ["ab", "abab", "b", "bab", "aac", "\n\n", "é", "aé", "🙂b", "\na\n"]
PIECES = [
    *(b"a", b"b", b"c", b"\n", b"\xc3", b"\xa9", "🙂".encode()[:2], "🙂".encode()[2:]),
    *(b"", b"ca", b"aa", b"ba", b"cab", b"bbb", b"a\n", b"\n\nc", b"a\xc3", b"\xa9a"),
    *("aéa".encode(), "c🙂bc".encode(), b"acacaaca"),
]
STOP_SETS = st.lists(st.sampled_from(STOPS), min_size=1, max_size=5, unique=True)


def byte_level() -> Tokenizer:
    text = "abab cab\n\nnaïve été 🙂🙂 \t東京 "
    tokenizer = train_tokenizer([text * 20], 330)
    tokenizer.add_special_tokens(["<|user|>", AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens(["  ", "    ", "日 本", "<plain>"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    tokens = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁a", "a", "b", "ab", "▁▁", "é", "a▁b", "b\n", "c", "▁c▁a"]
    vocab = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>", "<end>"])
    tokenizer.add_tokens(["▁▁▁▁", "x y"])
    replace = decoders.Replace("▁", " ")
    parts = [replace, decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return tokenizer


BYTE_LEVEL = byte_level()
BYTE_PIECES = token_bytes(BYTE_LEVEL)
SENTENCEPIECE = sentencepiece()
SENTENCE_PIECES = token_bytes(SENTENCEPIECE)

# Any ids for byte-level BPE. For SentencePiece, byte tokens only as whole characters.
BYTE_IDS = st.lists(st.integers(0, len(BYTE_PIECES) - 1), max_size=12)
SENTENCE_IDS = st.lists(
    st.one_of(
        st.sampled_from("aé🙂\n \ufffd").map(
            lambda char: [1 + b for b in char.encode()]
        ),
        st.integers(257, len(SENTENCE_PIECES) - 1).map(lambda token: [token]),
        st.just([0]),
    ),
    max_size=8,
).map(lambda units: [token for unit in units for token in unit])


def cut_text(
    tokenizer: Tokenizer,
    pieces: Sequence[bytes],
    tokens: Sequence[int],
    stops: list[str],
) -> tuple[str, str | None]:
    """Returns the text that ends with these tokens, and its stop string."""
    options = dict(running=False, stops=stops, pieces=pieces)
    found = text_so_far(tokenizer, tokens, **options)
    assert found.final == len(found.text)
    return found.text, found.stop


def joined(pieces: Sequence[bytes], tokens: Sequence[int]) -> bytes:
    return b"".join(pieces[token] for token in tokens)


def completed(before: bytes, after: bytes, stops: Sequence[str]) -> list[tuple]:
    """Returns a list (start, -size, stop) of matches that end later, the preferred
    first."""
    ends = range(len(before) + 1, len(after) + 1)
    keys = [(stop.encode(), stop) for stop in stops]
    found = [
        (end - len(key), -len(key), stop)
        for end in ends
        for key, stop in keys
        if after[:end].endswith(key)
    ]
    return sorted(found)


def until_hit(
    table: np.ndarray, pieces: Sequence[bytes], tokens: Sequence[int]
) -> Iterator[tuple[bytes, bytes, bool]]:
    """Follows the table [S, V] of one set. Returns the bytes before and after, and
    whether it hit."""
    state, data = 0, b""
    for token in tokens:
        state, before = table[state, token], data
        data += pieces[token]
        yield before, data, state == HIT
        if state == HIT:
            return


@settings(max_examples=300)
@given(BYTE_IDS)
def test_byte_level_pieces_join_to_the_decoded_text(tokens: list[int]) -> None:
    text = joined(BYTE_PIECES, tokens).decode("utf-8", "replace")
    assert text == BYTE_LEVEL.decode(tokens)


@settings(max_examples=300)
@given(SENTENCE_IDS)
def test_sentencepiece_pieces_join_to_the_decoded_text(tokens: list[int]) -> None:
    text = joined(SENTENCE_PIECES, tokens).decode("utf-8", "replace")
    assert text.removeprefix(" ") == SENTENCEPIECE.decode(tokens)


def test_every_token_has_its_own_bytes() -> None:
    for tokenizer, pieces in (
        (BYTE_LEVEL, BYTE_PIECES),
        (SENTENCEPIECE, SENTENCE_PIECES),
    ):
        assert len(pieces) == tokenizer.get_vocab_size()
        first = tokenizer.encode("a").ids[-1:]  # no space is stripped after a letter
        for token, piece in enumerate(pieces):
            text = b"a" + piece
            if piece != b"" and tokenizer is SENTENCEPIECE and 129 <= token <= 256:
                assert piece == bytes([token - 1])  # not a character on its own
            else:
                assert tokenizer.decode([*first, token]) == text.decode(
                    errors="replace"
                )
    for char in pre_tokenizers.ByteLevel.alphabet():
        assert len(BYTE_PIECES[BYTE_LEVEL.token_to_id(char)]) == 1


@pytest.mark.parametrize("text", ["🙂 東京 é\n", "a  b    c", "日 本<plain>"])
def test_characters_split_between_tokens_are_joined(text: str) -> None:
    assert joined(BYTE_PIECES, BYTE_LEVEL.encode(text).ids) == text.encode()
    split = [1 + byte for byte in text.encode()]
    assert joined(SENTENCE_PIECES, split) == text.encode()


def test_special_and_unused_ids_have_no_bytes() -> None:
    for tokenizer, name in ((BYTE_LEVEL, "<|user|>"), (SENTENCEPIECE, "<end>")):
        assert token_bytes(tokenizer)[tokenizer.token_to_id(name)] == b""
    assert BYTE_PIECES[BYTE_LEVEL.token_to_id("    ")] == b"    "
    holes = Tokenizer(models.WordLevel({"a": 0, "Ġb": 4}))
    holes.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert token_bytes(holes) == [b"a", b"", b"", b"", b" b"]


def test_metaspace_marks_spaces() -> None:
    tokenizer = Tokenizer(models.WordLevel({"_a": 0, "b": 1, "<0x41>": 2, "_c_d": 3}))
    tokenizer.decoder = decoders.Metaspace(replacement="_")
    pieces = token_bytes(tokenizer)
    assert pieces == [b" a", b"b", b"<0x41>", b" c d"]
    tokens = [0, 1, 2, 0]
    assert " " + tokenizer.decode(tokens) == joined(pieces, tokens).decode()
    assert cut_text(tokenizer, pieces, [0, 1, 0], [" a"]) == ("ab", " a")
    # Metaspace strips every space of the first token.
    assert cut_text(tokenizer, pieces, [3], ["c"]) == ("", "c")


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (
            decoders.Sequence([decoders.Replace("x", " "), decoders.Fuse()]),
            "Replace Fuse",
        ),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), "Strip"),
        (decoders.Strip(" ", 1, 0), "Strip"),
        (None, "missing"),
    ],
)
def test_other_decoders_are_refused(decoder: decoders.Decoder, name: str) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "##a": 1}, unk_token="[UNK]"))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ValueError, match=rf"{name}: stop strings need") as caught:
        token_bytes(tokenizer)
    assert "\n" not in str(caught.value)


@settings(max_examples=300)
@given(
    STOP_SETS,
    STOP_SETS,
    st.lists(st.integers(0, len(PIECES) + 1), max_size=20),
)
def test_the_table_hits_where_a_stop_string_ends(
    first: list[str], second: list[str], tokens: list[int]
) -> None:
    padded = [*PIECES, b"", b""]
    table = token_table(PIECES, [first, [], second], len(padded))
    for rows, stops in zip(table, (first, [], second), strict=True):
        for before, after, hit in until_hit(rows, padded, tokens):
            assert hit == bool(completed(before, after, stops)), (before, after)


@settings(max_examples=200)
@given(
    st.lists(st.text("ab", min_size=3, max_size=6), min_size=1, max_size=3),
    st.lists(st.integers(0, 3), min_size=10, max_size=30),
)
def test_table_falls_back_to_shorter_starts(
    stops: list[str], tokens: list[int]
) -> None:
    pieces = [b"a", b"b", b"aa", b"bab"]
    rows = token_table(pieces, [stops], len(pieces))[0]
    for before, after, hit in until_hit(rows, pieces, tokens):
        assert hit == bool(completed(before, after, stops)), (before, after)


def test_stop_strings_across_and_within_tokens() -> None:
    pieces = [b"x", b"a", b"b!", b"za", b"xaby", b"\xc3", b"\xa9"]
    table = token_table(pieces, [["ab", "é"]], len(pieces))[0]

    def hits(*tokens: int) -> list[bool]:
        return [hit for *_, hit in until_hit(table, pieces, tokens)]

    assert hits(0, 1, 2) == [False, False, True]  # across a token boundary
    assert hits(3, 2) == [False, True]
    assert hits(1, 4, 0) == [False, True]  # in the middle of a token
    assert hits(5, 6) == [False, True]  # part of a character in two tokens
    assert hits(1, 0, 2, 5, 1, 6) == [False] * 6


def test_table_shape_and_spare_rows() -> None:
    long = "abcdefghijklmno"  # 15 states: the start and all prefixes
    table = token_table([b"a", b"", b"b"], [["b"], [], [long]], 5)
    assert table.dtype == np.int32
    assert table.shape == (3, 16, 5)
    assert token_table([b"a"], [[long + "p"]], 5).shape == (1, 32, 5)
    assert token_table([b"a", b"b"], [], 1).shape == (0, 16, 1)
    np.testing.assert_array_equal(table[0, 0], [0, 0, HIT, 0, 0])
    np.testing.assert_array_equal(table[1], 0)
    np.testing.assert_array_equal(table[2, 1], [1, 1, 2, 1, 1])
    np.testing.assert_array_equal(table[[0, 2], HIT], HIT)  # after a hit it always hits
    # More pieces than the model has ids, and no pieces.
    np.testing.assert_array_equal(token_table([b"a", b"b"], [["b"]], 1)[0, :1], [[0]])
    np.testing.assert_array_equal(token_table([], [["b"]], 2)[0, 0], [0, 0])


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="stop string is empty"):
        token_table([b"a"], [["a"], ["b", ""]], 1)
    with pytest.raises(ValueError, match="stop string is empty"):
        find_stop([b"a"], [0], [""])


@settings(max_examples=300)
@given(STOP_SETS, st.lists(st.integers(0, len(PIECES)), max_size=8))
def test_find_stop_prefers_early_and_long(stops: list[str], tokens: list[int]) -> None:
    padded = [*PIECES, b""]
    data = joined(padded, tokens)
    matches = completed(joined(padded, tokens[:-1]), data, stops)
    expected = (len(data) - matches[0][0], matches[0][2]) if matches else None
    assert find_stop(PIECES, tokens, stops) == expected


def test_find_stop_skips_earlier_tokens() -> None:
    pieces = [b"ab", b"x", b"xabab", b""]
    assert find_stop(pieces, [0, 1], ["ab"]) is None
    assert find_stop(pieces, [0, 3], ["ab"]) is None
    assert find_stop(pieces, [], ["ab"]) is None
    assert find_stop(pieces, [0], []) is None
    assert find_stop(pieces, [0, 1, 2], ["b", "ab", "abab"]) == (4, "abab")
    assert find_stop(pieces, [1, 2], ["b", "xa"]) == (5, "xa")


@settings(max_examples=300)
@given(STOP_SETS, BYTE_IDS)
def test_cut_text_is_exact(stops: list[str], tokens: list[int]) -> None:
    for last in range(1, len(tokens) + 1):
        head = tokens[:last]
        check_cut(BYTE_LEVEL, BYTE_PIECES, head, stops, strip="")


@settings(max_examples=300)
@given(STOP_SETS, SENTENCE_IDS)
def test_cut_text_is_exact_without_the_first_space(
    stops: list[str], tokens: list[int]
) -> None:
    check_cut(SENTENCEPIECE, SENTENCE_PIECES, tokens, [*stops, " a", " "], strip=" ")


def check_cut(
    tokenizer: Tokenizer,
    pieces: Sequence[bytes],
    tokens: list[int],
    stops: list[str],
    strip: str,
) -> None:
    text, stop = cut_text(tokenizer, pieces, tokens, stops)
    data = joined(pieces, tokens)
    matches = completed(joined(pieces, tokens[:-1]), data, stops)
    if not matches:
        assert (text, stop) == (tokenizer.decode(tokens), None)
        return
    kept = data[: matches[0][0]].decode("utf-8", "replace").removeprefix(strip)
    assert (text, stop) == (kept, matches[0][2])
    assert data.decode("utf-8", "replace").removeprefix(strip).startswith(text)


def test_cut_text_in_the_middle_of_tokens() -> None:
    tokens = BYTE_LEVEL.encode("naïve 🙂 cab").ids
    assert cut_text(BYTE_LEVEL, BYTE_PIECES, tokens, ["ab"]) == ("naïve 🙂 c", "ab")
    user = BYTE_LEVEL.token_to_id("<|user|>")
    across = [*BYTE_LEVEL.encode("été").ids, user, *BYTE_LEVEL.encode("    b").ids]
    assert cut_text(BYTE_LEVEL, BYTE_PIECES, across, ["é  "]) == ("été    b", None)
    assert cut_text(BYTE_LEVEL, BYTE_PIECES, across[:-1], ["é  "]) == ("ét", "é  ")
    # Its first byte alone would break the run of byte tokens before a stop string.
    run = [1 + byte for byte in "é🙂".encode()]
    assert cut_text(SENTENCEPIECE, SENTENCE_PIECES, run, ["🙂"]) == ("é", "🙂")
    # An invalid run of byte tokens decodes to one character per byte.
    malformed = [1 + byte for byte in b"a\xff\xc3\xa9"]
    assert cut_text(SENTENCEPIECE, SENTENCE_PIECES, malformed, ["é"]) == (
        "\ufffd" * 2,
        "é",
    )


@settings(max_examples=300)
@given(STOP_SETS, st.lists(st.integers(0, len(PIECES)), max_size=8))
def test_unfinished_stop_is_the_longest_beginning_of_a_stop_string(
    stops: list[str], tokens: list[int]
) -> None:
    data = joined([*PIECES, b""], tokens)
    keys = [stop.encode() for stop in stops]
    starts = {key[:size] for key in keys for size in range(len(key))}
    longest = max(len(start) for start in starts if data.endswith(start))
    assert unfinished_stop(PIECES, tokens, stops) == longest


@settings(max_examples=500)
@given(STOP_SETS, BYTE_IDS)
def test_streaming_never_shows_text_that_is_cut(
    stops: list[str], tokens: list[int]
) -> None:
    shown, stop = "", None
    for end in range(1, len(tokens) + 1):
        head, seen = tokens[:end], joined(BYTE_PIECES, tokens[:end])
        stop = cut_text(BYTE_LEVEL, BYTE_PIECES, head, stops)[1]
        options = dict(stops=stops, pieces=BYTE_PIECES, running=stop is None)
        found = text_so_far(BYTE_LEVEL, head, **options)
        visible = found.text[: found.final]
        if stop is not None:
            assert visible == found.text and visible.startswith(shown)
            return
        assert visible.startswith(shown)  # shown text is never taken back
        assert seen.decode("utf-8", "replace").startswith(visible)
        shown = visible
    rest = text_so_far(BYTE_LEVEL, tokens, running=False).text
    assert rest.startswith(shown)


def test_final_text_examples() -> None:
    def final(data: bytes, stops: list[str]) -> str:
        tokens = [BYTE_LEVEL.token_to_id(spelled(bytes([byte]))) for byte in data]
        options = dict(stops=stops, pieces=BYTE_PIECES, running=True)
        found = text_so_far(BYTE_LEVEL, tokens, **options)
        return found.text[: found.final]

    assert final(b"", ["ab"]) == ""
    assert final(b"text", []) == "text"
    assert final(b"x\xc3", []) == "x"
    assert final(b"xa\xc3", ["a\xe9"]) == "x"
    assert final(b"xaba", ["abab", "ac"]) == "x"
    assert final(b"xab", ["ab"]) == "xab"  # complete, not a beginning


# Special tokens, which texts leave out


SEARCHED = searched_bytes(BYTE_LEVEL, BYTE_PIECES)
USER, END = (BYTE_LEVEL.token_to_id(name) for name in ("<|user|>", "<|end|>"))
SPECIAL_STOPS = [
    *("<|end|>", "a<|end|>", "<|end|>a", "<|user|><|end|>", "a<|end|><|user|>\u00e9"),
    *("|", "d|>a", "ab", "a<|user|>b", "<|end|"),
]
SPECIAL_IDS = st.lists(
    st.sampled_from([USER, END, *BYTE_LEVEL.encode("ab\u00e9\U0001f642 abab").ids]),
    max_size=12,
)


def test_special_tokens_are_searched_by_their_text() -> None:
    assert SEARCHED[USER] == b"<|user|>" and BYTE_PIECES[USER] == b""
    others = [i for i, piece in enumerate(BYTE_PIECES) if piece]
    assert [SEARCHED[i] for i in others] == [BYTE_PIECES[i] for i in others]
    pieces = searched_bytes(SENTENCEPIECE, SENTENCE_PIECES)
    assert pieces[SENTENCEPIECE.token_to_id("<end>")] == b"<end>"


@settings(max_examples=500)
@given(
    st.lists(st.sampled_from(SPECIAL_STOPS), min_size=1, max_size=4, unique=True),
    SPECIAL_IDS,
)
def test_stop_strings_with_special_tokens(stops: list[str], tokens: list[int]) -> None:
    """Follows the device's table and a streamed text, token by token. The expected text
    is that of all bytes before the first match, without those of special tokens."""
    table = token_table(SEARCHED, [stops], len(SEARCHED))[0]
    shown, state, data, visible = "", 0, b"", []
    for end, token in enumerate(tokens, 1):
        before = data
        data += SEARCHED[token]
        visible += [token not in (USER, END)] * len(SEARCHED[token])
        state = table[state, token]
        matches = completed(before, data, stops)
        assert (state == HIT) == bool(matches)
        found = text_so_far(
            BYTE_LEVEL, tokens[:end], running=not matches, stops=stops, pieces=SEARCHED
        )
        assert found.text[: found.final].startswith(shown)
        shown = found.text[: found.final]
        if matches:
            start = matches[0][0]
            kept = bytes(
                b for b, seen in zip(data[:start], visible, strict=False) if seen
            )
            assert (shown, found.stop) == (kept.decode(), matches[0][2])
            return
