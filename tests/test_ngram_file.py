"""Test n-gram files: round trips, and errors of one line."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import chex
import numpy as np
import pytest
from safetensors.numpy import load, save, save_file

from stree_jax.checkpoints.kinds.ngrams import _digest, _split, load_ngrams, save_ngrams
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.speculation.drafters.ngrams import ASSUMED_RATES
from stree_jax.training.ngrams import count_grams, katz

V = 9


@pytest.fixture(scope="module")
def table():
    text = np.random.default_rng(0).integers(0, V, (2, 60)) ** 2 // V
    return katz(count_grams(text, 3, V), V, slots=16, keep=2, temperature=0.7)


@pytest.fixture(scope="module")
def body(table, tmp_path_factory):
    """Returns the bytes of a saved table."""
    path = tmp_path_factory.mktemp("tables") / "table"
    save_ngrams(table, path)
    return path.read_bytes()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "n-grams.safetensors"


def refused(path):
    """Checks that a file is refused in one line. Returns the line."""
    with pytest.raises(CheckpointError) as caught:
        load_ngrams(path)
    line = str(caught.value)
    assert line.startswith(str(path)) and "\n" not in line and len(line) < 1000
    return line


def test_a_saved_table_loads_unchanged(table, file):
    save_ngrams(table, file)
    again = load_ngrams(str(file))
    chex.assert_trees_all_equal(again, table)
    chex.assert_trees_all_equal_dtypes(again, table)
    assert again.temperature == table.temperature == 0.7
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_existing_files_are_not_overwritten(table, file):
    file.write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        save_ngrams(table, file)
    assert file.read_text() == "mine"
    link = file.with_name("link")
    link.symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="exists already"):
        save_ngrams(table, link)
    assert link.is_symlink()


def test_a_missing_folder_is_named(table, tmp_path):
    with pytest.raises(CheckpointError, match="absent: no such directory"):
        save_ngrams(table, tmp_path / "absent" / "table")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("function", ["replace", "chmod"])
def test_a_failed_save_leaves_nothing(table, file, monkeypatch, function):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left\non device")

    monkeypatch.setattr(os, function, full)
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        save_ngrams(table, file)
    assert "\n" not in str(caught.value)
    assert not list(file.parent.iterdir())


def positions(body):
    """Returns offsets to damage: all bytes of the size, some of the header and
    arrays."""
    rng = np.random.default_rng(1)
    behind = 8 + int.from_bytes(body[:8], "little")
    header = rng.choice(np.arange(8, behind), 30, replace=False)
    arrays = rng.choice(np.arange(behind, len(body)), 30, replace=False)
    return [*range(8), *header.tolist(), *arrays.tolist(), behind - 1, len(body) - 1]


def test_one_wrong_bit_is_detected(body, file):
    rng = np.random.default_rng(2)
    for at in positions(body):
        damaged = bytearray(body)
        damaged[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        refused(file)


def test_truncated_and_extended_files_are_refused(body, file):
    behind = 8 + int.from_bytes(body[:8], "little")
    cuts = [0, 1, 7, 8, 9, 10, behind - 1, behind, behind + 4, len(body) // 2]
    for size in (*cuts, len(body) - 4, len(body) - 1):
        file.write_bytes(body[:size])
        refused(file)
    for more in (b"\0", b"\0" * 8, body):
        file.write_bytes(body + more)
        refused(file)


def test_other_files_are_refused(file):
    assert "no such file" in refused(file)
    assert "no such file" in refused(file.parent)
    for text in (
        "",
        "hello",
        "{}",
        "a longer text, of some length\nin two lines\n" * 9,
    ):
        file.write_text(text)
        assert "no n-gram table" in refused(file)
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": np.zeros((2, 2), np.float32)}, file, metadata)
        assert "no n-gram table" in refused(file)
    for header in (b"[]", b"3", b"{}", b'{"__metadata__": []}', b"[" * 9999):
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        assert "no n-gram table" in refused(file)


def parts(body):
    """Returns the arrays and metadata of a saved table."""
    return load(body), dict(_split(Path("x"), body)[0]["__metadata__"])


def sealed(tensors, facts):
    """Returns a file of arrays and metadata with a valid checksum."""
    facts = {k: v for k, v in facts.items() if k != "sha256"}
    body = save(tensors, facts)
    return save(tensors, {**facts, "sha256": _digest(*_split(Path("x"), body))})


def test_edited_metadata_is_detected(body, file):
    """For example the temperature, which scales the guesses and is only in the
    metadata."""
    tensors, facts = parts(body)
    file.write_bytes(sealed(tensors, facts))
    load_ngrams(file)
    file.write_bytes(save(tensors, {**facts, "temperature": "0.8"}))
    assert "checksum" in refused(file)
    file.write_bytes(save(tensors, {k: facts[k] for k in facts if k != "sha256"}))
    assert "checksum" in refused(file)


@pytest.mark.parametrize("temperature", ["0", "-1", "nan", "inf", "1e999", "warm", ""])
def test_invalid_temperatures_are_refused(body, file, temperature):
    tensors, facts = parts(body)
    file.write_bytes(sealed(tensors, {**facts, "temperature": temperature}))
    refused(file)


@pytest.mark.parametrize("rates", ["[]", "[0.6, 0.5]", "[1.2]", "[NaN]", '["a"]', "7"])
def test_invalid_rates_are_refused(body, file, rates):
    tensors, facts = parts(body)
    file.write_bytes(sealed(tensors, {**facts, "rates": rates}))
    assert "not a table" in refused(file)


def test_files_without_rates_get_assumed_rates(table, body, file):
    save_ngrams(replace(table, rates=(0.25, 0.5)), file)
    assert load_ngrams(file).rates == (0.25, 0.5)
    tensors, facts = parts(body)
    file.write_bytes(sealed(tensors, {k: facts[k] for k in facts if k != "rates"}))
    assert load_ngrams(file).rates == ASSUMED_RATES


def test_other_versions_are_refused(body, file):
    tensors, facts = parts(body)
    file.write_bytes(sealed(tensors, {**facts, "version": "2"}))
    assert "version: want 1, got '2'" in refused(file)
    file.write_bytes(sealed(tensors, {k: facts[k] for k in facts if k != "version"}))
    assert "version: want 1" in refused(file)


WRONG = {
    "of another type": lambda t: t | {"log_prob_1": t["log_prob_1"].astype(np.float64)},
    "of another shape": lambda t: t | {"tokens_2": t["tokens_2"][:, :1]},
    "of three axes": lambda t: t | {"tokens_1": t["tokens_1"][None]},
    "a number of slots": lambda t: t | {n: t[n][:6] for n in t if n.endswith("_2")},
    "no slots": lambda t: t | {n: t[n][:0] for n in t if n.endswith("_2")},
    "a token too large": lambda t: t | {"tokens_1": np.full_like(t["tokens_1"], V)},
    "a token below all": lambda t: (
        t | {"contexts_1": np.full_like(t["contexts_1"], -2)}
    ),
    "not a number": lambda t: t | {"back_off_1": t["back_off_1"] * np.float32("nan")},
    "above 1": lambda t: t | {"unigram": np.ones_like(t["unigram"])},
    "one array too many": lambda t: t | {"more": t["unigram"]},
    "one array too few": lambda t: {n: t[n] for n in t if n != "back_off_2"},
    "an order left out": lambda t: {n: t[n] for n in t if not n.endswith("_1")},
    "unigrams alone": lambda t: {"unigram": t["unigram"]},
    "no unigrams": lambda t: {n: t[n] for n in t if n != "unigram"},
    "nothing at all": lambda t: {},
    "no tokens": lambda t: (
        t | {n: t[n][:, :0] for n in t if n[:6] in ("tokens", "log_pr")}
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_inconsistent_arrays_are_refused(body, file, name):
    """With a valid checksum, as if another program had written the table."""
    tensors, facts = parts(body)
    changed = {k: np.ascontiguousarray(v) for k, v in WRONG[name](tensors).items()}
    file.write_bytes(sealed(changed, facts))
    refused(file)


def test_a_dtype_unknown_to_numpy_is_refused(body, file):
    """bfloat16, with a valid checksum."""
    header, data = _split(file, body)
    header["unigram"] |= {"dtype": "BF16", "shape": [2 * V]}
    header["__metadata__"]["sha256"] = _digest(header, data)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    refused(file)
