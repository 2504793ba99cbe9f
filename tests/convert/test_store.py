"""Test checksums of directories in our own format, and pipes in place of files."""

import hashlib
import json
import os
import random
import shutil
import subprocess
from functools import partial

import orbax.checkpoint
import pytest
import tokenizers

import stree_jax
from stree_jax.checkpoints.info import info
from stree_jax.cli import main as cli
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.saved import store
from stree_jax.convert.tensors.tensor_files import read_json
from tests.damage.attempts import watched
from tests.support.hf_checkpoints import HF_CASES, mamba2

convert = partial(convert_checkpoint, progress=False)


def save_source(model, directory):
    model.save_pretrained(directory)
    words = {"a": 0, "b": 1, "<|endoftext|>": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    return save_source(HF_CASES["mamba2"](), tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="module")
def written(foreign, tmp_path_factory):
    """Returns a directory in our own format, which tests must not change."""
    directory = tmp_path_factory.mktemp("own") / "model"
    convert(foreign, directory)
    return directory


@pytest.fixture
def own(written, tmp_path):
    return shutil.copytree(written, tmp_path / "own")


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


def edit_config(directory, change):
    values = config_of(directory)
    change(values)
    (directory / "config.json").write_text(json.dumps(values))


def params_of(directory):
    return sorted(f for f in (directory / "params").rglob("*") if f.is_file())


def flip(file, place, bits=1):
    data = bytearray(file.read_bytes())
    data[place] ^= bits
    file.write_bytes(data)


def refusal(directory, call=stree_jax.load):
    with pytest.raises(CheckpointError) as caught:
        call(directory)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


DAMAGED = "damaged: its checksum does not match config.json; copy or convert it again"


# Checksums


def test_entries_are_what_sha256sum_prints(written, tmp_path):
    """For every file of params/ and the tokenizer, by convert and by save."""
    stree_jax.save(stree_jax.load(written), tmp_path / "saved")
    for directory in (written, tmp_path / "saved"):
        values = config_of(directory)
        entries = {directory / "params" / k: v for k, v in values["files"].items()}
        assert sorted(entries) == params_of(directory)
        entries[directory / "tokenizer.json"] = values["tokenizer"]
        for file, entry in entries.items():
            data = file.read_bytes()
            assert entry == {
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
    files = [str(file) for file in params_of(written)]
    printed = subprocess.run(["sha256sum", *files], capture_output=True, text=True)
    sums = [entry["sha256"] for entry in config_of(written)["files"].values()]
    assert sorted(line.split()[0] for line in printed.stdout.splitlines()) == (
        sorted(sums)
    )


def test_every_flip_is_refused_before_orbax(own, monkeypatch, capfd):
    """First, last and random bytes of every file: one line with the file."""
    monkeypatch.setattr(orbax.checkpoint, "StandardCheckpointer", None)
    rng = random.Random(0)
    for file in [*params_of(own), own / "tokenizer.json"]:
        whole = file.read_bytes()
        for place in {0, len(whole) - 1, *(rng.randrange(len(whole)) for _ in "123")}:
            flip(file, place, 1 << rng.randrange(8))
            assert refusal(own) == f"{file}: {DAMAGED}"
            file.write_bytes(whole)
    assert capfd.readouterr() == ("", "")


def test_all_of_a_large_file_is_hashed(tmp_path):
    source = save_source(mamba2(vocab_size=20_000), tmp_path / "source")
    convert(source, tmp_path / "own")
    largest = max(params_of(tmp_path / "own"), key=lambda file: file.stat().st_size)
    size = largest.stat().st_size
    assert size > 2**20
    for place in range(2**12, size, 2**16):  # the blocks that a reader may have
        flip(largest, place)
        assert refusal(tmp_path / "own") == f"{largest}: {DAMAGED}"
        flip(largest, place)
    stree_jax.load(tmp_path / "own")


def test_the_command_says_one_line(own, tmp_path, capfd):
    flip(params_of(own)[-1], 5)
    assert cli.main(["export", str(own), str(tmp_path / "hf")]) == 2
    assert capfd.readouterr().err == f"stree-jax: {params_of(own)[-1]}: {DAMAGED}\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["own"]


def test_no_progress_bar_in_a_pipe(foreign, tmp_path, capfd):
    """So an error is one line of a log, whenever it occurs."""
    assert cli.main(["convert", str(foreign), str(tmp_path / "own")]) == 0
    assert capfd.readouterr() == ("", f"wrote {tmp_path / 'own'}\n")


def test_sizes_are_checked_first(own):
    """A partial copy is detected without reading its files."""
    last = params_of(own)[-1]
    flip(params_of(own)[0], 0)
    last.write_bytes(last.read_bytes() + b"x")
    size = last.stat().st_size
    assert refusal(own) == f"{last}: want {size - 1} bytes, got {size}"
    last.unlink()
    assert refusal(own) == f"{last}: want {size - 1} bytes, got no file"


def test_tokenizer_is_covered_and_templates_are_not(own):
    (own / "chat_template.jinja").write_text("mine")
    stree_jax.load(own)
    size = (own / "tokenizer.json").stat().st_size
    (own / "tokenizer.json").unlink()
    assert refusal(own) == f"{own / 'tokenizer.json'}: want {size} bytes, got no file"


def test_another_valid_number_in_the_config(own):
    """A valid number that is in no parameter's shape: only a checksum detects it."""
    edit_config(own, lambda v: v["model"].update(norm_eps=1e-2))
    file = own / "config.json"
    for call in (stree_jax.load, info):
        assert refusal(own, call) == (
            f"{file}: damaged: its checksum does not match its fields; copy or convert "
            'it again, or remove "checksum" if you edited the file'
        )
    edit_config(own, lambda v: v.pop("checksum"))
    assert stree_jax.load(own).config.norm_eps == 1e-2
    assert info(own)["format"] == "stree-jax"


def test_spelling_of_the_config_is_free(own):
    values = config_of(own)
    reordered = dict(reversed(values.items()))
    (own / "config.json").write_text(json.dumps(reordered, indent=4))
    stree_jax.load(own)


ODD_ENTRIES = [None, 7, "7", 1.5, True, [], {}, {"bytes": 1}, {"sha256": "0"}]
ODD_ENTRIES += [{"bytes": "1", "sha256": "0"}, {"bytes": 1, "sha256": "0", "x": 1}]


@pytest.mark.parametrize("odd", ODD_ENTRIES)
def test_odd_entries(own, odd):
    name = params_of(own)[-1].relative_to(own / "params").as_posix()
    edit_config(own, lambda v: v["files"].update({name: odd}))
    file = own / "config.json"
    assert refusal(own) == (
        f"{file}: entry of {params_of(own)[-1].name}: want bytes and sha256"
    )


def test_odd_checksums(own):
    whole = config_of(own)
    deep = []
    for _ in range(900):
        deep = [deep]
    for odd in (None, 7, "", [], {}, "0" * 64, whole["checksum"].upper(), deep):
        edit_config(own, lambda v, odd=odd: v.update(checksum=odd))
        assert "config.json: damaged" in refusal(own)
        assert "config.json: damaged" in refusal(own, info)
    edit_config(own, lambda v: v.update(checksum=whole["checksum"], files=deep))
    assert "config.json: damaged" in refusal(own, info)
    (own / "config.json").write_text(json.dumps(whole | {"extra": 1}))
    assert refusal(own) == f"{own / 'config.json'}: extra: unknown field"


def test_names_that_lead_elsewhere_are_no_files(own, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"x")
    entry = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    for name in ("../../outside", str(outside)):
        edit_config(own, lambda v, name=name: v["files"].update({name: entry}))
        assert "outside: want 1 bytes, got no file" in refusal(own)
        edit_config(own, lambda v, name=name: v["files"].pop(name))


def test_a_failing_checksum_leaves_nothing(foreign, tmp_path, monkeypatch):
    def fail(files):
        raise OSError("disk on fire")

    monkeypatch.setattr(store, "_entries", fail)
    with pytest.raises(CheckpointError, match=r"new: cannot be written \(disk on fire"):
        convert(foreign, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


# Pipes, which block whoever opens them for reading


def test_pipes_in_place_of_our_files(own):
    for file in [own / "config.json", own / "tokenizer.json", *params_of(own)]:
        whole = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        with watched(own) as opened:
            assert str(own) in refusal(own)
        assert opened == []
        file.unlink()
        file.write_bytes(whole)
    shutil.rmtree(own / "params")
    os.mkfifo(own / "params")
    assert refusal(own) == f"{own / 'params'}: no such directory"


NAMES = "config.json model.safetensors tokenizer.json generation_config.json"
BESIDE = "mamba_config.json chat_template.jinja tokenizer_config.json vocab.json"
UNREAD = "pytorch_model.bin model.safetensors.index.json zzz.safetensors"


@pytest.mark.parametrize("name", f"{NAMES} {BESIDE} {UNREAD}".split())
def test_pipes_in_place_of_others(foreign, tmp_path, name):
    """An error if the file would be read or kept; it is never opened."""
    source = shutil.copytree(foreign, tmp_path / "source")
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    with watched(source) as opened:
        if name not in UNREAD.split():
            assert str(source) in refusal(source)
            assert str(source) in refusal(source, lambda d: convert(d, tmp_path / "x"))
            assert not (tmp_path / "x").exists()
        else:
            stree_jax.load(source)
            convert(source, tmp_path / "own")
            stree_jax.load(tmp_path / "own")
    assert opened == []


def test_pipe_as_a_shard(foreign, tmp_path):
    source = shutil.copytree(foreign, tmp_path / "source")
    (source / "model.safetensors").unlink()
    os.mkfifo(source / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with watched(source) as opened:
        assert "shard 'a.safetensors' is missing" in refusal(source)
    assert opened == []


def test_pipe_as_json(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with watched(tmp_path) as opened:
        with pytest.raises(CheckpointError, match="pipe.json: not a regular file"):
            read_json(tmp_path / "pipe.json")
    assert opened == []
