"""Test the llama.cpp process and `bench peers`.

llama.cpp itself is not run here. `bench peers` compares its logits before timing it.
"""

import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from bench import peers
from bench.arms import PLAIN, parse_arm
from bench.llama_process import llama_process, llama_version
from bench.method import Run
from bench.others import TRANSFORMERS
from bench.registry import parse_bench
from stree_jax.generation.scoring import score
from stree_jax.models import Model
from tests.bench.pairs import MAMBA2, cells, drawn, params_of

# --- the process ----------------------------------------------------------------------


def test_a_python_without_llama_cpp_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--llama-python: .*No such file"):
        llama_version(tmp_path / "python")
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(ValueError, match="No module named '.*pip install llama-cpp"):
        llama_version(bare)


# --- the report -----------------------------------------------------------------------


def cell(seconds, tokens, calls, equal=None):
    times = {"seconds": seconds, "first_call_s": 1.0}
    return times | {"tokens": tokens, "calls": calls, "equal": equal}


def test_the_arithmetic_of_the_report():
    arms = {
        PLAIN: cell([2.0, 1.0, 4.0], 100, 100, True),
        "E": cell([0.5], 100, 40, False),
        peers.LLAMA: cell([1.0], 100, 100),
    }
    read = {"ours": 10**9, "llama.cpp": 2 * 10**9}
    units = {
        "logits": {"m/float32": {"logits_apart": 1e-5, "read_bytes": read}},
        "m/float32/set/0": {"bytes_per_s": 10**11, "arms": arms},
    }
    rows = {row["arm"]: row for row in peers.peer_rows(units)}
    plain, tree, llama = (rows[name] for name in arms)
    assert [row["tokens_per_s"] for row in rows.values()] == [50, 200, 100]
    assert [row["ms_per_token"] for row in rows.values()] == [20, 5, 10]
    assert [row["floor_ms"] for row in rows.values()] == pytest.approx([10, 10, 20])
    over = [row["over_floor"] for row in rows.values()]
    assert over == pytest.approx([2, 0.5, 0.5])
    medians = [row["over_llama"]["median"] for row in rows.values()]
    assert medians == [0.5, 2, 1]
    assert tree["over_transformers"] is None
    arms[TRANSFORMERS] = arms.pop(peers.LLAMA)
    alone = {row["arm"]: row for row in peers.peer_rows(units)}
    assert alone["E"]["over_transformers"]["median"] == 2
    assert alone["E"]["over_llama"] is None
    assert (plain["equal"], tree["equal"], llama["equal"]) == (1, 0, None)
    assert tree["tau"] == 2.5


@pytest.fixture
def subject():
    """Returns a model and a stand-in for llama.cpp whose logits are `off` away."""
    model = Model(params=params_of(MAMBA2), config=MAMBA2)
    prompts = {"random": [(1, 2, 3)]}
    return peers.Subject(model, model, (parse_arm(PLAIN),), prompts)


def stand_in(model, off):
    """A `llama_process` that returns this library's logits, with one of them
    changed."""

    @contextmanager
    def process(python):
        def ask(order, **what):
            if order == "logits":
                logits = np.array(score(model, [what["ids"]]))[0, what["read"] - 1 :]
                logits[-1, 5] += off * np.abs(logits).max()
                real = np.ascontiguousarray(logits[:, : model.config.num_tokens])
                Path(what["path"]).write_bytes(real.tobytes())
            timed = order in ("decode", "time_pass")
            return {"seconds": 0.001 * what["count"]} if timed else {}

        yield ask

    return process


def measured(monkeypatch, subject, off):
    monkeypatch.setattr(peers, "llama_process", stand_in(subject.target, off))
    known = {"version": "0", "built_with": "nothing"}
    monkeypatch.setattr(peers, "llama_version", lambda python: known)
    monkeypatch.setattr(peers, "transformers_version", lambda: None)
    monkeypatch.setattr(peers, "threads_of_xla", lambda: 2)
    words = ["--dtypes", "float32", "--llama-python", "python", "--passes", "1", "3"]
    args = parse_bench(["peers", *words, "--max-new-tokens", "4"])
    return peers.measure_peers({"tiny": subject}, args, Run(1))


def test_a_peer_with_other_logits_is_not_timed(monkeypatch, subject):
    with pytest.raises(RuntimeError, match="in float32 are 0.00.* more than 0.001"):
        measured(monkeypatch, subject, 0.002)


def test_a_report_with_llama_cpp(monkeypatch, subject):
    report = measured(monkeypatch, subject, 0.0005)
    assert report["complete"]
    apart = report["units"]["logits"]["tiny/float32"]["logits_apart"]
    assert apart == pytest.approx(0.0005, rel=0.05)
    rows = {row["arm"]: row for row in report["results"]}
    assert set(rows) == {PLAIN, peers.LLAMA} and rows[PLAIN]["equal"] == 1
    assert rows[peers.LLAMA]["tokens_per_s"] == pytest.approx(1000)
    single = {(r["program"], r["tokens"]): r for r in report["single_passes"]}
    assert list(single) == [(p, n) for p in ("ours", "llama.cpp") for n in (1, 3)]
    assert single["llama.cpp", 3]["ms"] == pytest.approx(3)
    assert single["llama.cpp", 3]["of_one"] == pytest.approx(3)
    text = peers.table(report)
    rows = cells(text)
    assert [row[1] for row in rows[:3]] == ["arm", PLAIN, peers.LLAMA]
    assert [row[:2] for row in rows[-2:]] == [["llama.cpp", "1"], ["llama.cpp", "3"]]
    assert "2 threads each" in text
    assert len(drawn(report).axes) == 1


def test_a_signal_that_ends_the_process_is_named(tmp_path):
    """For example an illegal instruction in a virtual machine, after which the last
    lines of output explain nothing."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho all is well >&2\nkill -SEGV $$\n")
    python.chmod(0o755)
    with llama_process(python) as ask:
        with pytest.raises(RuntimeError, match="load: died of SIGSEGV.*all is well"):
            ask("load")
