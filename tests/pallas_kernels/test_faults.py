"""Test that NaN and infinity in one token reach only its descendants, in every op.

All other results must equal those of a run with ordinary numbers, bit for bit. Other
tests compare such runs with float64.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.pallas_kernels import (
    attention,
    delta,
    ops,
    scan,
    tpu_scan,
    triton_attention,
    triton_delta,
    triton_scan,
)
from tests.support.deltas import Shape, delta_inputs, replayed_inputs
from tests.support.native import INSTRUCTIONS, each_level, use
from tests.support.reference import mask_of, random_parents
from tests.support.scans import normal

T, BATCH, TOKENS = 9, 2, (0, 3, 8)
SCALE = 0.3


def tree_masks(rng):
    return np.stack([mask_of(p) for p in random_parents(rng, BATCH, T)])


def chain_masks(length):
    return np.broadcast_to(np.tri(length, dtype=bool), (BATCH, length, length))


def with_number(arrays, name, place, value):
    """Returns the named arrays with `value` in one of them, at `place`."""
    changed = np.array(arrays[name])
    changed[place] = value
    return arrays | {name: changed}


def assert_only_reached(run, arrays, places, reached):
    """Asserts that NaN and infinity change only the results that depend on them.

    Args:
      run: function of named arrays, with results [B, Tq, ...].
      arrays: ordinary numbers.
      places: pairs of a name, and an index into the first row of that array.
      reached: function of a pair, returns which queries depend on it, [Tq] bool.
    """
    run = jax.jit(run)
    wanted = [np.asarray(z) for z in run(arrays)]
    assert all(np.isfinite(z).all() for z in wanted)
    for name, at in places:
        for value in (np.nan, np.inf):
            found = run(with_number(arrays, name, (0, *at), value))
            for one, before in zip(map(np.asarray, found), wanted, strict=True):
                hit = reached(name, at)
                np.testing.assert_array_equal(one[1:], before[1:], name)
                np.testing.assert_array_equal(one[0][~hit], before[0][~hit], name)
                finite = np.isfinite(one[0]).reshape(len(hit), -1).all(axis=1)
                assert not finite[hit].any(), (name, at, value)


def of_tree(mask, own):
    """Returns `reached` for a tree: the token itself and its descendants, or only
    itself for the names in `own`."""

    def reached(name, at):
        t = at[0]
        itself = np.arange(mask.shape[1]) == t
        return itself if name in own else mask[0][:, t]

    return reached


def scan_arrays(rng, count=T, P=16, N=16):
    dt = rng.uniform(0.1, 1, (BATCH, count, 2)).astype(np.float32)
    return {
        "x": normal(rng, BATCH, count, 2, P),
        "dt": dt,
        "a": -dt,
        "B": normal(rng, BATCH, count, 1, N),
        "C": normal(rng, BATCH, count, 1, N),
        "D": normal(rng, 2),
    }, normal(rng, BATCH, 2, P, N)


def places_of(names, tokens=TOKENS):
    return [(name, (t, 0)) for name in names for t in tokens]


def tpu_tree_scan(inputs, h0, mask):
    """Computes `tree_scan` with the TPU kernel, which always replays a path."""
    last = (jnp.zeros_like(z[:, :2]) for z in inputs[:4])
    path = jnp.zeros((BATCH, 1), jnp.int32)
    past = scan.Replayed(*last, path, path[:, 0])
    return tpu_scan.replay_tree_scan(h0, past, inputs, mask, interpret=True)[0]


SCANS = {
    "plain": (scan.tree_scan, {}),
    "triton": (partial(triton_scan.tree_scan, interpret=True), {}),
    "tpu": (tpu_tree_scan, {"P": 64, "N": 128}),
}


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_keeps_a_fault_on_its_paths(name):
    function, sizes = SCANS[name]
    rng = np.random.default_rng(0)
    arrays, h0 = scan_arrays(rng, **sizes)
    mask = tree_masks(rng)

    def run(arrays):
        return [function(scan.ScanInputs(**arrays), h0, mask)]

    places = places_of(("x", "dt", "a", "B", "C"))
    assert_only_reached(run, arrays, places, of_tree(mask, ("C",)))


def test_a_chunked_scan_keeps_a_fault_from_earlier_tokens():
    rng = np.random.default_rng(0)
    arrays, h0 = scan_arrays(rng, 21)

    def run(arrays):
        return [ops.chunk_scan(scan.ScanInputs(**arrays), h0, 8)]

    places = places_of(("x", "dt", "a", "B", "C"), (0, 5, 12))
    assert_only_reached(run, arrays, places, of_tree(chain_masks(21), ("C",)))


DELTAS = {
    "plain": delta.delta_scan,
    "triton": partial(triton_delta.delta_scan, interpret=True),
}


@pytest.mark.parametrize("by_column", [False, True], ids=["by head", "by column"])
@pytest.mark.parametrize("name", DELTAS)
def test_the_delta_rule_keeps_a_fault_on_its_paths(name, by_column):
    rng = np.random.default_rng(0)
    inputs, h0 = delta_inputs(rng, Shape(BATCH, T, 2, 1, 16, 16, by_column))
    mask = tree_masks(rng)

    def run(arrays):
        return DELTAS[name](delta.DeltaInputs(**arrays), h0, mask)

    def outputs(arrays):
        return run(arrays)[:1]

    names = ("k", "k_scale", "v", "a", "beta")
    reached = of_tree(mask, ())
    assert_only_reached(run, inputs._asdict(), places_of(names), reached)
    own = of_tree(mask, ("q", "q_scale"))
    places = places_of(("q", "q_scale"))
    assert_only_reached(outputs, inputs._asdict(), places, own)


@pytest.mark.parametrize("name", DELTAS)
def test_a_fault_of_an_earlier_level_reaches_only_its_descendants(name):
    """Drafters compute a tree level by level: earlier tokens are known by their u."""
    rng = np.random.default_rng(0)
    inputs, h0 = delta_inputs(rng, Shape(BATCH, T, 2, 1, 16, 16))
    mask = tree_masks(rng)
    rows = np.asarray([5, 6, 7, 8, T], np.int32)
    cut = {n: getattr(inputs, n)[:, rows % T] for n in ("q", "q_scale", "v", "beta")}
    arrays = inputs._replace(**cut)._asdict() | {"u": normal(rng, BATCH, T, 2, 16)}

    def run(arrays):
        u = arrays["u"]
        left = {name: z for name, z in arrays.items() if name != "u"}
        places = jnp.asarray(mask), jnp.asarray(rows)
        y, u = DELTAS[name](delta.DeltaInputs(**left), h0, *places, u)
        return [y[:, :4], u[:, 5:]]

    def reached(name, at):
        t = 5 + at[0] if name == "v" else at[0]
        return mask[0][5:, t]

    places = [*places_of(("u", "k"), (0, 3)), *places_of(("k",), (6,))]
    places += places_of(("v",), (0, 2))
    assert_only_reached(run, arrays, places, reached)


@pytest.mark.parametrize("by_column", [False, True], ids=["by head", "by column"])
def test_chunks_of_the_delta_rule_keep_a_fault_from_earlier_tokens(by_column):
    rng = np.random.default_rng(0)
    inputs, h0 = delta_inputs(rng, Shape(BATCH, 21, 2, 1, 4, 4, by_column))

    def run(arrays):
        return delta.delta_chunks(delta.DeltaInputs(**arrays), h0, 8)

    names = ("k", "k_scale", "v", "a", "beta")
    places = places_of(names, (0, 5, 12))
    reached = of_tree(chain_masks(21), ())
    assert_only_reached(run, inputs._asdict(), places, reached)


@pytest.mark.parametrize("kind", ["plain", "triton", "triton by column"])
def test_a_replay_reads_only_the_path(kind):
    """A path of no tokens must not read row 0, either."""
    rng = np.random.default_rng(0)
    shape = Shape(BATCH, 3, 2, 1, 16, 16, kind.endswith("column"))
    h0, past, inputs = replayed_inputs(rng, shape, T0=6, M=4)
    path = np.asarray([[0, 2, 5, 5], [0, 0, 0, 0]], np.int32)
    past = past._replace(path=path, length=np.asarray([2, 0], np.int32))
    mask = np.tril(np.ones((BATCH, 3, 3), bool))

    def run(past):
        if kind == "plain":
            return delta.delta_replay_scan(h0, past, inputs, mask)
        return triton_delta.delta_replay_scan(h0, past, inputs, mask, interpret=True)

    wanted = jax.jit(run)(past)
    others = np.ones((BATCH, 6), bool)
    others[0, [0, 2]] = False
    for name in ("u", "k", "k_scale", "a"):
        z = np.array(getattr(past, name))
        z[others] = np.nan
        found = jax.jit(run)(past._replace(**{name: z}))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


LENGTHS, CAPACITY, WINDOW = (40, 5), 48, 12


def attention_arrays(rng, channels=16):
    cache = BATCH, 2, CAPACITY, channels
    return {
        "q": normal(rng, BATCH, T, 4, channels),
        "k": normal(rng, BATCH, T, 2, channels),
        "v": normal(rng, BATCH, T, 2, channels),
        "k_cache": normal(rng, *cache),
        "v_cache": normal(rng, *cache),
    }


def attention_reach(mask, first):
    """Returns `reached` for attention: which queries see a node or a cache row."""

    def reached(name, at):
        if name == "q":
            return np.arange(T) == at[0]
        if name in ("k", "v"):
            return mask[0][:, at[0]]
        row = at[1]
        seen = np.full(T, row < LENGTHS[0])
        return seen if first is None else seen & (row >= first[0])

    return reached


ATTENTIONS = {
    "plain": attention.tree_attention,
    "blocks": attention.in_blocks,
    "triton": partial(
        triton_attention.tree_attention,
        blocks=triton_attention.Blocks(keys=16, rows=16, splits=2),
        interpret=True,
    ),
    "native": partial(ops.tree_attention, implementation="native"),
}


def check_attention(name, window):
    rng = np.random.default_rng(0)
    arrays, mask = attention_arrays(rng), tree_masks(rng)
    first = None
    if window:
        depth = mask.sum(axis=2, dtype=np.int32) - 1
        length = np.asarray(LENGTHS, np.int32)[:, None]
        first = np.maximum(length + depth - WINDOW + 1, 0)
    sink = normal(rng, 4)

    def run(arrays):
        numbers = (arrays[z] for z in ("q", "k", "v", "k_cache", "v_cache"))
        args = map(jnp.asarray, (*numbers, np.asarray(LENGTHS, np.int32), mask))
        return [ATTENTIONS[name](*args, SCALE, first, sink)]

    # Rows 24 and 28: out of the window; 29 to 33: in that of some; 41: past the text.
    rows = (24, 28, 30, 33, 39) if window else (0, 39)
    past = () if name == "plain" else (41,)  # the plain op wants finite rows there
    places = [("q", (3, 0)), *places_of(("k", "v"))]
    places += [(z, (0, r)) for z in ("k_cache", "v_cache") for r in (*rows, *past)]
    assert_only_reached(run, arrays, places, attention_reach(mask, first))


windows = pytest.mark.parametrize("window", [False, True], ids=["all", "window"])


@windows
@pytest.mark.parametrize("name", ["plain", "blocks", "triton"])
def test_attention_keeps_a_fault_from_queries_that_do_not_see_it(name, window):
    check_attention(name, window)


@pytest.mark.skipif(INSTRUCTIONS is None, reason="CPU kernels are not built")
@windows
@each_level
def test_compiled_attention_keeps_a_fault(level, window, monkeypatch):
    use(monkeypatch, level)
    check_attention("native", window)
