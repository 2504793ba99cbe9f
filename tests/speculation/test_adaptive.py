"""Test adaptive trees: the text never changes, and the expected sizes are chosen."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import stree_jax
from stree_jax import Sampling
from stree_jax.generation.generate import begin
from stree_jax.sampling.requests import Requests
from stree_jax.sampling.settings import sampling_rows
from stree_jax.speculation import loop
from stree_jax.speculation.accept import Accepted, resolve_rule
from stree_jax.speculation.adaptive.calibration import PRIOR, count, no_counts
from stree_jax.speculation.adaptive.policy import (
    FIRST_WAIT,
    TRIALS,
    AdaptivePolicy,
    Force,
    forced,
)
from stree_jax.speculation.adaptive.pool import KINDS, NO_KIND
from stree_jax.speculation.decoding import OPEN, RUNNING
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.layout import tree_layout
from stree_jax.speculation.specs import make_spec
from stree_jax.speculation.tree import Auto, Budget, compiled_steps, resolve_tree
from tests.speculation.auto import (
    NEW,
    SETTINGS,
    TREE,
    before_a_search,
    plain_of,
    searching,
    times,
)
from tests.speculation.steps import decode, row_of
from tests.support.tiny import REAL


@pytest.mark.parametrize("name", SETTINGS)
def test_text_is_identical_to_plain_decoding(target, drafter, prompts, name):
    options, plain = plain_of(target, prompts, name)
    for given in (times(), times([1.0, 3.0, 5.0], 1.0, 1.0)):
        result = stree_jax.generate(
            target, prompts, drafter=drafter, tree=TREE, times=given, **options
        )
        assert result.tokens == plain
        assert (result.calls_by_size.sum(axis=1) == result.target_calls).all()
        assert result.tree_sizes == (1, 4, 8)


def test_auto_is_the_default_if_the_rule_allows_it(target, drafter):
    def menu(**options):
        _, plan = begin(target, [[3]], max_new_tokens=1, **options)
        return plan.spec.policy.menu

    trees = (Auto().menu, Auto().shared_menu)
    assert menu(drafter=drafter) == menu(drafter="lookup") in trees
    assert menu(drafter=drafter, rule="mss") == (resolve_tree("E"),)
    assert menu(drafter=drafter, rule="naive/iid") == (resolve_tree("E"),)
    for tree in ("auto", TREE):
        with pytest.raises(ValueError, match="would bias .*naive/coupled"):
            menu(drafter=drafter, tree=tree, rule="mss")
    with pytest.raises(ValueError, match="want growing sizes from 1 on"):
        menu(drafter=drafter, tree="auto:4,8")
    with pytest.raises(ValueError, match="times: only tree 'auto'"):
        menu(drafter=drafter, tree="A", times=times())
    with pytest.raises(ValueError, match="tree: a beam is searched by a model"):
        menu(drafter="lookup", tree="beam:2x2")
    with pytest.raises(ValueError, match=r"load_drafter\('some/path'\)"):
        menu(drafter="some/path")


@struct.dataclass
class Ordered(AdaptivePolicy):
    """A policy that repeats a given sequence of sizes and levels."""

    order: tuple = struct.field(pytree_node=False, default=())

    def choose(self, decoding, drafter, rule, num_tokens):
        step = decoding.used.sum(axis=1, dtype=jnp.int32).max() % len(self.order)
        size, levels = jnp.asarray(self.order, jnp.int32)[step]
        learnt = replace(decoding.policy, force=Force(size, levels))
        d = replace(decoding, policy=learnt)
        return AdaptivePolicy.choose(self, d, drafter, rule, num_tokens)


ORDERS = {
    "in turns": ((0, 0), (2, 3)),
    "plain for long": ((2, 4), *[(0, 0)] * 12),
    "lookup between": ((1, 0), (2, 2), (0, 0), (1, 1), (2, 0)),
    "drafted for nothing": ((0, 3), (2, 4), (0, 1)),
}


def spec_of(target, drafter, tree=TREE, **options):
    _, plan = begin(
        target, [[3]], max_new_tokens=1, drafter=drafter, tree=tree, **options
    )
    return plan.spec


@pytest.mark.parametrize("name", ORDERS)
def test_state_stays_correct_after_any_sequence_of_steps(
    target, drafter, prompts, name
):
    """The text is that of plain decoding, and the draft model has read only that
    text."""
    plain = stree_jax.generate(target, prompts, max_new_tokens=NEW, drafter=None)
    spec = spec_of(target, drafter)
    policy = Ordered(spec.policy.times, spec.policy.tree, order=ORDERS[name])
    spec = replace(spec, policy=policy)
    tokens, done = decode(spec, target, prompts, NEW)
    assert tokens == plain.tokens
    used = {size for size, _ in ORDERS[name]}
    assert {k for k in range(3) if int(done.used[:, k].sum())} <= used
    for steps in (5, 14):
        tokens, done = decode(spec, target, prompts, NEW, steps)
        looking, checked = done.drafting, 0
        # If draft tokens stayed in the state, they would be invariants of their size's
        # loop, and XLA would do work on them at each step, outside of the loop.
        if ORDERS[name][(steps - 1) % len(ORDERS[name])][0] > 0:
            assert not np.asarray(looking.draft.tokens).any()
        for b, prompt in enumerate(prompts):
            if int(done.finish[b]) != 0:
                continue
            checked += 1
            text = prompt + tokens[b]
            length = int(looking.history.length[b])
            assert looking.history.tokens[b, :length].tolist() == text
            read = int(looking.searching.length[b])
            assert read <= len(text)
            fresh, _ = begin(
                drafter, [[*text, 3][: read + 1]], max_new_tokens=1, drafter=None
            )
            ours, theirs = row_of(looking.searching, b), row_of(fresh.state, 0)
            chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert checked or steps > 5


def test_all_drafts_of_the_target_itself_are_accepted(target, prompts):
    """After any other step, a drafted path of n tokens gains n + 1."""
    spec = spec_of(target, target, "auto:1,4,32")  # large enough for all candidates
    order = ((2, 3), (0, 0), (1, 0))
    policy = Ordered(spec.policy.times, spec.policy.tree, order=order)
    tokens, done = decode(replace(spec, policy=policy), target, prompts, NEW, 4)
    plain = stree_jax.generate(target, prompts, max_new_tokens=NEW, drafter=None)
    for row, whole in zip(tokens, plain.tokens, strict=True):
        assert row == whole[: len(row)]
    gained = np.asarray(done.gained)[np.asarray(done.finish) == 0]
    assert gained.size and (gained[:, 4:].sum(axis=1) == 2).all()


def test_it_chooses_the_fastest_size(target, drafter, prompts):
    options = dict(max_new_tokens=60, stop_tokens=(), tree=TREE)

    def run(drafter, given):
        return stree_jax.generate(
            target, prompts, drafter=drafter, times=given, **options
        )

    dear = run("lookup", times([1.0, 100.0, 200.0]))
    assert dear.calls_by_size[:, 1:].sum() == 0
    assert dear.expected_tokens.tolist() == dear.lengths.tolist()
    free = run(target, times())
    calls = free.calls_by_size.sum(axis=0)
    assert calls[2] > 0.9 * calls.sum()  # draft tokens are right and take no time
    assert sum(int((o == 1).sum()) for o in free.origins) > 0.5 * free.lengths.sum()
    # The expected number of tokens is about the actual number.
    expected, came = free.expected_tokens.sum(), free.lengths.sum()
    assert 0.6 < expected / came < 1.4


@pytest.mark.parametrize("resumed", [False, True])
def test_the_draft_model_is_tried_only_if_it_could_be_faster(
    target, drafter, prompts, resumed
):
    """A draft model that is not tried does not prefill the prompts either."""
    past = stree_jax.generate(
        target, prompts, max_new_tokens=3, keep_past=True, drafter=None
    ).past

    def used(drafter, given):
        at, plan = begin(
            target,
            [[7, 8]] * 3 if resumed else prompts,
            max_new_tokens=40,
            stop_tokens=(),
            drafter=drafter,
            tree=TREE,
            times=given,
            past=past if resumed else None,
        )
        read = np.asarray(at.drafting.searching.length)
        at = loop.advance_jit(plan.spec, at, jnp.int32(20))
        assert (at.used.sum(axis=1) > 0).all()
        return read, at.drafting.passes

    read, passes = used(drafter, times(draft=50.0, level=50.0))
    assert read.tolist() == [0, 0, 0]
    assert passes.tolist() == [0, 0, 0]
    cheap = times(draft=0.3, level=0.3)
    read, wrong = used(drafter, cheap)
    assert (read >= [len(prompt) - 1 for prompt in prompts]).all()
    assert (wrong > 0).all()
    _, right = used(target, cheap)
    assert (right > wrong).all()


def test_the_draft_model_is_judged_by_measured_gain(target, prompts):
    """The gain counts tokens of the target and of the draft model, in steps that use
    the model. It does not count tokens of prompt lookup."""
    given = times(draft=0.5, level=0.25)
    at, plan = begin(
        target, prompts, max_new_tokens=40, drafter=target, tree=TREE, times=given
    )
    brought = np.zeros(2, np.float32)
    for _ in range(4):
        before = at.length
        at = loop.advance_jit(plan.spec, jax.tree.map(jnp.copy, at), jnp.int32(1))
        place = np.arange(at.tokens.shape[1])[None]
        new = (place >= before[:, None]) & (place < at.length[:, None])
        came = [(new & (at.origin == o)).sum(axis=1) for o in (0, 1)]
        brought = 0.9 * brought + np.asarray(came) @ np.asarray(at.policy.weights)
        np.testing.assert_allclose(at.policy.observed_gain, brought.sum(), rtol=1e-5)
        assert at.policy.observed_seconds > 1 and at.policy.step_seconds == 0
    assert brought[1] > 1
    # A plain step that was charged to the draft model gained one token.
    plainly = replace(at.policy, force=forced(0, 1))
    plainly = jax.tree.map(jnp.copy, replace(at, policy=plainly))
    once = loop.advance_jit(plan.spec, plainly, jnp.int32(1))
    running = at.finish == RUNNING
    assert (once.used[:, 0] - at.used[:, 0]).tolist() == running.tolist()
    assert running.sum() > 1
    np.testing.assert_allclose(
        once.policy.observed_gain, 0.9 * brought.sum() + 1, rtol=1e-5
    )
    assert (
        once.policy.observed_seconds > 0.9 * at.policy.observed_seconds
        and once.policy.step_seconds == 0
    )
    low = replace(at.policy, gain=jnp.float32(0.5), seconds=jnp.float32(1))
    low = replace(low, use_model=jnp.bool_(True), wait=jnp.int32(0))
    pays = jnp.bool_(True), jnp.bool_(True)
    for took, asked in ((0.5, True), (2.0, False)):
        tried = replace(
            low, observed_gain=jnp.float32(1), observed_seconds=jnp.float32(took)
        )
        wanted = plan.spec.policy._wants_model(tried, jnp.float32(1), *pays)[1]
        assert bool(wanted) is asked


def test_times_and_choices_cause_no_compilation(target, drafter, prompts):
    begun, plan = begin(
        target, prompts, max_new_tokens=8, drafter=drafter, tree=TREE, times=times()
    )
    spec = plan.spec
    loop.advance_jit(spec, jax.tree.map(jnp.copy, begun), jnp.int32(2))
    before = loop.advance_jit._cache_size()
    for given in (times([1.0, 9.0, 20.0]), times(draft=3.0)):
        other = replace(spec, policy=replace(spec.policy, times=given))
        loop.advance_jit(other, jax.tree.map(jnp.copy, begun), jnp.int32(2))
    for way in ((0, 0), (1, 0), (2, 3)):
        at = jax.tree.map(jnp.copy, begun)
        at = replace(at, policy=replace(at.policy, force=forced(*way)))
        at = loop.advance_jit(spec, at, jnp.int32(2))
        assert at.used[0].tolist() == [2 if k == way[0] else 0 for k in range(3)]
    assert loop.advance_jit._cache_size() == before


def test_it_needs_no_more_memory_than_its_largest_tree(
    target, drafter, prompts, optimised
):
    """Sizes share the caches, and the whole menu is one program."""

    def temp_bytes(tree, **options):
        begun, plan = begin(
            target, prompts, max_new_tokens=2048, drafter=drafter, tree=tree, **options
        )
        lowered = loop.advance_jit.lower(plan.spec, begun, jnp.int32(9))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    largest = temp_bytes("chain:15")
    assert temp_bytes("auto:1,4,16", times=times()) <= 1.1 * largest


def brute_force(model, text, width, depth):
    """Returns the levels of a best-first search, from full forward passes, with
    values."""
    levels, frontier = [], [((), 1.0)]
    for _ in range(depth):
        found = []
        for path, value in frontier:
            logits = stree_jax.score(model, [[*text, *path]])[0, -1]
            logits = np.asarray(logits, np.float64)[:REAL]
            p = np.exp(logits - logits.max())
            p /= p.sum()
            odds = np.log(p) - np.log1p(-p)
            kind = np.clip(np.floor((odds + 4) * 2), 0, 15).astype(int)
            best = np.argsort(-p, kind="stable")[:width]
            found += [((*path, int(v)), value * PRIOR[kind[v]]) for v in best]
        frontier = sorted(found, key=lambda entry: -entry[1])[:width]
        levels.append(frontier)
    return levels


def test_levels_match_a_best_first_search(target, prompts):
    width, depth = 3, 4
    drafter, state, history, asked = before_a_search(target, prompts)

    grown = searching(drafter, history, asked, (width, depth))(state, 0.0)
    pool = grown.pool
    assert int(grown.levels) == int(grown.passes) == depth
    for b, ids in enumerate(prompts):
        tokens, parents = np.asarray(pool.tokens[b]), np.asarray(pool.parents[b])
        paths = [()]
        for t, p in zip(tokens, parents, strict=True):
            paths.append((*paths[p], int(t)))
        for d, wanted in enumerate(brute_force(target, ids, width, depth)):
            mine = slice(1 + d * width, 1 + (d + 1) * width)
            values = np.asarray(pool.value[b, d * width : (d + 1) * width])
            got = dict(zip(paths[mine], values, strict=True))
            assert set(got) == {path for path, _ in wanted}
            for path, value in wanted:
                assert got[path] == pytest.approx(value, rel=1e-4)


def test_nodes_of_low_value_get_no_children(target, prompts):
    """They are not read by the model, and other nodes keep their children."""
    width, depth = 3, 3
    drafter, state, history, asked = before_a_search(target, prompts)

    run = searching(drafter, history, asked, (width, depth))

    def of_others(pool, limit):
        """Counts children of nodes that are not the best of their level and have a
        value of at most `limit`."""
        value, parents = np.asarray(pool.value), np.asarray(pool.parents) - 1
        above = np.take_along_axis(value, np.maximum(parents, 0), axis=1)
        return ((value > 0) & (parents % width > 0) & (above <= limit))[:, width:].sum()

    whole, none = run(state, 0.0).pool, run(state, 2.0).pool
    least = float(np.median(np.asarray(whole.value[:, :width])))
    some = run(state, least).pool
    assert of_others(whole, least) > 0 == of_others(some, least) == of_others(none, 2.0)
    for b in range(len(prompts)):
        np.testing.assert_allclose(
            some.value[b, :width], whole.value[b, :width], rtol=1e-5
        )
        best = np.asarray(none.value[b]).reshape(depth, width)[:, 0]
        assert (best > 0).all()


def test_small_trees_share_the_step_of_a_larger_tree():
    menu = Auto((1, 4, 8, 16, 32)).shared_menu
    assert [tree.size for tree in menu] == [1, 4, 8, 16, 32]
    plain, large, shared = compiled_steps(menu, 4)
    assert (plain[0].size, plain[1]) == (1, (0,))
    assert shared == (Budget(16, 15, has_padding=True), (1, 2, 3))
    assert (large[0].size, large[1]) == (32, (4,))
    assert compiled_steps(menu, 64) == compiled_steps(menu, 4)
    # A shared step would need too much memory
    for trees, rows in ((menu, 65), (Auto().menu, 1)):
        places = [step[1] for step in compiled_steps(trees, rows)]
        assert sorted(places) == [(k,) for k in range(len(trees))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shared_step_decodes_the_same_text(target, drafter, prompts, temperature):
    """Whichever sizes are chosen; separate steps choose each size equally often."""
    sampling = sampling_rows([Sampling(temperature=temperature)], jax.random.key(1), 1)
    ids, lengths = jnp.asarray(prompts[0])[None], jnp.asarray([len(prompts[0])])
    requests = Requests(
        max_new_tokens=jnp.asarray([30], jnp.int32),
        min_new_tokens=None,
        stop_tokens=jnp.full((1, 1), -1, jnp.int32),
        stop_strings=None,
        sampling=sampling if temperature else None,
    )
    tree, found = Auto((1, 4, 8)), []
    rule = resolve_rule("naive/coupled", tree)
    for shares in (False, True):
        spec = make_spec(target, drafter, tree, rule, times([1.0, 1.1, 1.2], 0.1, 0.1))
        spec = replace(spec, policy=replace(spec.policy, shares=shares))
        args = spec, ids, lengths, requests
        d = loop.init_decoding_jit(*args, max_new_tokens=30)
        found.append(loop.advance_jit(spec, d, jnp.int32(loop.FOREVER)))
    own, shared = found
    np.testing.assert_array_equal(own.tokens, shared.tokens)
    np.testing.assert_array_equal(own.used, shared.used)
    assert (own.used[0] > 0).sum() > 1


def test_children_of_accepted_nodes_are_counted():
    parents = jnp.asarray([[-1, 0, 0, 1, 2], [-1, 0, 1, 2, 0]], jnp.int32)
    tree = Auto((1, 5)).menu[1]
    draft = Draft(
        layout=tree_layout(tree, parents),
        tokens=jnp.asarray([[9, 1, 2, 3, 4], [9, 1, 2, 3, 4]], jnp.int32),
        kind=jnp.asarray([[NO_KIND, 0, 1, 2, 3], [NO_KIND, 16, 17, 17, 31]], jnp.int32),
    )
    accepted = Accepted(
        path=jnp.asarray([[0, 2, 0, 0, 0], [0, 1, 2, 0, 0]], jnp.int32),
        length=jnp.asarray([2, 3], jnp.int32),
        tokens=jnp.asarray([[2, 8, 0, 0, 0], [1, 2, 7, 0, 0]], jnp.int32),
        margin=jnp.zeros((2, 5)),
    )
    counts = count(no_counts(), draft, accepted)
    tried, right = np.zeros(KINDS), np.zeros(KINDS)
    tried[[0, 1, 3]] = 1  # row 0: children of the root and of node 2
    right[1] = 1
    tried[[16, 31]], tried[17] = (
        1,
        2,
    )  # row 1: a chain of three, two right, and a sibling
    right[16], right[17] = 1, 1
    np.testing.assert_array_equal(counts.tried, tried)
    np.testing.assert_array_equal(counts.right, right)
    finished = replace(accepted, length=jnp.zeros((2,), jnp.int32))
    assert float(count(no_counts(), draft, finished).tried.sum()) == 0


def test_no_step_is_chosen_before_decoding_begins(target, drafter, prompts):
    begun, _ = begin(
        target, prompts, max_new_tokens=8, drafter=drafter, tree=TREE, times=times()
    )
    assert int(begun.choice) == OPEN


@pytest.mark.parametrize(
    ("tried", "own", "promising", "asked"),
    [
        (0, 0.0, True, True),
        (0, 0.0, False, False),
        (5, 0.5, False, True),  # too few trials to decide
        (6, 0.5, True, False),  # hopeless
        (6, 0.95, True, True),  # it may still turn out to be faster
        (12, 0.95, True, False),  # all its trials are used
        (12, 1.2, False, True),
    ],
)
def test_an_unpromising_draft_model_gets_fewer_trials(tried, own, promising, asked):
    """`own`: tokens per second in steps with the model. Steps without it gain 1 per
    second."""
    policy = AdaptivePolicy(times(), Auto((1, 4)))
    learnt = replace(
        policy.init(1),
        gain=jnp.float32(own),
        seconds=jnp.float32(1),
        wait=jnp.int32(TRIALS - tried),
    )
    rate, pays, promising = jnp.float32(1), jnp.bool_(True), jnp.bool_(promising)
    learnt, wanted = policy._wants_model(learnt, rate, pays, promising)
    assert bool(wanted) is asked
    assert asked or learnt.wait == FIRST_WAIT


@pytest.mark.parametrize(("left", "asked"), [((7, 5, 5), False), ((5, 8, 5), True)])
def test_the_draft_model_needs_enough_tokens_left_to_catch_up(
    target, drafter, prompts, left, asked
):
    """After seven plain steps, the draft model has eight tokens to read."""
    at, plan = begin(
        target, prompts, max_new_tokens=8, drafter=drafter, tree=TREE, times=times()
    )
    endless = jnp.full((3,), 2**20, jnp.int32)
    none = jnp.full_like(at.requests.stop_tokens, -1)
    requests = replace(at.requests, max_new_tokens=endless, stop_tokens=none)
    policy = replace(at.policy, rest=jnp.int32(2**20))
    at = replace(at, requests=requests, policy=policy, choice=jnp.int32(0))
    at = loop.advance_jit(plan.spec, at, jnp.int32(7))
    adaptive = plan.spec.drafter
    assert adaptive.tokens_behind(at.drafting).tolist() == [8, 8, 8]
    left = jnp.asarray(left, jnp.int32)
    requests = replace(at.requests, max_new_tokens=at.length + left)
    policy = replace(
        at.policy, rest=jnp.int32(0), use_model=jnp.bool_(False), wait=jnp.int32(0)
    )
    at = replace(at, requests=requests, policy=policy, choice=jnp.int32(OPEN))
    at = loop.advance_jit(plan.spec, at, jnp.int32(1))
    assert bool((at.drafting.passes > 0).all()) is asked


@pytest.mark.parametrize(
    ("rows", "sampling", "longest"),
    [(1, None, 3), (2, None, 7), (2, Sampling(1.0), 15)],
)
def test_pauses_between_trials_are_longer_for_sampling(
    target, prompts, rows, sampling, longest
):
    """Also in batches. If drafting is never faster, it is tried again after pauses of
    0, 1, 3 .. steps."""
    dear = times([1.0, 100.0, 200.0])
    at, plan = begin(
        target,
        prompts[:rows],
        max_new_tokens=60,
        stop_tokens=(),
        drafter="lookup",
        tree=TREE,
        times=dear,
        sampling=sampling,
    )
    if rows == 2 and sampling is None and not plan.spec.policy.shares:
        pytest.skip("passes take the time of their room here")
    rests = []
    for steps in (1, 1, 2, 4):
        at = loop.advance_jit(plan.spec, at, jnp.int32(steps))
        rests.append(int(at.policy.next_rest))
    assert rests == [min(2**n - 1, longest) for n in (1, 2, 3, 4)]
