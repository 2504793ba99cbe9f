"""Test plans: they fit, nothing faster fits, and the search always ends."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import stree_jax
from stree_jax.models.drafters.heads import (
    Heads,
    HeadsConfig,
    first_heads,
    head_logits,
    init_heads,
)
from stree_jax.sizing import candidates, step_times
from stree_jax.sizing import plan as planning
from stree_jax.sizing.memory import (
    CompiledBytes,
    abstract_model,
    memory_of,
)
from stree_jax.sizing.plan import plan
from stree_jax.sizing.request import Request
from stree_jax.sizing.units import bytes_named
from stree_jax.speculation.drafters.table import abstract_source
from stree_jax.speculation.gain import Acceptance
from tests.support.tiny import tiny

pytestmark = pytest.mark.usefixtures("nothing_measured")
MB = 10**6
ASKED = {"batch": 2, "context": 256, "queries": 2, "max_new_tokens": 64}


@pytest.fixture(scope="module")
def target():
    return tiny(1).config


@pytest.fixture(scope="module")
def drafter():
    return tiny(2, layers=("mamba",), d_model=16).config


@pytest.fixture(scope="module")
def ample(target, drafter):
    return plan(target, 100 * MB, drafter=drafter, **ASKED)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9),
        ("8GiB", 8 * 2**30),
        ("512MB", 512 * MB),
        ("1.5 kib", 1536),
        ("77", 77),
        (77, 77),
        ("2B", 2),
    ],
)
def test_byte_sizes_are_parsed(text, size):
    assert bytes_named(text) == size


@pytest.mark.parametrize("text", ["", "GB", "8XB", "-8GB", "0", "8 G B", "1e9", True])
def test_invalid_byte_sizes_are_refused(text):
    with pytest.raises(ValueError, match=r"^memory: want "):
        bytes_named(text)


def test_choices_that_fit_are_ranked(ample):
    speeds = [choice.tokens_per_s(2) for choice in ample.choices]
    assert len(speeds) == planning.KEPT and speeds == sorted(speeds, reverse=True)
    assert all(choice.memory.promised <= ample.limit for choice in ample.choices)
    assert ample.best.drafter == "model" and ample.best.dtype == "float32"
    assert not ample.best.measured and ample.best.tau > 2


def test_planned_bytes_match_memory_of(ample, target, drafter):
    """For caches with capacity for all queries."""
    best = ample.best
    abstract = [
        stree_jax.sizing.memory.abstract_model(c, np.dtype(best.dtype))
        for c in (target, drafter)
    ]
    room = Request(**ASKED).room(candidates.topology(best.tree).depth)
    assert room.capacity >= 2 * 256 and room.batch == 2
    assert memory_of(*abstract, best.tree, room) == best.memory


def test_one_byte_less_gives_another_choice(ample, target, drafter):
    size = ample.best.memory.promised
    same = plan(target, size, drafter=drafter, **ASKED)
    assert same.best == ample.best
    less = plan(target, size - 1, drafter=drafter, **ASKED)
    assert less.best != ample.best and less.best.memory.promised < size


def test_lower_precision_comes_last(target, drafter):
    """It is chosen only if not even plain decoding fits in float32."""
    plain = plan(target, MB * 100, drafter=None, dtypes=["float32"], **ASKED)
    (choice,) = plain.choices
    size = choice.memory.promised
    at = plan(target, size, drafter=drafter, **ASKED)
    assert (at.best.drafter, at.best.dtype) == ("none", "float32")
    below = plan(target, size - 1, drafter=drafter, **ASKED)
    assert below.best.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("limit", "advice"), [(1, "the shortest request takes"), (300_000, "it fits with")]
)
def test_the_search_ends_and_suggests_smaller_sizes(limit, advice, target, drafter):
    """SpecMemo's loop, as printed in the paper, would never end."""
    with pytest.raises(ValueError, match=r"^memory: .* too few for plain decod") as e:
        plan(target, limit, drafter=drafter, **ASKED)
    text = str(e.value)
    assert "\n" not in text and "in bfloat16" in text and advice in text


def test_suggested_sizes_fit(target):
    asked = {"batch": 4, "context": 4096, "queries": 3, "max_new_tokens": 64}
    (whole,) = plan(target, 100 * MB, drafter=None, **asked).choices
    limit = whole.memory.promised // 2
    with pytest.raises(ValueError, match="it fits with") as error:
        plan(target, limit, drafter=None, dtypes=["float32"], **asked)
    words = str(error.value).split("it fits with ")[1].split(", or ")
    assert len(words) == 3
    for word in words:
        name, number = word.split()
        assert int(number) < asked[name]
        less = asked | {name: int(number)}
        plan(target, limit, drafter=None, dtypes=["float32"], **less)


def test_several_sizes_are_reduced_if_one_is_not_enough(target):
    asked = {"batch": 4, "context": 1100, "queries": 3, "max_new_tokens": 1024}
    given = {"drafter": None, "dtypes": ["float32"]}
    (least,) = plan(target, 100 * MB, **given, **asked | {"batch": 1}).choices
    limit = int(0.8 * least.memory.promised)
    with pytest.raises(ValueError, match="it fits with batch 1 and ") as error:
        plan(target, limit, **given, **asked)
    words = [w.split() for w in str(error.value).split("fits with ")[1].split(" and ")]
    less = {name: int(number) for name, number in words}
    assert all(number < asked[name] for name, number in less.items())
    plan(target, limit, **given, **asked | less)


def test_plans_with_fewer_heads(target):
    config = HeadsConfig(d_model=32, vocab_size=50, heads=3, blocks=4)
    found = plan(target, 100 * MB, drafter=config, **ASKED)
    heads = {choice.heads for choice in found.choices}
    assert heads <= {0, 1, 2, 3} and found.best.heads
    whole = abstract_model(target, np.float32)
    heads = abstract_source(config, np.float32)
    options = candidates.by_speed(whole, heads, Request(**ASKED).room(16))
    assert {o.heads for o in options} == {0, 1, 2, 3}
    for option in options:
        if option.heads:
            tree = candidates.topology(option.tree)
            assert tree.depth <= option.heads or option.tree.startswith("auto")


def test_first_heads_keep_their_logits():
    target = tiny(1)
    config = HeadsConfig(32, 50, heads=3, accuracy=((0.5,), (0.4,), (0.3,)))
    heads = Heads(init_heads(config, jax.random.key(0), np.float32), config)
    hidden = np.ones((2, 32), np.float32)
    two = first_heads(heads, 2)
    assert two.config.heads == 2 and two.config.accuracy == ((0.5,), (0.4,))
    assert set(two.params) == {"head_0", "head_1"}
    got, all_of = (head_logits(h, target, hidden, 2) for h in (two, heads))
    np.testing.assert_array_equal(got, all_of)


def test_measured_steps_determine_the_plan(target, drafter, monkeypatch):
    """If every further node costs many times a plain step, plain decoding is
    fastest."""
    steep = step_times.Measured({1: 1.0, 4: 40.0, 8: 80.0, 16: 160.0}, 0.5, 0.5)
    monkeypatch.setattr(step_times, "known", lambda spec, decoding: steep)
    found = plan(target, 100 * MB, drafter=drafter, **ASKED)
    assert found.best.measured and found.best.tau == 1.0 and found.best.step_s == 1.0
    verify = candidates._between(steep.by_size)
    assert verify(6) == 60.0 and verify(31) == pytest.approx(160 + 15 * 159 / 15)


def test_high_acceptance_gives_large_trees(target, drafter):
    good, bad = (
        Acceptance(np.tile(np.array([[p, 0.02, 0.01]]), (15, 1))) for p in (0.95, 0.05)
    )
    taus = [
        plan(target, 100 * MB, drafter=drafter, acceptance=table, **ASKED).best.tau
        for table in (good, bad)
    ]
    assert taus[0] > 5 and taus[1] < 1.5


def test_the_compilers_sizes_decide(ample, target, drafter, monkeypatch):
    """A choice that does not fit by the compiler's size is skipped, and the search
    continues."""
    asked = []

    def says(*args, reads):
        asked.append((args[2], reads))
        return CompiledBytes(0, 0, 200 * MB if len(asked) < 2 else 1)

    monkeypatch.setattr(planning, "compiled_bytes", says)
    found = plan(target, 100 * MB, drafter=drafter, check=True, **ASKED)
    assert len(found.choices) == 1 and found.best == ample.choices[1]
    assert [tree for tree, _ in asked] == [
        ample.choices[0].tree,
        *[ample.choices[1].tree] * 2,
    ]
    assert asked[2][1] > 0 == asked[1][1]  # the loop, and the prefill program


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"batch": 0}, "batch"),
        ({"queries": 0}, "queries"),
        ({"context": 64}, "max_new_tokens"),
        ({"drafter": "who"}, "drafter"),
        ({"drafter": "mtp"}, "no MTP layers"),
    ],
)
def test_wrong_arguments(wrong, word, target):
    with pytest.raises(ValueError, match=word):
        plan(target, "8GB", **ASKED | wrong)


def test_more_queries_need_larger_caches():
    few, many = (Request(context=512, queries=n).room(4) for n in (2, 20))
    assert many.capacity > 20 * 512 > few.capacity > 2 * 512
    assert replace(many, capacity=0) == replace(few, capacity=0)


def test_a_plan_for_a_mesh_needs_no_devices(target, ample):
    """Limit and bytes are those of each device of the mesh."""
    found = plan(target, 100 * MB, drafter=None, mesh="data=2,model=4", **ASKED)
    alone = plan(target, 100 * MB, drafter=None, **ASKED)
    assert (found.mesh, alone.mesh) == ({"data": 2, "model": 4}, None)
    ours, whole = found.best.memory, alone.best.memory
    assert ours.state < whole.state / 4 and ours.caches < whole.caches
    assert whole.weights / 8 < ours.weights < whole.weights
    assert 0 < found.best.copied < ours.weights and alone.best.copied == 0
    told = found.as_json()
    assert told["mesh"] == found.mesh and "mesh" not in alone.as_json()
    assert told["choices"][0]["copied_weights"] == found.best.copied


@pytest.mark.parametrize(("batch", "groups"), [(3, 1), (4, 2)])
def test_rows_are_divided_if_they_divide_evenly(target, batch, groups):
    asked = ASKED | {"batch": batch}
    one, two = (
        plan(target, 100 * MB, drafter=None, mesh=mesh, **asked).best.memory
        for mesh in ("data=1", "data=2")
    )
    assert one.state == groups * two.state and one.caches == groups * two.caches
    assert one.temporaries.total == groups * two.temporaries.total
    assert one.reading == groups * two.reading


@pytest.mark.parametrize(
    ("mesh", "problem"),
    [
        ("rows=2", "mesh: want data=N"),
        (3, "mesh: want a text"),
        ("model=7", "mesh: no layer of this model divides by model=7"),
    ],
)
def test_meshes_that_cannot_be(target, mesh, problem):
    with pytest.raises(ValueError, match=problem) as error:
        plan(target, 100 * MB, mesh=mesh, **ASKED)
    assert "\n" not in str(error.value)


def test_compiling_for_a_mesh_needs_its_devices(target):
    with pytest.raises(ValueError, match="is 2 devices, there are 1"):
        plan(target, 100 * MB, drafter=None, mesh="data=2", check=True, **ASKED)
