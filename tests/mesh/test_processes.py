"""Test two processes that decode together, and their errors if they disagree."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import chex
import pytest

import stree_jax
from stree_jax.models.sharding.devices import connect
from tests.support.families import FAMILIES, prompts, random_model

ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def outputs(folder):
    """Returns what each of two processes with two devices printed."""
    port = str(free_port())
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.mesh.two", port, str(place), str(folder)],
            cwd=ROOT,
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in range(2)
    ]
    ends = [run.communicate(timeout=300) for run in runs]
    for run, (_, err) in zip(runs, ends, strict=True):
        assert run.returncode == 0, err[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in ends]


def test_text_matches_one_device(outputs):
    model = random_model(FAMILIES["bamba"], 1)
    ids = prompts(model.config, 4)
    options = {"max_new_tokens": 4, "drafter": "lookup", "tree": "A"}
    greedy = stree_jax.generate(model, ids, **options).tokens
    sampling = stree_jax.Sampling(temperature=1.0)
    drawn = stree_jax.generate(model, ids, sampling=sampling, **options).tokens
    for texts in outputs:
        for mesh in ("model=4", "data=2,model=2"):
            assert texts[f"{mesh} 0"] == greedy
            assert texts[f"{mesh} 1"] == drawn


def test_models_on_all_devices_are_saved(outputs, folder):
    """Process 0 writes the same as a single process with the whole model."""
    bamba = random_model(FAMILIES["bamba"], 1)
    whole = {"model=4": bamba, "data=2,model=2": bamba, "demo": stree_jax.load("demo")}
    for name, model in whole.items():
        assert [texts[f"save {name}"] for texts in outputs] == [None, None]
        saved = stree_jax.load(folder / name)
        chex.assert_trees_all_equal(saved.params, model.params)
        assert saved.config == model.config
        assert (saved.tokenizer is None) == (model.tokenizer is None)


def test_all_processes_say_that_a_model_is_not_saved(outputs):
    first, second = (texts["save again"] for texts in outputs)
    assert first.endswith("exists already; choose another place")
    assert second.endswith("process 0 did not write it; see its error")


ALONE = """
import sys
from stree_jax.cli import devices, main

devices.CONNECT_S = 2
words = ["--mesh", "model=2", "--processes", "2", "--process-id", sys.argv[2]]
main.main(["generate", "a", *words, "--coordinator", sys.argv[1]])
"""


@pytest.mark.parametrize("place", ["0", "1"])
def test_a_process_alone_times_out(place):
    words = [sys.executable, "-c", ALONE, f"localhost:{free_port()}", place]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and run.stdout == ""
    lines = [line for line in run.stderr.splitlines() if line.startswith("stree-jax")]
    assert len(lines) == 1 and "2 processes did not connect within 2 s" in lines[0]


@pytest.mark.parametrize("address", ["here", "here:", ":80", "here:x", "here:99999"])
def test_invalid_addresses_are_refused(address):
    with pytest.raises(ValueError, match="coordinator: want HOST:PORT"):
        connect(address, 2, 0)


def test_processes_that_disagree_get_an_error(outputs):
    for texts in outputs:
        assert texts["disagree"].startswith("process 1 was asked for something else")
