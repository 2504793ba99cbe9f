"""Test `generate` with a memory limit: predicted bytes, refusals, conversations."""

import jax
import pytest

import stree_jax
from stree_jax.models.stack.memory import size_of
from stree_jax.sizing import budget, step_times
from stree_jax.sizing.budget import weights_given
from stree_jax.sizing.parts import SCRATCH
from tests.support.tiny import tiny

pytestmark = pytest.mark.usefixtures("nothing_measured")
PROMPTS = [[1, 2, 3, 4], [5, 6]]
ASKED = {"drafter": None, "max_new_tokens": 8, "capacity": 512, "stop_tokens": ()}


@pytest.fixture(scope="module")
def target():
    return tiny(1)


@pytest.fixture(scope="module")
def plain(target):
    return stree_jax.generate(target, PROMPTS, **ASKED)


def record_needs(patch):
    """Records the predicted bytes without weights, call by call."""
    real, said = budget.needs, []

    def heard(*args):
        for need in real(*args):
            said.append(need)
            yield need

    patch.setattr(budget, "needs", heard)
    return said


def test_the_limit_determines_the_tree_not_the_text(target, plain, monkeypatch):
    """A tree fits in exactly the bytes that the compiler reports, and not in one byte
    less."""
    said = record_needs(monkeypatch)
    asked = ASKED | {"drafter": "lookup"}
    fixed = stree_jax.generate(target, PROMPTS, **asked, tree="chain:2", memory="1GB")
    assert fixed.tokens == plain.tokens and fixed.tree_sizes == (3,)
    weights = size_of(target.params)
    enough = weights + int(SCRATCH * max(said))
    again = stree_jax.generate(target, PROMPTS, **asked, tree="chain:2", memory=enough)
    assert again.tokens == plain.tokens
    with pytest.raises(ValueError, match=r"^memory: .* too few for tree chain:2") as e:
        stree_jax.generate(target, PROMPTS, **asked, tree="chain:2", memory=enough - 1)
    assert "\n" not in str(e.value) and "it fits with" in str(e.value)
    less = stree_jax.generate(target, PROMPTS, **asked, memory=enough - 1)
    assert less.tokens == plain.tokens and less.tree_sizes != (3,)


@pytest.mark.parametrize("share", [0.5, 0.99, 1.01])
def test_too_small_limits_are_refused_before_anything_runs(
    target, plain, share, monkeypatch
):
    monkeypatch.setattr(budget.Start, "begun", None)
    limit = int(share * size_of(target.params))
    with pytest.raises(ValueError, match=r"^memory: .* too few for plain") as error:
        stree_jax.generate(target, PROMPTS, **ASKED, memory=limit)
    assert f"{limit / 1e6:.2f} MB" in str(error.value)
    assert "the shortest request takes" in str(error.value)


def test_the_suggested_capacity_fits(target, monkeypatch):
    asked = ASKED | {"capacity": 16384}
    said = record_needs(monkeypatch)
    stree_jax.generate(target, PROMPTS, **asked, memory="1GB")
    limit = size_of(target.params) + max(said) // 2
    with pytest.raises(ValueError, match="it fits with capacity") as error:
        stree_jax.generate(target, PROMPTS, **asked, memory=limit)
    capacity = int(str(error.value).split("capacity ")[1].split(",")[0])
    assert 0 < capacity < 16384
    less = asked | {"capacity": capacity}
    stree_jax.generate(target, PROMPTS, **less, memory=limit)


def test_an_unused_draft_model_counts(target):
    drafter = tiny(2, layers=("mamba",), d_model=16)
    both = weights_given(target, drafter)
    assert both == size_of(target.params) + size_of(drafter.params)
    assert weights_given(target, target) == size_of(target.params)
    assert weights_given(target, "lookup") == size_of(target.params)


def test_turns_reuse_their_caches(target, monkeypatch):
    """The prediction for the first turn includes all others, which use the same
    programs and bytes."""
    said = record_needs(monkeypatch)
    asked = ASKED | {"drafter": "lookup", "tree": "chain:2", "keep_past": True}
    first = stree_jax.generate(target, PROMPTS, **asked, memory="1GB")
    assert len(said) == 4  # prefill, step, commit, resume
    limit = size_of(target.params) + int(SCRATCH * max(said))
    whole = [p + t for p, t in zip(PROMPTS, first.tokens, strict=True)]
    past, arrays = first.past, set()
    earlier = stree_jax.speculation.loop.resume_decoding_jit._cache_size()
    del first
    for turn in range(3):
        before = past.target
        result = stree_jax.generate(
            target, [[7], [8, 9]], **asked, past=past, take_past=True, memory=limit
        )
        assert before.length.is_deleted()
        whole = [t + more for t, more in zip(whole, ([7], [8, 9]), strict=True)]
        anew = stree_jax.generate(target, whole, **ASKED)
        assert result.tokens == anew.tokens
        whole = [t + more for t, more in zip(whole, result.tokens, strict=True)]
        past = result.past
        arrays.add(size_of((past.target, past.drafter)))
        programs = stree_jax.speculation.loop.resume_decoding_jit._cache_size()
        assert programs - earlier <= 1, f"turn {turn} compiled another program"
    assert len(arrays) == 1


def test_a_state_can_be_taken_over_only_once(target):
    asked = ASKED | {"keep_past": True}
    first = stree_jax.generate(target, PROMPTS, **asked)
    kept = stree_jax.generate(target, [[7], [7]], **asked, past=first.past)
    taken = stree_jax.generate(
        target, [[7], [7]], **asked, past=first.past, take_past=True
    )
    assert kept.tokens == taken.tokens
    with pytest.raises(ValueError, match=r"^past: its arrays were reused"):
        stree_jax.generate(target, [[7], [7]], **asked, past=first.past)
    larger = asked | {"capacity": 1024}  # new arrays, so there is nothing to reuse
    grown = stree_jax.generate(
        target, [[1], [1]], **larger, past=taken.past, take_past=True
    )
    assert jax.tree.leaves(grown.past.target)[0].shape


def test_times_are_not_measured_if_a_copy_does_not_fit(target, plain, monkeypatch):
    said = record_needs(monkeypatch)
    monkeypatch.setattr(step_times, "measured", lambda *args: pytest.fail("measured"))
    asked = ASKED | {"drafter": "lookup", "tree": "auto:1,4"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_times, "timed", lambda spec, *args: spec)
        stree_jax.generate(target, PROMPTS, **asked, memory="1GB")
    limit = size_of(target.params) + int(SCRATCH * max(said)) + 1
    result = stree_jax.generate(target, PROMPTS, **asked, memory=limit)
    assert result.tokens == plain.tokens


@pytest.mark.parametrize("wrong", ["8XB", 0, "", True])
def test_invalid_limits_are_refused(target, wrong):
    with pytest.raises(ValueError, match=r"^memory: want "):
        stree_jax.generate(target, PROMPTS, **ASKED, memory=wrong)
