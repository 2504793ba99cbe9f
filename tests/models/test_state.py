"""Test a tiny hybrid model: trees against chains, and commits against token by
token."""

from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax import models
from stree_jax.models import (
    Pending,
    commit,
    extend,
    forward_hidden,
    init_params,
    init_records,
    init_state,
    prefill,
    tree_nodes,
)
from stree_jax.models.layers.mixer import map_leaves
from stree_jax.models.layers.nodes import NO_NODE
from stree_jax.models.mixers import mamba2
from tests.models.configs import CONFIGS
from tests.support.native import INSTRUCTIONS, use
from tests.support.reference import (
    MODEL_TOLERANCE,
    assert_near,
    depth_of,
    path_to,
    random_parents,
    random_tree,
)

TOLERANCE = MODEL_TOLERANCE["float32"]
assert_close = partial(assert_near, tolerance=TOLERANCE)
BATCH, T, M, CAPACITY = 2, 8, 5, 64
STRANGE = 30  # a token whose embedding is no number
FEW = 3  # nodes
LEVELS = ["off", *([] if INSTRUCTIONS is None else [""])]


def rows_of(state, b):
    """The arrays of all mixers' states in one row, with their facts: caches up to the
    committed length, beyond which they mean nothing."""
    found, n = [], int(state.length[b])

    def visit(x, facts):
        axis = facts.capacity_axis
        row = np.asarray(x[b])
        found.append((row if axis is None else row.take(range(n), axis - 1), facts))
        return x

    map_leaves(visit, state.layers)
    return found


class Runner:
    """A config, large random parameters, and its functions, compiled once."""

    def __init__(self, config, dtype):
        self.config = config
        rng = np.random.default_rng(0)

        def loud(path, leaf):
            noise = rng.standard_normal(leaf.shape)
            name = path[-1].key
            if name == "A_log":
                value = np.log(rng.uniform(0.1, 4.0, leaf.shape))
            elif name == "dt_bias":
                value = noise - 1.0
            elif name in ("scale", "norm", "D"):
                value = 1.0 + 0.3 * noise
            elif name == "conv_weight":
                value = 0.6 * noise
            elif leaf.ndim == 2 and name != "embedding":
                value = noise / np.sqrt(leaf.shape[-1])
            else:
                value = 0.5 * noise
            return jnp.asarray(value, leaf.dtype)

        shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0), dtype))
        self.params = jax.tree_util.tree_map_with_path(loud, shapes)
        self.empty = init_state(config, BATCH, CAPACITY, dtype)
        self.extend = partial(jax.jit(extend), models.Model(self.params, config))
        self.forward = partial(
            jax.jit(forward_hidden), models.Model(self.params, config)
        )
        self.commit = jax.jit(commit)

    def nodes(self, parents):
        return tree_nodes(jnp.asarray(parents), self.config.conv_taps)

    def feed(self, state, rows_of_tokens):
        """Feeds each row its own tokens; returns the last valid hidden state of
        each."""
        tokens = np.zeros((BATCH, T), np.int32)
        for b, row in enumerate(rows_of_tokens):
            tokens[b, : len(row)] = row
        length = np.array([len(row) for row in rows_of_tokens], np.int32)
        hidden, state = self.extend(state, tokens, length)
        return np.asarray(hidden)[np.arange(BATCH), length - 1], state

    def prefix(self, rng):
        """Returns a state with 5 and 8 committed tokens."""
        tokens = random_tokens(rng)
        return self.feed(self.empty, [tokens[0, :5], tokens[1]])[1]


def random_tokens(rng, T=T):
    return rng.integers(0, 31, (BATCH, T)).astype(np.int32)


def random_accepted(rng, parents, lengths=None):
    """Returns a path [B, M] from the root down each tree, and its length."""
    path = np.zeros((BATCH, M), np.int32)
    length = np.zeros(BATCH, np.int32)
    for b in range(BATCH):
        down = path_to(parents[b], rng.integers(T))[:M]
        path[b, : len(down)] = down
        # Entries past the length may point anywhere.
        path[b, len(down) :] = rng.integers(0, T, M - len(down))
        wanted = rng.integers(0, len(down) + 1) if lengths is None else lengths[b]
        length[b] = min(len(down), wanted)
    return path, length


def assert_same_state(actual, expected, tolerance=TOLERANCE):
    """Asserts equality of states; of caches only up to the committed length."""
    np.testing.assert_array_equal(actual.length, expected.length)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for b in range(len(expected.length)):
        pairs = zip(rows_of(actual, b), rows_of(expected, b), strict=True)
        for (mine, facts), (other, _) in pairs:
            assert facts.role != "state" or mine.dtype == jnp.float32
            assert_near(mine, other, tolerance)


@cache
def model_of(name, dtype="float32"):
    return Runner(CONFIGS[name], jnp.dtype(dtype))


@pytest.fixture(params=CONFIGS)
def model(request):
    return model_of(request.param)


@pytest.fixture
def hybrid():
    return model_of("mamba2 hybrid")


@pytest.mark.parametrize("seed", range(4))
def test_node_equals_the_end_of_its_path(model, seed):
    rng = np.random.default_rng(seed)
    state = model.prefix(rng)
    parents, tokens = random_parents(rng, BATCH, T), random_tokens(rng)
    hidden = model.forward(state, tokens, model.nodes(parents))[0]
    for t in range(T):
        paths = [tokens[b, path_to(parents[b], t)] for b in range(BATCH)]
        alone, _ = model.feed(state, paths)
        assert_near(hidden[:, t], alone, TOLERANCE)


def test_tree_without_a_prefix(hybrid):
    rng = np.random.default_rng(10)
    parents, tokens = random_parents(rng, BATCH, T), random_tokens(rng)
    hidden = hybrid.forward(hybrid.empty, tokens, hybrid.nodes(parents))[0]
    for t in range(T):
        paths = [tokens[b, path_to(parents[b], t)] for b in range(BATCH)]
        assert_near(hidden[:, t], hybrid.feed(hybrid.empty, paths)[0], TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_commit_equals_feeding_the_accepted_tokens(model, seed):
    """Over several steps, each from the committed state of the one before."""
    rng = np.random.default_rng(seed)
    state = plain = model.prefix(rng)
    for lengths in [None, (0, M), None, (2, 0), (1, 1)]:
        parents, tokens = random_parents(rng, BATCH, T), random_tokens(rng)
        _, records, same = model.forward(state, tokens, model.nodes(parents))
        chex.assert_trees_all_equal(same, state)
        path, length = random_accepted(rng, parents, lengths)
        accepted = [tokens[b, path[b, : length[b]]] for b in range(BATCH)]
        before, state = state, model.commit(state, records, path, length)
        _, plain = model.feed(plain, accepted)
        assert_same_state(state, plain, 2 * TOLERANCE)
        for b in np.flatnonzero(length == 0):
            assert_row_unchanged(state, before, b)


def test_commit_to_a_new_state(model):
    """No pass has returned this state: what a replay needs is in the records."""
    rng, state = np.random.default_rng(11), model.empty
    parents, tokens = random_parents(rng, BATCH, T), random_tokens(rng)
    records = model.forward(state, tokens, model.nodes(parents))[1]
    path, length = random_accepted(rng, parents, (3, 1))
    accepted = [tokens[b, path[b, : length[b]]] for b in range(BATCH)]
    expected = model.feed(state, accepted)[1]
    committed = model.commit(state, records, path, length)
    assert_same_state(committed, expected, 2 * TOLERANCE)


def test_bfloat16_nodes_and_commit():
    """Records, caches and windows in bfloat16; the SSM state stays float32."""
    model, tolerance = (
        model_of("mamba2 hybrid", "bfloat16"),
        MODEL_TOLERANCE["bfloat16"],
    )
    rng = np.random.default_rng(70)
    state = model.prefix(rng)
    parents, tokens = random_parents(rng, BATCH, T), random_tokens(rng)
    hidden, records, _ = model.forward(state, tokens, model.nodes(parents))
    for t in range(T):
        paths = [tokens[b, path_to(parents[b], t)] for b in range(BATCH)]
        assert_near(hidden[:, t], model.feed(state, paths)[0], tolerance)
    path, length = random_accepted(rng, parents)
    accepted = [tokens[b, path[b, : length[b]]] for b in range(BATCH)]
    committed = model.commit(state, records, path, length)
    empty_records = init_records(model.config, BATCH, T, jnp.bfloat16)
    chex.assert_trees_all_equal_shapes_and_dtypes(records, empty_records)
    chex.assert_trees_all_equal_dtypes(committed, state)
    ssm = np.asarray(committed.layers[0]["mamba"].ssm)
    assert (ssm != ssm.astype(jnp.bfloat16).astype(np.float32)).any()
    assert_same_state(committed, model.feed(state, accepted)[1], tolerance)


def assert_row_unchanged(state, before, b):
    n = int(before.length[b])
    assert int(state.length[b]) == n
    for (new, _), (old, _) in zip(rows_of(state, b), rows_of(before, b), strict=True):
        np.testing.assert_array_equal(new, old)


def test_pending_is_commit_then_forward(model):
    rng = np.random.default_rng(20)
    state = model.prefix(rng)
    for lengths in [(3, 1), (0, 2), None]:
        parents, tokens = random_parents(rng, BATCH, T), random_tokens(rng)
        _, records, _ = model.forward(state, tokens, model.nodes(parents))
        path, length = random_accepted(rng, parents, lengths)
        committed = model.commit(state, records, path, length)

        nodes, tokens = model.nodes(random_parents(rng, BATCH, T)), random_tokens(rng)
        pending = Pending(records, jnp.asarray(path), jnp.asarray(length))
        hidden, new, state = model.forward(state, tokens, nodes, pending=pending)
        expected, expected_new, _ = model.forward(committed, tokens, nodes)
        assert_near(hidden, expected, TOLERANCE)
        assert_same_state(state, committed)
        jax.tree.map(assert_close, new, expected_new)


@pytest.mark.parametrize("seed", range(2))
def test_level_by_level_is_the_tree_in_one_pass(model, seed):
    """Each call adds up to 3 nodes; rows >= T are dropped."""
    rng = np.random.default_rng(seed)
    state = model.prefix(rng)
    parents, tokens = random_parents(rng, BATCH, T), random_tokens(rng)
    parents[1] = parents[0]  # the rows of a call are shared by the batch
    nodes = model.nodes(parents)
    hidden, records, _ = model.forward(state, tokens, nodes)

    mine = init_records(model.config, BATCH, T, jnp.float32)
    depth = depth_of(parents[0])
    for level in range(depth.max() + 1):
        at = np.flatnonzero(depth == level)
        for start in range(0, len(at), 3):
            rows = np.full(3, T, np.int32)
            rows[: len(at[start : start + 3])] = at[start : start + 3]
            real = rows < T
            asked = np.where(real, tokens[:, rows % T], 0)
            out, mine, _ = model.forward(state, asked, nodes, records=mine, rows=rows)
            assert_near(out[:, real], hidden[:, rows[real]], TOLERANCE)
    chex.assert_trees_all_equal_shapes_and_dtypes(mine, records)
    jax.tree.map(assert_close, mine, records)


def test_rows_with_a_pending_path_raise(hybrid):
    records = init_records(hybrid.config, BATCH, T, jnp.float32)
    path, length = np.zeros((BATCH, M), np.int32), np.zeros(BATCH, np.int32)
    given = dict(records=records, rows=np.arange(1, dtype=np.int32))
    args = (
        hybrid.empty,
        np.zeros((BATCH, 1), np.int32),
        hybrid.nodes([[-1] * T] * BATCH),
    )
    with pytest.raises(ValueError, match="rows: .* commit it first"):
        hybrid.forward(*args, **given, pending=Pending(records, path, length))


def test_the_order_of_siblings_does_not_matter(hybrid):
    rng = np.random.default_rng(30)
    state = hybrid.prefix(rng)
    parents = np.stack([random_tree(rng, T) for _ in range(BATCH)]).astype(np.int32)
    tokens = random_tokens(rng)
    hidden = hybrid.forward(state, tokens, hybrid.nodes(parents))[0]
    for _ in range(3):
        moved, order = np.zeros_like(parents), np.zeros_like(parents)
        for b in range(BATCH):
            # Any order with parents before children: here by depth, shuffled within.
            order[b] = np.lexsort([rng.random(T), depth_of(parents[b])])
            row_of = np.argsort(order[b])
            above = parents[b, order[b]]
            moved[b] = np.where(above < 0, -1, row_of[above])
        again = hybrid.forward(
            state, np.take_along_axis(tokens, order, 1), hybrid.nodes(moved)
        )[0]
        expected = np.take_along_axis(np.asarray(hidden), order[..., None], 1)
        assert_near(again, expected, TOLERANCE)


def test_prefill_by_any_chunk_is_one_pass(hybrid, monkeypatch):
    """Also with the causal scan by chunks, whose size does not divide the pass."""
    rng = np.random.default_rng(40)
    tokens = random_tokens(rng, 24)
    length = np.array([23, 10], np.int32)

    def run(chunk):
        fill = jax.jit(partial(prefill, chunk=chunk))
        model = models.Model(hybrid.params, hybrid.config)
        return fill(model, hybrid.empty, tokens, length)[0]

    whole = hybrid.extend(hybrid.empty, tokens, length)[1]
    assert_same_state(run(4), whole)
    assert_same_state(run(8), whole)
    monkeypatch.setattr(mamba2, "CHUNK", 7)
    jax.clear_caches()  # layers were traced with the other size
    assert_same_state(run(24), whole)
    jax.clear_caches()


@pytest.mark.parametrize("name", ["mamba2 hybrid", "two mixers a layer"])
def test_extend_is_one_token_at_a_time(name):
    model = model_of(name)
    rng = np.random.default_rng(50)
    tokens = random_tokens(rng)
    start = model.prefix(rng)
    hidden, whole = model.extend(start, tokens, np.full(BATCH, T, np.int32))
    state = start
    for t in range(T):
        one = np.ones(BATCH, np.int32)
        out, state = model.extend(state, tokens[:, t : t + 1], one)
        assert_near(hidden[:, t : t + 1], out, TOLERANCE)
    assert_same_state(state, whole)


def test_padding_leaves_no_trace(hybrid):
    rng = np.random.default_rng(60)
    start = hybrid.prefix(rng)
    tokens, other = random_tokens(rng), random_tokens(rng)
    length = np.array([0, 5], np.int32)
    real = np.arange(T)[None] < length[:, None]
    first, state = hybrid.extend(start, tokens, length)
    second, again = hybrid.extend(start, np.where(real, tokens, other), length)
    np.testing.assert_array_equal(np.asarray(first)[real], np.asarray(second)[real])
    assert_same_state(again, state, 0.0)
    assert_row_unchanged(state, start, 0)
    # What lies past the committed length is never read.
    following = random_tokens(rng)
    nodes = hybrid.nodes(random_parents(rng, BATCH, T))
    np.testing.assert_array_equal(
        hybrid.forward(state, following, nodes)[0],
        hybrid.forward(again, following, nodes)[0],
    )


def poisoned(params):
    """Returns parameters with which reading an unexpected token gives NaN."""
    table = params["embedding"]
    return params | {"embedding": table.at[STRANGE].set(jnp.nan)}


def with_and_without_padding(name, dtype):
    """Runs trees in larger arrays and without padding; returns both results."""
    runner = model_of(name, dtype)
    rng = np.random.default_rng(3)
    start, first = runner.prefix(rng), random_parents(rng, BATCH, T)
    _, records, _ = runner.forward(start, random_tokens(rng), runner.nodes(first))
    pending = Pending(records, *map(jnp.asarray, random_accepted(rng, first)))
    small = random_parents(rng, BATCH, FEW)
    tokens = random_tokens(rng)
    parents = np.full((BATCH, T), NO_NODE, np.int32)
    parents[:, :FEW] = small
    inside = np.where(parents == NO_NODE, STRANGE, tokens)
    taps = runner.config.conv_taps
    model = runner.forward.args[0]
    if name != "two mixers a layer":  # experts mix what their rows are
        model = model.replace(params=poisoned(model.params))

    def run(tokens, parents, *, has_padding=False):
        nodes = tree_nodes(jnp.asarray(parents), taps, has_padding=has_padding)
        run = jax.jit(partial(forward_hidden, model))
        return run(start, jnp.asarray(tokens), nodes, pending=pending)

    return run(inside, parents, has_padding=True), run(tokens[:, :FEW], small)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["mamba2 hybrid", "grouped x heads", "two mixers a layer"]
)
def test_nodes_do_not_depend_on_padding(level, dtype, name, monkeypatch):
    if level:
        use(monkeypatch, level)
    (hidden, records, state), (alone, few, after) = with_and_without_padding(
        name, dtype
    )
    assert np.isfinite(alone).all()
    tolerance = MODEL_TOLERANCE[dtype]
    assert_near(hidden[:, :FEW], alone, tolerance)
    assert_same_state(state, after, tolerance)
    for mine, other in zip(*map(jax.tree.leaves, (records, few)), strict=True):
        assert_near(mine[:, :FEW], other[:, :FEW], tolerance)


def test_tables_of_padding():
    parents = jnp.asarray([[-1, 0, NO_NODE, NO_NODE], [-1, 0, 1, 0]], jnp.int32)
    nodes = tree_nodes(parents, 3, has_padding=True)
    np.testing.assert_array_equal(nodes.valid_count, [2, 4])
    assert not nodes.mask[0, 2:].any() and not nodes.mask[0, :, 2:].any()
    assert nodes.depth.min() == 0 and 0 <= nodes.window.min() <= nodes.window.max() < 6
