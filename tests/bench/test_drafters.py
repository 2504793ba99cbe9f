"""Test `bench drafters`: agreement, decoding, bytes and the table."""

from dataclasses import replace

import numpy as np
import pytest

from bench import drafters as bench
from bench.method import Run
from bench.registry import parse_bench
from stree_jax.checkpoints.kinds.ngrams import save_ngrams
from stree_jax.training.ngrams import count_grams, katz
from tests.bench.pairs import pair_with_words
from tests.support.dflash import KINDS, random_dflash
from tests.support.tiny import tiny

WITH_NGRAMS = ["chain with n-grams", "tree of 6 with n-grams"]
WAYS = ["chain", "tree of marginals, 6", "tree of 6"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    target, model = pair_with_words(layers=("mamba", "mlp"))
    file = tmp_path_factory.mktemp("prompts") / "set.jsonl"
    file.write_text('{"prompt": "def add(a, b):"}\n')
    options = dict(KINDS["dspark"], boundaries=(1,), slots=3)
    found = {"model": model, "block": random_dflash(target, **options)}
    plain = replace(found["block"].config, pairs="", confidence=False)
    found["plain"] = replace(found["block"], config=plain)
    text, V = np.arange(200)[None] % 50, target.config.num_tokens
    ngrams = katz(count_grams(text, 2, V), V, slots=256, keep=2)
    save_ngrams(ngrams, file.with_suffix(".safetensors"))
    words = ["drafters", "--prompts", str(file), "--count", "1", "--max-new-tokens"]
    words += ["6", "--temperatures", "0", "--nodes", "6", "--levels", "3"]
    words += ["--ngrams", str(file.with_suffix(".safetensors"))]
    args = parse_bench([*words, "--drafters", *found])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "load_pair", lambda _, name, __: (target, found[name]))
        return bench.measure(args, Run(repeats=1))


@pytest.mark.parametrize("names", [["mtp", "lookup"], ["lookup", "mtp"]])
def test_the_target_keeps_the_mtp_layers_that_a_drafter_needs(names, monkeypatch):
    plain = tiny(1)
    with_mtp = replace(plain, config=replace(plain.config, mtp=("attention", "mlp")))

    def load_pair(model, name, dtype):
        return (with_mtp if name == "mtp" else plain), name

    monkeypatch.setattr(bench, "load_pair", load_pair)
    args = parse_bench(["drafters", "--prompts", "unread", "--drafters", *names])
    target, found = bench.load_drafters(args)
    assert target is with_mtp and found == {name: name for name in names}


def test_every_way_of_drafting_is_measured(report):
    found = [row["way"] for row in report["agreement"] if row["drafter"] == "block"]
    assert found == WAYS
    found = [row["way"] for row in report["agreement"] if row["drafter"] == "plain"]
    assert found == ["chain", "tree of 6", *WITH_NGRAMS]
    assert {row["places"] for row in report["agreement"]} == {6}
    assert all(1 <= row["tau"] <= 4 for row in report["agreement"])


def test_decoding_is_equal_with_every_drafter(report):
    arms = {row["arm"] for row in report["results"]}
    assert {"plain", "lookup", "model, auto", "block, chain:3", "block, auto"} <= arms
    (unit,) = report["units"].values()
    assert all(arm["equal"] for arm in unit.values())


def test_the_table_names_drafters_and_bytes(report):
    text = bench.table(report)
    assert "| block | tree of marginals, 6 |" in text
    assert "Read in a round: model " in text
    assert report["bytes"]["block"] < report["bytes"]["target"] * 2
