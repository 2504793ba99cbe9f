"""Test step times: measured once per machine and stored; invalid files are ignored."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.generation.generate import begin
from stree_jax.sampling.settings import Sampling
from stree_jax.sizing import step_times
from tests.support.tiny import perturbed, tiny

TREE = "auto:1,4"


@pytest.fixture(scope="module")
def target():
    return tiny(1, layers=("mamba", "attention"))


@pytest.fixture(scope="module")
def drafter(target):
    return target.replace(params=perturbed(target.params, 0.05, 3))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STREE_JAX_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(step_times, "_known", {})
    monkeypatch.setattr(step_times, "_doubted", {})
    monkeypatch.setattr(step_times, "_to_measure", set())
    monkeypatch.setattr(step_times, "_announced", set())
    return tmp_path / "kept"


@pytest.fixture
def measured(monkeypatch):
    """Returns a list of measurements. The times are made up."""
    calls = []

    def measure(spec, decoding):
        calls.append(spec)
        sizes = spec.policy.tree.sizes
        return step_times.Measured({n: 1.0 * n for n in sizes}, 0.5, 0.25)

    monkeypatch.setattr(step_times, "measured", measure)
    return calls


def times_of(model, drafter="lookup", tree=TREE, batch=1, sampled=False, context=500):
    """Returns the times that a generation would get."""
    sampling = Sampling(temperature=1.0) if sampled else None
    begun, plan = begin(
        model,
        [[3, 4]] * batch,
        max_new_tokens=3,
        drafter=drafter,
        tree=tree,
        sampling=sampling,
        capacity=context,
    )
    return step_times.times_of(plan.spec, begun)


def test_times_are_measured_once_and_stored(target, folder, measured, monkeypatch):
    for _ in range(2):
        found = times_of(target)
    assert len(measured) == 1
    monkeypatch.setattr(step_times, "_known", {})  # as in another process
    assert times_of(target) == found
    assert len(measured) == 1
    assert [file.name for file in folder.iterdir()] == ["steps.json"]
    result = stree_jax.generate(
        target, [[3, 4]], max_new_tokens=3, drafter="lookup", tree=TREE
    )
    assert len(measured) == 1 and result.tree_sizes == (1, 4)
    stree_jax.tune(target, tree=TREE)  # tune always measures again
    assert len(measured) == 2


def test_a_measurement_is_announced_once(target, folder, measured, monkeypatch, caplog):
    """It was for sampled rows, and whenever measured times turned out too long."""
    caplog.set_level("INFO", "stree_jax")
    times_of(target)
    times_of(target, sampled=True)
    step_times._to_measure.update(step_times._known)
    times_of(target)
    assert len(measured) == 3
    said = "measuring steps of this model on this machine"
    assert caplog.messages == [f"{said} (once)"]
    monkeypatch.setenv("STREE_JAX_CACHE", "off")
    times_of(target, tree="auto:1,8")
    assert caplog.messages[1:] == [f"{said} (STREE_JAX_CACHE is off: in every process)"]


def test_times_are_stored_for_each_configuration(target, drafter, folder, measured):
    half = target.replace(
        params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), target.params)
    )
    cases = [
        dict(model=target),
        dict(model=target, batch=8),
        dict(model=target, sampled=True),
        dict(model=target, context=10000),
        dict(model=target, tree="auto:1,8"),
        dict(model=target, drafter=drafter),
        dict(model=half),
        dict(model=tiny(1, layers=("mamba", "mamba"))),
    ]
    for n, case in enumerate(cases, start=1):
        times_of(**case)
        assert len(measured) == n, case
    for case in cases:
        times_of(**case)
    assert len(measured) == len(cases)
    entries = json.loads((folder / "steps.json").read_text())
    assert len(entries) == len(cases)
    times_of(target, context=1500)  # contexts below 4096 count as equal
    assert len(measured) == len(cases)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"KEY": 3}',
        '{"KEY": {"by_size": {"1": -1}, "draft": 0, "level": 0}}',
        '{"KEY": {"by_size": {"1": 1, "4": NaN}, "draft": 0, "level": 0}}',
        '{"KEY": {"by_size": {"1": 1}, "draft": 0, "level": 0}}',
        '{"KEY": {"by_size": {"1": 1, "4": 1%s}, "draft": 0, "level": 0}}'
        % ("0" * 400),
        "[" * 100_000,
        "\0\xff",
    ],
    ids=range(10),
)
def test_an_invalid_file_is_replaced(target, folder, measured, text):
    begun, plan = begin(
        target, [[3, 4]], max_new_tokens=3, drafter="lookup", tree=TREE, capacity=500
    )
    key = step_times.key_of(plan.spec, *step_times._shape_of(begun))
    folder.mkdir()
    (folder / "steps.json").write_text(text.replace("KEY", key))
    times_of(target)
    assert len(measured) == 1
    assert key in json.loads((folder / "steps.json").read_text())


def test_an_invalid_entry_does_not_affect_others(target, folder, measured):
    found = times_of(target)
    file = folder / "steps.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"other": 1}))
    step_times._known.clear()
    assert times_of(target) == found and step_times.is_kept(found)
    assert len(measured) == 1


def test_without_a_usable_folder_nothing_is_stored(
    target, measured, monkeypatch, tmp_path
):
    monkeypatch.setattr(step_times, "_known", {})
    for named in ("off", str(tmp_path / "file" / "below")):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("STREE_JAX_CACHE", named)
        stree_jax.tune(target, tree=TREE)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file"]


def test_a_failed_write_leaves_no_file(target, folder, measured):
    (folder / "steps.json").mkdir(parents=True)
    times_of(target)
    assert [file.name for file in folder.iterdir()] == ["steps.json"]


def test_real_steps_are_timed_on_copies(target, drafter, folder):
    """Every kind of step is timed, and the decoding state does not change."""
    begun, plan = begin(
        target, [[3, 4]], max_new_tokens=2, drafter=drafter, tree="auto:1,2,4"
    )
    times = step_times.measured(plan.spec, begun)
    assert list(times.by_size) == [1, 2, 4]
    numbers = [*times.by_size.values(), times.draft, times.level]
    assert all(0 < t < 60 for t in numbers)
    assert int(begun.length[0]) == 0 and int(begun.used.sum()) == 0


def test_disturbed_measurements_are_corrected(target, drafter):
    """A smaller tree is never slower than a larger one, and no time is negative."""
    _, plan = begin(target, [[3]], max_new_tokens=1, drafter=drafter, tree="auto:1,2,4")
    deepest = plan.spec.drafter.depth
    ways = [(0, 0), (1, 0), (2, 0), (1, 1), (1, deepest)]
    seconds = dict(
        zip(ways, ([2.0, 9.0], [8.0, 9.0], [4.0], [5.0], [3.0]), strict=True)
    )
    found = step_times._summary(seconds, ways, plan.spec)
    assert found.by_size == {1: 2.0, 2: 4.0, 4: 4.0}
    assert found.draft == 1.0 and 0 < found.level < 0.01


def test_only_auto_can_be_tuned(target):
    with pytest.raises(ValueError, match="tree: only 'auto' is tuned, got 'A'"):
        stree_jax.tune(target, tree="A")
    with pytest.raises(ValueError, match="batch"):
        stree_jax.tune(target, batch=0)
    with pytest.raises(ValueError, match="context: want 1..16777216 tokens, got 0"):
        stree_jax.tune(target, context=0)


def test_given_times_are_not_measured(target, folder, measured):
    given = step_times.Measured({1: 1.0, 4: 1.1}, 0.0, 0.0).on_device()
    stree_jax.generate(
        target,
        [[3]],
        max_new_tokens=4,
        drafter="lookup",
        tree=TREE,
        times=given,
        sampling=Sampling(temperature=1),
    )
    assert not measured


def test_times_that_are_too_long_are_measured_again(target, folder, monkeypatch):
    """The shorter of both times is kept. Times that are too short are not noticed."""
    calls, seconds = [], iter([[9.0, 9.5], [7.0, 19.0], [1e-7, 2e-7], [5.0, 5.0]])

    def measure(spec, decoding):
        calls.append(spec)
        by_size = dict(zip(spec.policy.tree.sizes, next(seconds), strict=True))
        return step_times.Measured(by_size, 0.0, 0.0)

    monkeypatch.setattr(step_times, "measured", measure)

    def generate(prompts):
        stree_jax.generate(
            target, prompts, max_new_tokens=9, drafter="lookup", tree=TREE
        )
        return len(calls)

    def kept():
        (entry,) = json.loads((folder / "steps.json").read_text()).values()
        return list(entry["by_size"].values())

    assert generate([[3, 4]]) == 1
    assert kept() == [9.0, 9.5]
    assert generate([[3, 4]]) == 2
    assert kept() == [7.0, 9.5]
    assert [generate([[3, 4]]) for _ in range(3)] == [3, 3, 3]
    assert kept() == [1e-7, 2e-7]


def test_times_are_measured_again_a_limited_number_of_times(target, folder, measured):
    begun, plan = begin(target, [[3, 4]], max_new_tokens=3, drafter="lookup", tree=TREE)
    calls = np.array([[2, 1]])
    asked = plan.spec, begun, calls
    assert not step_times.doubt(*asked, 0, 1.0)  # nothing was measured
    step_times.times_of(plan.spec, begun)
    assert not step_times.doubt(*asked, 0, 6.0)  # 1 + 1 + 4 s, as measured
    assert not step_times.doubt(*asked, 0, 5.8)
    assert step_times.doubt(*asked, 4, 5.8)  # includes passes of 0.25 s
    for _ in range(step_times.AGAIN - 1):
        assert step_times.doubt(*asked, 0, 1.0)
    assert not step_times.doubt(*asked, 0, 1.0)


def test_plain_steps_of_a_batch_are_checked(target, folder, measured):
    """Rows have different trees, so only the time of plain steps is a lower bound."""
    prompts = [[3, 4], [5]]
    begun, plan = begin(target, prompts, max_new_tokens=9, drafter="lookup", tree=TREE)
    calls = np.array([[2, 1], [7, 0]])
    plain = step_times.times_of(plan.spec, begun).by_size[1]
    assert not step_times.doubt(plan.spec, begun, calls, 9, 3 * plain / 1.05)
    assert step_times.doubt(plan.spec, begun, calls, 9, 3 * plain / 1.15)


def test_a_slow_first_call_does_not_shorten_steps(target, monkeypatch):
    """The time of a call without steps is subtracted, but not the delay of a first
    call."""
    begun, plan = begin(target, [[3, 4]], max_new_tokens=3, drafter="lookup", tree=TREE)
    cold = set()

    def timed_steps(spec, at, steps):
        size = int(at.policy.force.size)
        delay = 0.0 if (size, steps) in cold else 1.0
        cold.add((size, steps))
        per_step = 0.01 if int(at.choice) == 0 else 0.03
        return at, 0.002 + per_step * steps + (delay if steps == 0 else 0.0)

    monkeypatch.setattr(step_times, "_timed_steps", timed_steps)
    found = step_times.measured(plan.spec, begun)
    assert found.by_size == pytest.approx({1: 0.01, 4: 0.03})


def test_several_steps_are_timed_together():
    """So that one disturbed step does not dominate. Long steps are timed one by one."""
    steps = {1e-4: 32, 1e-3: 20, 0.01: 4, 0.04: 4, 0.1: 1, 2.0: 1}
    assert {about: step_times._steps_of_segment(about) for about in steps} == steps
