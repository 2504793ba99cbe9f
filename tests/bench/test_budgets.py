"""Test `bench memory`: bytes of shapes, what fits, conversations within a budget."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from bench import budgets, command, conversations, memory
from bench.budgets import Subject, last_fit, run_time
from bench.device_memory import cache_row_bytes
from bench.method import Run
from bench.prompts import read_turns
from bench.registry import parse_bench
from stree_jax.generation.generate import bucket
from stree_jax.models.drafters.heads import first_heads
from stree_jax.sizing.memory import abstract_model, memory_of
from stree_jax.sizing.parts import BufferSizes
from stree_jax.sizing.plan import Choice, plan
from stree_jax.sizing.request import Request
from tests.bench.pairs import cells, pair_with_words
from tests.support.families import FAMILIES
from tests.support.heads import random_heads

PROMPTS = {"MT-Bench": ["def f(x):", "x"]}
TURNS = [["def f(x):\n", "return x\n"]]
NEW, K = 6, 2
MOST = "2 heads, pruned:2x2x6"
OPTIONS = {
    "parts": ["breakdown", "longest", "caches", "pruned", "turns"],
    "shapes": ["pair"],
    "memory": "1GB",
    "small": "1MB",
    "sizes": [6],
    "head_counts": [1, 2],
    "caches": [512],
    "pruned": ["pruned:2x2x6"],
    "shares": [1.0, 0.5],
    "max_new_tokens": NEW,
}


def run_memory(models, prompts, turns, **chosen):
    loaded = {
        "load_models": (models.target, models.drafter),
        "load_heads": models.heads,
        "load_prompts": prompts,
        "read_turns": turns,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in loaded.items():
            patch.setattr(memory, name, lambda *args, value=value: value)
        return memory.measure(options(**chosen), Run(1))


def options(**chosen):
    args = parse_bench(["memory"])
    for name, value in (OPTIONS | chosen).items():
        assert hasattr(args, name)
        setattr(args, name, value)
    return args


@pytest.fixture(scope="module", autouse=True)
def few():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgets, "BATCHES", (1, 8))
        patch.setattr(budgets, "CONTEXTS", (1024, 4096))
        patch.setattr(budgets, "LONGEST", 2**13)
        yield


@pytest.fixture(scope="module")
def models():
    target, drafter = pair_with_words(layers=("mamba", "attention"))
    return memory.Models(target, drafter, random_heads(target, heads=K))


@pytest.fixture(scope="module")
def subject(models):
    return Subject(models.target, models.heads, "float32", 10**6)


def fixed(models, name, heads=K):
    """Returns a `Choice` as from the planner, of a tree that needs no step times."""
    request = Request(1, 64, 2, NEW)
    room = request.room(2)
    memory = memory_of(models.target, models.heads, name, room)
    return Choice(
        "heads", heads, name, "float32", 1.5, 1e-3, False, room.capacity, memory
    )


def plans(target, heads, turns, shares, max_new_tokens, timed):
    """A stand-in for the planner, with fixed trees, because "auto" would time steps."""
    models = memory.Models(target, target, heads)
    ample, less = fixed(models, "pruned:2x2x6"), fixed(models, "chain:1", heads=1)
    found = {shares[0]: (10**6, ample), shares[1]: (10**5, less), 0.1: (9, "too few")}
    request = Request(1, 64, 2, NEW)
    return conversations.Talk(target, heads, turns, request, ample, found)


@pytest.fixture(scope="module")
def report(models):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversations, "plans", plans)
        found = run_memory(models, PROMPTS, TURNS)
    jax.clear_caches()
    return json.loads(json.dumps(found))


def test_the_parts_of_the_breakdown_add_up(subject):
    rows = budgets.breakdown(subject, (4,))
    assert all(sum(row["parts"].values()) == row["total"] for row in rows)
    of = {(row["axis"], row["value"]): row["parts"] for row in rows}
    for part in ("attention caches", "SSM and convolution state"):
        assert of["batch", 8][part] == 8 * of["batch", 1][part]
    assert (
        of["context", 4096]["attention caches"]
        > of["context", 1024]["attention caches"]
    )
    assert "drafter's weights" not in of["nodes", 1]
    assert "drafter's weights" in of["nodes", 4]
    row = next(row for row in rows if row["axis"] == "nodes" and row["value"] == 4)
    weights = row["parts"]["target's weights"] + row["parts"]["drafter's weights"]
    assert row["run_time"] == row["total"] - weights


def test_the_longest_text_fits_and_a_longer_one_does_not(subject):
    for row in budgets.longest(subject, (6,)):
        tree = subject.tree(row["nodes"])
        for name, total in (("context", "promised"), ("steps", "steps_total")):
            width = row[name] - budgets.NEW_TOKENS
            after = next(n for n in range(width + 1, 2 * width) if bucket(n) == n)
            sizes = [
                getattr(subject.memory(tree, Request(1, n + 128)), total)
                for n in (width, after)
            ]
            assert sizes[0] <= subject.limit < sizes[1], (row, name)
        assert row["steps"] >= row["context"]
    alone = replace(subject, limit=1000)
    assert [row["context"] for row in budgets.longest(alone, ())] == [0]


def test_the_search_finds_the_last_size_that_fits():
    for count in (1, 2, 7, 20):
        sizes = [3 * i for i in range(count)]
        for limit in range(-1, 3 * count):
            fitting = [i for i in range(count) if sizes[i] <= limit]
            want = fitting[-1] if fitting else -1
            assert last_fit(sizes.__getitem__, limit, count) == want


def test_fixed_ratios_compared_with_the_planner(subject, monkeypatch):
    monkeypatch.setattr(budgets, "RATIOS", (1, 63))
    limit = 2 * 10**6
    half, little = budgets.ratios(replace(subject, limit=limit), (4, 6))
    for row, parts in ((half, 2), (little, 64)):
        assert row["cache_bytes"] <= limit // parts
    assert half["planned"] is None and half["queries"] > half["most_queries"]
    assert little["planned"]["bytes"] <= limit
    assert little["fixed"]["nodes"] == 6
    assert little["fixed"]["bytes"] + little["fixed"]["unused"] == limit - limit // 64


@pytest.mark.parametrize("limit", [3 * 10**5, 10**6])
def test_the_largest_number_of_queries_fits(subject, limit, monkeypatch):
    monkeypatch.setattr(budgets, "RATIOS", (1,))
    (row,) = budgets.ratios(replace(subject, limit=limit), (4, 6))
    most = row["most_queries"]
    more = next(n for n in range(most + 1, 2 * most) if bucket(n, 1) == n)
    for queries, fits in ((most, True), (more, False)):
        found = subject.memory(subject.tree(1), budgets.served(queries))
        assert (found.promised <= limit) == fits


def test_printed_numbers_match_the_paper():
    """The paper's 55 MB and 19.5 MB, and 65 % less for 20 conversations."""
    rows = budgets.printed(budgets.subject_of(budgets.PAPER, 16 * 10**9))
    assert [round(row["specmemo"] / 2**20, 1) for row in rows] == [55.2, 19.5]
    assert [row["printed_mib"] for row in rows] == ["55", "19.5"]
    stock, small = (row["specmemo"] for row in rows)
    assert round(20 * small / 2**20) == 391 and round(20 * stock / 2**20, -2) == 1100
    assert round(1 - small / stock, 2) == 0.65
    assert rows[0]["head_bytes"] * 3 == rows[1]["head_bytes"] * 4


def test_cache_rows_are_counted_in_every_kind_of_layer():
    """2 h k x d p for Llama-2-7B: 2048 tokens in 16 bits are one GiB."""
    llama = budgets.subject_of(budgets.PAPER, 0).target
    assert 2048 * cache_row_bytes(llama) == 2**30
    assert cache_row_bytes(budgets.subject_of("mamba2-2.7b", 0).target) == 0
    # Two layers with 8 heads of 8
    shared = abstract_model(FAMILIES["zamba2"], "float32")
    assert cache_row_bytes(shared) == 2 * 2 * 8 * 8 * 4


def test_arms_have_the_plain_text_and_their_bytes(report, models):
    assert report["complete"]
    rows = {row["arm"]: row for row in report["results"]}
    names = [f"{k} heads, sparse:{n}" for k in (1, 2) for n in OPTIONS["sizes"]]
    assert list(rows) == ["plain", *names, "heads, sparse:6", "heads, pruned:2x2x6"]
    assert all(row["equal_to_plain"] == row["units"] == 2 for row in rows.values())
    row = rows["1 heads, sparse:6"]
    heads = first_heads(models.heads, 1)
    memory = memory_of(models.target, heads, "chain:0", BufferSizes(1, 512, 64))
    assert (row["nodes"], rows["plain"]["nodes"]) == (6, 1)
    assert row["bytes"] - row["run_time"] == memory.weights + memory.drafter_weights
    assert row["expected_tau"] > 1 and rows["plain"]["expected_tau"] is None
    # More heads allow better places for the same number of nodes.
    better = [rows[f"{k} heads, sparse:6"]["expected_tau"] for k in (1, 2)]
    assert better[0] <= better[1]


def test_conversations_in_budgets(report):
    found = report["conversations"]
    one, half, none = found["budgets"]
    assert (one["share"], one["of_ample"], one["arm"]) == (1.0, 1.0, MOST)
    assert half["arm"] == "1 heads, chain:1" and half["of_ample"] > 0
    assert none["arm"] is None and none["refusal"] == "too few"
    arms = [row["arm"] for row in found["arms"]]
    assert arms == ["plain", MOST, "1 heads, chain:1"]
    assert all(row["equal"] == row["conversations"] == 1 for row in found["arms"])
    record = report["units"]["turns/0"]["plain"]
    assert record["tokens"] == 2 * NEW and len(record["resident"]) == 2


def test_wrong_text_in_a_turn_is_found(models):
    talk = plans(models.target, models.heads, TURNS, (1.0, 0.5), NEW, False)
    said = [result for result, _ in conversations.converse(talk, TURNS[0], None)]
    same = {"plain": said, "a": said}
    assert conversations.check_turns(models.target, same) == {"plain": True, "a": True}
    last = said[1].tokens[0]
    wrong = replace(said[1], tokens=[[*last[:-1], (last[-1] + 1) % 200]])
    with pytest.raises(RuntimeError, match="a: token 5 differs"):
        conversations.check_turns(models.target, {"plain": said, "a": [said[0], wrong]})


def test_the_planner_runs_for_every_budget(models):
    """Including a limit that its own choice just fits."""
    talk = conversations.plans(
        models.target, models.heads, TURNS, (1.0, 0.0), NEW, False
    )
    ample = talk.ample.memory
    limit, choice = talk.budgets[1.0]
    assert limit == ample.promised and choice == talk.ample
    limit, choice = talk.budgets[0.0]
    assert (
        limit == ample.weights + ample.drafter_weights == ample.total - run_time(ample)
    )
    assert isinstance(choice, str) or choice.memory.promised <= limit
    best = plan(
        models.target.config,
        conversations.AMPLE,
        drafter=models.heads.config,
        context=talk.request.context,
        queries=2,
        max_new_tokens=NEW,
        dtypes=["float32"],
    ).best
    assert best == talk.ample


def test_tables_and_figures(report, tmp_path):
    shown = cells(command.table_of(report))
    assert ["pair", "batch", "8"] in [row[:3] for row in shown]
    assert ["pair", "steps"] in [row[:2] for row in shown]
    assert "heads, pruned:2x2x6" in [row[2] for row in shown]
    assert ["10%", "0.0", "refused", *"-----"] in shown
    command.save_figures(report, tmp_path / "f")
    for part in OPTIONS["parts"]:
        assert (tmp_path / f"f-{part}.png").stat().st_size > 10_000


def test_measured_parts_need_prompts(models):
    for parts, error in (
        ("batch", "--parts batch: what is measured wants --prompts"),
        ("turns", "--parts turns: want --prompts with conversations"),
    ):
        with pytest.raises(ValueError, match=error):
            run_memory(models, {}, [], parts=[parts])
    with pytest.raises(ValueError, match="--caches: want"):
        memory.works_of(models, PROMPTS, options(parts=["caches"], caches=[8]))


def test_conversations_are_read(tmp_path):
    records = [{"turns": ["a", "b"]}, {"prompt": "c"}, {"turns": ["d"]}]
    path = tmp_path / "q.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in records))
    assert read_turns([path, path], 3) == [["a\n", "b\n"]] * 2
    assert np.shape(read_turns([path], 0)) == (0,)
