"""Test texts drafted by Medusa heads, and options that heads do not support."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from stree_jax.drafters import Staged
from stree_jax.sampling.distribution import Distribution
from stree_jax.sampling.requests import Requests
from stree_jax.speculation.accept import resolve_rule
from stree_jax.speculation.adaptive.best_first import (
    best_first,
    by_depth,
    nothing_grown,
)
from stree_jax.speculation.adaptive.calibration import PRIOR, model_kind
from stree_jax.speculation.adaptive.policy import assumed_times
from stree_jax.speculation.default_tree import tree_for
from stree_jax.speculation.draft import DRAFTER
from stree_jax.speculation.drafters.medusa import (
    ASSUMED_RANKS,
    accuracy_of,
    sparse_tree,
)
from stree_jax.speculation.gain import Acceptance, expected_tau
from stree_jax.speculation.tree import Auto, cartesian, make_tree, resolve_tree
from stree_jax.training.ngrams import count_grams, katz
from tests.support.heads import random_heads, repeating
from tests.support.tiny import REAL, tiny

NEW = 24
TREE = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 6]  # three levels, irregular


@pytest.fixture(scope="module")
def target():
    return repeating()


@pytest.fixture(scope="module")
def heads(target):
    """Returns heads close to the model's own head, so that repeated tokens are
    right."""
    return random_heads(target, scale=0.03, heads=4)


SETTINGS = {
    "greedy": dict(),
    "sampled": dict(
        sampling=[Sampling(0.3), Sampling(0.5, top_p=0.9), Sampling(0.0)], n=2
    ),
    "naive": dict(sampling=Sampling(0.3, top_k=4), rule="naive"),
    # Nodes of a level differ: the penalty depends on the tokens of the path.
    "penalty": dict(
        sampling=[Sampling(t, repetition_penalty=1.1) for t in (0.0, 0.5, 0.3)],
        min_new_tokens=[0, 4, 20],
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_text_is_identical_to_plain_decoding(target, heads, prompts, name):
    """In batches of different lengths, with ends in the middle of an accepted path."""
    options = dict(max_new_tokens=[NEW, 5, NEW], **SETTINGS[name])
    plainly = {k: v for k, v in options.items() if k != "rule"}
    plain = stree_jax.generate(target, prompts, **plainly, drafter=None)
    result = stree_jax.generate(target, prompts, drafter=heads, tree=TREE, **options)
    assert result.tokens == plain.tokens
    assert result.finish_reasons == plain.finish_reasons
    assert result.promise == "tokens"
    most = 0.95 if name == "penalty" else 0.9
    assert result.target_calls.sum() < most * plain.target_calls.sum()


@pytest.mark.parametrize("name", ["greedy", "sampled", "penalty"])
def test_auto_combines_heads_with_lookup(target, heads, prompts, name):
    """The step times make heads faster. A cached state continues with heads."""
    times = assumed_times(Auto(), True)
    options = dict(max_new_tokens=NEW, **SETTINGS[name])
    asked = dict(drafter=heads, tree="auto", times=times)
    plain = stree_jax.generate(target, prompts, **options, drafter=None)
    result = stree_jax.generate(target, prompts, **asked, **options)
    assert result.tokens == plain.tokens and result.tree_sizes == Auto().sizes
    (drafted,) = (t for t in result.traffic if t.stage == "heads")
    assert drafted.passes > 0 and drafted.weights > 0
    assert any((row == DRAFTER).any() for row in result.origins)
    if name == "greedy":
        first = stree_jax.generate(
            target, prompts, **asked, max_new_tokens=10, keep_past=True
        )
        rest = dict(max_new_tokens=NEW - 10, past=first.past)
        more = stree_jax.generate(target, [[]] * len(prompts), **asked, **rest)
        joined = [a + b for a, b in zip(first.tokens, more.tokens, strict=True)]
        assert joined == plain.tokens


def test_auto_finds_the_best_paths_of_guesses_by_depth():
    """For each level, by the product of acceptance estimates along the path."""
    W, M, V = 3, 3, 12
    rng = np.random.default_rng(5)
    logits = (3 * rng.standard_normal((1, M, V))).astype(np.float32)
    limit, none = jnp.full((1,), 9, jnp.int32), jnp.full((1, 1), -1, jnp.int32)
    requests = Requests(limit, None, none, None, None)
    dist = Distribution(requests, jnp.zeros((1,), jnp.int32), None, V)
    grown = best_first(
        jnp.asarray(logits[:, :1]),
        by_depth(jnp.asarray(logits), True),
        jnp.zeros((1,), jnp.int32),
        dist,
        resolve_rule("naive", Auto()),
        jnp.asarray(PRIOR),
        nothing_grown(None, 1, W, M),
        lambda grown: jnp.bool_(True),
    )
    assert int(grown.levels) == int(grown.passes) == M
    pool = grown.pool
    p = np.asarray(jax.nn.softmax(logits[0], axis=-1))
    worth = np.asarray(PRIOR)[np.asarray(model_kind(jnp.asarray(p)))]
    tokens, parents = np.asarray(pool.tokens[0]), np.asarray(pool.parents[0])
    paths = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], int(token)))
    value = {(): 1.0}
    for d in range(M):
        mine = slice(1 + d * W, 1 + (d + 1) * W)
        values = np.asarray(pool.value[0, d * W : (d + 1) * W])
        best = np.argsort(-p[d], kind="stable")[:W]
        above = list(value.items())[-W:]
        all_ = [v * worth[d, t] for _, v in above for t in best]
        np.testing.assert_allclose(np.sort(values), np.sort(all_)[-W:], rtol=1e-5)
        value = dict(zip(paths[mine], values.tolist(), strict=True))
        for path, own in value.items():
            each = [worth[i, t] for i, t in enumerate(path)]
            assert own == pytest.approx(np.prod(each), rel=1e-5)


def test_stop_tokens_end_the_text_as_in_plain_decoding(target, heads, prompts):
    """With `min_new_tokens`, stop tokens are not used earlier, although heads guess
    them."""
    free = stree_jax.generate(
        target, prompts, max_new_tokens=NEW, stop_tokens=(), drafter=None
    )
    stop = next(t for t in free.tokens[0][3:] if t not in free.tokens[0][:3])
    options = dict(max_new_tokens=NEW, stop_tokens=[stop], min_new_tokens=[0, 9, 9])
    plain = stree_jax.generate(target, prompts, **options, drafter=None)
    result = stree_jax.generate(target, prompts, drafter=heads, tree=TREE, **options)
    assert result.tokens == plain.tokens != free.tokens
    assert result.finish_reasons == plain.finish_reasons
    assert result.finish_reasons[0] == "stop" and 3 < result.lengths[0] < NEW
    assert result.target_calls.sum() < result.lengths.sum()


def test_a_conversation_can_continue_with_heads(target, heads, prompts):
    """With any drafter before: heads start from states of the new text."""
    options = dict(max_new_tokens=9, stop_tokens=())
    drafting = dict(drafter=heads, tree=TREE)
    more = [[11, 12], [13], list(range(8, 40)) * 4]
    first = stree_jax.generate(target, prompts, keep_past=True, **options, **drafting)
    plain = stree_jax.generate(target, prompts, keep_past=True, **options, drafter=None)
    assert first.tokens == plain.tokens
    text = [p + t + m for p, t, m in zip(prompts, first.tokens, more, strict=True)]
    anew = stree_jax.generate(target, text, **options, **drafting)
    for past in (first.past, plain.past):
        later = stree_jax.generate(target, more, past=past, **options, **drafting)
        assert later.tokens == anew.tokens
        assert later.gained.tolist() == anew.gained.tolist()
    without = stree_jax.generate(target, more, past=first.past, **options, drafter=None)
    assert without.tokens == anew.tokens
    nothing = [[], [], []]
    onward = stree_jax.generate(target, nothing, past=first.past, **options, **drafting)
    alone = stree_jax.generate(
        target, nothing, past=plain.past, **options, drafter=None
    )
    assert onward.tokens == alone.tokens


def test_inside_jit(target, heads, prompts):
    """Heads are an argument of the program, like the target."""
    padded = np.zeros((3, 40), np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    lengths = jnp.asarray([len(ids) for ids in prompts], jnp.int32)
    bare = stree_jax.models.Model(target.params, target.config)

    @jax.jit
    def run(bare, heads, prompts):
        done = stree_jax.generate_tokens(
            bare,
            prompts,
            lengths,
            drafter=heads,
            tree="cartesian:2x2",
            max_new_tokens=8,
        )
        return done.tokens, done.length, done.calls

    tokens, length, calls = map(np.asarray, run(bare, heads, jnp.asarray(padded)))
    plain = stree_jax.generate(target, prompts, max_new_tokens=8, drafter=None)
    for row, n, want in zip(tokens, length, plain.tokens, strict=True):
        assert row[:n].tolist() == want
    assert calls.sum() < length.sum()
    other = heads.replace(params=jax.tree.map(jnp.zeros_like, heads.params))
    run(bare, other, jnp.asarray(padded))
    assert run._cache_size() == 1


def test_bfloat16_heads_with_separate_outputs(target, prompts):
    """bfloat16 heads draft for a float32 target, whose text does not change."""
    other = random_heads(target, scale=0.03, dtype=jnp.bfloat16, heads=3)
    params = {
        name: {
            **head,
            "output": {"weight": target.params["embedding"].astype("bfloat16")},
        }
        for name, head in other.params.items()
    }
    config = random_heads(target, heads=3, own_output=True).config
    own = other.replace(params=params, config=config)
    plain = stree_jax.generate(target, prompts, max_new_tokens=9, drafter=None)
    for heads in (other, own):
        result = stree_jax.generate(
            target, prompts, max_new_tokens=9, drafter=heads, tree="chain:3"
        )
        assert result.tokens == plain.tokens
        assert result.target_calls.sum() < plain.target_calls.sum()


def test_one_node_is_plain_decoding(target, heads, prompts):
    result = stree_jax.generate(
        target, prompts, max_new_tokens=5, drafter=heads, tree="chain:0"
    )
    assert result.target_calls.tolist() == result.lengths.tolist()
    assert result.traffic[1].passes == result.traffic[1].weights == 0


def test_traffic_counts_only_the_heads_in_use(target, heads, prompts):
    """A pass reads as many heads as the tree has levels, and the model's head once."""
    for given, depth in (
        (heads, 2),
        (random_heads(target, heads=2, own_output=True), 2),
    ):
        result = stree_jax.generate(
            target, prompts, max_new_tokens=8, drafter=given, tree=f"chain:{depth}"
        )
        _, stage = result.traffic
        d, V = target.config.d_model, target.config.vocab_size
        own = given.config.own_output
        each = 4 * (depth * (d * d + d + own * V * d) + (not own) * V * d)
        assert stage.passes == result.target_calls.max()
        assert stage.weights == stage.passes * each
        assert (stage.state, stage.caches) == (0, 0)


# --- trees ----------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(4, 2, 2), (1,), (3,), (1, 3, 2), (2, 1, 1, 2)])
def test_cartesian_trees_have_every_combination(counts):
    """Of the ranks of guesses by depth, in the order of levels."""
    tree = cartesian(*counts)
    parents = tree.parents.tolist()
    ranks = [()]
    for t in range(1, tree.size):
        elder = sum(p == parents[t] for p in parents[:t])
        ranks.append((*ranks[parents[t]], elder))
    want = [
        combination
        for depth in range(len(counts) + 1)
        for combination in product(*(range(n) for n in counts[:depth]))
    ]
    assert ranks == want
    assert tree.depth == len(counts) and tree.children == max(counts)
    name = "cartesian:" + "x".join(map(str, counts))
    assert resolve_tree(name).parents.tolist() == parents


@pytest.mark.parametrize(
    "name",
    ["cartesian:", "cartesian:0", "cartesian:4x0", "cartesian:4x", "cartesian:-1"]
    + ["cartesian:a", "cartesian", "cartesian:40x40", "cartesian:2.5"],
)
def test_invalid_cartesian_trees(name):
    with pytest.raises(ValueError, match="tree|cartesian") as caught:
        resolve_tree(name)
    assert "\n" not in str(caught.value)


def all_trees(size, width, depth):
    """Yields every tree shape of `size` nodes at least once."""
    found = [[-1]]
    for _ in range(size - 1):
        found = [[*tree, p] for tree in found for p in range(len(tree))]
    for parents in found:
        tree = make_tree(parents)
        if tree.children <= width and tree.depth <= depth:
            yield tree


def measured(target, table):
    rows = tuple(map(tuple, table))
    return random_heads(target, heads=len(rows), accuracy=rows)


@pytest.mark.parametrize("seed", range(3))
def test_sparse_trees_have_the_best_expected_tau(target, seed):
    """Compared with every tree of the same size."""
    rng = np.random.default_rng(seed)
    table = -np.sort(-rng.dirichlet(np.ones(4), 3), axis=1)[:, :3]
    heads, p = measured(target, table), Acceptance(table)
    for size in (2, 4, 6):
        best = max(expected_tau(tree, p) for tree in all_trees(size, 3, 3))
        tree = tree_for(heads, f"sparse:{size}", None)
        assert tree.size == size
        assert expected_tau(tree, p) == pytest.approx(best, rel=1e-12)


def test_default_trees(target, heads):
    """The default is "auto", or 16 nodes by the measured accuracies of the heads, or by
    assumed ones that decrease."""
    assert tree_for(heads, None, None) == Auto()
    assert tree_for(heads, None, "mss").size == 16
    assumed = np.array(accuracy_of(heads))
    assert assumed.shape == (4, ASSUMED_RANKS) and (np.diff(assumed) < 0).all()
    assert (assumed.sum(axis=1) <= 1).all() and (np.diff(assumed, axis=0) < 0).all()
    parents = sparse_tree(heads, 16).parents
    assert tree_for(heads, None, "mss").parents.tolist() == parents.tolist()
    sure = measured(target, [[0.9, 0.05]] * 4)
    assert sparse_tree(sure, 5).parents.tolist() == [-1, 0, 1, 2, 3]
    unsure = measured(target, [[0.3, 0.3, 0.3]] + [[0.01, 0, 0]] * 3)
    assert sparse_tree(unsure, 4).parents.tolist() == [-1, 0, 0, 0]


@pytest.mark.parametrize("shape", [(1, 10), (4, 1), (1, 1), (2, 3)])
def test_the_default_tree_of_few_heads_or_ranks(target, shape):
    """It has at most as many nodes as heads and ranks allow."""
    few = measured(target, np.full(shape, 0.09))
    nodes = sum(shape[1] ** d for d in range(shape[0] + 1))
    assert tree_for(few, None, "mss").size == min(nodes, 16)


def refused(target, drafter, match, **options):
    with pytest.raises(ValueError, match=match) as caught:
        stree_jax.generate(target, [[8]], max_new_tokens=2, drafter=drafter, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("E", "tree: 5 levels want as many heads, and there are 4"),
        ("chain:5", "tree: 5 levels want as many heads, and there are 4"),
        ("cartesian:1x1x1x1x1", "tree: 5 levels want as many heads"),
        ([-1, 0, 1, 2, 3, 4], "tree: 5 levels want as many heads"),
        ("beam:2x2", "tree: heads fill a fixed tree"),
        ("sparse:0", "tree: sparse:N wants N in 2..1024, got '0'"),
        ("sparse:1", "tree: sparse:N wants N in 2..1024, got '1'"),
        ("sparse:1025", "tree: sparse:N wants N in 2..1024, got '1025'"),
        ("sparse:x", "tree: sparse:N wants N in 2..1024, got 'x'"),
        ("sparse:-4", "tree: sparse:N wants N in 2..1024, got '-4'"),
        ("sparse:", "tree: sparse:N wants N in 2..1024, got ''"),
        ("sparse", "tree: sparse:N wants N in 2..1024, got ''"),
        ("F", "tree: unknown name 'F'"),
    ],
)
def test_unsupported_trees_are_refused(target, heads, tree, message):
    refused(target, heads, message, tree=tree)


def test_a_sparse_tree_too_large_for_the_accuracies(target):
    few = measured(target, [[0.5, 0.2]])
    refused(target, few, "has 3 nodes, not 4", tree="sparse:4")


def test_sparse_trees_need_heads(target):
    text = np.random.default_rng(0).integers(0, REAL, (4, 90), np.int32)
    table = katz(count_grams(text, 2, REAL), REAL, slots=64, keep=4)
    for drafter in (
        target,
        "lookup",
        table,
        Staged(target, table, 1),
    ):
        refused(
            target, drafter, "needs the accuracies of Medusa heads", tree="sparse:8"
        )
    with pytest.raises(ValueError, match="tree: a tree needs a drafter"):
        stree_jax.generate(
            target, [[8]], max_new_tokens=2, tree="sparse:8", drafter=None
        )


def test_heads_of_another_model_are_refused(target, heads):
    other = tiny(2, layers=("mamba",), d_model=64)
    message = "heads: of states 32 wide, but the target's are 64 wide"
    refused(other, heads, message)
    own = random_heads(target, own_output=True)
    few = own.replace(config=replace(own.config, vocab_size=REAL - 1))
    refused(target, few, f"heads: {REAL - 1} tokens, but the target has {REAL}; use")


def test_unsupported_options_are_refused(target, heads):
    times = stree_jax.speculation.adaptive.policy.assumed_times(
        resolve_tree("auto"), False
    )
    asked = {"times": times, "tree": "chain:2"}
    refused(target, heads, "times: only tree 'auto' uses them", **asked)
    refused(target, heads, "rule: leviathan supports chains only", rule="leviathan")
