"""Test the compiled mixers against their equations in JAX, and their
reproducibility."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models import MambaConfig, chain_nodes
from stree_jax.models.configs.delta import DeltaConfig
from stree_jax.models.configs.kda import KDAConfig
from tests.support.mixers import (
    BATCH,
    Case,
    adding,
    agree,
    case,
    equations,
    kernel_name,
    mixed,
    reading,
    replaying,
)
from tests.support.native import built, each_level, use
from tests.support.reference import chain

pytestmark = built
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
    "delta": DeltaConfig(1, 2, 16, 32),
    "delta, groups": DeltaConfig(2, 6, 33, 17, d_conv=3, norm_eps=1e-3),
    "kda": KDAConfig(3, 3, 33, 17, d_conv=3, norm_eps=1e-3),
}
EACH = ["plain", "delta"]  # one config of each mixer


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
        assert kernel_name(c) in ours.as_text()
        with pytest.MonkeyPatch.context() as patch:
            use(patch, "off")
            agree(ours.compile()(texts[T]), reading(equations, c)(texts[T]), dtype)
    assert kernel_name(c) not in reading(mixed, c).lower(texts[65]).as_text()


@each_level
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_matches_the_equations(name, dtype, level, monkeypatch):
    (*after, added), (*wanted, wanted_added) = solved(name, dtype)
    c = CONFIGS[name]
    use(monkeypatch, level)
    for given, expected in zip(after, wanted, strict=True):
        run = replaying(mixed, c).lower(given)
        assert kernel_name(c) in run.as_text()
        agree(run.compile()(given), expected, dtype)
    y, *ours = adding(mixed, c, ROWS)(added)
    wanted_y, *expected = wanted_added
    agree((y[:, :2], ours), (wanted_y[:, :2], expected), dtype)
    np.testing.assert_array_equal(ours[1].ssm, added.state.ssm)


@each_level
@pytest.mark.parametrize("name", EACH)
def test_extreme_steps_and_gates(name, level, monkeypatch):
    """exp overflows or underflows in softplus, silu and decays."""
    use(monkeypatch, level)
    c = CONFIGS[name]
    given = case(c)
    for scale in (0.0, 60.0, 3000.0):
        scaled = given._replace(
            projected=jax.tree.map(lambda z, by=scale: z * by, given.projected)
        )
        agree(replaying(mixed, c)(scaled), replaying(equations, c)(scaled), "float32")


@each_level
@pytest.mark.parametrize("name", ["norm first", "delta, groups"])
def test_results_do_not_depend_on_other_rows_and_nodes(name, level, monkeypatch):
    """Bitwise equal alone and in a batch, and as the last node and as an earlier
    one."""
    use(monkeypatch, level)
    c = CONFIGS[name]
    given = case(c, T=12, dtype="bfloat16", parents=np.stack([chain(12)] * BATCH))
    run = replaying(mixed, c)
    y, record, state = run(given)
    for b, T in ((0, 12), (1, 12), (0, 1), (1, 5)):
        row = slice(b, b + 1)
        nodes = given.nodes
        one = given._replace(
            projected=jax.tree.map(lambda z, row=row, T=T: z[row, :T], given.projected),
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
    assert record.a.shape[1] == T
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


@pytest.mark.parametrize("name", EACH)
def test_vmap_adds_rows_to_the_batch(name):
    """With shared weights, bitwise equal to separate calls; else the equations run."""
    c = CONFIGS[name]
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


@pytest.mark.parametrize("name", EACH)
def test_vmap_shares_the_queried_rows(name):
    c = CONFIGS[name]
    one = case(c)
    run = adding(mixed, c, [1, 4])
    mapped = jax.vmap(lambda z: run(one._replace(projected=z)))
    turned = jax.tree.map(jnp.negative, one.projected)
    stacked = jax.tree.map(lambda *z: jnp.stack(z), one.projected, turned)
    text = jax.jit(mapped).lower(stacked).as_text()
    assert text.count(f"@{kernel_name(c)}") == 1
    got = jax.tree.map(lambda z: z[1], mapped(stacked))
    wanted = run(one._replace(projected=turned))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("T", [32, 8])
@pytest.mark.parametrize(
    "c", [MambaConfig(8, 64, 64), DeltaConfig(4, 8, 64, 64)], ids=["mamba2", "delta"]
)
def test_records_and_state_are_updated_in_place_if_unused(optimised, c, T):
    """A loop copies nothing of the records' size; arrays that are read later stay."""
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
    # The mixer's output, and what lies around it.
    y = sum(z.nbytes for z in given.projected)
    largest = max(z.nbytes for z in jax.tree.leaves(given.record))
    assert held < 2 * y + largest / 2
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


@pytest.mark.parametrize("name", EACH)
def test_unsupported_arguments_use_the_equations(name, monkeypatch):
    """Repeated heads, norms across heads, scans of baselines, and no kernels."""
    c = CONFIGS[name]
    given = case(c)

    def text(c, given):
        return replaying(mixed, c).lower(given).as_text()

    assert kernel_name(c) in text(c, given)
    if name == "plain":
        odd = replace(c, norm_groups=2)  # of three heads
        assert kernel_name(c) not in text(odd, given)
    for scan in ("step", "chunk"):
        baseline = given._replace(nodes=replace(given.nodes, scan=scan))
        assert kernel_name(c) not in text(c, baseline)
    use(monkeypatch, "off")
    assert kernel_name(c) not in text(c, given)


@pytest.mark.parametrize("name", EACH)
def test_a_path_outside_its_tree_raises(name):
    c = CONFIGS[name]
    given = case(c)
    wild = given._replace(path=given.path + 1000)
    with pytest.raises(Exception, match="a path leads out of its tree"):
        jax.block_until_ready(replaying(mixed, c)(wild))


@pytest.mark.parametrize(
    ("of", "name"),
    [
        ("plain", "conv_weight"),
        ("plain", "conv_bias"),
        ("plain", "norm"),
        ("delta", "conv_weight"),
        ("delta", "norm"),
    ],
)
def test_weights_of_two_dtypes_use_the_equations(of, name):
    """For example if only a model's matrices are bfloat16."""
    c = CONFIGS[of]
    given = case(c)
    other = getattr(given.weights, name).astype(jnp.bfloat16)
    given = given._replace(weights=given.weights._replace(**{name: other}))
    with jax.numpy_dtype_promotion("standard"):
        ours, wanted = (replaying(f, c)(given) for f in (mixed, equations))
    agree(ours, wanted, "float32")
