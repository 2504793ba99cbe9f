"""Test the path from text files to batches of token ids."""

import gzip
import json
import subprocess
import sys
import zipfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from stree_jax.training.corpus import (
    END_OF_TEXT,
    MAX_DOCUMENT_BYTES,
    encode_corpus,
    iter_documents,
    sample_batches,
    split_holdout,
    train_tokenizer,
)

CODE = "def add(a, b):\n    total = a + b\n    if total:\n        return 12345\n\n\n"
TRICKY = [
    "",
    " ",
    "\n",
    "\t\tx\r\n  y \u00a0 z  ",
    "naïve ‘quotes’ — 東京 🙂👩‍👩‍👧 \u200b e\u0301",
    "x = 1234 << 5  # 3.5e-7\n\n\n        return _a.b_c[0]",
    "\x00\x01\x7f\x85\u2028\ufeff",
    f"before {END_OF_TEXT} after",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([CODE * 20, "Natalia sold 48 clips to friends. " * 20], 400)


def write_zip(path: Path, members: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)


def write_jsonl(path: Path, *records: object) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_folder_is_read_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/hidden.txt").write_text("hidden")
    (tmp_path / "sub/b.md").write_text("b")
    (tmp_path / "c.py").write_bytes("\ufeffc = 'ä'\r\n".encode())
    (tmp_path / "a.txt").write_bytes("latin ä".encode("latin-1"))
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress("zipped ü".encode()))
    (tmp_path / "z.png").write_bytes(b"\x89PNG")
    (tmp_path / "empty.txt").write_text(" \n\n")
    expected = ["latin ä", "c = 'ä'\n", "zipped ü", "b"]
    assert list(iter_documents([tmp_path])) == expected
    both = [tmp_path / "sub/b.md", tmp_path]
    assert list(iter_documents(both)) == ["b", *expected]


def test_jsonl_records(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write_jsonl(
        path,
        {"question": "1 << 2 >> 1?", "answer": "48/2 = <<48/2=24>>24\n#### 24"},
        {"text": "Shift.", "code": "a <<b>> c\r\nreturn"},
        {"prompt": "def f():", "task_id": 1},
        {"prompt": "lone \ud800"},
    )
    assert list(iter_documents([path])) == [
        "1 << 2 >> 1?\n48/2 = 24\n#### 24",
        "Shift.\na <<b>> c\nreturn",
        "def f():",
        "lone ?",
    ]


def test_archives_leave_out_tests_and_metadata(tmp_path: Path) -> None:
    members = {
        "pkg/b.py": "b",
        "pkg/a.py": "a",
        "pkg/notes.txt": "notes",
        "pkg/tests/c.py": "no",
        "pkg/test/c.py": "no",
        "pkg/test_d.py": "no",
        "pkg/data.bin": "no",
        "pkg-1.0.dist-info/top_level.txt": "no",
    }
    for name in ("pkg.whl", "pkg.zip"):
        write_zip(tmp_path / name, members)
        assert list(iter_documents([tmp_path / name])) == ["a", "b", "notes"]


@pytest.mark.parametrize("line", ["über = 'é'  # \x0c🙂\n", "é" * 100_000 + "\n"])
def test_long_documents_are_cut_without_loss(tmp_path: Path, line: str) -> None:
    text = "head\n" + line * (200_000 // len(line)) + "no newline at the end"
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    pieces = list(iter_documents([tmp_path / "long.txt"]))
    assert "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= MAX_DOCUMENT_BYTES
    if len(line) < 100:
        assert all(piece.endswith("\n") for piece in pieces[:-1])
        assert len(pieces) == -(-len(text.encode()) // MAX_DOCUMENT_BYTES)


def test_bad_paths_are_refused_before_reading(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing: no such file") as caught:
        iter_documents([tmp_path / "missing"])
    assert "\n" not in str(caught.value)
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a\.png: not one of \.py"):
        iter_documents([tmp_path / "a.png"])


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"other": 1}\n', r"a\.jsonl:2: no question"),
        ("a.jsonl", b'{"question": "x", "answer": 1}', r"a\.jsonl:1: no question"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1: no question"),
        ("a.jsonl", b"{\n", r"a\.jsonl:1: not JSON"),
        ("a.zip", b"PK", r"a\.zip: cannot be unpacked"),
        ("a.txt.gz", b"text", r"a\.txt\.gz: cannot be unpacked"),
        (
            "a.txt.gz",
            gzip.compress(b"text" * 99, mtime=0)[:20],
            r"a\.txt\.gz: cannot be",
        ),
    ],
)
def test_bad_files_are_named(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        list(iter_documents([tmp_path]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", TRICKY)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    corpus = encode_corpus([text], tokenizer, 0)
    assert corpus[-1] == 0
    assert (corpus[:-1] != 0).all()
    assert tokenizer.decode(corpus[:-1].tolist()) == text


def test_tokenizer_is_deterministic(tokenizer: Tokenizer) -> None:
    documents = [CODE * 20, "Natalia sold 48 clips to friends. " * 20]
    assert train_tokenizer(iter(documents), 400).to_str() == tokenizer.to_str()
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    assert 257 < tokenizer.get_vocab_size() <= 400


def test_tokens_follow_the_layout_of_code(tokenizer: Tokenizer) -> None:
    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([token]) for token in tokenizer.encode(text).ids]

    assert pieces("\n        return 12345") == [
        *("\n", " " * 8, "return", " 1", "2", "3", "4", "5")
    ]
    # A prompt's last newline is the same token with and without a continuation.
    assert pieces("a + b\n    return")[:-2] == pieces("a + b\n")


@pytest.mark.parametrize("vocab_size", [256, 65537])
def test_tokenizer_refuses_impossible_sizes(vocab_size: int) -> None:
    with pytest.raises(ValueError, match=str(vocab_size)):
        train_tokenizer([CODE], vocab_size)


def test_encode_corpus_joins_documents(tokenizer: Tokenizer) -> None:
    # Needs more than two tokenizer calls
    documents = [f"{CODE} {i}" for i in range(1100)]
    tokens = encode_corpus(documents, tokenizer, 0)
    expected = [i for text in documents for i in (*tokenizer.encode(text).ids, 0)]
    assert tokens.dtype == np.uint16
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(
        encode_corpus(iter(documents), tokenizer, 0), expected
    )
    assert encode_corpus([], tokenizer, 0).dtype == np.uint16


def test_encode_corpus_ignores_the_tokenizers_padding(tokenizer: Tokenizer) -> None:
    padded = Tokenizer.from_str(tokenizer.to_str())
    padded.enable_padding()
    padded.enable_truncation(2)
    documents = [CODE, "a"]
    np.testing.assert_array_equal(
        encode_corpus(documents, padded, 0), encode_corpus(documents, tokenizer, 0)
    )
    assert padded.padding is not None


def test_encode_corpus_takes_32_bits_where_16_are_too_few(tokenizer: Tokenizer) -> None:
    big = Tokenizer(models.WordLevel({str(i): i for i in range(65537)}))
    tokens = encode_corpus(["65536"], big, 0)
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == [65536, 0]
    with pytest.raises(ValueError, match="eos_id 400"):
        encode_corpus(["1"], tokenizer, 400)


@pytest.mark.parametrize(
    ("length", "fraction", "block", "count"),
    [(100_003, 0.01, 100, 10), (1000, 0.3, 10, 30), (50, 0.001, 7, 1), (20, 0.9, 9, 1)],
)
def test_split_holdout_takes_spread_blocks(
    length: int, fraction: float, block: int, count: int
) -> None:
    tokens = np.arange(length, dtype=np.uint32)
    train, held = split_holdout(tokens, fraction=fraction, block=block)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, held])), tokens)
    blocks = held.reshape(count, block)
    assert (blocks[:, 0] % block == 0).all()
    assert (np.diff(blocks, axis=1) == 1).all()
    gaps = np.diff(blocks[:, 0]) // block
    assert count == 1 or gaps.max() - gaps.min() <= 1
    again = split_holdout(tokens, fraction=fraction, block=block)
    np.testing.assert_array_equal(again[1], held)


@pytest.mark.parametrize(("fraction", "block"), [(0, 8), (1, 8), (0.1, 0), (0.1, 51)])
def test_split_holdout_refuses_impossible_parts(fraction: float, block: int) -> None:
    with pytest.raises(ValueError, match="hold out"):
        split_holdout(np.zeros(100, np.uint16), fraction=fraction, block=block)


def test_batches_are_windows_and_resume_exactly() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    batches = list(islice(sample_batches(tokens, batch=4, length=16, seed=7), 10))
    for windows in batches:
        assert windows.dtype == np.int32
        assert windows.shape == (4, 17)
        assert (np.diff(windows, axis=1) == 1).all()
    resumed = sample_batches(tokens, batch=4, length=16, seed=7, start_step=6)
    np.testing.assert_array_equal(list(islice(resumed, 4)), batches[6:])
    other = next(sample_batches(tokens, batch=4, length=16, seed=8))
    assert not np.array_equal(other, batches[0])
    assert not np.array_equal(batches[1], batches[0])


def test_batches_reach_both_ends() -> None:
    tokens = np.arange(6, dtype=np.uint16)
    windows = next(sample_batches(tokens, batch=99, length=3, seed=0))
    assert set(windows[:, 0].tolist()) == {0, 1, 2}
    assert (next(sample_batches(tokens, batch=1, length=5, seed=0)) == tokens).all()


def test_batches_refuse_impossible_shapes_at_once() -> None:
    tokens = np.zeros(8, np.uint16)
    with pytest.raises(ValueError, match="window of 9"):
        sample_batches(tokens, batch=1, length=8, seed=0)
    for batch, length, start in ((0, 4, 0), (1, 0, 0), (1, 4, -1)):
        with pytest.raises(ValueError, match="want batch and length"):
            sample_batches(tokens, batch=batch, length=length, seed=0, start_step=start)


def test_importing_corpus_is_cheap() -> None:
    code = (
        "import sys, stree_jax.training.corpus\n"
        "print({'tokenizers', 'optax'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
