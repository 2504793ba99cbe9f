"""Test copies of cached prefixes on disk: a restart, damage, kills and a full disk."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stree_jax.server import prefix_folder
from stree_jax.server.batch import Batch
from stree_jax.server.host_states import Form
from stree_jax.server.prefix_folder import (
    ABOUT,
    FOLDER,
    MAGIC,
    MOST_HEADER,
    SET_ASIDE,
    PrefixFolder,
    model_key,
)
from stree_jax.server.rows import TextRequest
from stree_jax.speculation.decoding import RUNNING
from stree_jax.speculation.default_tree import spec_for
from tests.server import served
from tests.support.prefix_states import cache_of, check_restored, past_of
from tests.support.served_rows import SIZES, prompt_of
from tests.support.tiny import tiny

LAGS = dict.fromkeys(range(65), 0)


def opened(path, prefixes, key="a", said=None):
    said = [] if said is None else said
    return PrefixFolder(path, prefixes, key, 100, said.append)


def filled(path, recurrent=True, limit=10**6):
    """Saves some texts in a folder. Returns the texts."""
    prefixes = cache_of(limit, recurrent)
    folder, rng = opened(path, prefixes), np.random.default_rng(3)
    common = rng.integers(0, 9, 30).tolist()
    texts = [[*common, i, *rng.integers(0, 9, 25).tolist()] for i in range(3)]
    for text in texts:
        prefixes.find(text)
        for n in (20, 40, 55):
            prefixes.add(text[: n + 1], past_of(text[:n], recurrent))
    folder.close()
    return texts


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_restart_continues(tmp_path, recurrent):
    texts, said = filled(tmp_path / "kept", recurrent), []
    files = list((tmp_path / "kept" / FOLDER).glob("*.prefix"))
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    prefixes = cache_of(10**6, recurrent)
    folder = opened(tmp_path / "kept", prefixes, said=said)
    assert not said
    for text in texts:
        found = prefixes.find([*text, 0])
        assert found.length == 55
        check_restored(found, text, recurrent, LAGS)
    assert any(isinstance(n.rows[0].base, np.memmap) for n in prefixes.nodes())
    branch = [*texts[0][:50], 9, 9]
    prefixes.add(branch, past_of(branch[:-1], recurrent))  # splits a mapped run
    folder.close()
    again = cache_of(10**6, recurrent)
    opened(tmp_path / "kept", again).close()
    assert again.bytes == prefixes.bytes and len(again) == len(prefixes)
    check_restored(again.find([*branch, 0]), branch, recurrent, LAGS)


def test_a_server_continues_after_a_restart(tmp_path):
    """With the texts and bits of a server without a cache; drafts included."""
    model = replace(served.tiny_model(), config=tiny(1, layers=LAYERS).config)
    spec = spec_for(model, tiny(2, layers=("mamba",)), "E", None, None)
    history, found = prompt_of(1, 150), {}
    for start in ("first", "second", "cold"):
        sizes = SIZES if start != "cold" else replace(SIZES, prefix_memory=0)
        batch = Batch(model, spec, sizes)
        if start != "cold":
            folder = served_folder(tmp_path, batch)
        found[start] = [
            answered(batch, prompt)
            for prompt in (history, [*history[:100], 9, 9, 9], history[:60])
        ]
        if start != "cold":
            folder.close()
    cached = {start: [one[0] for one in texts] for start, texts in found.items()}
    assert cached == {"first": [0, 64, 0], "second": [149, 102, 59], "cold": [0] * 3}
    for texts in found.values():
        for (_, tokens, raw), one in zip(texts, found["cold"], strict=True):
            assert tokens == one[1] and np.array_equal(raw, one[2])


LAYERS = "mamba", "attention", "mlp"


def served_folder(path, batch):
    batch.admit(0, TextRequest([9, 9], 1))
    batch.cancel([0])
    spec = batch.specs[False]
    key = model_key((batch.model.params, spec.drafter), batch.prefixes.form)
    return PrefixFolder(path, batch.prefixes, key, 1000, pytest.fail)


def answered(batch, prompt):
    """Returns the cached tokens of a prompt, its answer, and its log-probabilities."""
    cached = batch.admit(0, TextRequest(prompt, 8, logprobs=True))
    tokens, raw = [], []
    while True:
        update = batch.advance()[0]
        tokens += update.tokens
        raw += update.raw.tolist()
        if update.finish != RUNNING:
            return cached, tokens, raw


def test_the_key_is_of_the_weights_and_the_form():
    form, other = (cache_of(1, recurrent).form for recurrent in (True, False))
    x = np.arange(12, dtype=np.float32)
    y = np.where(x == 5, np.nextafter(x, 9), x)
    keys = [model_key((v,), f) for v, f in ((x, form), (y, form), (x, other))]
    assert len({*keys, model_key((x.reshape(3, 4),), form)}) == 4
    assert keys[0] == model_key((x.copy(),), Form.of(past_of([1], True)))


def content(path):
    return {f.name: f.read_bytes() for f in path.iterdir()}


def damage(path, kind):
    files = sorted(path.glob("*.prefix"), key=lambda f: f.stat().st_size)
    if kind == "older":
        (path / ABOUT).write_text(json.dumps({"format": 0, "key": "a"}))
    elif kind == "foreign":
        (path / "letter.txt").write_text("dear")
    elif kind == "no about":
        (path / ABOUT).unlink()
    elif kind == "short":
        files[-1].write_bytes(files[-1].read_bytes()[:-64])
    elif kind == "empty":
        files[0].write_bytes(b"")
    elif kind == "header":
        data = bytearray(files[0].read_bytes())
        data[20] ^= 255
        files[0].write_bytes(data)
    elif kind == "nested":
        size = MOST_HEADER.to_bytes(8, "little")
        files[0].write_bytes(MAGIC + size + b"[" * MOST_HEADER)
    elif kind == "exchanged":
        files[0].write_bytes(files[-1].read_bytes())
    elif kind == "file":
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
        path.write_text("x")
    elif kind == "open":
        path.chmod(0o777)


KINDS = (
    "older foreign short empty header nested exchanged file open another".split()
    + ["no about"]
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_does_not_fit_is_set_aside(tmp_path, kind):
    texts, path, said = filled(tmp_path), tmp_path / FOLDER, []
    damage(path, kind)
    before = content(path) if path.is_dir() else path.read_text()
    prefixes = cache_of(10**6, True)
    folder = opened(tmp_path, prefixes, "b" if kind == "another" else "a", said)
    (line,) = said
    assert "set aside as prefixes.aside-1" in line and "\n" not in line
    aside = tmp_path / "prefixes.aside-1"
    assert (content(aside) if aside.is_dir() else aside.read_text()) == before
    assert prefixes.find(texts[0]).length == prefixes.bytes == 0
    prefixes.add(texts[0], past_of(texts[0][:-1], True))
    folder.close()
    again = cache_of(10**6, True)
    opened(tmp_path, again, "b" if kind == "another" else "a", said).close()
    assert again.bytes == prefixes.bytes and len(said) == 1


def test_changed_bytes_are_noticed_when_a_prompt_needs_them(tmp_path):
    texts, said = filled(tmp_path), []
    files = {f: f.read_bytes() for f in (tmp_path / FOLDER).glob("*.prefix")}
    for file, data in files.items():
        wrong = bytearray(data)
        wrong[-(64 + 4)] ^= 1
        file.write_bytes(wrong)
    prefixes = cache_of(10**6, True)
    folder = opened(tmp_path, prefixes, said=said)
    assert prefixes.bytes and not said, "they are mapped, not read"
    for text in texts:
        assert prefixes.find([*text, 0]).length == 0
    assert 0 < len(said) <= len(files) and all("damaged" in line for line in said)
    assert list((tmp_path / FOLDER).glob(f"*{SET_ASIDE}"))
    prefixes.add(texts[0], past_of(texts[0][:-1], True))
    check_restored(prefixes.find([*texts[0], 0]), texts[0], True, LAGS)
    folder.close()


def test_random_damage_never_gives_a_wrong_state(tmp_path):
    texts, rng = filled(tmp_path), np.random.default_rng(5)
    path = tmp_path / FOLDER
    before = content(path)
    for _ in range(60):
        if not path.exists():
            path.mkdir(mode=0o700)
        for name, data in before.items():
            (path / name).write_bytes(data)
        file = path / sorted(before)[rng.integers(len(before))]
        data = bytearray(file.read_bytes())
        at = rng.integers(len(data))
        data[at : at + rng.integers(1, 9)] = rng.bytes(rng.integers(0, 9))
        file.write_bytes(data)
        prefixes = cache_of(10**6, True)
        opened(tmp_path, prefixes).close()
        for text in texts:
            found = prefixes.find([*text, 0])
            if found.length:
                check_restored(found, text, True, LAGS)


def test_a_full_disk_stops_the_saving(tmp_path, monkeypatch):
    said, written, prefixes = [], [], cache_of(10**6, True)
    folder = opened(tmp_path, prefixes, said=said)

    def full(dst, body, mode):
        written.append(dst)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(prefix_folder, "write_whole", full)
    for i in range(4):
        text = [i] * 40
        prefixes.add(text, past_of(text[:-1], True))
        folder._thread.join(5)
        check_restored(prefixes.find([*text, 0]), text, True, LAGS)
    assert len(written) == 1 and len(prefixes) == 4
    assert said == [
        f"{tmp_path / FOLDER}: No space left on device; prefixes are not saved"
    ]
    folder.close()


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("x")
    said = []
    folder = opened(tmp_path / "file" / "kept", cache_of(10**6, True), said=said)
    assert len(said) == 1 and "prefixes are not saved" in said[0]
    folder.close()


def test_two_servers_do_not_share_a_folder(tmp_path):
    said, prefixes = [], cache_of(10**6, True)
    first = opened(tmp_path, prefixes)
    second = opened(tmp_path, cache_of(10**6, True), said=said)
    assert "in use by another server" in said[0] and len(said) == 1
    second.close()
    first.close()


def test_files_of_evicted_states_are_removed(tmp_path):
    filled(tmp_path)
    prefixes = cache_of(10**6, True)
    folder = opened(tmp_path, prefixes)
    size = sum(map(len, content(tmp_path / FOLDER).values()))
    prefixes.limit = prefixes.bytes // 2
    prefixes.evict()
    folder.close()
    assert sum(map(len, content(tmp_path / FOLDER).values())) < 0.8 * size
    small = cache_of(prefixes.limit // 2, True)
    opened(tmp_path, small).close()
    assert 0 < small.bytes <= small.limit
    again = cache_of(10**6, True)
    opened(tmp_path, again).close()
    assert again.bytes == small.bytes


def test_a_parent_is_written_before_those_that_wait_longer(tmp_path, monkeypatch):
    """Texts that are split again while they wait to be written."""
    write, begun, goes_on, order = (
        prefix_folder.write_whole,
        threading.Event(),
        threading.Event(),
        [],
    )

    def held(dst, data, *args):
        if dst.name != ABOUT:
            begun.set()
            assert goes_on.wait(60)
            order.append(dst.name)
        write(dst, data, *args)

    monkeypatch.setattr(prefix_folder, "write_whole", held)
    prefixes = cache_of(10**6, True)
    folder = opened(tmp_path, prefixes)
    for first in (
        [1] * 40,
        [1] * 20 + [2] * 20,
        [1] * 30 + [3] * 10,
        [1] * 18 + [4] * 9,
    ):
        prefixes.find(first)
        prefixes.add([*first, 5], past_of(first, True))
        assert begun.wait(60)
    goes_on.set()
    parents = {
        folder.name_of(n.text()): folder.name_of(n.parent.text())
        for n in prefixes.nodes()
        if n.parent.parent is not None
    }
    folder.close()
    last = {name: i for i, name in enumerate(order)}
    assert len(last) == 7 and len(parents) == 6
    assert all(
        order.index(parents[name]) < i for name, i in last.items() if name in parents
    )


KILLED = """
import sys
from pathlib import Path
import numpy as np
from stree_jax.server.prefix_folder import PrefixFolder
from tests.support.prefix_states import cache_of, past_of
prefixes = cache_of(60_000, True)
folder = PrefixFolder(Path(sys.argv[1]), prefixes, "a", 100, print)
rng, old = np.random.default_rng(int(sys.argv[2])), [1] * 60
print("begun", flush=True)
while True:
    old = [*old[: rng.integers(10, 60)], *rng.integers(0, 9, 60).tolist()][:60]
    n = int(rng.integers(17, 60))
    prefixes.find(old)
    prefixes.add(old[: n + 1], past_of(old[:n], True))
"""


def test_a_split_that_is_interrupted_loses_no_text(tmp_path, monkeypatch):
    """A text waits to be written when another one splits it. After each write, a copy
    of the folder stands for a server that was killed there."""
    source, write, copies = tmp_path / "source", prefix_folder.write_whole, []
    begun, goes_on = threading.Event(), threading.Event()

    def copied(dst, *args):
        write(dst, *args)
        if dst.name == ABOUT:
            return
        copies.append(tmp_path / f"after-{len(copies)}")
        shutil.copytree(source, copies[-1])
        begun.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(prefix_folder, "write_whole", copied)
    prefixes = cache_of(10**6, True)
    folder = opened(source, prefixes)
    text = list(range(50))
    prefixes.find(text)
    prefixes.add(text, past_of(text[:-1], True))
    assert begun.wait(60)  # its write has not ended
    other = [*text[:30], *range(60, 80)]
    prefixes.find(other)
    prefixes.add(other, past_of(other[:-1], True))
    goes_on.set()
    folder.close()
    monkeypatch.setattr(prefix_folder, "write_whole", write)
    assert len(copies) == 4  # the text, its first part, the rest, the other's rest
    for copy in copies:
        again = cache_of(10**6, True)
        opened(copy, again).close()
        check_restored(again.find([*text, 0]), text[:-1], True, LAGS)


def test_a_killed_server_leaves_a_whole_folder(tmp_path):
    for seed in range(3):
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(seed)]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
            assert process.stdout.readline() == b"begun\n"
            until = time.monotonic() + 60
            while sum(1 for _ in tmp_path.rglob("*")) < 20 and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.1 * seed)
            process.send_signal(signal.SIGKILL)
        said, prefixes = [], cache_of(60_000, True)
        opened(tmp_path, prefixes, said=said).close()
        assert not said and len(prefixes) > 0
        for node in list(prefixes.nodes()):
            text = node.text().tolist()
            if node.kept is not None and len(text) >= 16:
                check_restored(prefixes.find([*text, 0]), text, True, LAGS)
        assert not said
