"""Test how benchmarks measure: alternation, resuming, statistics, tables, figures."""

import dataclasses
import gzip
import json
from functools import partial
from unittest import mock

import chex
import jax
import pytest

import stree_jax
from bench import (
    arms,
    command,
    cost,
    decode,
    everything,
    method,
    profile,
    temperature,
    trees,
)
from bench.arms import parse_arm, summarise_arms
from bench.method import Run, measure, sign_test, spread, take_turns
from bench.prompts import prompt_of, read_prompts, rounds
from bench.widen import sizes_of
from stree_jax import cpu_kernels
from stree_jax.cli import main as cli
from stree_jax.speculation import loop
from tests.bench.pairs import cells, drawn, measured, pair_with_words
from tests.support.tiny import too_much

LONG = "return x and f, f and x\n" * 30  # another length bucket
PROMPTS = {"HumanEval": ["def f(x):", LONG], "GSM8K": ["how many", "x"]}


@pytest.fixture(scope="module")
def pair():
    return pair_with_words(layers=("mamba", "mlp", "attention", "mlp"))


@pytest.fixture(scope="module")
def report(pair, tmp_path_factory):
    """Decodes both sets, with prompts of two lengths. Each arm is traced only once."""
    path = tmp_path_factory.mktemp("bench") / "r.json"
    counted = chex.assert_max_traces(loop.advance, n=7)
    program = jax.jit(counted, static_argnames=("verify",))
    with mock.patch.object(loop, "advance_jit", program):
        return decoded(pair, Run(2, path))


def decoded(pair, run):
    names = ["plain", "leviathan@chain:2", "mss@A", "naive/coupled@A"]
    ways = [parse_arm(name) for name in names]
    work = arms.workload(*pair, ways, PROMPTS, 8)
    return arms.measure_arms("decode", {"": work}, PROMPTS, [0, 1], run)


def test_arms_alternate_after_a_first_call():
    calls, warm = [], {"c"}
    arms = {name: (lambda n=name: calls.append(n) or len(calls)) for name in "abc"}
    results, first = take_turns(arms, 2, warm)
    assert "".join(calls) == "ab" + "abc" + "cba"
    assert results == {"a": [3, 8], "b": [4, 7], "c": [5, 6]}
    assert set(first) == {"a", "b"} and warm == set("abc")
    take_turns(arms, 1, warm)
    assert "".join(calls[8:]) == "abc"


def test_an_arm_that_runs_out_of_memory_is_skipped():
    def wrong():
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    warm = set()
    arms = {"huge": too_much, "fits": lambda: 1}
    results, first = take_turns(arms, 2, warm, skip_too_large=True)
    assert results == {"huge": [], "fits": [1, 1]}
    assert set(first) == warm == {"fits"}
    for arm, message in ((too_much, "RESOURCE_EXHAUSTED"), (wrong, "INTERNAL")):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            take_turns({"a": arm}, 2, set(), skip_too_large=arm is wrong)


def test_sign_test_and_quartiles():
    assert sign_test([2.0] * 10) == pytest.approx(2 / 1024)
    assert sign_test([0.5] * 10) == sign_test([2.0] * 10)
    assert sign_test([2.0, 0.5]) == 1.0
    assert sign_test([1.0, 1.0]) == 1.0  # ties do not count
    assert sign_test([2.0] * 5 + [1.0]) == pytest.approx(2 / 32)
    assert spread([3.0]) == {"median": 3.0, "low": 3.0, "high": 3.0}
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3, "low": 2, "high": 4}


def calls(names, work=str.upper):
    return {name: partial(work, name) for name in names}


def test_a_killed_run_resumes(tmp_path):
    path, seen = tmp_path / "r.json", []

    def work(name):
        if name == "c" and len(seen) < 3:
            seen.append("killed")
            raise KeyboardInterrupt
        seen.append(name)
        return {"n": name}

    with pytest.raises(KeyboardInterrupt):
        measure({"kind": "k"}, calls("abcd", work), Run(1, path))
    part = path.with_name("r.json.part")
    with part.open("a") as lines:
        lines.write('["c", {"n": "cut off')  # a write interrupted by a kill
    report = measure({"kind": "k"}, calls("abcd", work), Run(1, path))
    assert seen == ["a", "b", "killed", "c", "d"]
    assert report["complete"] and list(report["units"]) == ["a", "b", "c", "d"]
    method.write_report(report, path)
    assert not part.exists()
    assert json.loads(path.read_text()) == report


def test_minutes_end_a_run_between_units(tmp_path):
    path = tmp_path / "r.json"
    report = measure({"kind": "k"}, calls("abc"), Run(1, path, minutes=0))
    assert not report["complete"] and report["units"] == {}
    method.write_report(report, path)
    assert not path.with_name("r.json.part").exists()  # there is nothing to resume
    report = measure({"kind": "k"}, calls("abc"), Run(1, path))
    assert report["units"] == {"a": "A", "b": "B", "c": "C"}


def test_a_run_with_other_settings_is_not_resumed(tmp_path):
    path = tmp_path / "r.json"
    measure({"kind": "k", "count": 1}, calls("a"), Run(1, path))
    before = path.with_name("r.json.part").read_text()
    with pytest.raises(ValueError, match="r.json.part: made with other count; delete"):
        measure({"kind": "k", "count": 2}, calls("a"), Run(1, path))
    with pytest.raises(ValueError, match="made with other repeats"):
        measure({"kind": "k", "count": 1}, calls("a"), Run(2, path))
    assert path.with_name("r.json.part").read_text() == before


def test_an_invalid_option_writes_nothing(folder, capsys, tmp_path):
    """The corrected command then runs. Only reports may be overwritten."""
    report, other = tmp_path / "r.json", tmp_path / "p.jsonl"
    other.write_text((folder / "p.jsonl").read_text())
    assert bench(folder, "decode", "--json", report, "--max-new-tokens", "0") == 2
    assert "--max-new-tokens: want at least 1, got 0" in capsys.readouterr().err
    assert bench(folder, "decode", "--json", other) == 2
    assert "p.jsonl: is there, and no report" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["p.jsonl"]
    assert other.read_text() == (folder / "p.jsonl").read_text()


def test_machine_describes_the_system():
    facts = method.machine()
    assert facts["cores"] >= 1 and facts["device"] and facts["jax"]
    line = method.machine_line({"machine": facts, "dtype": "f", "complete": False})
    assert str(facts["commit"]) in line and line.endswith("stopped before the end")
    assert f"CPU kernels: {facts['cpu_kernels']}" in line


def cell(seconds, tokens=100, calls=50, equal=True):
    return {
        "seconds": seconds,
        "tokens": tokens,
        "calls": calls,
        "gained": None,
        "equal": equal,
        "first_call_s": None,
    }


def test_statistics_of_an_arm():
    units = {
        f"/S/T=0/{i}": {
            "plain": cell([2.0, 1.0, 3.0], calls=100),
            "chain:2": cell([1.0, 1.0, 5.0]),
            "A": cell([t, t, t], calls=calls, equal=i > 0),
        }
        for i, (t, calls) in enumerate([(0.5, 25), (1.0, 50), (4.0, 25)])
    }
    rows = {row["arm"]: row for row in summarise_arms(units)}
    tree = rows["A"]
    assert tree["tau"] == 3.0
    assert tree["speedup"]["median"] == 2.0  # median of 4, 2 and 0.5
    assert tree["tokens_per_s"] == 100.0
    assert tree["ms_per_call"] == 20.0
    assert tree["over_chain"] == 1.0  # median of 2, 1 and 0.25
    assert (tree["faster_than_plain"], tree["equal_to_plain"]) == (2, 2)
    assert tree["p_plain"] == 1.0 and tree["p_chain"] == 1.0
    assert rows["plain"]["speedup"]["median"] == 1.0
    assert rows["chain:2"]["over_chain"] is None


def test_greedy_rows_hold_for_all_rules():
    names = [(0, "plain"), (0, "mss@A"), (1, "plain"), (1, "mss@A")]
    rows = [{"temperature": t, "arm": arm} for t, arm in names]
    assert temperature.row_of(rows, "naive@A", 0) is rows[1]
    assert temperature.row_of(rows, "mss@A", 1) is rows[3]
    # Absent in an interrupted run
    assert temperature.row_of(rows, "naive@A", 1) is None
    assert temperature.row_of(rows, "naive@E", 0) is None


def test_the_report_of_bench_decode(pair, report):
    assert report["complete"] and len(report["units"]) == 8
    for name, record in report["units"].items():
        greedy = "T=0" in name
        trees = {arm.rpartition("@")[2] for arm in record}
        assert trees == {"plain", "chain:2", "A"}
        # Rules do not matter for greedy decoding
        assert len(record) == (3 if greedy else 4)
        for arm, cell in record.items():
            assert len(cell["seconds"]) == 2 and min(cell["seconds"]) > 0
            assert cell["tokens"] == 8 and sum(cell["gained"]) == cell["calls"]
            if arm == "plain":
                assert cell["calls"] == 8
            promised = greedy or "naive" in arm or arm == "plain"
            assert cell["equal"] is (True if promised else None)
    compiled = [
        arm
        for record in report["units"].values()
        for arm, cell in record.items()
        if cell["first_call_s"] is not None
    ]
    assert len(compiled) == 7  # every program once
    text = command.table_of(report)
    shown = [row[:3] for row in cells(text)[1:]]
    assert [row[0] for row in shown].count("GSM8K") == 7
    assert ["GSM8K", "0", "A"] in shown and ["GSM8K", "1", "mss@A"] in shown
    assert method.machine_line(report) in text
    counts = sizes_of(*pair)
    assert report["parameters"] == {"": counts}
    assert f"{counts[0] / 1e6:.1f} + {counts[1] / 1e6:.1f} M parameters" in text


@pytest.mark.parametrize("kind", ["decode", "temperature"])
def test_figures_can_be_drawn(report, tmp_path, kind):
    shown = {**report, "kind": kind, "temperatures": [0, 1]}
    figure = drawn(shown)
    command.save_figures(shown, tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 10_000
    svg = (tmp_path / "f.svg").read_text()
    assert svg.startswith("<?xml")
    assert all(ax.get_ylabel() for ax in figure.axes)
    texts = (
        [t.get_text() for ax in figure.axes for t in ax.get_legend().get_texts()]
        if kind == "decode"
        else []
    )
    assert kind == "temperature" or "tree A, mss" in texts
    assert "A" in command.table_of(shown)


def test_an_arm_has_the_same_colour_in_all_figures(report):
    greedy, sampled = (
        {label: bars[0].get_facecolor() for bars, label in zip(*shown, strict=True)}
        for shown in (ax.get_legend_handles_labels() for ax in drawn(report).axes)
    )
    assert greedy["chain of 2"] == sampled["chain of 2, leviathan"]
    assert greedy["tree A"] == sampled["tree A, naive/coupled"]
    assert len(set(sampled.values())) == 3


@pytest.mark.parametrize("arm", ["Q", "mss@Q", "foo@A", "leviathan@A", "mss@beam:2x2"])
def test_wrong_arms_are_refused(arm):
    with pytest.raises(ValueError, match="tree|rule"):
        parse_arm(arm)


def test_a_set_smaller_than_a_batch_is_refused(pair):
    with pytest.raises(ValueError, match="--count: 2 of HumanEval make no batch of 3"):
        arms.workload(*pair, [parse_arm("plain")], PROMPTS, 8, batch=3)


def test_a_wrong_token_ends_the_run(pair):
    """Arms whose greedy text differs from plain decoding are never timed silently."""
    work = arms.workload(*pair, [parse_arm("plain")], PROMPTS, 8)
    plain = arms.decode_once(work, work.arms[0], ["def f(x):"], 0)
    (row,) = plain.tokens
    wrong = dataclasses.replace(plain, tokens=[[(row[0] + 1) % 200, *row[1:]]])
    with pytest.raises(RuntimeError, match="A: token 0 differs from plain decoding"):
        results = {"plain": plain, "A": wrong}
        arms.check_ties(pair[0], ["def f(x):"], results)


def test_rounds_alternate_between_sets():
    prompts = {"a": [1, 2, 3, 4, 5], "b": [6, 7, 8]}
    first, second = {"a": [1, 2], "b": [6, 7]}, {"a": [3, 4]}
    assert rounds(prompts, 2) == [first, second]  # only complete batches
    sets = [list(groups) for groups in rounds(prompts)]
    assert sets == [["a", "b"]] * 3 + [["a"]] * 2


def test_prompt_files(tmp_path):
    rows = [{"prompt": "a"}, {"turns": ["b", "c"]}, {"question": "d", "answer": "e"}]
    path = tmp_path / "HumanEval.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert read_prompts([path], 2) == {"HumanEval": ["a", "b\n"]}
    assert prompt_of(rows[2], path) == "d\n"
    with pytest.raises(ValueError, match="no prompt, turns or question"):
        prompt_of({"x": 1}, path)
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": \xff\n')
    with pytest.raises(ValueError, match="odd.jsonl:2: not UTF-8"):
        read_prompts([path], 2)
    path.write_text('{"prompt": "a"}\nb\n')
    with pytest.raises(ValueError, match="odd.jsonl:2: not JSON"):
        read_prompts([path], 2)
    zipped = path.rename(tmp_path / "odd.gz")
    with pytest.raises(ValueError, match="odd.gz: cannot be unpacked"):
        read_prompts([zipped], 2)


@pytest.fixture(scope="module")
def folder(pair, tmp_path_factory):
    """Writes the pair as directories, and a file of prompts."""
    path = tmp_path_factory.mktemp("models")
    stree_jax.save(pair[0], path / "target")
    stree_jax.save(pair[1], path / "drafter")
    lines = [json.dumps({"prompt": text}) for text in ("def f(x)", "x", "re", "f(")]
    (path / "p.jsonl").write_text("\n".join(lines) + "\n")
    return path


def bench(folder, kind, *options):
    words = ["bench", kind, "--prompts", folder / "p.jsonl"]
    words += ["--model", folder / "target", "--drafter", folder / "drafter"]
    return cli.main([str(word) for word in (*words, *options)])


def test_the_command_prints_and_writes(folder, capsys, tmp_path):
    options = ["--count", "1", "--max-new-tokens", "6", "--repeats", "1"]
    options += ["--arms", "chain:2", "--temperatures", "0", "--transformers"]
    options += ["--json", tmp_path / "r.json", "--figure", tmp_path / "f.png"]
    assert bench(folder, "decode", *options) == 0
    shown = [row[:3] for row in cells(capsys.readouterr().out)]
    report = json.loads((tmp_path / "r.json").read_text())
    rows = {row["arm"]: row for row in report["results"]}
    assert rows["plain"]["tau"] == 1.0
    assert set(rows) == {"plain", "chain:2", "transformers, plain"}
    assert ["p.jsonl", "0", "chain:2"] in shown and report["complete"]
    assert {p.name for p in tmp_path.iterdir()} == {"r.json", "f.png", "f.svg"}


def test_several_pairs(folder, capsys):
    spec = f"half={folder / 'target'}:{folder / 'drafter'}"
    options = ["--count", "1", "--max-new-tokens", "4", "--repeats", "1", "--pairs"]
    options += [spec, spec.replace("half", "none"), "--arms", "chain:2"]
    assert bench(folder, "attention", *options) == 0
    shown = [row[:4] for row in cells(capsys.readouterr().out)]
    assert all([name, "p.jsonl", "1", "chain:2"] in shown for name in ("half", "none"))
    assert bench(folder, "attention", "--pairs", "a/b=x:y") == 2
    assert "want NAME=TARGET:DRAFTER" in capsys.readouterr().err


def test_cost_is_predicted_and_measured(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "OPTIMAL", (3,))
    monkeypatch.setattr(cost, "PASSES", 2)
    prompts = {"HumanEval": ["def f(x):", "return", "x = ", "f("]}

    words = ["--prompts", "p", "--arms", "chain:2", "--max-new-tokens", "12"]

    def again():
        run = Run(1, tmp_path / "c.json")
        return measured(cost, words, pair, prompts, run)

    report = again()
    assert list(report["units"]) == [
        *("ranks", "target", "drafter"),
        *(f"/HumanEval/T=0/{i}" for i in range(4)),
    ]
    assert set(report["units"]["target"]) == {"1", "3"}
    rows = {row["arm"]: row for row in report["results"]}
    assert set(rows) == {"plain", "chain:2", "optimal:3"}
    speeds = [row["predicted"] for row in report["results"]]
    assert speeds == sorted(speeds, reverse=True)
    assert rows["plain"]["predicted"] == rows["plain"]["speedup"] == 1.0
    # A plain step is predicted from its own time, other steps are not.
    pass_ms = 1e3 * report["units"]["target"]["1"]
    own = max(rows["plain"]["ms"], pass_ms)
    assert rows["plain"]["predicted_ms"] == pytest.approx(own)
    for arm in ("chain:2", "optimal:3"):  # the replayed walk matches the loop
        assert rows[arm]["simulated_tau"] == rows[arm]["tau"]
        assert 1 < rows[arm]["tau"] <= 3
    text = command.table_of(report)
    assert "With this target, drafter and machine" in text and "| 6 |" in text
    labels = drawn(report).axes[0].get_legend().get_texts()
    assert [text.get_text() for text in labels][-1] == "optimal"

    before = report["units"]
    with mock.patch.object(cost, "decode_unit", side_effect=AssertionError):
        assert again()["units"] == before  # resumed: nothing is measured again


def test_the_verdict_names_the_fastest_trees():
    def row(arm, predicted, speedup, parents):
        numbers = {"predicted": predicted, "speedup": speedup}
        return {"arm": arm, "parents": parents, **numbers}

    optimal, chain = row("optimal:4", 2, 1.9, [-1, 0, 0, 1]), row("chain:1", 1, 1, [])
    text = cost.verdict({"results": [optimal, chain]})
    assert "optimal:4 is fastest, 2.00 times plain decoding (measured 1.90)" in text
    assert "`--tree parents:0,0,1`" in text and "None of the others" in text
    text = cost.verdict({"results": [chain | {"predicted": 3}, optimal]})
    assert "Measured, optimal:4 is: 1.90" in text and "--tree" not in text


def test_profile_has_all_parts_of_a_step(pair):
    prompts = {"HumanEval": ["def f(x):"]}
    words = ["--prompts", "p", "--arms", "plain", "A"]
    report = measured(profile, words, pair, prompts, Run(1))
    native = cpu_kernels.level() is not None
    mixer = {"mixers, in one kernel"} if native else {"scan and replay", "convolution"}
    for arm in ("plain", "A"):
        rows = [row for row in report["results"] if row["arm"] == arm]
        stages = {row["stage"] for row in rows}
        assert "verify" in stages and ("draft" in stages) == (arm == "A")
        parts = {row["part"] for row in rows if row["stage"] == "verify"}
        assert parts >= {"products with weights"} | mixer
        assert all(row["us"] >= 0 for row in rows if row["operations"])
    text = profile.table(report)
    assert "plain: " in text and "| verify | products with weights |" in text


def test_all_writes_one_report(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(everything, "TITLES", {"decode": "Decoding", "trees": "T"})
    monkeypatch.setattr(decode, "ARMS", ["chain:2"])
    monkeypatch.setattr(trees, "ARMS", ["mss@A"])
    words = ["--count", "1", "--max-new-tokens", "4", "--out", tmp_path / "all"]
    with mock.patch.object(jax, "clear_caches", wraps=jax.clear_caches) as cleared:
        assert bench(folder, "all", *words) == 0
    # Otherwise many benchmarks use up the memory maps of a process
    assert cleared.call_count == 2
    names = {path.name for path in (tmp_path / "all").iterdir()}
    figures_of = {f"{k}.{s}" for k in ("decode", "trees") for s in ("png", "svg")}
    assert names == {"REPORT.md", "decode.json", "trees.json"} | figures_of
    text = (tmp_path / "all" / "REPORT.md").read_text()
    assert "![Decoding](decode.png)" in text and "| p.jsonl | 1 | mss@A |" in text
    with mock.patch.object(everything, "measure", side_effect=AssertionError):
        assert bench(folder, "all", *words) == 0  # all reports exist already
    capsys.readouterr()


def test_all_lists_what_was_not_measured(folder, capsys, tmp_path):
    assert bench(folder, "all", "--out", tmp_path, "--minutes", "0") == 0
    text = (tmp_path / "REPORT.md").read_text()
    assert text.count("Not measured: the time was over.") == text.count("## ") == 6
    capsys.readouterr()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("decode", ["--repeats", "0"], "--repeats: want at least 1"),
        (
            "decode",
            ["--json", "/nowhere/r.json"],
            "--json: /nowhere: no such directory",
        ),
        ("profile", ["--figure", "f"], "--figure: bench profile draws no figure"),
        ("decode", ["--arms", "leviathan@A"], "leviathan supports chains only"),
        ("trees", ["--drafter", "none"], "bench trees needs a draft model"),
        ("cost", ["--arms", "Q"], "unknown name 'Q'"),
        ("cost", ["--arms", "auto"], "auto has no fixed shape to predict"),
        ("unrolled", ["--beam-widths", "0"], "beam"),
        ("temperature", ["--batch", "9"], "make no batch of 9"),
        ("temperature", ["--batch", "0"], "--batch: want at least 1, got 0"),
        ("decode", ["--count", "-1"], "count: want at least 0, got -1"),
        ("decode", ["--minutes", "-1"], "--minutes: want at least 0, got -1"),
    ],
)
def test_invalid_options_are_refused_in_one_line(
    folder, capsys, kind, options, message
):
    assert bench(folder, kind, *options) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1
