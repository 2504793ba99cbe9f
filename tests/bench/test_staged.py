"""Test `bench staged`: memory traffic, predictions of the cost model, tables,
figures.
"""

import json

import jax
import numpy as np
import pytest

from bench import command, staged
from bench.method import Run
from stree_jax.sizing.pass_time import MeasuredTime
from stree_jax.speculation.gain import staged_gain, staged_passes
from stree_jax.speculation.tree import resolve_tree
from stree_jax.training.ngrams import count_grams, katz
from tests.bench.pairs import cells, measured, pair_with_words

PROMPTS = {"HumanEval": ["def f(x):"], "GSM8K": ["x = 1"]}
WORDS = [
    "--prompts",
    "p",
    "--ngrams",
    "n",
    "--ngram-levels",
    "1",
    "2",
    "--ngram-width",
    "1",
    "2",
]
WORDS += ["--top-k", "5", "--max-new-tokens", "8"]


@pytest.fixture(scope="module")
def pair():
    return pair_with_words()


@pytest.fixture(scope="module")
def ngrams(pair):
    size = pair[0].config.num_tokens
    text = np.random.default_rng(0).integers(0, size, (4, 200), np.int32)
    return katz(count_grams(text, 3, size), size, slots=1024, keep=4)


@pytest.fixture(scope="module")
def report(pair, ngrams):
    few = {"PASSES": 2, "LOOKUPS": 2, "load_ngrams": lambda path: ngrams}
    words = [*WORDS, "--tree", "chain:3"]
    found = measured(staged, words, pair, PROMPTS, Run(1), **few)
    jax.clear_caches()
    return json.loads(json.dumps(found))


def rows_of(report, title, temperature):
    return {
        row["arm"]: row
        for row in report["results"]
        if (row["set"], row["temperature"]) == (title, temperature)
    }


def test_stages_draft_the_same_in_fewer_passes(report):
    for temperature in (0.0, 1.0):
        rows = rows_of(report, "HumanEval", temperature)
        one, two = rows["staged, 1 ahead"], rows["staged, 2 ahead"]
        base = rows["speculative"]
        assert rows["plain"]["passes_per_call"] == 0
        assert base["passes_per_call"] == 3  # the text, and two more levels
        for row in (one, two, rows["staged, 2 ahead x 2"]):
            assert (row["tau"], row["equal_to_plain"]) == (base["tau"], 1)
            assert row["passes_per_call"] <= 3
            how = report["guesses"][row["arm"]]
            expected = staged_passes(3, report["rates"], *how)
            assert row["passes_predicted"] == expected
        assert rows["n-grams alone"]["equal_to_plain"] == 1


def test_traffic_counts_the_bytes_that_passes_read(report, pair):
    """Target and draft model have equal sizes: a step reads 1 + 3 models, plus
    states."""
    rows = rows_of(report, "GSM8K", 0.0)
    assert rows["plain"]["traffic"] == rows["plain"]["traffic_without_caches"] == 1
    unit = report["units"]["/GSM8K/T=0/0"]["speculative"]
    target, drafter = unit["traffic"]
    assert [target["stage"], drafter["stage"]] == ["target", "drafter"]
    assert drafter["passes"] == 3 * target["passes"]
    assert drafter["weights"] == 3 * target["weights"]
    total = sum(
        stage[part]
        for stage in unit["traffic"]
        for part in ("weights", "state", "caches")
    )
    plain = report["units"]["/GSM8K/T=0/0"]["plain"]["traffic"][0]
    alone = plain["weights"] + plain["state"] + plain["caches"]
    want = (total / unit["tokens"]) / (alone / 8)
    assert rows["speculative"]["traffic"] == pytest.approx(want)


def test_the_cost_model_matches_arithmetic():
    """Steps of 10 ms contain 4 passes of 1 ms for levels. Guesses save 2 of them."""
    seconds = MeasuredTime([1, 2, 3, 4, 6], [1e-3, 1e-3, 1e-3, 1e-3, 1e-3])
    shape = {"depth": 5, "inner": 2, "ahead": 1}
    assert staged_gain(10e-3, seconds, **shape, passes=3) == pytest.approx(10 / 8)
    assert staged_gain(10e-3, seconds, **shape, passes=5) == pytest.approx(1)
    slow = staged_gain(10e-3, seconds, **shape, passes=3, lookup_s=1e-3)
    assert slow == pytest.approx(10 / 11)
    dear = MeasuredTime([1, 2, 3, 4], [1e-3, 1e-3, 2e-3, 3e-3])
    assert staged_gain(10e-3, dear, **shape, passes=3) == pytest.approx(10 / 13)
    wide = {"depth": 5, "inner": 1, "ahead": 1, "passes": 3, "width": 2}
    # Two passes of 3 rows, and 2 more rows to read
    steep = MeasuredTime([1, 3], [1e-3, 2e-3])
    assert staged_gain(10e-3, steep, **wide) == pytest.approx(10 / (10 - 4 + 2 * 2 + 1))
    with pytest.raises(ValueError, match="passes: want at least 1"):
        staged_gain(10e-3, seconds, **shape, passes=0.5)


def test_expected_passes_match_a_simulation():
    """The guesses are right at random, at the given rates."""
    rates, depth, rng = (0.4, 0.5, 0.7), 6, np.random.default_rng(0)
    for ahead, width in ((1, 1), (2, 1), (2, 3)):
        passes = []
        for _ in range(4000):
            level = count = 0
            while level < depth:
                count, level = count + 1, level + 1
                for _ in range(ahead):
                    drawn = rng.random()
                    level += drawn < rates[width - 1]
                    if drawn >= rates[0]:
                        break
            passes.append(count)
        expected = staged_passes(depth, rates, ahead, width)
        assert np.mean(passes) == pytest.approx(expected, rel=0.02)
    assert staged_passes(8, (0.0,), 2) == 8 and staged_passes(9, (1.0,), 2) == 3


def test_tables_and_figures(report, tmp_path):
    shown = [row[:3] for row in cells(command.table_of(report))]
    assert ["HumanEval", "greedy", "staged, 1 ahead"] in shown
    assert ["GSM8K", "top-k 5, T = 1", "n-grams alone"] in shown
    command.save_figures(report, tmp_path / "f.png")
    page = (tmp_path / "f-text.html").read_text("utf-8")
    runs = report["text"]["runs"]
    assert page.count("<span style") >= len(runs) and "def f(x):" in page
    names = {"f.png", "f.svg", "f-text.png", "f-text.svg", "f-text.html"}
    assert {file.name for file in tmp_path.iterdir()} == names


@pytest.mark.parametrize("tree", ["auto", "beam:2x2", "chain:1"])
def test_trees_without_levels_to_guess_are_refused(tree):
    with pytest.raises(ValueError, match="want a fixed one of at least two levels"):
        measured(staged, [*WORDS, "--tree", tree], None, PROMPTS, Run(1))
    assert resolve_tree(tree) is not None
