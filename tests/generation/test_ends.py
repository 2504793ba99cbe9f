"""`generate` and `stream`: what ends a text, and its parts on the way there."""

import dataclasses

import numpy as np
import pytest

import stree_jax
from tests.generation.batch import (
    NEW,
    QUIET,
    assert_same,
    with_quiet,
)
from tests.support.pieces import PIECES, data_of, expected_stop, text_of
from tests.support.tiny import REAL

# Stops


@pytest.mark.parametrize("which", [0, 2, 4, -1])
def test_a_stop_string_ends_the_text(ask, free, strings_of, arm, which):
    strings = [row[which] for row in strings_of]
    result = ask(stop_strings=with_quiet([[s] for s in strings]), **arm)
    for row, string in enumerate(strings):
        whole, tokens = free.texts[row], result.tokens[row]
        assert result.texts[row] == whole[: whole.find(string)]
        assert tokens == free.tokens[row][: len(tokens)]
        assert string in text_of(tokens) and string not in text_of(tokens[:-1])
    assert result.finish_reasons == ["stop"] * 4
    assert result.stop_reasons == strings


def test_the_first_of_several_stop_strings_counts(ask, free, strings_of, arm):
    lists = with_quiet([row[1:4:2] for row in strings_of])
    result = ask(stop_strings=lists, **arm)
    for row, strings in enumerate(lists):
        tokens, text, reason = expected_stop(free.tokens[row], strings)
        assert reason is not None
        assert result.tokens[row] == tokens
        assert result.texts[row] == text
        assert result.stop_reasons[row] == reason


def test_stop_strings_count_from_min_new_tokens_on(ask, free, strings_of, arm):
    """A string that only comes up before stops nothing; nor does one across."""
    least, lists = [], []
    for row, strings in zip(free.tokens, strings_of, strict=True):
        kept, _, _ = expected_stop(row, strings[2:3])
        least.append(len(kept) - 1)  # the string's last token is the first that counts
        lists.append([strings[2], strings[-1], *QUIET[len(lists)]])
    result = ask(stop_strings=lists, min_new_tokens=least, **arm)
    for row, strings in enumerate(lists):
        tokens, text, reason = expected_stop(free.tokens[row], strings, least[row])
        assert result.tokens[row] == tokens
        assert result.texts[row] == text
        assert result.stop_reasons[row] == reason
        assert result.finish_reasons[row] == ("length" if reason is None else "stop")
        assert len(tokens) > least[row] + 1


@pytest.mark.parametrize("place", [1, 3, 17])
def test_stop_tokens_end_a_row(ask, free, arm, place):
    """Several by row, of which the first that comes up counts."""
    unused = [sorted(set(range(REAL)) - set(row)) for row in free.tokens]
    stops = [
        [unused[row][0], tokens[place + 4], tokens[place], *unused[row][1:3]]
        for row, tokens in enumerate(free.tokens)
    ]
    stops[1] = unused[1][:2]
    result = ask(stop_tokens=stops, min_new_tokens=[0, 1, 0, 0], **arm)
    for row, tokens in enumerate(free.tokens):
        first = next((i for i, t in enumerate(tokens) if t in stops[row]), None)
        kept = tokens if first is None else tokens[: first + 1]
        assert result.tokens[row] == kept
        assert result.texts[row] == text_of(kept)
        assert result.finish_reasons[row] == ("length" if first is None else "stop")
        assert result.stop_reasons[row] == (None if first is None else kept[-1])
    assert result.finish_reasons[1] == "length"


def test_a_stop_beats_the_limit(ask, free, strings_of, arm):
    """Both on the last token: by token, by string; and a string one token too late."""
    kept = [
        expected_stop(tokens, [row[0]])[0]
        for tokens, row in zip(free.tokens, strings_of, strict=True)
    ]
    first = free.tokens[0]
    place = next(i for i in range(3, NEW) if first[i] not in first[:i])
    result = ask(
        max_new_tokens=[place + 1, len(kept[1]), 5, len(kept[3]) - 1],
        stop_tokens=[[first[place]], [], [], []],
        stop_strings=with_quiet([[], strings_of[1][:1], ["zz"], strings_of[3][:1]]),
        **arm,
    )
    assert result.finish_reasons == ["stop", "stop", "length", "length"]
    assert result.stop_reasons == [first[place], strings_of[1][0], None, None]
    wanted = [first[: place + 1], kept[1], free.tokens[2][:5], kept[3][:-1]]
    assert result.tokens == wanted
    texts = [text_of(tokens) for tokens in wanted]
    texts[1] = texts[1][: texts[1].find(strings_of[1][0])]
    assert result.texts == texts


def test_a_stop_token_that_spells_a_stop_string_is_left_out(ask, free, arm):
    tokens = free.tokens[1]
    place, piece = next(
        (i, PIECES[token])
        for i, token in enumerate(tokens)
        if i > 2 and PIECES[token].isascii() and PIECES[token].strip()
        if data_of(tokens[: i + 1]).find(PIECES[token]) == len(data_of(tokens[:i]))
    )
    result = ask(
        stop_tokens=[[], [tokens[place]], [], []],
        stop_strings=with_quiet([[], [piece.decode()], [], []]),
        **arm,
    )
    assert result.tokens[1] == tokens[: place + 1]
    assert result.texts[1] == text_of(tokens[:place])
    assert result.stop_reasons[1] == piece.decode()


def oracle(model, prompt, count, stops, least):
    """Greedy text from whole-sequence scores, without `stops` at the first places."""
    text = list(prompt)
    for place in range(count):
        logits = np.array(stree_jax.score(model, [text])[0, -1, :REAL])
        if place < least:
            logits[list(stops)] = -np.inf
        text.append(int(logits.argmax()))
        if text[-1] in stops:
            break
    return text[len(prompt) :]


def test_no_stop_before_min_new_tokens(target, prompts, greedily, arm):
    """Not even the argmax; the text goes round it, and may end right afterwards."""
    free = greedily(max_new_tokens=8, **arm)
    least = [3, 1, 3, 0]
    lists = [[tokens[0]] for tokens in free.tokens]
    result = greedily(max_new_tokens=8, min_new_tokens=least, stop_tokens=lists, **arm)
    assert result.tokens[3] == free.tokens[3][:1]
    for row in (1, 2, 3):
        tokens = oracle(target, prompts[row], 8, lists[row], least[row])
        assert result.tokens[row] == tokens
        assert lists[row][0] not in tokens[: least[row]]
    ends = 0
    for row in (0, 2):  # the first token that may be a stop is made one
        head = result.tokens[row]
        if head[3] not in head[:3]:
            lists[row] = [lists[row][0], head[3]]
            ends += 1
    again = greedily(max_new_tokens=8, min_new_tokens=least, stop_tokens=lists, **arm)
    for row in (0, 2):
        if len(lists[row]) == 2:
            assert again.tokens[row] == result.tokens[row][:4]
            assert again.finish_reasons[row] == "stop"
            assert again.stop_reasons[row] == result.tokens[row][3]
    assert ends


def test_the_models_stop_tokens_and_none(target, ask, free, arm):
    """None: the model's own; (): the text goes on beyond them."""
    own = target.config.stop_tokens
    assert free.finish_reasons == ["length"] * 4
    assert free.lengths.tolist() == [NEW] * 4
    result = ask(stop_tokens=None, min_new_tokens=[0, 0, 0, 1], **arm)
    assert result.finish_reasons.count("stop") > 1
    for row, tokens in enumerate(free.tokens):
        first = next((i for i, token in enumerate(tokens) if token in own), NEW)
        assert result.tokens[row] == tokens[: first + 1]
    assert ask(stop_tokens=(), **arm).tokens == free.tokens


# Streams


def held(text, strings):
    """Returns the most characters that may yet change or become a stop string."""
    whole = text.rstrip("\ufffd")
    sizes = [
        size
        for string in strings
        for size in range(1, len(string))
        if whole.endswith(string[:size])
    ]
    return len(text) - len(whole) + max(sizes, default=0)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("which", [slice(0, 1), slice(3, 5), slice(0)])
def test_streamed_parts_are_the_text(ask, strings_of, arm, steps, which):
    lists = with_quiet([row[which] for row in strings_of])
    options = dict(stop_strings=lists, stop_tokens=[[], [], [20], []], **arm)
    wanted = ask(**options)
    parts = list(ask(call=stree_jax.stream, steps=steps, **options))
    assert len(parts) > 1
    assert_same(parts[-1], wanted)
    shown = [""] * 4
    for part in parts:
        for row, reason in enumerate(part.finish_reasons):
            tokens = part.tokens[row]
            assert tokens == wanted.tokens[row][: len(tokens)]
            shown[row] += part.new_texts[row]
            assert wanted.texts[row].startswith(shown[row])
            if reason == "running":
                keep = len(part.texts[row]) - held(part.texts[row], lists[row])
                assert shown[row].startswith(part.texts[row][:keep])
                assert part.past is None
            else:
                assert shown[row] == part.texts[row] == wanted.texts[row]
    assert [part.new_texts[row] for part in parts[-1:] for row in range(4)] != shown
    assert "running" not in parts[-1].finish_reasons
    if arm and steps == 1:
        assert len(parts) == max(wanted.target_calls)


def test_the_streamed_texts_have_split_characters(free):
    """Or else the test above would show little."""
    chars = set("".join(free.texts))
    assert {"é", "€", "\ufffd"} <= chars
    cuts = 0
    for tokens, text in zip(free.tokens, free.texts, strict=True):
        assert text == text_of(tokens)
        cuts += sum(
            not text.startswith(text_of(tokens[:end])) for end in range(len(tokens))
        )
    assert cuts >= 3


def test_a_stream_without_a_tokenizer_has_no_text(target, greedily, drafter):
    bare = dataclasses.replace(target, tokenizer=None)
    options = dict(drafter=drafter, stop_tokens=(), keep_past=True)
    options |= dict(stop_strings=(), model=bare, steps=4, call=stree_jax.stream)
    parts = list(greedily(**options))
    assert len(parts) > 1
    for part in parts:
        assert part.texts is None and part.new_texts is None
    assert [part.past is not None for part in parts] == [False] * (len(parts) - 1) + [
        True
    ]
    assert parts[-1].tokens == greedily(drafter=drafter).tokens
