"""Test directories in our own format: damaged ones raise, killed writers leave none."""

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import stree_jax
from stree_jax.convert import CheckpointError, convert_checkpoint
from tests.support.checkpoints import assert_same, edit_json, sources
from tests.support.families import FAMILIES, random_model

convert = partial(convert_checkpoint, progress=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return sources(tmp_path_factory.mktemp("sources"))


OWN_DAMAGE = {
    "version": (lambda v: v.update(version=4), "version"),
    "dtype": (lambda v: v.update(dtype="int4"), "dtype"),
    "no model": (lambda v: v.pop("model"), "model"),
    "unknown field": (lambda v: v["model"].update(extra=1), "model.extra"),
    "type": (lambda v: v["model"].update(d_model="24"), "model.d_model"),
    "negative": (lambda v: v["model"].update(d_model=-24), "model.d_model"),
    "huge": (lambda v: v["model"].update(vocab_size=1 << 60), "model.vocab_size"),
    "taps": (lambda v: v["model"]["mixers"]["mamba"].update(d_conv=1 << 20), "d_conv"),
    "kind": (lambda v: v["model"].update(layers=["rwkv"]), "unknown mixer 'rwkv'"),
    "mismatch": (
        lambda v: v["model"].update(vocab_size=60, num_tokens=60),
        "embedding.*shape",
    ),
    "fewer layers": (lambda v: v["model"]["layers"].pop(), "layers_2/.*shape"),
    "no sizes": (lambda v: v.pop("files"), "files"),
}


@pytest.mark.parametrize("case", OWN_DAMAGE)
def test_damaged_config_of_ours(source, tmp_path, case):
    change, where = OWN_DAMAGE[case]
    convert(source("mamba2"), tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", change)
    with pytest.raises(CheckpointError, match=where) as caught:
        stree_jax.load(tmp_path / "model")
    assert "\n" not in str(caught.value)


EARLIER = Path(__file__).parents[1] / "support" / "earlier_configs.jsonl"


@pytest.mark.parametrize("line", EARLIER.read_text().splitlines(), ids=lambda s: s[:24])
def test_directories_of_earlier_versions_are_read(tmp_path, line):
    """`earlier_configs.jsonl` has the configs that version 1 wrote for `FAMILIES`."""
    case = json.loads(line)
    model = random_model(FAMILIES[case["family"]], 0)
    stree_jax.save(model, tmp_path / "model")

    def earlier(values):
        values.pop("checksum")
        values.update(version=1, model=case["model"])

    edit_json(tmp_path / "model" / "config.json", earlier)
    assert_same(stree_jax.load(tmp_path / "model", mtp=bool(model.config.mtp)), model)


def test_every_missing_or_cut_file_of_ours(source, tmp_path):
    convert(source("mamba2"), tmp_path / "model")
    params = [f for f in (tmp_path / "model" / "params").rglob("*") if f.is_file()]
    for file in [tmp_path / "model" / "config.json", *params]:
        whole = file.read_bytes()
        for damaged in (whole[:-2], None):
            file.write_bytes(damaged) if damaged is not None else file.unlink()
            if whole:
                with pytest.raises(CheckpointError) as caught:
                    stree_jax.load(tmp_path / "model")
                assert file.name in str(caught.value)
        file.write_bytes(whole)
    stree_jax.load(tmp_path / "model")


ENDLESS = """
import itertools, sys
from pathlib import Path
from stree_jax.convert import convert_checkpoint
print("ready", flush=True)
for i in itertools.count():
    out = Path(sys.argv[2], str(i))
    convert_checkpoint(Path(sys.argv[1]), out, progress=False)
"""


def test_killed_conversions_leave_nothing_or_a_complete_directory(source, tmp_path):
    """Processes that convert repeatedly are killed meanwhile."""
    expected = stree_jax.load(source("mamba2"))
    root = Path(__file__).parents[2]
    running = []
    for i in range(3):
        (tmp_path / str(i)).mkdir()
        command = [sys.executable, "-c", ENDLESS, source("mamba2"), tmp_path / str(i)]
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(command, cwd=root, stdout=pipe, text=True))
    for i, process in enumerate(running):
        with process:
            assert process.stdout.readline() == "ready\n"
            while not (tmp_path / str(i) / "1").exists():
                assert process.poll() is None
                time.sleep(0.01)
            time.sleep(0.05 * (i + 1))
            process.send_signal(signal.SIGKILL)
    for i in range(3):
        made = [d for d in (tmp_path / str(i)).iterdir() if d.name[0] != "."]
        assert len(made) >= 2
        for directory in made:
            assert_same(stree_jax.load(directory), expected)
