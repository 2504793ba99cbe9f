"""Test that a tokenizer in parts gives what the whole tokenizer gives."""

import pytest

from stree_jax.checkpoints.pair import load_pair
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors.gguf_header import read_header
from stree_jax.convert.tokenizers import in_parts
from stree_jax.convert.tokenizers.gguf_vocabulary import Vocabulary, read_vocabulary
from stree_jax.generation.generate import generate
from tests.support.gguf_files import GGUF_CASES, write_gguf, write_predicting
from tests.support.vocabularies import (
    UNSEEN,
    byte_level,
    piece_merges,
    pieces,
    write_byte_level,
    write_pieces,
)

TEXTS = (*UNSEEN, "a<fim>b c<|im_end|>fox<|im_start|> fox", "the</s>the<s> the<0x0A>")
BYTE_LEVEL = ("gpt-2", "llama-bpe", "qwen35", "deepseek-llm", "falcon")


def _extra(name):
    if name in BYTE_LEVEL:
        return write_byte_level(byte_level(name), name, add_bos_token=name == "gpt-2")
    merges = piece_merges() if name == "listed" else None
    return write_pieces(*pieces(), merges, add_space_prefix=name == "prefix")


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Returns a function: a vocabulary's writer -> a GGUF file with it."""
    root = tmp_path_factory.mktemp("parts")
    GGUF_CASES["llama-tied"][1]().save_pretrained(root / "model")

    def make(extra):
        file = root / "model.gguf"
        return write_gguf(root / "model", "llama-tied", file, extra=extra)

    return make


@pytest.fixture
def built(monkeypatch):
    """Lists the numbers of tokens of all tokenizers that are built."""
    sizes, build = [], Vocabulary.tokenizer

    def counted(self):
        sizes.append(len(self.kinds))
        return build(self)

    monkeypatch.setattr(Vocabulary, "tokenizer", counted)
    return sizes


@pytest.mark.parametrize("name", [*BYTE_LEVEL, "prefix", "pieces", "listed"])
def test_ids_and_texts_are_those_of_the_whole(write, name):
    header = read_header(write(_extra(name)))
    whole, count = read_vocabulary(header), 0
    some = [*range(0, whole.get_vocab_size() - 1, 7)]
    for text in TEXTS:
        ours = in_parts.read_in_parts(header)
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special).ids
            assert ids == whole.encode(text, add_special_tokens=special).ids, text
        for part in (ids, ids[1:], some):
            for skip in (True, False):
                back = ours.decode(part, skip_special_tokens=skip)
                assert back == whole.decode(part, skip_special_tokens=skip)
        count += "_whole" not in vars(ours)
    assert count >= len(TEXTS) - 1  # all but a decomposed text


def test_the_whole_is_built_when_it_is_needed(write, built):
    header = read_header(write(_extra("pieces")))
    ours = in_parts.read_in_parts(header)
    count = len(header.values["tokenizer.ggml.tokens"])
    ours.encode("a fox")
    ours.decode([300, 301])
    assert len(built) == 1 and built[0] < count
    assert ours.get_vocab_size() == count and built[1:] == [count]
    assert ours.decode([300, count]) == ours.decode([300])  # as the whole ignores it
    with pytest.raises(AttributeError, match="no_such"):
        _ = ours.no_such
    ours = in_parts.read_in_parts(header)
    many = in_parts.MOST // in_parts.EACH_TEXT
    assert len(ours.encode("a fox", "the fox")) == len(ours.encode("a fox the fox"))
    ours = in_parts.read_in_parts(header)
    found = [ours.encode(f"fox {i}").ids for i in range(many + 1)]
    assert built[-1] == count
    assert found == [ours.encode(f"fox {i}").ids for i in range(many + 1)]


def test_a_long_text_is_not_encoded_in_parts(write, built):
    header = read_header(write(_extra("pieces")))
    ours, text = in_parts.read_in_parts(header), "\u3042 fox" * 4000
    assert ours.encode(text).ids == read_vocabulary(header).encode(text).ids
    count = len(header.values["tokenizer.ggml.tokens"])
    assert built == [count, count]


@pytest.mark.parametrize("kind", [None, 1, 3, 4])
def test_bytes_of_other_types_are_found(write, kind):
    """Bytes are found by their texts, as some files have no or wrong types."""
    tokens, scores = pieces()

    def extra(writer):
        write_pieces(tokens, scores)(writer)
        key = "tokenizer.ggml.token_type"
        types = [2, 3, 3, *[kind] * 256, *[1] * (len(tokens) - 259)]
        if kind is None:
            types = None
        writer.kv_data[0].pop(key)
        if types is not None:
            writer.add_token_types(types)

    header = read_header(write(extra))
    ours, whole = in_parts.read_in_parts(header), read_vocabulary(header)
    for text in ("\U0001f98a", "a\nb\tc", "\u0e01"):
        assert ours.encode(text).ids == whole.encode(text).ids
        assert "_whole" not in vars(ours)


def test_a_repeated_token_needs_the_whole(write):
    tokens, scores = pieces()
    header = read_header(write(write_pieces([*tokens[:-1], tokens[300]], scores)))
    ours = in_parts.read_in_parts(header)
    assert type(ours) is type(read_vocabulary(header))
    assert ours.decode([300, len(tokens) - 1]) == ours.decode([300])


def test_damage_is_named_when_it_is_met(write):
    tokens, scores = pieces()

    def extra(writer):
        write_pieces(tokens, scores)(writer)
        writer.add_array("tokenizer.ggml.scores", scores[:-1])

    ours = in_parts.read_in_parts(read_header(write(extra)))
    with pytest.raises(CheckpointError, match=r"scores: \d+ of them, but \d+ tokens"):
        ours.encode("a fox")


def test_a_text_is_generated_without_the_whole(tmp_path, built):
    """The command's way: `load_pair`, the prompt, the text."""
    file = write_predicting(tmp_path / "m.gguf")
    model, drafter = load_pair(str(file), "lookup", "float32")
    result = generate(model, "a fox", drafter=drafter, max_new_tokens=4)
    assert 0 < max(built) < 401
    whole = read_vocabulary(read_header(file))
    assert result.texts == [whole.decode(result.tokens[0])]
