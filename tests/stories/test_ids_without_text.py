"""Ids to which a vocabulary gives no text of their own, in every format.

Padding, unused, empty and repeated entries of a vocabulary are ids that a model can
choose. Decoding them and naming them in log-probabilities must work.
"""

import base64
import json

import gguf
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stree_jax.convert.tensors.checkpoint_files import CheckpointFiles
from stree_jax.convert.tensors.gguf_header import read_header
from stree_jax.convert.tokenizers.gguf_vocabulary import read_vocabulary
from stree_jax.convert.tokenizers.tokenizer import read_tokenizer
from stree_jax.sampling.continuation import continuation
from stree_jax.sampling.stop_strings import searched_bytes, token_bytes, token_table
from stree_jax.server.texts import Reader

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
EOS, PAD = "</s>", 8  # a special token, and rows of the model beyond the vocabulary


def byte_level(path):
    """Writes a tokenizer.json with holes and an empty token. Returns what is read."""
    vocab = {name: 2 * i for i, name in enumerate(LETTERS)} | {"": 3, EOS: 601}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(path / "tokenizer.json"))
    return read_tokenizer(CheckpointFiles(path))


def vocab_json(path):
    vocab = {name: 2 * i for i, name in enumerate(LETTERS)} | {"": 3, EOS: 601}
    (path / "vocab.json").write_text(json.dumps(vocab))
    (path / "merges.txt").write_text("#version: 0.2\n")
    fields = {"tokenizer_class": "GPT2Tokenizer", "eos_token": EOS}
    (path / "tokenizer_config.json").write_text(json.dumps(fields))
    return read_tokenizer(CheckpointFiles(path))


def tekken(path):
    """Has ten special tokens without a name, and a token twice."""
    tokens = [*(bytes([i]) for i in range(256)), b"ab", b"ab", b"\xf0\x9f"]
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None}
        for i, t in enumerate(tokens)
    ]
    special = [{"rank": 0, "token_str": EOS, "is_control": True}]
    config = {"pattern": r"\S+|\s+", "default_num_special_tokens": 11}
    fields = {"config": config, "vocab": entries, "special_tokens": special}
    (path / "tekken.json").write_text(json.dumps(fields))
    return read_tokenizer(CheckpointFiles(path))


def gguf_file(path, model, tokens, kinds):
    writer = gguf.GGUFWriter(str(path / "m.gguf"), "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_eos_token_id(tokens.index(EOS))
    if model == "llama":
        writer.add_token_scores([0.0] * len(tokens))
    else:
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_vocabulary(read_header(path / "m.gguf"))


def gguf_bytes(path):
    kind = gguf.TokenType
    tokens = [*LETTERS, EOS, "ab", "ab", "", "[PAD1]", "[PAD1]", "", "<x>", "<x>"]
    kinds = [kind.NORMAL] * 256 + [kind.CONTROL, kind.NORMAL, kind.NORMAL, kind.NORMAL]
    kinds += [kind.UNUSED] * 3 + [kind.USER_DEFINED] * 2
    return gguf_file(path, "gpt2", tokens, kinds)


def gguf_pieces(path):
    kind = gguf.TokenType
    tokens = ["<unk>", EOS, *BYTES, "a", "a", "", "[PAD1]", "", "<x>", "<x>"]
    kinds = [kind.UNKNOWN, kind.CONTROL, *[kind.BYTE] * 256, *[kind.NORMAL] * 3]
    kinds += [kind.UNUSED] * 2 + [kind.CONTROL] * 2
    return gguf_file(path, "llama", tokens, kinds)


def piece_model(path):
    """Writes a SentencePiece model, in the protocol buffer format, by hand."""

    def field(number, data):
        return bytes([number << 3 | 2, len(data)]) + data

    tokens = ["<unk>", "<s>", EOS, *BYTES, "a", "a", "", "", "[PAD1]"]
    types = [2, 3, 3, *[6] * 256, 1, 1, 1, 5, 5]
    data = b""
    for token, kind in zip(tokens, types, strict=True):
        data += field(1, field(1, token.encode()) + bytes([3 << 3, kind]))
    data += field(2, bytes([3 << 3, 2])) + field(3, bytes([4 << 3, 0]))
    (path / "tokenizer.model").write_bytes(data)
    return read_tokenizer(CheckpointFiles(path))


FORMATS = [byte_level, vocab_json, tekken, gguf_bytes, gguf_pieces, piece_model]


@pytest.mark.parametrize("make", FORMATS)
def test_every_id_can_be_decoded_and_named(tmp_path, make):
    tokenizer = make(tmp_path)
    pieces = token_bytes(tokenizer)
    searched = searched_bytes(tokenizer, pieces)
    reader = Reader(tokenizer, pieces, searched)
    size = max(tokenizer.get_vocab().values()) + 1 + PAD
    first = tokenizer.encode("a", add_special_tokens=False).ids
    place = continuation(tokenizer, first)
    names = set()
    for token in range(size):
        found = reader.token(token, place)
        assert found.data.decode("utf-8", "replace") == place.decode([token])
        names.add(found.name)
    assert {b"", b"a", EOS.encode()} <= names
    table = token_table(searched, [["ab", EOS, f"b{EOS}"]], size)[0]
    end = tokenizer.token_to_id(EOS)
    assert table[0, end] == -1 and (table[0, -PAD:] == 0).all()
