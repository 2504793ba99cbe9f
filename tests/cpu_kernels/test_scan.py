"""Test the compiled replay and scan against float64, and their reproducibility."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.pallas_kernels import Replayed, ScanInputs, replay, replay_tree_scan
from tests.support.native import built, each_level, use
from tests.support.reference import (
    OP_TOLERANCE,
    assert_near,
    binary,
    chain,
    random_parents,
)
from tests.support.scans import Shape, definition, replay_inputs

pytestmark = built
TOLERANCE = OP_TOLERANCE["float32"]
SHAPES = {
    "one token": Shape(2, 1, 2, 1, 3, 4),
    "two groups": Shape(2, 9, 4, 2, 3, 5, True),
    "a group a head": Shape(3, 5, 3, 3, 17, 33),
    "whole lanes": Shape(1, 16, 6, 1, 64, 128),
    "all nodes": Shape(2, 64, 2, 1, 5, 16),
}


def native(*args):
    return replay_tree_scan(*args, implementation="native")


def case(shape, seed=0, parents=None, **options):
    rng = np.random.default_rng(seed)
    if parents is None:
        parents = random_parents(rng, shape.batch, shape.T)
    h0, past, inputs, mask = replay_inputs(rng, shape, parents, **options)
    args = h0, past, inputs._replace(D=inputs.D.reshape(-1)), mask  # as models keep it
    return jax.tree.map(jnp.asarray, args), parents


@each_level
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_computes_the_recurrence_along_each_path(level, shape, monkeypatch):
    """Paths of every length, steps of 0 (as in padding) and large decays."""
    use(monkeypatch, level)
    run = jax.jit(native)
    for seed, extreme in ((0, False), (1, True)):
        args, parents = case(shape, seed, extreme=extreme)
        for ours, wanted in zip(run(*args), definition_of(args, parents), strict=True):
            assert ours.dtype == jnp.float32
            assert_near(ours, wanted, TOLERANCE)


def definition_of(args, parents):
    h0, past, inputs, mask = jax.tree.map(np.asarray, args)
    heads = h0.shape[1]
    D = inputs.D if inputs.D.size == heads else inputs.D.reshape(heads, -1)
    return definition((h0, past, inputs._replace(D=D), mask), parents)


@each_level
def test_bfloat16_inputs_are_not_converted(level, monkeypatch):
    use(monkeypatch, level)
    args, parents = case(SHAPES["two groups"], dtype="bfloat16")
    for ours, wanted in zip(
        jax.jit(native)(*args), definition_of(args, parents), strict=True
    ):
        assert_near(ours, wanted, TOLERANCE)


def test_a_mask_that_is_no_tree_is_refused():
    (h0, past, inputs, mask), _ = case(SHAPES["two groups"])
    node = np.array(mask)
    last = node.shape[1] - 1
    node[0, last] = False
    node[0, last, [0, last - 1, last]] = True  # an ancestor without its own ancestors
    node[0, last - 1, : last - 1] = True
    with pytest.raises(jax.errors.JaxRuntimeError, match="want the mask of a tree"):
        jax.block_until_ready(jax.jit(native)(h0, past, inputs, jnp.asarray(node)))


@each_level
def test_results_do_not_depend_on_other_rows_and_nodes(level, monkeypatch):
    """Bitwise equal alone and in a batch, and as the last node and as an earlier
    one."""
    use(monkeypatch, level)
    shape = Shape(3, 12, 4, 2, 7, 19)
    args, _ = case(shape, parents=np.broadcast_to(binary(12), (3, 12)))
    h0, past, (x, dt, a, B, C, D), mask = args
    run = jax.jit(native)
    y, h = run(*args)

    def cut(b, T):
        now = ScanInputs(*(z[b : b + 1, :T] for z in (x, dt, a, B, C)), D)
        last = Replayed(*(z[b : b + 1] for z in past))
        return h0[b : b + 1], last, now, mask[b : b + 1, :T, :T]

    for b, T in ((0, 12), (1, 12), (2, 1), (2, 5)):
        one_y, one_h = run(*cut(b, T))
        np.testing.assert_array_equal(one_y[0], y[b, :T])
        np.testing.assert_array_equal(one_h[0], h[b])


def test_vmap_adds_rows_to_the_batch():
    """With a shared tree and D, bitwise equal to separate calls; else XLA runs."""
    shape = SHAPES["two groups"]
    (first, *_, mask), parents = case(shape, 0)
    (second, past, inputs, _), _ = case(shape, 1, parents=parents)
    h0 = jnp.stack([first, second])
    run = jax.jit(native)
    y, h = jax.jit(jax.vmap(native, (0, None, None, None)))(h0, past, inputs, mask)
    for i in range(2):
        one_y, one_h = run(h0[i], past, inputs, mask)
        np.testing.assert_array_equal(y[i], one_y)
        np.testing.assert_array_equal(h[i], one_h)
    D = jnp.stack([inputs.D, -inputs.D])
    with_D = jax.vmap(lambda D: native(first, past, inputs._replace(D=D), mask))
    one_y, _ = run(first, past, inputs._replace(D=D[1]), mask)
    assert_near(jax.jit(with_D)(D)[0][1], one_y, TOLERANCE)


def test_empty_paths_do_not_change_the_state():
    args, _ = case(SHAPES["two groups"])
    h0, past, *rest = args
    none = past._replace(length=jnp.zeros_like(past.length))
    _, h = jax.jit(native)(h0, none, *rest)
    np.testing.assert_array_equal(h, h0)


def test_padding_is_not_read():
    """Padding nodes and unused path entries may have any values."""
    shape = Shape(1, 6, 2, 1, 3, 4)
    args, _ = case(shape, parents=np.array([[-1, 0, 1, 2, -1, -1]]))
    h0, past, inputs, mask = args
    run = jax.jit(native)
    y, h = run(*args)
    broken = inputs._replace(x=inputs.x.at[:, 4:].set(jnp.nan))
    paths = past._replace(path=past.path.at[0, int(past.length[0]) :].set(999))
    other_y, other_h = run(h0, paths, broken, mask)
    np.testing.assert_array_equal(other_y[:, :4], y[:, :4])
    np.testing.assert_array_equal(other_h, h)


def test_path_lengths_are_clamped():
    args, _ = case(SHAPES["two groups"])
    h0, past, *rest = args
    full, more = (
        past._replace(length=jnp.full_like(past.length, past.path.shape[1] + n))
        for n in (0, 3)
    )
    run = jax.jit(native)
    np.testing.assert_array_equal(run(h0, more, *rest)[1], run(h0, full, *rest)[1])


def test_a_path_outside_its_tree_raises():
    args, _ = case(SHAPES["two groups"])
    h0, past, *rest = args
    wild = past._replace(path=past.path + 1000, length=jnp.full_like(past.length, 2))
    with pytest.raises(Exception, match="a path leads out of its tree"):
        jax.block_until_ready(jax.jit(native)(h0, wild, *rest))


def test_the_state_is_updated_in_place_if_unused(optimised):
    """A loop copies nothing of the state's size; arrays that are read later stay."""
    shape = Shape(1, 8, 16, 1, 64, 64)
    (h0, past, inputs, mask), _ = case(shape, parents=chain(8)[None])
    before = np.array(h0)

    def steps(h0, past, inputs, mask):
        def body(_, carry):
            return native(carry[1], past, inputs, mask)

        y = jnp.zeros((1, 8, 16, 64), jnp.float32)
        return jax.lax.fori_loop(0, 3, body, (y, h0))

    run = jax.jit(steps, donate_argnums=0)
    held = run.lower(h0, past, inputs, mask).compile().memory_analysis()
    assert held.temp_size_in_bytes < h0.nbytes / 2
    kept = jax.jit(steps)(h0, past, inputs, mask)
    np.testing.assert_array_equal(h0, before)

    @jax.jit
    def both(h0):
        y, h = native(h0, past, inputs, mask)
        return y, h, h0 + 1.0  # h0 is read after h was written

    _, _, after = both(h0)
    np.testing.assert_array_equal(after, before + 1.0)
    for ours, again in zip(
        run(jnp.array(before), past, inputs, mask), kept, strict=True
    ):
        np.testing.assert_array_equal(ours, again)


@each_level
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_replay_without_a_tree_has_the_same_results(level, shape, monkeypatch):
    """Bitwise equal to a replay with a tree; a row without a path keeps its state."""
    use(monkeypatch, level)
    (h0, past, inputs, mask), _ = case(shape)
    past = past._replace(length=past.length.at[0].set(0))
    run = jax.jit(partial(replay, implementation="native"))
    alone = run(h0, past)
    _, wanted = jax.jit(native)(h0, past, inputs, mask)
    np.testing.assert_array_equal(alone, wanted)
    np.testing.assert_array_equal(alone[0], h0[0])
    assert_near(alone, replay(h0, past, implementation="xla"), TOLERANCE)


@built
def test_a_long_path_uses_xla():
    (h0, past, *_), _ = case(SHAPES["one token"])
    longer = past._replace(path=jnp.zeros((2, 65), jnp.int32))
    assert "stree_replay" in jax.jit(replay).lower(h0, past).as_text()
    assert "stree_replay" not in jax.jit(replay).lower(h0, longer).as_text()
    with pytest.raises(ValueError, match="replay: native: wants paths of 1 to 64"):
        replay(h0, longer, implementation="native")
