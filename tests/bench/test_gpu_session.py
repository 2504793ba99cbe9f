"""Test the bookkeeping of sessions on a GPU, with commands that need none."""

import json
import sys

import pytest

from bench import gpu_session
from bench.gpu_session import STEPS, Step, finished, run_session
from bench.registry import parse_bench


def python(name, code, minutes=1.0):
    return Step(name, (sys.executable, "-c", code), minutes)


SESSION = (
    python("writes", "open('FOLDER/made', 'a').write('x'); print('well')"),
    python("fails", "raise SystemExit(3)"),
    python("hangs", "import time; print(1, flush=True); time.sleep(60)", 0.02),
)


def test_a_session_resumes_after_its_last_success(tmp_path, capsys):
    folder = tmp_path / "out"
    first = run_session(SESSION, folder, 1)
    assert first == {"writes": 0, "fails": 3, "hangs": None}
    assert finished(folder) == {"writes"}
    assert run_session(SESSION[:2], folder, 1) == {"fails": 3}
    assert (folder / "made").read_text() == "x"
    assert (folder / "writes.txt").read_text() == "well\n"
    lines = (folder / "steps.jsonl").read_text().splitlines()
    names = [json.loads(line)["name"] for line in lines]
    assert names == ["writes", "fails", "hangs", "fails"]
    assert "writes: done before" in capsys.readouterr().out


def test_a_step_is_not_started_without_time_for_it(tmp_path, capsys):
    assert run_session(SESSION[:1], tmp_path, 0) == {}
    assert "writes: no time left" in capsys.readouterr().out
    assert not (tmp_path / "made").exists()


def test_a_benchmark_that_is_not_complete_runs_again(tmp_path):
    code = "open('FOLDER/part.json', 'w').write('{\"complete\": false}')"
    step = python("part", code)
    assert run_session([step], tmp_path, 1) == {"part": None}
    assert finished(tmp_path) == set()


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_commands_are_understood(step):
    """Benchmarks know their options, and tests exist."""
    module, *words = step.words[2:]
    if module == "bench":
        assert parse_bench(words).benchmark == words[0]
    else:
        files = [word for word in words if word.startswith("tests")]
        assert files and all(map(gpu_session.Path.exists, map(gpu_session.Path, files)))
