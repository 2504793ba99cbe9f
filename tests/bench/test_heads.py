"""Test `bench heads`: accuracies, arms, text of typical acceptance, tables, figures."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import stree_jax
from bench import arms, command, inputs
from bench import heads as bench
from bench.method import Run
from bench.registry import parse_bench
from bench.widen import widened, widened_heads
from stree_jax import Sampling
from stree_jax.cli import figures
from stree_jax.generation.generate import encode_prompts
from stree_jax.models import AttentionConfig, MambaConfig, Rope, init_params
from stree_jax.models.drafters.heads import head_logits
from stree_jax.models.stack.memory import weights_read
from stree_jax.training.hidden_state_files import hidden_states
from tests.bench.pairs import cells, drawn, measured, pair_with_words
from tests.distribution import processed
from tests.support.heads import random_heads, reference_logits
from tests.support.tiny import REAL, perturbed, tiny, too_much

PROMPTS = {"HumanEval": ["def f(x):", "x"], "GSM8K": ["x = 1"]}
NEW, K = 10, 3


WORDS = ["--prompts", "p", "--trees", "cartesian:3x2", "--model-trees", "chain:1"]
WORDS += ["--typical", "chain:2", "--max-new-tokens", str(NEW)]
DRAFTING = ["heads, cartesian:3x2", "model, chain:1", "lookup", "typical, chain:2"]
ARMS = ["plain", *DRAFTING]


@pytest.fixture(scope="module")
def pair():
    return pair_with_words(layers=("mamba",))


@pytest.fixture(scope="module")
def heads(pair):
    return random_heads(pair[0], scale=0.1, heads=K)


@pytest.fixture(scope="module")
def report(pair, heads):
    loaded = {"load_heads": lambda path, dtype: heads}
    found = measured(bench, WORDS, pair, PROMPTS, Run(1), **loaded)
    jax.clear_caches()
    return json.loads(json.dumps(found))


def rows_of(report, title, temperature):
    return {
        row["arm"]: row
        for row in report["results"]
        if (row["set"], row["temperature"]) == (title, temperature)
    }


def test_arms_of_the_options():
    words = ["--trees", "chain:1", "sparse:8", "--model-trees", "E"]
    args = parse_bench(["heads", *WORDS, *words])
    found = {arm.name: arm for arm in bench.arms_of(args, staged=True)}
    names = ["plain", "heads, chain:1", "heads, sparse:8", "model, E", "staged, E"]
    assert list(found) == [*names, "lookup", "typical, chain:2"]
    drafting = [arm.drafting for arm in found.values()][1:]
    assert drafting == ["heads", "heads", "model", "staged", "lookup", "heads"]
    assert {name for name, arm in found.items() if arm.rule} == {"typical, chain:2"}


def test_arms_of_exact_rules_match_plain_decoding(report):
    """For the rule typical, sampled text is not reported as equal."""
    assert report["arms"] == ARMS and report["complete"]
    for title in PROMPTS:
        for temperature in (0.0, 1.0):
            rows = rows_of(report, title, temperature)
            assert list(rows) == ARMS
            for name in ARMS[1:]:
                typical = name.startswith("typical") and temperature > 0
                units = None if typical else len(PROMPTS[title])
                assert rows[name]["equal_to_plain"] == units, name
            assert rows["plain"]["tau"] == 1
            assert rows["heads, cartesian:3x2"]["tau"] > 1


def test_accuracies_match_greedy_text(report, pair, heads):
    """By brute force, at the places whose guesses are all inside the generated text."""
    target = pair[0]
    for title, prompts in PROMPTS.items():
        said = stree_jax.generate(
            target,
            prompts,
            max_new_tokens=NEW,
            stop_tokens=(),
            drafter=None,
        ).tokens
        ranks = []
        for prompt, own in zip(encode_prompts(target, prompts), said, strict=True):
            whole = np.array(prompt + own, np.int32)
            bare = target
            hidden = np.asarray(hidden_states(bare, whole[None]))[0]
            guesses = reference_logits(heads, target, hidden)
            for t in range(len(prompt) - 1, len(whole) - K - 1):
                ranks.append(
                    [
                        (guesses[t, k] > guesses[t, k, whole[t + k + 2]]).sum()
                        for k in range(K)
                    ]
                )
        assert len(ranks) == len(prompts) * (NEW - K)
        ranks = np.array(ranks)
        want = [[(r == w).mean() for w in range(10)] for r in ranks.T]
        np.testing.assert_allclose(report["accuracy"][title], want, atol=1e-12)
        given = report["accuracy"][f"{title}, given the heads before"]
        np.testing.assert_allclose(given[0], want[0], atol=1e-12)
        reached = ranks[:, 0] < 10
        second = [(ranks[reached, 1] == w).mean() for w in range(10)]
        np.testing.assert_allclose(given[1], second, atol=1e-12)


def test_traffic_counts_the_bytes_that_heads_read(report, pair, heads):
    unit = report["units"]["/GSM8K/T=0/0"]
    target, stage = unit["heads, cartesian:3x2"]["traffic"]
    d = pair[0].config.d_model
    each = 2 * 4 * (d * d + d) + pair[0].params["embedding"].nbytes
    assert (target["stage"], stage["stage"]) == ("target", "heads")
    assert stage["passes"] == target["passes"]
    assert stage["weights"] == stage["passes"] * each
    parts = ("weights", "state", "caches")
    total = sum(t[part] for t in (target, stage) for part in parts)
    (plain,) = unit["plain"]["traffic"]
    alone = sum(plain[part] for part in parts)
    row = rows_of(report, "GSM8K", 0.0)["heads, cartesian:3x2"]
    assert row["traffic"] == pytest.approx(total / alone)
    assert rows_of(report, "GSM8K", 0.0)["plain"]["traffic"] == 1
    assert report["bytes"]["heads"] == K * 4 * (d * d + d)
    assert report["bytes"]["model"] == weights_read(pair[1])
    assert report["bytes"]["lookup"] == 0


def test_statistics_of_typical_acceptance(report, pair, heads):
    """Mean log-probabilities under the target, token by token."""
    (row,), target = report["texts"], pair[0]
    assert row["temperature"] == 1.0
    texts = [text for group in PROMPTS.values() for text in group]
    settings = [Sampling(1.0, seed=i) for i in range(len(texts))]
    drafting = dict(drafter=heads, tree="chain:2", rule="typical")
    for name, options in (
        ("sampling", dict(drafter=None, sampling=settings)),
        ("typical", dict(sampling=settings, **drafting)),
        ("greedy", dict(drafter=None)),
    ):
        said = stree_jax.generate(
            target, texts, max_new_tokens=NEW, stop_tokens=(), **options
        )
        found = []
        for prompt, own in zip(encode_prompts(target, texts), said.tokens, strict=True):
            logits = np.asarray(stree_jax.score(target, [prompt + own]))[0]
            for place, token in enumerate(own, start=len(prompt) - 1):
                found.append(np.log(processed(logits[place], Sampling(1.0))[token]))
        assert row[name]["log_prob"] == pytest.approx(np.mean(found), abs=1e-4)
        want = 0 if name == "sampling" else -np.mean(found)
        assert row[name]["divergence"] == pytest.approx(want, abs=1e-4)
        assert row[name]["distinct"] == pytest.approx(bench.distinct(said.tokens))
    assert row["greedy"]["tau"] == row["sampling"]["tau"] == 1 < row["typical"]["tau"]


def test_distinct_ngrams():
    assert bench.distinct([[1, 2, 3, 4, 5]]) == 1
    assert bench.distinct([[1] * 7]) == 1 / 4
    assert bench.distinct([[1, 2, 1, 2, 1, 2], list(range(9))]) == (2 / 3 + 1) / 2


def test_tables_and_figures(report, tmp_path):
    shown = cells(command.table_of(report))
    named = [row[0:3] for row in shown if row[2] in ARMS]
    assert named == [
        [row["set"], f"{row['temperature']:g}", row["arm"]] for row in report["results"]
    ]
    assert ["1", "typical"] in [row[:2] for row in shown]
    figures.save(drawn(report), tmp_path / "f")
    assert {file.name for file in tmp_path.iterdir()} == {"f.png", "f.svg"}
    greedy = report | {"temperatures": [0.0], "texts": []}
    assert len(cells(command.table_of(greedy))) == len(shown) - 4
    assert len(drawn(greedy).axes) == 3


def test_heads_are_widened_with_their_target(monkeypatch):
    target, made = wide_target(), []
    small = random_heads(target, heads=2)
    monkeypatch.setattr(inputs, "load_pair", lambda *args: (target, target))
    monkeypatch.setattr(bench, "load_heads", lambda path, dtype: small)
    monkeypatch.setattr(bench, "load_prompts", lambda args: PROMPTS)
    work = arms.Workload(target, target, (), NEW, 1, 9)
    monkeypatch.setattr(bench, "workload", lambda t, *_: replace(work, target=t))
    monkeypatch.setattr(bench, "accuracies", lambda work, prompts: made.append(work))
    monkeypatch.setattr(bench, "text_of", too_much)
    with pytest.raises(jax.errors.JaxRuntimeError):
        command.measure(parse_bench(["heads", *WORDS, "--widen", "4"]))
    assert made[0].target.config.d_model == made[0].heads.config.d_model == 128


# --- widening -------------------------------------------------------------------------


def wide_target():
    """Returns a model that can be widened."""
    config = replace(
        tiny(0, layers=("mamba", "attention")).config.with_mixers(
            mamba=MambaConfig(4, 8, 16, norm_eps=0.1),
            attention=AttentionConfig(4, 2, 8, Rope(1e4, 8)),
        ),
        norm_eps=0.2,
    )
    params = init_params(config, jax.random.key(0), np.float32)
    return stree_jax.Model(params=perturbed(params, 0.2, 0), config=config)


OWN = [dict(heads=3, blocks=2), dict(heads=2, own_output=True, bias=False)]


@pytest.mark.parametrize("options", OWN, ids=["the model's output", "own outputs"])
def test_widened_heads_have_the_same_logits(options):
    target = wide_target()
    heads, factor = random_heads(target, accuracy=(), **options), 4
    wide, wider = widened(target, factor), widened_heads(heads, factor)
    assert wider.config == replace(heads.config, d_model=128)
    assert widened_heads(heads, 1) is heads
    tokens = np.random.default_rng(0).integers(REAL, size=(2, 9)).astype(np.int32)
    count = options["heads"]
    said = [
        head_logits(h, m, hidden_states(m, tokens), count)
        for h, m in ((heads, target), (wider, wide))
    ]
    assert float(np.std(said[0])) > 0.1
    np.testing.assert_allclose(said[0], said[1], rtol=0, atol=2e-5)


def test_widened_heads_draft_the_same():
    target = wide_target()
    heads = random_heads(target, scale=0.03, heads=3)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(8, REAL, n).tolist() for n in (5, 9)]
    small, wide = (
        stree_jax.generate(
            t, prompts, max_new_tokens=16, stop_tokens=(), drafter=h, tree="chain:3"
        )
        for t, h in ((target, heads), (widened(target, 4), widened_heads(heads, 4)))
    )
    assert small.tokens == wide.tokens and small.min_margin.min() > 1e-4
    assert small.gained.tolist() == wide.gained.tolist()
    assert small.acceptance_length.max() > 1.5
