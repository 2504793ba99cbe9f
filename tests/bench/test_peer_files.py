"""Test `bench peers` and `bench kl` on a GGUF file that all programs take as it is.

llama.cpp is a stand-in that computes with this library.
"""

import os
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from bench import kl, peer_files, peers, quantized_files, resident
from bench.arms import PLAIN
from bench.command import measure
from bench.peer_tables import LLAMA, LLAMA_DRAFTS
from bench.registry import parse_bench
from bench.shapes import config_of
from stree_jax.convert.export_gguf import write_gguf
from stree_jax.generation.scoring import score
from stree_jax.models import init_params
from tests.bench.pairs import MAMBA2, cells, drawn, params_of


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("file") / "m.gguf"
    write_gguf(MAMBA2, params_of(MAMBA2), "q8_0", path)
    return path


@pytest.fixture
def orders(monkeypatch, file):
    """Replaces llama.cpp by a stand-in whose logits are 0.01 times the largest away.
    Returns the list of its orders."""
    model, given = stree_jax.load(file, dtype="float32"), []

    @contextmanager
    def process(python):
        def ask(order, **what):
            given.append((order, what))
            if order == "logits":
                logits = np.array(score(model, [what["ids"]]))[0, what["read"] - 1 :]
                logits[-1, 5] += 0.01 * what["batch"] * np.abs(logits).max()
                Path(what["path"]).write_bytes(logits.tobytes())
            if order == "decode":
                tokens = list(range(what["count"] - (what["draft"] == 10)))
                return {"seconds": 0.004, "tokens": tokens, "calls": 2}
            return {"can_draft": {"supported": True}}.get(order, {"seconds": 0.1})

        yield ask

    memory = {"base": 10, "loading": 10**6, "loaded": 5 * 10**5, "decoding": 10**6}
    known = {"version": "0", "built_with": "nothing"}
    for module in (peers, kl):
        monkeypatch.setattr(module, "llama_process", process)
        monkeypatch.setattr(module, "llama_version", lambda python: known)
    monkeypatch.setattr(peers, "our_memory", lambda *args: memory | {"load_s": 1.0})
    monkeypatch.setattr(peers, "llama_memory", lambda *args: memory | {"load_s": 2.0})
    monkeypatch.setattr(peers, "transformers_version", lambda: None)
    return given


def measured(*words):
    return measure(parse_bench([*map(str, words), "--llama-python", "python"]))


def test_peers_take_the_same_file(file, orders):
    words = ["--passes", 1, 2, "--prefill", 8, "--count", 1, "--max-new-tokens", 4]
    words += ["--dtypes", "float32", "--repeats", 1, "--arms", "E"]
    report = measured("peers", "--model", file, *words)
    loads = [what["path"] for order, what in orders if order == "load"]
    assert loads == [str(file)]
    rows = {row["arm"]: row for row in report["results"]}
    assert list(rows) == [PLAIN, LLAMA, *LLAMA_DRAFTS]
    assert [rows[name]["equal"] for name in LLAMA_DRAFTS] == [1, 0]
    assert rows["llama.cpp, lookup 2"]["tau"] == 2
    check = report["units"]["logits"]["m.gguf/float32"]
    ours, llama = check["programs"]["ours"], check["programs"]["llama.cpp"]
    assert ours["exact"]["relative"] < 1e-4 and ours["passes"]["2"]["relative"] < 1e-4
    assert llama["exact"]["relative"] == pytest.approx(0.01, rel=0.3)
    assert llama["passes"]["2"]["relative"] == pytest.approx(0.01, rel=0.3)
    assert [row["llama.cpp"] for row in report["prefill_rates"]] == [pytest.approx(80)]
    rows = cells(peers.table(report))
    assert [row[0] for row in rows].count("llama.cpp") == 3
    assert len(drawn(report).axes) == 1


def test_another_model_is_not_timed(file, orders, monkeypatch):
    monkeypatch.setattr(peer_files, "OTHER_MODEL", 0.001)
    with pytest.raises(RuntimeError, match="llama.cpp: logits .* are 0.0.*exact"):
        measured("peers", "--model", file, "--dtypes", "float32", "--arms", "E")


def test_kept_weights_need_a_file():
    with pytest.raises(ValueError, match="--dtypes kept: only for a GGUF file"):
        measured("peers", "--dtypes", "kept", "--shapes", "mamba2-130m")


def test_the_bytes_of_a_file(file):
    found = peer_files.model_file(str(file), None)
    sizes = jax.tree.leaves(params_of(MAMBA2))
    assert found.parameters == sum(leaf.size for leaf in sizes)
    table = MAMBA2.vocab_size * MAMBA2.d_model * 34 // 32
    assert found.file_bytes - found.read_bytes == table  # an untied embedding
    assert peer_files.model_file("demo", None) is None


def test_kl_of_a_file(file, orders):
    words = ["--dtypes", "bfloat16", "--tokens", 20]
    report = measured("kl", "--model", file, *words)
    ours, one, many = report["results"]
    assert 0 < ours["kl_mean"] < 1e-3 and 0.8 < ours["same_best"] <= 1
    assert one["kl_mean"] < many["kl_mean"]
    assert [row[0] for row in cells(kl.table(report))[1:]] == [
        "bfloat16",
        "llama.cpp, 1 token a pass",
        "llama.cpp, 128 tokens a pass",
    ]


def test_the_distance_of_distributions():
    exact, other = np.log([[[0.5, 0.5], [0.8, 0.2]], [[0.75, 0.25], [0.2, 0.8]]])
    found = kl.distance(exact, other)
    kls = [0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25), 0.6 * np.log(4)]
    assert found["kl_mean"] == pytest.approx(np.mean(kls))
    assert found["same_best"] == 0.5
    assert found["largest"] == pytest.approx(np.mean(np.log([2, 4])))


def test_resident_memory():
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    found = resident.resident(os.getpid())
    assert 10**6 < found["now"] <= found["peak"]


def test_files_are_made_by_the_quantizer(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    made = []

    @contextmanager
    def process(python):
        def ask(order, source, target, kind):
            assert order == "quantize" and Path(source).exists()
            made.append(kind)
            Path(target).write_bytes(b"")

        yield ask

    monkeypatch.setattr(quantized_files, "llama_process", process)
    written = quantized_files.write_types(
        "hybrid-2m", ["Q4_0", "Q6_K"], Path("python"), tmp_path
    )
    assert made == ["Q4_0", "Q6_K"]
    assert [path.name for path in written] == [
        f"hybrid-2m-{kind}.gguf" for kind in made
    ]
    assert sorted(tmp_path.iterdir()) == written  # the source is removed


def test_parameters_of_the_shapes_of_files():
    for shape, count in (("hybrid-2m", 1.9e6), ("hybrid-1.2b", 1.2e9)):
        config = config_of(shape)
        params = jax.eval_shape(
            lambda config=config: init_params(config, jax.random.key(0), jnp.float32)
        )
        found = sum(leaf.size for leaf in jax.tree.leaves(params))
        assert found == pytest.approx(count, rel=0.03)
