"""Test `bench prompts` and `bench capacity` on tiny models."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import capacity, command, passes, reading, shapes
from bench.method import Run
from bench.registry import parse_bench
from stree_jax.generation.scoring import score
from stree_jax.models import (
    AttentionConfig,
    MambaConfig,
    MLPConfig,
    Model,
    init_params,
)
from tests.bench.pairs import cells, drawn
from tests.support.tiny import perturbed, tiny

HYBRID = replace(
    shapes.config_of("hybrid-130m").with_mixers(
        mamba=MambaConfig(8, 8, 16),
        attention=AttentionConfig(4, 2, 8),
        mlp=MLPConfig(48),
    ),
    vocab_size=50,
    num_tokens=47,
    d_model=32,
    layers=("mamba", "mlp", "attention", "mlp"),
)
LENGTHS = ("5", "70")  # less than a chunk, and more


# --- prompts --------------------------------------------------------------------------


@pytest.fixture
def model(monkeypatch):
    """A model used in place of all shapes."""
    params = init_params(HYBRID, jax.random.key(0), jnp.float32)
    made = Model(params=perturbed(params, 0.2, 1), config=HYBRID)
    monkeypatch.setattr(reading, "config_of", lambda shape: HYBRID)
    monkeypatch.setattr(reading, "random_model", lambda config, dtype: made)
    return made


def read(*dtypes, lengths=LENGTHS):
    words = ["--shapes", "tiny", "--once", "70", "--dtypes", *dtypes, "--lengths"]
    return reading.measure(parse_bench(["prompts", *words, *lengths]), Run(2))


def test_prefill_returns_the_logits_of_the_last_token(model):
    ids = list(np.random.default_rng(0).integers(47, size=70))
    call, about = reading.our_reader(model, ids)
    seconds, logits = call()
    assert logits.shape == (47,) and seconds > 0 and about["temp_bytes"] > 0
    expected = np.asarray(score(model, [ids]))[0, -1, :47]
    np.testing.assert_allclose(logits, expected, atol=1e-5 * abs(expected).max())
    without = np.asarray(score(model, [ids]))[0, -2, :47]
    assert abs(logits - without).max() > 0.1 * abs(expected).max()


def test_a_report_with_transformers(model):
    pytest.importorskip("transformers")
    report = read("float32", "int8")
    assert report["complete"] and json.loads(json.dumps(report)) == report
    rows = {(row["dtype"], row["length"]): row for row in report["results"]}
    assert list(rows) == [(d, n) for d in ("float32", "int8") for n in (5, 70)]
    assert [row["turns"] for row in rows.values()] == [2, 1, 2, 1]
    for (dtype, length), row in rows.items():
        assert row["ours_low"] <= row["ours"] <= row["ours_high"]
        seconds = report["units"][f"tiny/{dtype}/{length}"]["seconds"]
        assert row["ours"] == pytest.approx(
            np.median([length / s for s in seconds["ours"]])
        )
        if dtype == "int8":
            assert row["transformers"] is row["ratio"] is row["logits_apart"] is None
            continue
        assert 0 < row["logits_apart"] < 1e-5
        ratios = np.divide(seconds["transformers"], seconds["ours"])
        assert row["ratio"] == pytest.approx(np.median(ratios))
    text = reading.table(report)
    assert len(cells(text)) == 2 + len(rows) and "plain torch" in text
    assert len(drawn(report).axes) == 1


def test_a_peer_with_other_weights_is_not_timed(model, monkeypatch):
    pytest.importorskip("transformers")
    other = reading.in_transformers

    def changed(made, dtype):
        return other(replace(made, params=perturbed(made.params, 0.01, 2)), dtype)

    monkeypatch.setattr(reading, "in_transformers", changed)
    monkeypatch.setattr(reading, "take_turns", None)
    with pytest.raises(RuntimeError, match="of the largest from ours, more than 0.001"):
        read("float32")


def test_without_transformers_only_this_library_is_timed(model, monkeypatch):
    monkeypatch.setattr(reading, "transformers_version", lambda: None)
    report = read("float32")
    assert [row["ratio"] for row in report["results"]] == [None, None]
    text = reading.table(report)
    assert len(cells(text)) == 3 and "transformers is not installed" in text
    drawn(report)


def test_prompts_of_one_token_are_refused(model):
    with pytest.raises(ValueError, match="--lengths: want at least 2, got 1"):
        read("float32", lengths=("1", "8"))


# --- capacity -------------------------------------------------------------------------

OPTIONS = {
    "--models": ["a/b"],
    "--sizes": ["1", "3"],
    "--capacities": ["128", "512"],
    "--lengths": ["5", "300"],
    "--text-tokens": ["5"],
    "--dtypes": ["float32"],
}


def capacities(**options):
    chosen = OPTIONS | {f"--{name}": values for name, values in options.items()}
    words = [word for name, values in chosen.items() for word in (name, *values)]
    return command.measure(parse_bench(["capacity", "--repeats", "2", *words]))


def test_a_report_by_capacity_and_text_length(monkeypatch):
    model = tiny(0, layers=("attention", "mlp", "attention"))
    monkeypatch.setattr(capacity, "model_named", lambda name, dtype: model)
    report = capacities()
    assert report["complete"] and json.loads(json.dumps(report)) == report
    assert "text" not in report  # --explain prints this, and --figure draws it
    rows = report["results"]
    places = [(row["capacity"], row["text"]) for row in rows]
    assert places == 2 * [(128, 5), (512, 5), (512, 5), (512, 300)]
    assert [row["nodes"] for row in rows] == 4 * [1] + 4 * [3]
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    # Two layers, keys and values, two heads of 8, float32; and a length
    for row in rows:
        assert row["read_bytes"] == weights + row["text"] * 2 * 2 * 2 * 8 * 4 + 4
        assert row["model"] == "a/b" and row["temp_bytes"] > 0
        assert row["ms_low"] <= row["ms"] <= row["ms_high"]
    shown = cells(capacity.table(report))
    assert len(shown) == 1 + len(rows) and len(shown[0]) == 9
    assert len(drawn(report).axes) == 2


def test_ratios_are_computed_turn_by_turn():
    def record(rows, seconds, size):
        times = {"capacity": rows, "text": 5, "seconds": seconds, "read_bytes": size}
        return times | {"temp_bytes": 1, "memory_bytes": 1, "compile_s": 0.0}

    records = [record(128, [0.1, 0.2, 0.4], 10**8), record(256, [0.2, 0.1, 0.8], 10**9)]
    records.append(record(512, [], 10**9))  # memory was not enough
    unit = {"parameters": 1, "records": records}
    first, second, third = capacity.capacity_rows({"nodes": 16}, unit)
    assert (second["ms"], second["over_first"]) == pytest.approx((200, 2))
    assert second["bytes_per_s"] == pytest.approx(5e9)
    assert [row["read_over_first"] for row in (first, second)] == [1, 10]
    assert third["ms"] is third["over_first"] is third["bytes_per_s"] is None


def test_a_turn_runs_after_the_given_length_of_text():
    model = tiny(0, layers=("attention",))
    case = passes.Case(1, "packed", context=5, capacity=512)
    turns = passes.Turns(passes.compile_case(model, case, 1))
    for text in (300, 300, None):
        turns(text)
    state, _, _ = turns.carry
    written = np.flatnonzero(
        np.abs(np.asarray(state.layers[0]["attention"].k)).sum((0, 1, 3))
    )
    assert state.layers[0]["attention"].k.shape[2] == 512 and state.length.tolist() == [
        300
    ]
    assert written.tolist() == [300]


def test_loaded_weights_compile_once(caplog):
    """The second call once compiled again, for a carry committed to the device."""
    model = tiny(0, layers=("attention",))
    model = replace(model, params=jax.device_put(model.params, jax.devices()[0]))
    turns = passes.Turns(passes.compile_case(model, passes.Case(1, "packed"), 1))
    turns()
    with jax.log_compiles():
        turns()
    assert not [line for line in caplog.messages if "Compiling" in line]


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"lengths": ["5", "600"]}, "--lengths: 600 tokens and a path need .* has 512"),
        (
            {"text": ["127"]},
            "--text-tokens: 127 tokens and a path need caches of 130",
        ),
        ({"sizes": ["0", "1"]}, "--sizes: want at least 1, got 0"),
    ],
)
def test_a_text_longer_than_the_caches_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        capacities(**wrong)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_random_weights_in_other_dtypes(monkeypatch, dtype):
    monkeypatch.setattr(capacity, "config_of", {"mamba2-130m": HYBRID}.__getitem__)
    model = capacity.model_named("mamba2-130m", dtype)
    assert model.config == HYBRID and str(model.weight_format) == dtype
