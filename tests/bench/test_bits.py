"""Test `bench bits` on a tiny model, and its sums on records with differences."""

import json

import pytest

from bench import bits, command
from bench.registry import parse_bench
from stree_jax import cpu_kernels
from tests.support.tiny import tiny_hybrid

WAYS = ["tree chain:2", "drafter, tree auto", "1 rows in turn, tree E", "score"]


def test_every_way_is_counted(tmp_path, monkeypatch, capsys):
    model = tiny_hybrid(0, ("attention", "mlp"))
    monkeypatch.setattr(bits, "load", lambda name, dtype: model)
    file = tmp_path / "bits.json"
    words = ["bits", "--count", "2", "--batch", "2", "--max-new-tokens", "4"]
    words += ["--trees", "chain:2", "--json", str(file)]
    assert command.run(parse_bench(words)) == 0
    report = json.loads(file.read_text())
    assert report["complete"] and report["dtype"] == "float32"
    assert [row["way"] for row in report["results"]] == WAYS * 2
    for row in report["results"]:
        assert (row["texts"], row["tokens"], row["equal_tokens"]) == (2, 8, 2)
        if cpu_kernels.level() is not None:
            assert row["equal_bits"] == 2 and row["different_bits"] == 0
    assert "| T = 1 | score | 2 | 8 | 0 |" in capsys.readouterr().out


def test_differences_are_summed():
    def record(tokens, different, largest):
        equal = {"texts": 2, "equal_tokens": tokens, "equal_bits": tokens}
        return [
            {"way": "tree", "tokens": 9, "different_bits": different}
            | equal
            | {"largest": largest}
        ]

    units = {"0/greedy": record(1, 3, 0.5), "0/T = 1": record(2, 0, 0.0)}
    units |= {"8/greedy": record(2, 1, 0.25)}
    greedy, sampled = bits.summed(units)
    assert (greedy["texts"], greedy["equal_tokens"]) == (4, 3)
    assert (greedy["different_bits"], greedy["largest"]) == (4, 0.5)
    assert (sampled["kind"], sampled["texts"]) == (bits.SAMPLED, 2)
    report = {"model": "demo", "max_new_tokens": 9, "results": [greedy, sampled]}
    assert "| greedy | tree | 4 | 18 | 1 | 4 | 5.0e-01 |" in bits.table(report)


def test_counts_are_checked(monkeypatch):
    monkeypatch.setattr(bits, "load", lambda *_, **__: pytest.fail("it loads"))
    with pytest.raises(ValueError, match="count"):
        command.run(parse_bench(["bits", "--count", "0"]))
