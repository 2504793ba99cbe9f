"""Test that a header is the same however much of the file is read at once."""

import random

import gguf
import numpy as np
import pytest

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.tensors import gguf_header

TEXTS = ["", "a", "\u00e9\u2581", "word" * 20, "\U0001f600", "end"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("header") / "x.gguf", TEXTS)


def write(path, texts):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("texts", texts)
    writer.add_array("numbers", list(range(50)))
    writer.add_string("text", "of one key")
    writer.add_tensor("w", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("piece", [1, 7, 64, 2**20])
def test_a_header_is_read_in_pieces(file, monkeypatch, piece):
    monkeypatch.setattr(gguf_header, "PIECE", piece)
    header = gguf_header.read_header(file)
    assert header.values["texts"] == TEXTS
    assert header.values["numbers"].tolist() == list(range(50))
    assert header.values["text"] == "of one key"
    assert header.tensors["w"].start == file.stat().st_size - 256


@pytest.mark.parametrize("piece", [1, 100, 2**20])
def test_texts_with_zeros_and_long_ones_are_read(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(gguf_header, "PIECE", piece)
    monkeypatch.setattr(gguf_header, "FEW", 3)
    rng = random.Random(0)
    parts = "\0", "\0" * 7, "\0" * 9, "a", "\u00e9\u0100", "b" * 255, "c" * 256
    for number in range(20):
        texts = ["".join(rng.choices(parts, k=rng.randrange(3))) for _ in range(40)]
        file = write(tmp_path / f"{number}.gguf", texts)
        header = gguf_header.read_header(file)
        assert header.values["texts"] == texts
        assert header.values["text"] == "of one key"


@pytest.mark.parametrize("piece", [1, 2**20])
def test_a_truncated_header_is_refused(file, monkeypatch, tmp_path, piece):
    monkeypatch.setattr(gguf_header, "PIECE", piece)
    whole = file.read_bytes()
    begin = gguf_header.read_header(file).tensors["w"].start
    for size in range(0, begin, 5):
        (tmp_path / "y.gguf").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="truncated|not a GGUF"):
            gguf_header.read_header(tmp_path / "y.gguf")
