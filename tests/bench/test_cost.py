"""Test the cost model: times of passes, acceptance by depth and rank, predictions.

Predictions of the decoding loop are compared with the loop, call by call.
"""

import dataclasses
import re
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import cost
from stree_jax.sizing.pass_time import MeasuredTime, PassTime
from stree_jax.speculation.gain import Acceptance
from stree_jax.speculation.layout import tree_layout, tree_levels
from stree_jax.speculation.tree import (
    Beam,
    chain,
    from_child_counts,
    full_tree,
    make_tree,
    resolve_tree,
)
from tests.support.tiny import REAL, STOP, perturbed, tiny

DOC = Path(__file__).parents[2] / "docs" / "explanation" / "cost-model.md"
# Depth first, and a younger sibling has more children. Other layouts would not detect
# rows in the wrong order.
ODD = make_tree([-1, 0, 1, 2, 1, 0, 5, 5, 6, 6, 0])
TREES = {name: resolve_tree(name) for name in ("A", "E", "chain:4")} | {"odd": ODD}


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile():
    """Compiles with little optimisation, because most programs run once or twice."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# --- times ----------------------------------------------------------------------------


def test_a_fit_finds_the_coefficients():
    sizes = [1, 2, 4, 8, 16, 64]
    line, square = PassTime(3e-3, 2e-4), PassTime(3e-3, 2e-4, 5e-6)
    for time, degree in ((line, 1), (square, 2), (line, 2)):
        seconds = [time(n) for n in sizes]
        fit = cost.fit_pass_time(sizes, seconds, degree)
        got, want = dataclasses.astuple(fit), dataclasses.astuple(time)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-15)
        assert cost.fit_quality(fit, sizes, seconds) == pytest.approx((1, 0))
    assert isinstance(line(7), float)
    np.testing.assert_allclose(square(np.array([0.0, 10.0])), [3e-3, 5.5e-3])


def test_a_poor_fit_has_a_low_quality():
    """The times jump at two rows, and the fitted line starts below zero."""
    sizes, seconds = [1, 2, 3, 4], [1.0, 8.0, 9.0, 14.0]
    fit = cost.fit_pass_time(sizes, seconds, 1)
    assert (fit.c, fit.b) == pytest.approx((-2, 4))
    r2, worst = cost.fit_quality(fit, sizes, seconds)
    assert r2 == pytest.approx(1 - 6 / 86)  # errors are 1, -2, 1, 0
    assert worst == pytest.approx(1.0)
    assert np.isnan(cost.fit_quality(PassTime(1.0), [1, 2], [1.0, 1.0])[0])


def test_measured_times_are_interpolated_not_extrapolated():
    time = MeasuredTime([1, 2, 8], np.array([1.0, 3.0, 6.0]))
    assert [time(n) for n in (1, 2, 8, 5)] == [1, 3, 6, 4.5]
    np.testing.assert_allclose(time(np.array([1.5, 2.0])), [2, 3])
    assert cost.fit_quality(time, [1, 2, 8], [1, 3, 6]) == (1, 0)
    for outside in (0, 9, np.array([2.0, 8.5]), np.nan):
        with pytest.raises(ValueError, match="^size: measured from 1 to 8"):
            time(outside)


def test_bad_measurements_are_refused():
    with pytest.raises(ValueError, match="growing"):
        MeasuredTime([1, 1], [1.0, 2.0])
    with pytest.raises(ValueError, match="one a size"):
        MeasuredTime([1, 2], [1.0])
    with pytest.raises(ValueError, match="above 0"):
        cost.fit_pass_time([1, 2], [1.0, 0.0], 1)
    with pytest.raises(ValueError, match="want 3 different"):
        cost.fit_pass_time([1, 2, 2], [1.0, 2.0, 2.0], 2)
    with pytest.raises(ValueError, match="want 1 .SSM. or 2"):
        cost.fit_pass_time([1, 2], [1.0, 2.0], 3)


def test_tau_ratio_and_crossing():
    assert cost.tau_ratio(PassTime(2.0, 1.0), 4, 10) == 2
    # Ends of the lines in Fig. 3 of the paper: 15 and 63 nodes, packed and unrolled.
    packed = cost.fit_pass_time([15, 63], [27.6, 34.0], 1)
    unrolled = cost.fit_pass_time([15, 63], [27.3, 59.8], 1)
    assert cost.crossing(packed, unrolled, range(1, 64)) == 16
    assert cost.crossing(unrolled, packed, range(1, 64)) is None
    assert cost.crossing(unrolled, packed, range(1, 16)) == 1
    # Faster, slower, faster: the crossing is where it starts to stay faster.
    bumpy = MeasuredTime([1, 2, 3, 4], [1.0, 5.0, 1.0, 1.0])
    assert cost.crossing(bumpy, PassTime(2.0), [4, 1, 3, 2]) == 3
    assert cost.crossing(PassTime(2.0), PassTime(2.0), [1, 2]) is None


# --- ranks ----------------------------------------------------------------------------


def test_ranks_match_the_order_of_drafting():
    logits = jnp.round(jax.random.normal(jax.random.key(0), (6, 9)) * 2)  # ties
    logits = logits + 0.0  # top_k orders 0 before -0, and ranks treat them as equal
    _, order = jax.lax.top_k(logits, 9)
    for place in range(9):
        ranks = jax.jit(cost.rank_of)(logits, order[:, place])
        assert ranks.dtype == jnp.int32
        np.testing.assert_array_equal(ranks, place)


def test_ranks_of_a_text():
    model = tiny(1, ("mamba",))
    prompt, text = [3, 9], [11, STOP, 46, 0, 30]
    ranks = cost.drafter_ranks(model, prompt, text)
    assert ranks.dtype == np.int32 and ranks.shape == (5,)
    logits = np.asarray(stree_jax.score(model, [prompt + text]))[0, :, :REAL]
    for i, token in enumerate(text):
        order = np.argsort(-logits[len(prompt) - 1 + i]).tolist()
        assert ranks[i] == order.index(token)
    assert cost.drafter_ranks(model, prompt, []).shape == (0,)
    with pytest.raises(ValueError, match="prompt: want at least one"):
        cost.drafter_ranks(model, [], text)
    with pytest.raises(ValueError, match="text: ids"):
        cost.drafter_ranks(model, prompt, [50])


# --- the walk -------------------------------------------------------------------------


def gains(tree, *ranks):
    return [gain.tolist() for gain in cost.simulated_gains(tree, ranks)]


def test_calls_by_hand():
    # chain(2): two draft tokens and the bonus; a miss with the bonus; a draft token cut
    # by the end.
    assert gains(chain(2), [0, 0, 0, 1, 0]) == [[3, 1, 1]]
    assert gains(chain(2), [0, 0], [0, 1, 0, 0, 4], []) == [[2], [2, 3], []]
    assert gains(chain(0), [0, 0, 0]) == [[1, 1, 1]]
    # ODD's root has children 1, 5, 10; 1 has 2, 4; 5 has 6, 7; 2 has 3; 6 has 8, 9.
    assert gains(ODD, [1, 0, 1, 9, 2, 0]) == [[4, 2]]
    assert gains(ODD, [1, 1, 0, 0, 1, 0]) == [[3, 3]]
    assert gains(ODD, [0, 0, 1, 3, 0, 0, 0, 0]) == [[3, 1, 4]]
    assert cost.simulated_tau(ODD, [[0, 0, 1, 3], [2, 0]]) == 2


def test_trees_and_ranks_without_a_walk_are_refused():
    for function in (cost.simulated_tau, cost.simulated_gains):
        with pytest.raises(ValueError, match="^tree: a beam"):
            function(Beam(2, 3), [[0]])
        with pytest.raises(ValueError, match="at least one token"):
            function(chain(2), [[], []])
        for bad in ([0.5], [-1], [[0]]):
            with pytest.raises(ValueError, match=r"ranks\[1\]"):
                function(chain(2), [[0], bad])


def assert_calls_match_the_loop(target, drafter, tree, prompts, **options):
    """Replays the texts of a loop and compares the calls one by one."""
    lengths = []
    for part in stree_jax.stream(
        target, prompts, drafter=drafter, tree=tree, steps=1, **options
    ):
        lengths.append(part.lengths.copy())
    ranks = [
        cost.drafter_ranks(drafter, prompt, text)
        for prompt, text in zip(prompts, part.tokens, strict=True)
    ]
    simulated = cost.simulated_gains(tree, ranks)
    measured = np.diff(np.stack(lengths), axis=0, prepend=0)
    for row, gain in enumerate(simulated):
        assert gain.tolist() == [n for n in measured[:, row].tolist() if n]
        assert len(gain) == part.target_calls[row]
    # Several different gains
    assert len({n for gain in simulated for n in gain.tolist()}) > 2
    return part


@pytest.mark.parametrize("rule", ["greedy", "naive"])
def test_calls_of_a_random_pair(rule):
    target = tiny(0, ("mamba", "attention"))
    drafter = dataclasses.replace(target, params=perturbed(target.params, 0.04, 5))
    prompts = [[5, 6, 9], [1], [30, 31, 32, 33, 8]]
    options = {} if rule == "greedy" else {"sampling": stree_jax.Sampling(0.7, seed=4)}
    done = assert_calls_match_the_loop(
        target, drafter, ODD, prompts, max_new_tokens=48, rule="naive", **options
    )
    assert done.min_margin.min() > 1e-4  # no ties


@pytest.fixture(scope="module")
def pair():
    return tuple(
        stree_jax.load(name, dtype="float32") for name in ("demo", "demo-drafter")
    )


@pytest.fixture(scope="module")
def bundled(pair):
    """Returns prompts as ids, and the ranks of the bundled target's texts."""
    target, drafter = pair
    texts = ["def fibonacci(n):\n", "import os\n", "It was the best of times, ", "x"]
    prompts = [target.tokenizer.encode(text).ids for text in texts]
    plain = stree_jax.generate(target, prompts, max_new_tokens=96, drafter=None)
    rows = zip(prompts, plain.tokens, strict=True)
    return prompts, [cost.drafter_ranks(drafter, *row) for row in rows]


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_calls_of_the_bundled_pair(pair, bundled, tree):
    prompts, ranks = bundled
    done = stree_jax.generate(
        *pair[:1], prompts, max_new_tokens=96, drafter=pair[1], tree=tree
    )
    simulated = cost.simulated_gains(tree, ranks)
    assert [len(gain) for gain in simulated] == done.target_calls.tolist()
    for gain, by_size in zip(simulated, done.gained, strict=True):
        np.testing.assert_array_equal(
            np.bincount(gain, minlength=len(by_size)), by_size
        )
    tau = done.lengths.sum() / done.target_calls.sum()
    assert cost.simulated_tau(tree, ranks) == pytest.approx(tau)
    # There are few calls, and ranks depend on the rank above, so this is approximate.
    own = cost.acceptance_from_ranks(ranks, tree.depth, tree.children, tree)
    assert cost.expected_tau(tree, own) == pytest.approx(tau, rel=0.06)


# --- acceptance -----------------------------------------------------------------------


def test_a_table_by_hand():
    # Calls: 0 0|2, 1 0|0, 3|, 0 1|. Places after a bonus token begin a new call.
    ranks = [[0, 0, 2, 1, 0, 0, 3], [0, 1]]
    table = cost.acceptance_from_ranks(ranks, 2, 3)
    # Full tree of 3 children, 2 deep: 0 0|2, 1 0|0, |3, and 0 1 of the second text.
    np.testing.assert_array_equal(table.reached, [4, 3])
    np.testing.assert_allclose(table.p, [[2 / 4, 1 / 4, 0], [2 / 3, 1 / 3, 0]])
    # A chain continues only after rank 0: 0 0|2, |1, 0 0|3, and 0|1.
    table = cost.acceptance_from_ranks(ranks, 2, 2, chain(2))
    np.testing.assert_array_equal(table.reached, [4, 3])
    np.testing.assert_allclose(table.p, [[3 / 4, 1 / 4], [2 / 3, 1 / 3]])
    # The loop sees nothing below a leaf: 0 0|2, 1|0, 0|3, and 0 1.
    wide = from_child_counts([[2], [2, 0]])
    table = cost.acceptance_from_ranks(ranks, 2, 2, wide)
    np.testing.assert_array_equal(table.reached, [4, 3])
    np.testing.assert_allclose(table.p, [[3 / 4, 1 / 4], [1 / 3, 1 / 3]])
    # At the text's end, depth 2 is unknown.
    table = cost.acceptance_from_ranks([[0]], 2, 1)
    np.testing.assert_array_equal(table.reached, [1, 0])
    np.testing.assert_array_equal(table.p, [[1], [0]])


def test_bad_tables_are_refused():
    with pytest.raises(ValueError, match="want depth and width >= 1, got 0 and 2"):
        cost.acceptance_from_ranks([[0]], 0, 2)
    with pytest.raises(ValueError, match="depth: want at most the tree's, 2, got 3"):
        cost.acceptance_from_ranks([[0]], 3, 1, chain(2))
    with pytest.raises(ValueError, match="shape"):
        Acceptance(np.array([0.5]))
    for p in ([[0.6, 0.5]], [[-0.1]], [[np.nan]]):
        with pytest.raises(ValueError, match="probabilities"):
            Acceptance(np.array(p))
    table = Acceptance(np.full((2, 2), 0.5))
    for tree in (chain(3), full_tree(3, 1)):
        with pytest.raises(ValueError, match="but p has shape"):
            cost.expected_tau(tree, table)
    with pytest.raises(ValueError, match="^tree: a beam"):
        cost.expected_tau(Beam(2, 2), table)


def streaky(n, seed, stay=0.85):
    """Returns ranks of a text with easy and hard stretches, so that misses are
    clustered."""
    rng = np.random.default_rng(seed)
    easy, ranks = True, []
    p = {True: [0.85, 0.1, 0.03, 0.02], False: [0.3, 0.2, 0.1, 0.4]}
    for _ in range(n):
        easy = easy if rng.random() < stay else not easy
        ranks.append(int(rng.choice(4, p=p[easy])))
    return ranks


def test_the_expected_tau_of_a_chain_is_exact():
    """Over complete calls, because products of conditional shares are shares."""
    ranks, tree = streaky(4000, 0), chain(4)
    gain = cost.simulated_gains(tree, [ranks])[0]
    whole = ranks[: int(gain[:-1].sum())]
    table = cost.acceptance_from_ranks([whole], 4, 1, tree)
    expected = cost.expected_tau(tree, table)
    assert expected == pytest.approx(cost.simulated_tau(tree, [whole]), rel=1e-12)
    # Acceptance counted at all places, without regard to calls, differs.
    p = np.mean(np.array(ranks) == 0)
    places = 1 + sum(p ** np.arange(1, 5))
    assert abs(places / expected - 1) > 0.03


@pytest.mark.parametrize("name", ["A", "E", "B", "odd"])
def test_the_expected_tau_of_a_tree_is_close(name):
    ranks = [streaky(6000, seed) for seed in (1, 2)]
    tree = ODD if name == "odd" else resolve_tree(name)
    own = cost.acceptance_from_ranks(ranks, tree.depth, tree.children, tree)
    tau = cost.simulated_tau(tree, ranks)
    assert cost.expected_tau(tree, own) == pytest.approx(tau, rel=0.015)


def test_the_expected_tau_for_independent_ranks():
    """If ranks are independent, one table is right for all trees."""
    p = np.array([0.5, 0.25, 0.1])
    rng = np.random.default_rng(3)
    ranks = [rng.choice(4, 60_000, p=[*p, 1 - p.sum()])]
    table = cost.acceptance_from_ranks(ranks, 4, 3)
    np.testing.assert_allclose(table.p, np.tile(p, (4, 1)), atol=0.012)
    for tree in (ODD, resolve_tree("A"), chain(3)):
        tau = cost.simulated_tau(tree, ranks)
        assert cost.expected_tau(tree, table) == pytest.approx(tau, rel=0.01)


def table_of(shape, seed):
    """Returns random acceptance that decreases with rank."""
    rng = np.random.default_rng(seed)
    p = np.sort(rng.random(shape), axis=1)[:, ::-1]
    return Acceptance(p / p.sum(axis=1, keepdims=True) * rng.random((shape[0], 1)))


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_expected_tau_is_the_sum_over_paths(tree):
    table = table_of((5, 3), 4)
    layout = tree_layout(tree, tree.rows(1))
    rank, paths = np.asarray(tree_levels(tree).rank), np.asarray(layout.paths[0])
    total = 0.0
    for node, depth in enumerate(np.asarray(layout.depth)[0].tolist()):
        path = paths[node, 1 : depth + 1]
        total += np.prod([table.p[d, rank[n]] for d, n in enumerate(path)])
    assert cost.expected_tau(tree, table) == pytest.approx(total)
    assert cost.expected_tau(chain(0), table) == 1


# --- search and prediction ------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_greedy_tree_is_the_best(seed):
    """Compared with all trees of up to seven nodes."""
    table = table_of((3, 3), seed)
    for size in (1, 2, 4, 7):
        parents = product(*(range(t) for t in range(1, size)))
        trees = (make_tree([-1, *row]) for row in parents)
        taus = [
            cost.expected_tau(tree, table)
            for tree in trees
            if tree.depth <= 3 and tree.children <= 3
        ]
        tree = cost.greedy_tree(table, size)
        assert tree.size == size
        assert cost.expected_tau(tree, table) == pytest.approx(max(taus))


def test_the_greedy_tree_by_hand():
    table = Acceptance(np.array([[0.6, 0.3], [0.4, 0.2]]))
    # Products: .6; its sibling .3; below the first .6 * .4 = .24; then .6 * .2 and .3 *
    # .4.
    tree = cost.greedy_tree(table, 4)
    assert tree.parents.tolist() == [-1, 0, 0, 1]
    assert cost.greedy_tree(table, 7).size == 7
    with pytest.raises(ValueError, match=r"p \[2, 2\] has 7 nodes, not 8"):
        cost.greedy_tree(table, 8)
    with pytest.raises(ValueError, match="at least the root"):
        cost.greedy_tree(table, 0)


TARGET, DRAFTER = PassTime(10.0, 1.0), PassTime(2.0, 0.5)


def test_the_time_of_a_step_is_the_sum_of_its_passes():
    # A has 13 nodes, 4 deep, 3 wide: 23 + (2 + 2.5) + 3 * (2 + 1.5) + 1.
    assert cost.step_time(resolve_tree("A"), TARGET, DRAFTER, 1.0) == 39
    # The draft model does not read the only level of a chain of 1.
    assert cost.step_time(chain(1), TARGET, DRAFTER) == 12 + 3
    assert cost.step_time(chain(1), TARGET, MeasuredTime([2], [3.0])) == 12 + 3
    assert cost.step_time(Beam(3, 4), TARGET, DRAFTER, 1.0) == 39
    assert cost.step_time(chain(0), TARGET, DRAFTER, 1.0) == 11  # plain decoding
    speedup = cost.predicted_speedup(resolve_tree("A"), 3.0, TARGET, DRAFTER, 1.0)
    assert speedup == pytest.approx(3 * 11 / 39)
    assert cost.predicted_speedup(chain(0), 1.0, TARGET, DRAFTER, 1.0) == 1


def test_the_best_comes_first():
    trees = {"chain": chain(1), "A": resolve_tree("A"), "slow": full_tree(4, 3)}
    ranks = [[0, 1, 2, 0, 0, 0, 3, 1, 1, 0, 0]]
    rows = cost.best(
        trees, lambda tree: cost.simulated_tau(tree, ranks), TARGET, DRAFTER, 0.5
    )
    assert {row.name for row in rows} == {"plain", *trees}
    speedups = [row.speedup for row in rows]
    assert speedups == sorted(speedups, reverse=True)
    for row in rows:
        tree = trees.get(row.name, chain(0))
        assert row.size == tree.size
        assert row.tau == cost.simulated_tau(tree, ranks)
        assert row.step_s == cost.step_time(tree, TARGET, DRAFTER, 0.5)
        assert row.speedup == pytest.approx(row.tau * 11 / row.step_s)


def test_the_example_in_the_docs_prints_its_output(capsys):
    text = DOC.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    printed = re.search(r"```python\n.*?```\s*```text\n(.*?)```", text, re.S)[1]
    exec(compile(code, str(DOC), "exec"), {})
    assert capsys.readouterr().out == printed
