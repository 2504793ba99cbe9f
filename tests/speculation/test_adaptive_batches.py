"""Test tree "auto" in batches whose rows have different trees."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax.generation.generate import begin
from stree_jax.models.layers.nodes import NO_NODE
from stree_jax.speculation.adaptive import policy as adaptive_policy
from stree_jax.speculation.draft import only_root
from stree_jax.speculation.step import (
    of_running,
    packed,
    passes_skip,
    step,
    trees_of,
)
from stree_jax.speculation.tree import Auto
from tests.speculation.auto import TREE, times

OPTIONS = dict(max_new_tokens=12, drafter="lookup", tree="auto:1,4,8")


def spec_of(target, given):
    _, plan = begin(target, [[3]], times=given, **OPTIONS)
    return plan.spec


def test_rows_get_nodes_by_their_value(target):
    """One text repeats itself, one does not, and one row is finished."""
    texts = [[5, 6, 7, 8] * 5, list(range(20, 40)), [9, 10, 11, 12] * 5]
    spec = spec_of(target, times([1.0, 1.3, 1.7]))
    if not spec.policy.shares:
        pytest.skip("passes take the time of their room here")
    begun, _ = begin(target, texts, times=spec.policy.times, **OPTIONS)
    at = replace(begun, finish=jnp.asarray([0, 0, 1], jnp.int32))
    at = spec.policy.choose(at, spec.drafter, spec.rule, target.config.num_tokens)
    draft = at.drafting.draft
    nodes = (np.asarray(draft.layout.parents) != NO_NODE).sum(axis=1)
    assert nodes[0] > 4 and nodes[1:].tolist() == [1, 0]
    assert int(at.choice) == 2
    assert trees_of(spec, at, replace(draft, has_padding=True)).tolist() == [2, 0, 0]
    options = dict(OPTIONS, times=spec.policy.times, stop_tokens=())
    again = stree_jax.generate(target, texts[:2], **options)
    plain = stree_jax.generate(
        target, texts[:2], max_new_tokens=12, stop_tokens=(), drafter=None
    )
    assert again.tokens == plain.tokens
    repeated, other = again.calls_by_size
    assert repeated[1:].sum() > other[1:].sum()


@pytest.mark.parametrize(
    ("drafts", "tree"), [(False, None), (True, "A"), (True, "auto:1,4")]
)
def test_finished_rows_have_no_nodes(target, drafts, tree):
    """The target verifies no nodes of finished rows, and all nodes of the others."""
    given = dict(times=times([1.0, 1.0])) if tree == "auto:1,4" else {}
    options = dict(drafter=target if drafts else None, tree=tree, **given)
    d, plan = begin(target, [[3, 4]] * 3, max_new_tokens=4, **options)
    spec, ended = plan.spec, jnp.asarray([0, 1, 0], jnp.int32)
    d = replace(d, finish=ended)
    seen = []

    def verify(*args):
        seen.append(args[2])
        return packed(*args)

    one = replace(d, choice=jnp.int32(len(spec.policy.menu) - 1))
    step(spec, spec.policy.menu[-1], one, verify)
    (draft,) = seen
    nodes = (np.asarray(draft.layout.parents) != NO_NODE).sum(axis=1)
    T = draft.tokens.shape[1]
    skips = passes_skip(target)
    assert draft.has_padding is skips and nodes.tolist() == [T, 0 if skips else T, T]
    alone = replace(d, root=d.root[:1], finish=ended[1:2])
    assert not of_running(only_root(alone.root), alone, target).has_padding


def test_finished_rows_do_not_change_other_rows(target, prompts):
    """Whenever rows finish, with every drafter."""
    limits = [3, 17, 9][: len(prompts)]
    for options in (
        dict(drafter=None),
        dict(drafter=target, tree="A"),
        dict(drafter="lookup"),
    ):
        one_by_one = [
            stree_jax.generate(
                target, [p], max_new_tokens=n, stop_tokens=(), drafter=None
            ).tokens[0]
            for p, n in zip(prompts, limits, strict=False)
        ]
        together = stree_jax.generate(
            target, prompts[:3], max_new_tokens=limits, stop_tokens=(), **options
        )
        assert together.tokens == one_by_one


@pytest.mark.parametrize(
    ("sizes", "batch", "by_row"),
    [
        ((1, 4, 8), 3, True),
        ((1, 4, 8), 1, False),
        ((1, 4, 8), 200, False),  # too many rows: each size has its own step
        ((1, 4), 3, False),  # the step has no padding
        ((1, 4, 8, 32), 3, False),
    ],
)
def test_rows_have_separate_trees_if_all_sizes_share_a_step(
    target, sizes, batch, by_row
):
    policy = spec_of(target, times([1.0] * 3)).policy
    policy = replace(policy, tree=Auto(sizes), shares=True)
    assert policy._by_row(batch) is by_row
    assert not replace(policy, shares=False)._by_row(batch)


@pytest.mark.parametrize("tree", ["auto:1,4", "auto:1,4,32"])
def test_text_is_identical_if_sizes_share_no_step(target, prompts, tree):
    plain = stree_jax.generate(
        target, prompts, max_new_tokens=14, stop_tokens=(), drafter=None
    )
    given = times([1.0] * tree.count(",") + [1.0])
    options = dict(drafter=target, tree=tree, times=given, stop_tokens=())
    result = stree_jax.generate(target, prompts, max_new_tokens=14, **options)
    assert result.tokens == plain.tokens
    assert result.calls_by_size[:, -1].sum() > 0


def test_the_best_nodes_of_all_rows_are_chosen():
    """Among equal values the first is chosen, so that each row keeps its first
    nodes."""
    value = jnp.asarray([[0.9, 0.5, 0.2], [0.5, 0.5, 0.1], [0.0, 0.0, 0.0]])
    wanted = [[0, 0], [1, 0], [2, 0], [2, 1], [2, 2], [3, 2], [3, 3]]
    for taken, rows in enumerate(wanted):
        best = adaptive_policy._of_the_best(value, jnp.int32(taken))
        assert best.tolist() == [*rows, 0]


def test_times_of_small_steps_are_extrapolated(target):
    """In batches: by the line through the times of 4 and 8 nodes a row, but never below
    the time of a plain step."""
    spec = spec_of(target, times([1.0, 2.0, 2.8]))
    nodes = np.array([1, 1.5, 2, 4, 6, 8])
    found = spec.policy._seconds(nodes)
    np.testing.assert_allclose(found, [1.0, 1.5, 1.6, 2.0, 2.4, 2.8], rtol=1e-6)
    steep = replace(spec.policy, times=times([1.0, 2.0, 6.0]))
    np.testing.assert_allclose(steep._seconds(nodes)[:3], 1.0)


def test_a_draft_model_that_takes_no_time_is_used(target, prompts):
    """A measured time of zero does not mean that the model was not used."""
    calls = []
    for seconds in (0.0, 1e-6):
        free = times(draft=seconds, level=seconds)
        options = dict(max_new_tokens=60, stop_tokens=(), drafter=target, tree=TREE)
        result = stree_jax.generate(target, prompts, times=free, **options)
        calls.append(result.target_calls.tolist())
    assert calls[0] == calls[1]
    assert max(calls[0]) < 40


@pytest.mark.parametrize(
    ("rows", "seconds", "nodes"),
    [(1, 1.6, 1), (1, 1.45, 4), (2, 1.45, 1), (2, 1.36, 2)],
)
def test_a_batch_needs_a_larger_predicted_gain_to_draft(target, rows, seconds, nodes):
    """The gain is 1.63 tokens a step; steps with more than one node take `seconds`."""
    begun, plan = begin(
        target, [[3]] * rows, times=times([1.0, seconds, seconds]), **OPTIONS
    )
    policy = replace(plan.spec.policy, shares=True)
    weights = jnp.full((rows,), 1 / rows, jnp.float32)
    value = 0.63 if rows == 1 else 0.63 / adaptive_policy.LAST_ROW_GAIN
    values = jnp.zeros((rows, 8), jnp.float32).at[:, :2].set(jnp.array([1.0, value]))
    learnt = replace(begun.policy, weights=weights)
    _, chosen = policy._chosen(begun, learnt, values, jnp.float32(0))
    assert chosen.tolist() == [nodes] * rows
