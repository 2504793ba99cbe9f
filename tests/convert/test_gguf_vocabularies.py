"""Test that vocabularies of GGUF files give the same tokens as their source."""

import re

import pytest

import stree_jax
from stree_jax.cli.chat import read_chat_template, read_special_tokens
from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.gguf_header import read_header
from stree_jax.convert.tokenizers.gguf_vocabulary import read_vocabulary
from stree_jax.convert.tokenizers.pretokenizers import PRETOKENIZERS
from tests.support.gguf_files import GGUF_CASES, write_gguf
from tests.support.vocabularies import (
    COMPOSED,
    RANGES,
    UNSEEN,
    byte_level,
    piece_ids,
    piece_merges,
    pieces,
    write_byte_level,
    write_pieces,
)

PRES = ("gpt-2", "olmo", "smollm", "refact", "llama-bpe", "dbrx", "qwen2", "qwen35")
PRES += ("falcon-h1", "falcon", "command-r", "deepseek-llm", "deepseek-coder")


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Returns a function: a vocabulary's writer -> a GGUF file of a tiny model with
    it."""
    root = tmp_path_factory.mktemp("vocabularies")
    GGUF_CASES["llama-tied"][1]().save_pretrained(root / "model")

    def make(extra):
        file = root / "model.gguf"
        return write_gguf(root / "model", "llama-tied", file, extra=extra)

    return make


def read(file):
    return read_vocabulary(read_header(file))


@pytest.mark.parametrize("pre", PRES)
def test_byte_level_tokens(write, pre):
    theirs = byte_level(pre)
    ours = read(write(write_byte_level(theirs, pre, add_bos_token=False)))
    for text in (*UNSEEN, "a<fim>b"):
        wanted = theirs.encode(text)
        assert ours.encode(text).ids == wanted.ids, text
        assert ours.encode(text).offsets == wanted.offsets
        for skip in (True, False):
            back = ours.decode(wanted.ids, skip_special_tokens=skip)
            assert back == theirs.decode(wanted.ids, skip_special_tokens=skip)
    assert ours.id_to_token(401) is None  # fills the embedding up


def test_letters_of_words_are_those_of_the_published_list(write):
    """At each end of each range, within and outside of it."""
    theirs = byte_level("deepseek-llm")
    ours = read(write(write_byte_level(theirs, "deepseek-llm")))
    ends = {end + i for pair in RANGES for end in pair for i in (-1, 0, 1)}
    text = "x".join(map(chr, sorted(ends)))
    both = [t.pre_tokenizer.pre_tokenize_str(text) for t in (ours, theirs)]
    assert both[0] == both[1] and len(both[0]) > len(RANGES)


def test_every_name_makes_a_tokenizer(write):
    trained = byte_level("gpt-2")
    for pre in PRETOKENIZERS:
        ours = read(write(write_byte_level(trained, pre, add_bos_token=False)))
        for text in UNSEEN:
            if "\u0301" not in text or pre not in COMPOSED:
                assert ours.decode(ours.encode(text).ids, False) == text, (pre, text)


@pytest.mark.parametrize(
    ("pre", "flags", "first", "last"),
    [
        ("smollm", {}, [], []),
        ("llama-bpe", {}, [1], []),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, [1], [0]),
        ("llama-bpe", {"add_bos_token": False}, [], []),
    ],
)
def test_tokens_around_a_text(write, pre, flags, first, last):
    ours = read(write(write_byte_level(byte_level(pre), pre, **flags)))
    inner = ours.encode("a fox", add_special_tokens=False).ids
    assert ours.encode("a fox").ids == [*first, *inner, *last]


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces(write, prefix):
    tokens, scores = pieces()
    ours = read(write(write_pieces(tokens, scores, add_space_prefix=prefix)))
    for text in (t for t in UNSEEN if t):
        wanted = piece_ids(text, tokens, scores, prefix)
        assert ours.encode(text).ids == [1, *wanted], text
        if "\u2581" not in text:
            assert ours.decode(wanted) == text
    assert ours.encode("").ids == [1]
    assert ours.encode("a</s>b", add_special_tokens=False).ids.count(2) == 1


def test_pieces_with_merges_in_the_file(write):
    """As in files of Gemma 4, where every line is merged as one word."""
    tokens, scores = pieces()
    extra = write_pieces(tokens, scores, piece_merges(), add_space_prefix=False)
    ours = read(write(extra))
    for text in (t for t in UNSEEN if t):
        words = re.findall(r"[^\n]+|\n+", text)
        each = [piece_ids(word, tokens, scores, False) for word in words]
        wanted = [number for ids in each for number in ids]
        assert ours.encode(text).ids == [1, *wanted], text
        if "\u2581" not in text:
            assert ours.decode(wanted) == text


def test_what_chat_needs(write):
    extra = write_byte_level(byte_level("smollm"), "smollm", "{{ messages[0] }}")
    file = write(extra)
    assert read_chat_template(CheckpointFiles(file)) == "{{ messages[0] }}"
    texts = {"bos": "<|im_start|>", "eos": "<|endoftext|>", "pad": "<|im_end|>"}
    wanted = {f"{name}_token": text for name, text in texts.items()}
    assert read_special_tokens(CheckpointFiles(file)) == wanted
    # The end of a turn stops, too, although the file lists only the end of a text.
    assert stree_jax.load(file).config.stop_tokens == (0, 2)


@pytest.mark.parametrize(("model", "pre"), [("gpt2", "hunyuan"), ("rwkv", "default")])
def test_an_unknown_kind_is_left_out(write, model, pre):
    def extra(writer):
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)

    with pytest.warns(
        UserWarning, match=f"model.gguf: unknown tokenizer .*{pre}|{model}"
    ):
        loaded = stree_jax.load(write(extra))
    assert loaded.tokenizer is None
