"""Test reports on passes, unrolled decoding, kernels and memory."""

import json
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import (
    arms,
    device_memory,
    forward,
    kernels,
    passes,
    shapes,
    unrolled,
)
from bench.method import Run
from bench.registry import parse_bench
from bench.unroll import Unrolled
from stree_jax.cli.main import main
from stree_jax.models import init_records, init_state
from stree_jax.models.stack.state import Pending
from stree_jax.speculation.step import packed as verify_packed
from stree_jax.speculation.tree import resolve_tree
from tests.bench.pairs import MAMBA2, cells, drawn, measured
from tests.support.tiny import REAL, perturbed, tiny, too_much

SIZED = {"memory_bytes", "temp_bytes"}


@pytest.fixture(scope="module")
def target():
    return tiny(1, layers=("mamba",), d_model=16)


@pytest.fixture(scope="module")
def drafter(target):
    return target.replace(params=perturbed(target.params, 0.05, 3))


def passes_of(*words):
    return parse_bench(["forward", "--shape", "small", *words])


class Killed(Exception):
    pass


def killed_at(call, n):
    """Wraps `call` so that its n-th call raises `Killed`."""
    calls = []

    def counted(*args, **options):
        calls.append(args)
        if len(calls) == n:
            raise Killed
        return call(*args, **options)

    return counted


# --- memory ---------------------------------------------------------------------------


def test_bytes_of_a_program_count_a_donated_buffer_once():
    x = jax.ShapeDtypeStruct((1000,), jnp.float32)
    kept = jax.jit(lambda x: x + 1).lower(x).compile()
    donated = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    for compiled, size in ((kept, 8000), (donated, 4000)):
        sizes = device_memory.compiled_bytes(compiled)
        assert sizes["memory_bytes"] - sizes["temp_bytes"] == size


def test_allocator_peaks_are_taken_in_ascending_order(monkeypatch):
    called, peak = [], [100]

    def arm(name, size):
        def call():
            called.append(name)
            peak[0] = max(peak[0], size)

        return call

    arms = {
        "big": (30, arm("big", 300)),
        "small": (10, arm("small", 200)),
        "hidden": (20, arm("hidden", 150)),  # the compiler predicted more
    }
    monkeypatch.setattr(device_memory, "peak_in_use", lambda: peak[0])
    peaks = device_memory.allocator_peaks(arms)
    assert called == ["small", "hidden", "big"]
    assert peaks == {"small": 200, "hidden": None, "big": 300}
    monkeypatch.setattr(device_memory, "peak_in_use", lambda: None)
    assert device_memory.allocator_peaks(arms) == dict.fromkeys(arms)
    assert len(called) == 3  # without memory statistics, nothing runs


# --- forward --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("levels", "leaves", "tokens"), [(4, 8, 32), (5, 16, 80), (6, 32, 192)]
)
def test_sizes_of_unrolled_full_trees(levels, leaves, tokens):
    tree = resolve_tree(f"binary:{levels}")
    packed, step = (passes.Case(tree.size, scan) for scan in ("packed", "step"))
    assert packed.tree.parents.tolist() == tree.parents.tolist()
    assert unrolled.leaves_of(tree.rows(2)).tolist() == [leaves] * 2
    assert (packed.tokens, packed.states) == (2**levels - 1, 1)
    assert (step.tokens, step.states) == (tokens, 1 + leaves)
    assert step.verify == Unrolled(leaves, "step") and packed.verify is verify_packed


@pytest.mark.parametrize("nodes", [15, 63])
def test_all_scans_agree(target, nodes):
    model = target  # tests/bench/test_unrolled.py has attention
    rng = np.random.default_rng(0)

    def noise(path, z):
        value = rng.normal(size=z.shape).astype(z.dtype)
        return jnp.asarray(-abs(value) if path[-1].name == "a" else value)

    draft = passes.draft_of(passes.Case(nodes, "packed"), model.config)
    state = jax.eval_shape(lambda: init_state(model.config, 1, 24, jnp.float32))
    layers = jax.tree_util.tree_map_with_path(noise, state.layers)
    state = replace(state, layers=layers, length=jnp.asarray([9], jnp.int32))
    records = jax.eval_shape(lambda: init_records(model.config, 1, nodes, jnp.float32))
    records = jax.tree_util.tree_map_with_path(noise, records)
    path = draft.layout.paths[:, -1]
    pending = Pending(records, path, jnp.asarray([3], jnp.int32))

    @jax.jit
    def all_scans(model, *args):
        return [passes.Case(nodes, scan).verify(model, *args) for scan in passes.SCANS]

    packed, *others = all_scans(model, state, draft, pending)
    for other in others:
        chex.assert_trees_all_close(other, packed, atol=2e-4, rtol=1e-3)
    assert float(jnp.std(packed.hidden)) > 0.1


def test_forward_report(target, monkeypatch, tmp_path):
    compiled, peak = [], [0]

    def counted(model, case, passes_a_call):
        compiled.append(case)
        return passes.compile_case(model, case, passes_a_call)

    def rising():
        peak[0] += 1
        return peak[0]

    monkeypatch.setattr(forward, "config_of", lambda name: target.config)
    monkeypatch.setattr(forward, "compile_case", counted)
    # A backend with memory statistics
    monkeypatch.setattr(forward, "peak_in_use", rising)
    monkeypatch.setattr(device_memory, "peak_in_use", rising)

    def measured():
        run = Run(2, tmp_path / "r.json")
        return forward.measure(passes_of("--sizes", "1", "7", "--levels", "3"), run)

    with monkeypatch.context() as patch:
        patch.setattr(forward, "time_cases", killed_at(forward.time_cases, 2))
        with pytest.raises(Killed):
            measured()
    assert len(compiled) == 4  # each case once for all units
    part = (tmp_path / "r.json.part").read_text().splitlines()
    kept = dict(json.loads(line) for line in part[1:])
    assert list(kept) == ["allocator", "bandwidth", "sizes"]
    report = measured()
    assert [case.nodes for case in compiled[4:]] == [7, 7, 7]
    assert {name: report["units"][name] for name in kept} == kept
    assert report["complete"] and json.loads(json.dumps(report)) == report

    sizes, trees = report["results"][:2], report["results"][2:]
    assert [row["nodes"] for row in sizes] == [1, 7]
    assert [row["scan"] for row in trees] == list(passes.SCANS)
    assert [row["tokens"] for row in trees] == [7, 12, 12]
    assert [row["states"] for row in trees] == [1, 5, 5]
    assert all(row["same_argmax"] == 1 for row in trees)
    assert all(row["allocator_peak_bytes"] > 0 for row in trees)
    packed, *others = trees
    assert packed["over_packed"] == 1
    for row in others:
        assert row["temp_bytes"] > packed["temp_bytes"]
        assert row["over_packed"] == pytest.approx(row["ms"] / packed["ms"])
    for row in report["results"]:
        assert row.keys() == packed.keys() > SIZED and "seconds" not in row
        assert row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row["memory_bytes"] > report["weight_bytes"] == report["read_bytes"]
    shown = cells(forward.table(report))
    assert len(shown) == 2 + len(report["results"])

    cut = report | {"results": [], "fit": None, "floor_ms": None}  # as with --minutes 0
    assert forward.table(cut).startswith("small, float32")


def test_passes_that_run_out_of_memory(target, monkeypatch):
    def compile_case(model, case, passes_a_call):
        program = passes.compile_case(model, case, passes_a_call)
        fits = case.scan == "packed" and case.nodes < 7
        return program if fits else replace(program, run=too_much)

    monkeypatch.setattr(forward, "config_of", lambda name: target.config)
    monkeypatch.setattr(forward, "compile_case", compile_case)
    words = ["--sizes", "1", "7", "--levels", "2", "3"]
    report = forward.measure(passes_of(*words), Run(2))
    assert json.loads(json.dumps(report)) == report
    found = [row["ms"] is not None for row in report["results"]]
    assert found == [True, False, True, False, False, False, False, False]
    for row in report["results"]:
        compared = row["ms"] is not None
        assert (row["over_packed"] == 1) is compared and row["memory_bytes"] > 0
    assert report["fit"] is None  # only one size remains
    assert sum("OOM" in row for row in cells(forward.table(report))) == 6
    drawn(report)


def test_the_fit_is_in_milliseconds():
    rows = [{"nodes": n, "ms": 2 + 3 * n + 0.5 * n * n} for n in (1, 4, 9, 16)]
    fit = forward.fit_of(rows, 2)
    assert [fit[k] for k in ("c_ms", "b_ms", "a_ms")] == pytest.approx([2, 3, 0.5])
    assert fit["r2"] == pytest.approx(1) and fit["largest_error"] < 1e-6
    assert forward.fit_of(rows[:2], 2) is None
    report = {"shape": "s", "dtype": "d", "weight_bytes": 1e6, "floor_ms": None}
    report |= {"results": [], "fit": forward.fit_of(rows, 2) | {"b_ms": -3}}
    assert "t(N) = 2.00 - 3.000 N + 0.50000 N^2 ms" in forward.table(report)


def test_bytes_read_by_a_pass(target):
    tied, apart = (replace(target.config, tie_embeddings=t) for t in (True, False))
    assert len(set(forward.bytes_of(tied, "float32"))) == 1
    total, read = forward.bytes_of(apart, "float32")
    assert total - read == apart.vocab_size * apart.d_model * 4
    for option, value, most in (
        ("--sizes", 0, 1024),
        ("--sizes", 1025, 1024),
        ("--levels", 11, 10),
    ):
        args = parse_bench(["forward", option, str(value)])
        with pytest.raises(ValueError, match=f"{option}: want 1..{most}, got {value}"):
            forward.measure(args, Run(1))
    with pytest.raises(ValueError, match="--shape: unknown 'small'; known: "):
        forward.measure(passes_of(), Run(1))


# --- unrolled -------------------------------------------------------------------------


def test_leaves_by_row():
    parents = jnp.asarray(
        [[-1, 0, 0, 1, 2, 4], [-1, 0, 0, 0, 0, 0], [-1, 0, 1, 2, 3, 4]]
    )
    assert unrolled.leaves_of(parents.astype(jnp.int32)).tolist() == [2, 5, 1]


def beam_report(target, drafter, run):
    rng = np.random.default_rng(0)
    prompts = {"ids": [tuple(rng.integers(8, REAL, 5).tolist()) for _ in range(2)]}
    words = [
        "--prompts",
        "p",
        "--beam-widths",
        "2",
        "--beam-depths",
        "3",
        "--max-new-tokens",
        "12",
    ]
    return measured(unrolled, words, (target, drafter), prompts, run)


def test_unrolled_report(target, drafter, monkeypatch, tmp_path):
    run = Run(2, tmp_path / "r.json")
    with monkeypatch.context() as patch:
        patch.setattr(unrolled, "decode_text", killed_at(unrolled.decode_text, 2))
        with pytest.raises(Killed):
            beam_report(target, drafter, run)
    part = (tmp_path / "r.json.part").read_text().splitlines()
    (kept,) = (json.loads(line) for line in part[1:])
    report = beam_report(target, drafter, run)
    assert list(report["units"]) == ["2x3/ids/0", "2x3/ids/1"]
    assert [kept[0], report["units"][kept[0]]] == kept
    assert report["complete"] and json.loads(json.dumps(report)) == report

    packed, step = report["results"]
    assert [row["scan"] for row in report["results"]] == ["packed", "step"]
    for row in report["results"]:
        assert (row["set"], row["width"], row["depth"], row["nodes"]) == (
            "ids",
            2,
            3,
            7,
        )
        assert row["units"] == row["equal"] == 2
        assert (
            row["tokens_per_s_low"] <= row["tokens_per_s"] <= row["tokens_per_s_high"]
        )
        assert 1 <= row["leaves_mean"] <= row["leaves"] <= row["leaves_bound"] == 4
        assert row.keys() == packed.keys() > SIZED
    assert packed["tau"] == step["tau"] > 1
    assert (packed["states"], step["states"]) == (1, 1 + step["leaves"])
    assert (packed["tokens_per_call"], step["tokens_per_call"]) == (
        7,
        4 * step["leaves"],
    )
    assert step["temp_bytes"] > packed["temp_bytes"]
    assert packed["over_packed"] is None and step["over_packed"] > 0
    shown = cells(unrolled.table(report))
    assert [row[:3] for row in shown[3:]] == [
        ["ids", "2 x 3", "packed"],
        ["ids", "2 x 3", "step"],
    ]


def test_a_baseline_that_runs_out_of_memory(target, drafter, monkeypatch):
    def decode_once(work, arm, texts, temperature):
        if arm.verify is not verify_packed:
            too_much()
        return arms.decode_once(work, arm, texts, temperature)

    monkeypatch.setattr(unrolled, "decode_once", decode_once)
    report = beam_report(target, drafter, Run(1))
    assert report["complete"] and json.loads(json.dumps(report)) == report
    packed, step = report["results"]
    assert (packed["units"], step["units"]) == (2, 0)
    assert packed.keys() == step.keys() and step["tokens_per_s"] is None
    assert step["memory_bytes"] > packed["memory_bytes"]
    shown = cells(unrolled.table(report))
    assert f"{packed['tokens_per_s']:.1f} / OOM;" in shown[1][1]
    assert "OOM" in shown[-1] and "OOM" not in shown[-2]
    drawn(report)


@pytest.fixture
def small_shapes(monkeypatch):
    """Defines the shapes "tiny", and "other" with a smaller vocabulary."""
    small = replace(MAMBA2, d_model=64, layers=MAMBA2.layers[:1])
    found = {
        "tiny": replace(small, vocab_size=128, num_tokens=120),
        "other": replace(small, vocab_size=96, num_tokens=90),
    }
    monkeypatch.setattr(shapes, "config_of", found.__getitem__)


def test_random_weights_of_a_shape(small_shapes, capsys):
    options = [
        "--beam-widths",
        "2",
        "--beam-depths",
        "2",
        "--repeats",
        "1",
        "--count",
        "2",
    ]
    options += ["--max-new-tokens", "8", "--shape", "other"]
    assert main(["bench", "unrolled", *options, "--drafter-shape", "tiny"]) == 0
    assert cells(capsys.readouterr().out)[-1][:3] == ["other, tiny", "2 x 2", "step"]
    for wrong in (["--shape", "tiny", "--prompts", "a.jsonl"], []):
        assert main(["bench", "unrolled", *wrong]) == 2
        assert "want either --prompts or --shape" in capsys.readouterr().err
    assert main(["bench", "unrolled", "--shape", "other", "--widen", "4"]) == 2
    assert "--widen is for models" in capsys.readouterr().err


def test_a_drafter_shape_gets_the_vocabulary_of_the_target(small_shapes):
    target, drafter = shapes.random_pair("other", "tiny", "bfloat16")
    assert (drafter.config.vocab_size, drafter.config.num_tokens) == (96, 90)
    assert drafter.params["embedding"].shape == (96, 64)
    assert drafter.params["embedding"].dtype == jnp.bfloat16
    assert not (drafter.params["embedding"] == target.params["embedding"]).all()
    prompts = shapes.random_prompts(target.config, 2, 5)
    assert prompts == shapes.random_prompts(target.config, 2, 5)
    assert len(set(prompts)) == 2 and {len(ids) for ids in prompts} == {5}


def test_a_baseline_with_too_few_leaves_is_detected(target, drafter, monkeypatch):
    monkeypatch.setattr(unrolled, "count_leaves", lambda *args: [1])
    with pytest.raises(RuntimeError, match="step: token .* differs from plain"):
        beam_report(target, drafter, Run(1))


# --- kernels --------------------------------------------------------------------------


def test_kernels_report(monkeypatch):
    small_shapes = {
        "a scan": kernels.Scan(2, 1, 4, 8),
        "delta": kernels.Delta(2, 1, 4, 8),
        "attention": kernels.Attend(2, 1, 8, 16),
        "products": kernels.Multiply(6, 8, 2),
        "int8": kernels.Multiply(6, 8, 2, True, 4),
    }
    monkeypatch.setattr(kernels, "SHAPES", small_shapes)
    monkeypatch.setattr(kernels, "implementations", lambda: ("xla", "triton"))
    op_case = kernels.op_case

    def refusing(shape, batch, T, dtype, implementation):
        if implementation == "triton":
            raise NotImplementedError("triton: not here\nand more")
        return op_case(shape, batch, T, dtype, implementation)

    monkeypatch.setattr(kernels, "op_case", refusing)
    words = ["--batch", "2", "--sizes", "3", "--dtype", "float32"]
    report = kernels.measure(parse_bench(["kernels", *words]), Run(2))
    units = [f"{name}/2/3" for name in small_shapes]
    assert list(report["units"]) == ["bandwidth", *units]
    sizes = {row["op"]: row["bytes"] for row in report["results"]}
    assert sizes["products"] == 4 * (6 * 8 + 2 * 6 * 8)  # rows and two weight matrices
    assert sizes["int8"] == 4 * 6 * 8 + 2 * (6 * 8 + 4 * 6 * 2)
    assert json.loads(json.dumps(report)) == report
    state, token = 2 * 4 * 8, 2 * 4 + 2 + 1 + 8  # H P N; u, a, k_scale, k
    path, mask = 4 * (3 + 1), 3 * 3
    more = 2 * 4 + 2 + 8 + 1 + 8 + 1 + 2  # v, a, q, q_scale, k, k_scale, beta
    moved = 2 * 4 * state + 4 * 3 * (token + more) + path + mask
    assert sizes["delta"] == 2 * moved
    xla, triton = report["results"][:2]
    assert (xla["op"], xla["batch"], xla["T"]) == ("a scan", 2, 3)
    assert xla["over_xla"] == 1 and xla["refused"] is None
    assert xla["us_low"] <= xla["us"] <= xla["us_high"]
    assert triton["refused"] == "triton: not here"
    assert triton.keys() == xla.keys() and triton["us"] is None
    shown = cells(kernels.table(report))
    assert [row[5] for row in shown[2::2]] == ["triton: not here"] * 5
