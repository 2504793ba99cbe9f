"""Test what is particular to the compiled kernel of the gated delta rule: its system
over ancestors, levels of a tree, and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models import tree_nodes
from stree_jax.models.configs.delta import DELTA, DeltaConfig
from stree_jax.models.configs.kda import KDAConfig
from stree_jax.models.layers.mixer import MixerPending, zeros
from stree_jax.models.layers.nodes import NO_NODE, Pass
from stree_jax.models.mixers.delta import DeltaRecord, equations, mixed
from tests.support.mixers import BATCH, agree, case, replaying
from tests.support.native import built, each_level, use
from tests.support.reference import chain, random_tree

pytestmark = built
C = DeltaConfig(2, 4, 16, 24)
each_rule = pytest.mark.parametrize(
    "c", [C, KDAConfig(4, 4, 18, 24)], ids=["by head", "by channel"]
)


def trees(T, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([random_tree(rng, T) for _ in range(BATCH)]).astype(np.int32)


@each_level
@pytest.mark.parametrize(
    "c",
    [
        DeltaConfig(1, 3, 96, 192),
        DeltaConfig(2, 2, 128, 128),
        DeltaConfig(1, 1, 3, 5, d_conv=2),
        DeltaConfig(3, 6, 37, 41, d_conv=5),
        KDAConfig(2, 2, 128, 128),
        KDAConfig(1, 1, 3, 5, d_conv=2),
        KDAConfig(32, 32, 64, 16),  # groups in several threads
    ],
    ids=str,
)
def test_head_sizes(c, level, monkeypatch):
    use(monkeypatch, level)
    given = case(c, T=9, last=5, dtype="bfloat16", parents=trees(9))
    agree(replaying(mixed, c)(given), replaying(equations, c)(given), "bfloat16")


@each_level
@each_rule
def test_paths_of_every_length(c, level, monkeypatch):
    use(monkeypatch, level)
    given = case(c, T=7, last=7, parents=trees(7))
    path = jnp.array([[0, 1, 3, 4, 6], [0, 2, 5, 6, 1]], jnp.int32)
    ours, wanted = replaying(mixed, c), replaying(equations, c)
    for lengths in ((0, 1), (2, 3), (4, 5)):
        length = jnp.array(lengths, jnp.int32)
        one = given._replace(path=path, length=length)
        agree(ours(one), wanted(one), "float32")
        if lengths[0] == 0:  # an empty path leaves the state as it is, bit for bit
            np.testing.assert_array_equal(ours(one)[2].ssm[0], given.state.ssm[0])


@each_level
@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_a_chain_of_equal_keys_that_forgets_nothing(strength, level, monkeypatch):
    """A system whose inverse cancels if it is computed as a product of powers."""
    use(monkeypatch, level)
    given = case(C, T=64, parents=np.stack([chain(64)] * BATCH))
    qkvz, _ = given.projected
    b = jnp.log(strength / (1.0 - strength)) if strength < 1 else jnp.float32(100.0)
    equal = jnp.broadcast_to(qkvz[:, :1, : 2 * C.d_key], (BATCH, 64, 2 * C.d_key))
    qkvz = qkvz.at[:, :, : 2 * C.d_key].set(equal)
    gates = jnp.full((BATCH, 64, 2 * C.value_heads), -1000.0)
    gates = gates.at[..., : C.value_heads].set(b)
    window = jnp.broadcast_to(qkvz[:, :1, : C.d_qkv], given.state.conv.shape)
    given = given._replace(
        projected=(qkvz, gates),
        state=given.state.replace(conv=window),
        record=given.record.replace(
            qkv=jnp.broadcast_to(qkvz[:, :1, : C.d_qkv], given.record.qkv.shape)
        ),
    )
    ours, wanted = (replaying(f, C)(given) for f in (mixed, equations))
    keys = np.asarray(ours[1].k)
    np.testing.assert_array_equal(keys, np.broadcast_to(keys[:, :1], keys.shape))
    agree(ours, wanted, "float32")


@each_level
@each_rule
def test_decays_that_forget_everything(c, level, monkeypatch):
    """Off the path, exponents of decays would be large and positive."""
    use(monkeypatch, level)
    given = case(c, T=24, parents=trees(24))
    qkvz, gates = given.projected
    rng = np.random.default_rng(3)
    a = gates[..., c.value_heads :]
    forgets = jnp.asarray(rng.random(a.shape) < 0.3)
    a = jnp.where(forgets, -1e6 if c.by_channel else 1e6, a)
    gates = gates.at[..., c.value_heads :].set(a)
    given = given._replace(projected=(qkvz, gates))
    agree(replaying(mixed, c)(given), replaying(equations, c)(given), "float32")


def level_by_level(c, given, levels):
    """Returns y [B, T, H * P] and the record of a tree that is computed in levels."""
    T = given.nodes.mask.shape[1]

    @jax.jit
    def run(given):
        record = zeros(
            DeltaRecord, DELTA.record_arrays(c, BATCH, T, given.state.conv.dtype)
        )
        ys = jnp.zeros((BATCH, T, c.d_inner))
        for level in levels:
            rows = jnp.array(level, jnp.int32)
            pass_ = Pass(given.nodes, rows, None, given.length)
            projected = (z[:, rows] for z in given.projected)
            args = given.weights, pass_, given.state, record
            y, record, _ = mixed(c, *projected, *args)
            ys = ys.at[:, rows].set(y)
        return ys, record

    return run(given)


@each_level
@each_rule
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_levels_have_the_bits_of_one_pass(c, dtype, level, monkeypatch):
    """Siblings together, and a first level that holds a chain."""
    use(monkeypatch, level)
    parents = np.array([[-1, 0, 1, 2, 2, 2, 3, 3, 5]] * BATCH, np.int32)
    given = case(c, T=9, dtype=dtype, parents=parents)
    pass_ = Pass(given.nodes, None, None, given.length)
    whole = jax.jit(
        lambda given: mixed(
            c, *given.projected, given.weights, pass_, given.state, None
        )
    )
    y, record, _ = whole(given)
    for levels in ([[0, 1, 2], [3, 4, 5], [6, 7, 8]], [[0], [1], [2], [5, 3], [8]]):
        ys, parts = level_by_level(c, given, levels)
        known = jnp.array([row for level in levels for row in level])
        np.testing.assert_array_equal(ys[:, known], y[:, known])
        for part, all_nodes in zip(
            jax.tree.leaves(parts), jax.tree.leaves(record), strict=True
        ):
            np.testing.assert_array_equal(part[:, known], all_nodes[:, known])


@each_level
@each_rule
def test_padding_changes_nothing(c, level, monkeypatch):
    """Nodes have the bits that they have among other nodes; padding may be NaN."""
    use(monkeypatch, level)
    T, counts = 8, (5, 3)
    parents = trees(T)
    for b, count in enumerate(counts):
        parents[b, count:] = NO_NODE
    given = case(c, T=T, last=9, parents=trees(T))
    real = np.arange(T)[None] < np.array(counts)[:, None]

    @jax.jit
    def run(projected, given):
        nodes = tree_nodes(jnp.asarray(parents), 4, has_padding=True)
        pending = MixerPending(given.record, given.path, given.length)
        pass_ = Pass(nodes, None, pending, given.length, nodes.valid_count)
        return mixed(c, *projected, given.weights, pass_, given.state, None)

    strange = jax.tree.map(
        lambda z: jnp.where(jnp.asarray(real)[..., None], z, jnp.nan), given.projected
    )
    y, record, state = run(strange, given)
    wanted_y, wanted_record, wanted_state = replaying(mixed, c)(given)
    jax.tree.map(np.testing.assert_array_equal, state, wanted_state)
    np.testing.assert_array_equal(y[real], wanted_y[real])
    for ours, wanted in zip(
        jax.tree.leaves(record), jax.tree.leaves(wanted_record), strict=True
    ):
        np.testing.assert_array_equal(ours[:, :T][real], wanted[:, :T][real])


@each_level
@each_rule
def test_the_record_replays_to_the_state_of_the_path(c, level, monkeypatch):
    """Two trees, one after the other, agree with the equations of both."""
    use(monkeypatch, level)
    given = case(c, T=12, last=12, dtype="bfloat16", parents=trees(12))
    path = jnp.array([[0, 1, 2], [0, 3, 0]], jnp.int32)
    length = jnp.array([1, 0], jnp.int32)

    def two(function):
        _, record, state = replaying(function, c)(given)
        assert isinstance(record, DeltaRecord)
        again = given._replace(record=record, state=state, path=path, length=length)
        return replaying(function, c)(again)

    agree(two(mixed), two(equations), "bfloat16")
