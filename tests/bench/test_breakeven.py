"""Test `bench breakeven`: its arithmetic by hand, rounds of drafting, its report."""

from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import breakeven, drafting
from bench.command import measure, table_of
from bench.passes import CONTEXT, Turns
from bench.registry import parse_bench
from bench.shapes import config_of, random_model
from stree_jax.convert.export_gguf import write_gguf
from stree_jax.models.drafters.dflash import dflash_table
from stree_jax.models.layers.params import abstract_table, parameter_count
from tests.bench.pairs import HYBRID, MAMBA2, cells, params_of


@pytest.mark.parametrize(
    "tau, drafts, rate",
    [(1.1, 1, 0.1), (1.75, 2, 0.5), (1.875, 3, 0.5), (4, 3, 1), (0.9, 3, 0)],
)
def test_rates_of_chains_by_hand(tau, drafts, rate):
    """1 + a + a^2 + ..: 1.1 = 1 + a; 1.75 = 1 + 1/2 + 1/4; 1.875 = 1.75 + 1/8."""
    assert breakeven.chain_rate(tau, drafts) == pytest.approx(rate, abs=1e-6)


def test_no_rate_is_enough():
    assert breakeven.chain_rate(4.1, 3) is None
    assert breakeven.tree_rate(2.1, 4, 1) is None


def test_rates_of_trees_by_hand():
    """At a = 1/2 the first guesses are accepted at 0.5, 0.2, 0.08. Two nodes of one
    level have 1.7; the best three of two levels are 0.5, 0.2 and 0.5^2, together 1.95.
    """
    assert breakeven.tree_rate(1.7, 3, 1) == pytest.approx(0.5, abs=1e-6)
    assert breakeven.tree_rate(1.95, 4, 2) == pytest.approx(0.5, abs=1e-6)
    assert breakeven.tree_rate(1.95, 4, 2) < breakeven.chain_rate(1.95, 3)
    assert breakeven.tree_rate(1.1, 10, 1) is None  # it has eight guesses


def test_rows_by_hand():
    times = {
        "lookup": {"1": [0.0], "3": [0.0]},
        "dspark": {"1": [0.4, 0.4, 9.0], "3": [0.45]},
        "ours": {"1": [1.0, 0.9, 7.0], "2": [1.1], "4": [1.3]},
        "llama.cpp": {"1": [2.0], "2": [3.0], "4": [9.0]},
    }
    rows = {(r["drafter"], r["nodes"]): r for r in breakeven.rows_of(times, [4, 2])}
    assert list(rows) == [("lookup", 2), ("lookup", 4), ("dspark", 2), ("dspark", 4)]
    free, two, four = rows["lookup", 2], rows["dspark", 2], rows["dspark", 4]
    assert free["tau"] == free["pass"] == pytest.approx(1.1)
    assert free["chain"] == pytest.approx(0.1, abs=1e-6)
    assert (free["llama_pass"], free["llama_chain"]) == pytest.approx((1.5, 0.5))
    assert rows["lookup", 4]["llama_pass"] == 4.5
    assert rows["lookup", 4]["llama_chain"] is two["llama_pass"] is None
    assert (two["tau"], two["chain"]) == pytest.approx((1.5, 0.5))
    assert (four["tau"], four["drafting"]) == pytest.approx((1.75, 0.45))
    # The best three are two of the first level and one of the second, 1.4 a + a^2.
    assert four["tree"] == pytest.approx((4.96**0.5 - 1.4) / 2) and four["levels"] == 3
    assert (two["best"], four["best"]) == (False, True)


def test_a_drafter_with_few_drafts():
    times = {"ours": {"1": [1.0], "8": [1.0]}, "dspark": {"3": [0.75]}}
    (row,) = breakeven.rows_of(times, [8])
    assert row["drafts"] == 3 and row["tree"] < row["chain"] < 0.46


@pytest.fixture(scope="module")
def target():
    config = replace(HYBRID, d_model=64, mtp=("attention", "mlp"))
    return random_model(config, "float32")


@pytest.mark.parametrize("name", ["mtp", "dspark", "hybrid-2m"])
def test_rounds_of_drafting(target, name):
    """A call of three rounds is three calls of one, and the text stays as long."""
    drafter = drafting.random_drafter(name, target, "float32")
    three, once = (
        drafting.compile_drafting(target, drafter, 2, passes=n) for n in (3, 1)
    )
    carry = once.begin()
    for _ in range(3):
        carry = once.run(carry)
    other = three.run(three.begin())
    tokens = np.asarray(carry[2])
    assert tokens.shape == (1, 3) and (tokens < target.config.num_tokens).all()
    assert tokens.tolist() == np.asarray(other[2]).tolist()
    lengths = [
        part.length.tolist()
        for part in jax.tree.leaves(carry[0], is_leaf=lambda x: hasattr(x, "layers"))
        if hasattr(part, "layers")
    ]
    assert lengths == [[CONTEXT]]
    assert min(Turns(once)() for _ in range(2)) > 0


def test_the_published_dspark_drafter():
    """LiquidAI/LFM2.5-1.2B-Instruct-DSpark has 295.7 M parameters."""
    config = drafting.dspark_of(config_of("lfm2-1.2b"))
    count = parameter_count(abstract_table(dflash_table(config), jnp.float32))
    assert count == pytest.approx(295.7e6, rel=5e-3)
    assert (config.drafts, config.attention.num_kv_heads) == (9, 8)


def test_a_target_without_a_dspark_drafter_is_named():
    with pytest.raises(
        ValueError, match="--pairs: m:dspark: .*divisible by 64, got 32"
    ):
        drafting.check_drafter("dspark", "m", HYBRID)


def test_shapes_are_measured():
    words = ["breakeven", "--pairs", "hybrid-2m", "hybrid-2m:hybrid-2m", "--sizes", "3"]
    report = measure(parse_bench([*words, "--dtype", "float32", "--repeats", "1"]))
    found = [(r["drafter"], r["nodes"], r["drafts"]) for r in report["results"]]
    assert found == [("lookup", 3, 2), ("hybrid-2m", 3, 2)]
    times = report["units"]["hybrid-2m"]
    row = report["results"][1]
    seconds = median(times["ours"]["3"]) + median(times["hybrid-2m"]["2"])
    assert row["tau"] == pytest.approx(seconds / median(times["ours"]["1"]))
    rows = cells(table_of(report))
    assert len(rows) == 3 and rows[0][-1] == "tree: a* (levels)"


def test_a_file_beside_llama_cpp(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    path, orders = tmp_path / "m.gguf", []
    write_gguf(MAMBA2, params_of(MAMBA2), "f32", path)

    @contextmanager
    def process(python):
        def ask(order, **what):
            orders.append((order, what.get("count")))
            return {"seconds": 0.5 * what.get("count", 0)}

        yield ask

    monkeypatch.setattr(breakeven, "llama_process", process)
    monkeypatch.setattr(breakeven, "llama_version", lambda python: {"version": "0"})
    words = ["breakeven", "--pairs", str(path), "--sizes", "4", "--repeats", "1"]
    words += ["--dtype", "float32", "--llama-python", "python"]
    report = measure(parse_bench(words))
    assert orders[0][0] == "load" and {n for _, n in orders[1:]} == {1, 4}
    (row,) = report["results"]
    assert (row["llama_pass"], row["llama_chain"]) == (4, pytest.approx(1))
    head, cell = cells(table_of(report))
    assert head[-2:] == ["llama.cpp: pass", "llama.cpp: a*"]
    assert cell[0] == "m.gguf" and cell[-2:] == ["4.00", "1.00"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--pairs", "hybrid-2m:mtp"], "--pairs: hybrid-2m has no MTP layers"),
        (["--pairs", "hybrid-2m:dspak"], "--pairs: unknown 'dspak'; .*'dspark'"),
        (["--pairs", "demo"], "--pairs: demo is no shape and no GGUF file"),
        (["--sizes", "1"], "--sizes: want 2..64 nodes, got 1"),
        (["--llama-python", "no/python"], "--llama-python: no/python: No such file"),
    ],
)
def test_wrong_options_are_named(words, message):
    with pytest.raises(ValueError, match=message):
        measure(parse_bench(["breakeven", *words]))
