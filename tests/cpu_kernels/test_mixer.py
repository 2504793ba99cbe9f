"""Test the compiled mixer against its equations in JAX, and its reproducibility."""

from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models import MambaConfig, chain_nodes, tree_nodes
from stree_jax.models.mixer import MixerPending
from stree_jax.models.mixers.mamba2 import (
    MambaRecord,
    MambaState,
    MixerWeights,
    equations,
    mixed,
)
from stree_jax.models.nodes import Nodes, Pass
from tests.support.native import built, each_level, use
from tests.support.reference import OP_TOLERANCE, assert_near, chain, random_parents

pytestmark = built
BATCH = 2
# Sizes that are whole vectors or not, and all supported options.
CONFIGS = {
    "plain": MambaConfig(3, 32, 16),
    "norm first": MambaConfig(
        4, 17, 19, n_groups=2, norm="norm_first", norm_groups=2, d_conv=3
    ),
    "no norm": MambaConfig(
        6, 5, 4, n_groups=3, norm=None, conv_bias=False, D_per_channel=True, d_mlp=7
    ),
    "limits": MambaConfig(2, 16, 33, norm_groups=2, dt_limit=(0.05, 0.6), d_conv=2),
}


class Case(NamedTuple):
    """The arguments of a mixer between its projections, without its config."""

    zxbcdt: jax.Array
    weights: MixerWeights
    nodes: Nodes
    state: MambaState
    record: MambaRecord
    path: jax.Array
    length: jax.Array


def case(c, T=6, last=6, dtype="float32", seed=0, parents=None):
    """Returns a tree of T nodes after one of `last`, with accepted paths of 2 and 0."""
    rng = np.random.default_rng(seed)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)

    H, P, K = c.num_heads, c.head_dim, c.d_conv
    wide = partial(normal, dtype="float32")
    weights = MixerWeights(
        normal(c.d_xBC, K),
        normal(c.d_xBC) if c.conv_bias else None,
        normal(c.d_inner) if c.norm else None,
        wide(H),
        wide(H),
        wide(c.d_inner if c.D_per_channel else H),
    )
    record = MambaRecord(
        normal(BATCH, last, H, P),
        jnp.abs(wide(BATCH, last, H)),
        -jnp.abs(wide(BATCH, last, H)),
        normal(BATCH, last, c.n_groups, c.d_state),
        normal(BATCH, last, c.d_xBC),
    )
    parents = random_parents(rng, BATCH, T) if parents is None else parents
    state = MambaState(wide(BATCH, H, P, c.d_state), normal(BATCH, K - 1, c.d_xBC))
    path = jnp.broadcast_to(jnp.array([[0, last - 1, 0]], jnp.int32), (BATCH, 3))
    return Case(
        2 * wide(BATCH, T, c.d_in_proj),
        weights,
        tree_nodes(jnp.asarray(parents), 4),
        state,
        record,
        path,
        jnp.array([2, 0], jnp.int32),
    )


def replaying(function, c):
    """Replays the last path of a case and runs a new tree."""

    @jax.jit
    def run(case):
        pending = MixerPending(case.record, case.path, case.length)
        pass_ = Pass(case.nodes, None, pending, case.length)
        return function(c, case.zxbcdt, case.weights, pass_, case.state, None)

    return run


def reading(function, c):
    """Runs a tree of a case from its state, without a path to replay."""

    @jax.jit
    def run(case):
        pass_ = Pass(case.nodes, None, None, case.length)
        return function(c, case.zxbcdt, case.weights, pass_, case.state, None)

    return run


def adding(function, c, rows):
    """Adds nodes at these rows to the records of a tree's other nodes."""
    rows = jnp.array(rows, jnp.int32)

    @jax.jit
    def run(case):
        pass_ = Pass(case.nodes, rows, None, case.length)
        zxbcdt = case.zxbcdt[:, : len(rows)]
        args = case.weights, pass_, case.state, case.record
        return function(c, zxbcdt, *args)

    return run


def agree(ours, wanted, dtype):
    """Asserts equality; in bfloat16 a number may be rounded to either neighbour."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(z, np.float32) for z in (a, b))
        if dtype == "bfloat16":
            assert_near(a, b, 4e-3)
            assert np.mean(np.abs(a - b) > 1e-5 * np.abs(b).max()) < 0.02
        else:
            assert_near(a, b, OP_TOLERANCE["float32"])


@cache
def solved(name, dtype):
    """Returns cases with the results of the equations without any kernel: a tree after
    one of the same size and after a smaller one, and nodes added to others."""
    c = CONFIGS[name]
    after = [case(c, last=last, dtype=dtype) for last in (6, 4)]
    added = case(c, dtype=dtype, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        use(patch, "off")
        wanted = [replaying(equations, c)(given) for given in after]
        return [*after, added], [*wanted, adding(equations, c, ROWS)(added)]


ROWS = [1, 4, 6]  # the last is no node


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill(name, dtype):
    """After a state without a pending path; long texts are read in chunks."""
    c = CONFIGS[name]
    texts = {
        T: case(c, T=T, dtype=dtype)._replace(nodes=chain_nodes(BATCH, T, 4))
        for T in (5, 64, 65)
    }
    for T in (5, 64):
        ours = reading(mixed, c).lower(texts[T])
        assert "stree_mixer" in ours.as_text()
        with pytest.MonkeyPatch.context() as patch:
            use(patch, "off")
            agree(ours.compile()(texts[T]), reading(equations, c)(texts[T]), dtype)
    assert "stree_mixer" not in reading(mixed, c).lower(texts[65]).as_text()


@each_level
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_matches_the_equations(name, dtype, level, monkeypatch):
    (*after, added), (*wanted, wanted_added) = solved(name, dtype)
    c = CONFIGS[name]
    use(monkeypatch, level)
    for given, expected in zip(after, wanted, strict=True):
        run = replaying(mixed, c).lower(given)
        assert "stree_mixer" in run.as_text()
        agree(run.compile()(given), expected, dtype)
    y, *ours = adding(mixed, c, ROWS)(added)
    wanted_y, *expected = wanted_added
    agree((y[:, :2], ours), (wanted_y[:, :2], expected), dtype)
    np.testing.assert_array_equal(ours[1].ssm, added.state.ssm)


@each_level
def test_extreme_steps_and_gates(level, monkeypatch):
    """exp overflows or underflows in softplus, silu and decays."""
    use(monkeypatch, level)
    c = CONFIGS["plain"]
    given = case(c)
    for scale in (0.0, 60.0, 3000.0):
        scaled = given._replace(zxbcdt=given.zxbcdt * scale)
        agree(replaying(mixed, c)(scaled), replaying(equations, c)(scaled), "float32")


@each_level
def test_results_do_not_depend_on_other_rows_and_nodes(level, monkeypatch):
    """Bitwise equal alone and in a batch, and as the last node and as an earlier
    one."""
    use(monkeypatch, level)
    c = CONFIGS["norm first"]
    given = case(c, T=12, dtype="bfloat16", parents=np.stack([chain(12)] * BATCH))
    run = replaying(mixed, c)
    y, record, state = run(given)
    for b, T in ((0, 12), (1, 12), (0, 1), (1, 5)):
        row = slice(b, b + 1)
        nodes = given.nodes
        one = given._replace(
            zxbcdt=given.zxbcdt[row, :T],
            nodes=replace(
                nodes,
                mask=nodes.mask[row, :T, :T],
                depth=nodes.depth[row, :T],
                window=nodes.window[row, :T],
            ),
            state=jax.tree.map(lambda z, row=row: z[row], given.state),
            record=jax.tree.map(lambda z, row=row: z[row], given.record),
            path=given.path[row],
            length=given.length[row],
        )
        one_y, one_record, one_state = run(one)
        np.testing.assert_array_equal(one_y[0], y[b, :T])
        for a, z in zip(
            jax.tree.leaves(one_record), jax.tree.leaves(record), strict=True
        ):
            np.testing.assert_array_equal(a[0, :T], z[b, :T])
        for a, z in zip(
            jax.tree.leaves(one_state), jax.tree.leaves(state), strict=True
        ):
            np.testing.assert_array_equal(a[0], z[b])


@each_level
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_smaller_tree_overwrites_records_of_a_larger_one(
    name, dtype, level, monkeypatch
):
    """Bitwise equal to the results after a smaller last tree; records past the new tree
    stay, whether the arrays are donated or not."""
    use(monkeypatch, level)
    c, T = CONFIGS[name], 6
    given = case(c, T=T, last=9, dtype=dtype)._replace(length=jnp.array([2, 3]))
    given = given._replace(path=jnp.array([[0, 8, 0], [3, 1, 7]], jnp.int32))
    run = replaying(mixed, c)
    small = given._replace(
        record=jax.tree.map(
            lambda z: jnp.stack([z[b, given.path[b]] for b in range(BATCH)]),
            given.record,
        ),
        path=jnp.array([[0, 1, 2]] * BATCH, jnp.int32),
    )
    y, record, state = run(small)
    assert record.x.shape[1] == T
    behind = jax.tree.map(lambda z: np.array(z[:, T:]), given.record)
    in_place = jax.jit(
        lambda record, given: run(given._replace(record=record)), donate_argnums=0
    )
    copy = jax.tree.map(jnp.copy, given.record)
    for ours in (run(given), in_place(copy, given)):
        jax.tree.map(np.testing.assert_array_equal, (ours[0], ours[2]), (y, state))
        first = jax.tree.map(lambda z: z[:, :T], ours[1])
        jax.tree.map(np.testing.assert_array_equal, first, record)
        last = jax.tree.map(lambda z: z[:, T:], ours[1])
        jax.tree.map(np.testing.assert_array_equal, last, behind)
    assert all(z.is_deleted() for z in jax.tree.leaves(copy))


def test_vmap_adds_rows_to_the_batch():
    """With shared weights, bitwise equal to separate calls; else the equations run."""
    c = CONFIGS["plain"]
    first, second = case(c, last=8, seed=0), case(c, last=8, seed=1)
    second = second._replace(weights=first.weights, nodes=first.nodes)
    run = replaying(mixed, c)
    axes = Case(0, None, None, 0, 0, 0, 0)
    both = jax.tree.map(lambda *z: jnp.stack(z), first, second)
    both = both._replace(weights=first.weights, nodes=first.nodes)
    mapped = jax.jit(jax.vmap(run, (axes,)))(both)
    for i, one in enumerate((first, second)):
        got = jax.tree.map(lambda z, i=i: z[i], mapped)
        jax.tree.map(np.testing.assert_array_equal, got, run(one))
    weights = jax.tree.map(lambda z: jnp.stack([z, -z]), first.weights)
    each = jax.jit(jax.vmap(lambda w: run(first._replace(weights=w))))(weights)
    got = jax.tree.map(lambda z: z[1], each)
    turned = first._replace(weights=jax.tree.map(jnp.negative, first.weights))
    agree(got, run(turned), "float32")


def test_vmap_shares_the_queried_rows():
    c = CONFIGS["plain"]
    one = case(c)
    run = adding(mixed, c, [1, 4])
    mapped = jax.vmap(lambda z: run(one._replace(zxbcdt=z)))
    text = jax.jit(mapped).lower(jnp.stack([one.zxbcdt] * 2)).as_text()
    assert text.count("@stree_mixer") == 1
    both = mapped(jnp.stack([one.zxbcdt, -one.zxbcdt]))
    got = jax.tree.map(lambda z: z[1], both)
    wanted = run(one._replace(zxbcdt=-one.zxbcdt))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("T", [32, 8])
def test_records_and_state_are_updated_in_place_if_unused(optimised, T):
    """A loop copies nothing of the records' size; arrays that are read later stay."""
    c = MambaConfig(8, 64, 64)
    given = case(c, T=T, last=32)
    run = replaying(mixed, c)

    def steps(kept, given):
        def body(_, kept):
            record, state = kept
            _, record, state = run(given._replace(record=record, state=state))
            return record, state

        return jax.lax.fori_loop(0, 3, body, kept)

    once = jax.jit(steps, donate_argnums=0)
    args = (given.record, given.state), given
    held = once.lower(*args).compile().memory_analysis().temp_size_in_bytes
    y = given.zxbcdt.nbytes  # of the mixer's output, and of what lies around it
    assert held < 2 * y + given.record.x.nbytes / 2
    before = jax.tree.map(np.array, given)
    kept = jax.jit(steps)(*args)
    jax.tree.map(np.testing.assert_array_equal, given, before)

    @jax.jit
    def both(given):
        out = run(given)
        return out, jax.tree.map(lambda z: z + 1, (given.record, given.state))

    _, after = both(given)
    wanted = jax.tree.map(lambda z: z + 1, (before.record, before.state))
    jax.tree.map(np.testing.assert_array_equal, after, wanted)
    own = jax.tree.map(jnp.copy, args[0])
    jax.tree.map(np.testing.assert_array_equal, once(own, given), kept)


def test_unsupported_arguments_use_the_equations(monkeypatch):
    """Repeated heads, norms across heads, scans of baselines, and no kernels."""
    c = CONFIGS["plain"]
    given = case(c)

    def text(c, given):
        return replaying(mixed, c).lower(given).as_text()

    assert "stree_mixer" in text(c, given)
    odd = replace(c, norm_groups=2)  # of three heads
    assert "stree_mixer" not in text(odd, given)
    for scan in ("step", "chunk"):
        baseline = given._replace(nodes=replace(given.nodes, scan=scan))
        assert "stree_mixer" not in text(c, baseline)
    use(monkeypatch, "off")
    assert "stree_mixer" not in text(c, given)


def test_a_path_outside_its_tree_raises():
    given = case(CONFIGS["plain"])
    wild = given._replace(path=given.path + 1000)
    with pytest.raises(Exception, match="a path leads out of its tree"):
        jax.block_until_ready(replaying(mixed, CONFIGS["plain"])(wild))


@pytest.mark.parametrize("name", ["conv_weight", "conv_bias", "norm"])
def test_weights_of_two_dtypes_use_the_equations(name):
    """For example if only a model's matrices are bfloat16."""
    c = CONFIGS["plain"]
    given = case(c)
    other = getattr(given.weights, name).astype(jnp.bfloat16)
    given = given._replace(weights=given.weights._replace(**{name: other}))
    with jax.numpy_dtype_promotion("standard"):
        ours, wanted = (replaying(f, c)(given) for f in (mixed, equations))
    agree(ours, wanted, "float32")
