"""Trees verified by a sequence per leaf: a baseline with the packed results."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.bench.unroll import Unrolled, verify_unrolled
from stree_jax.generation import FOREVER, begin
from stree_jax.models import forward_hidden, init_state, tree_nodes
from stree_jax.models.state import Pending, init_records
from stree_jax.pallas_kernels import ScanInputs, step_scan, tree_scan
from stree_jax.speculation import loop
from stree_jax.speculation.tree import make_tree, resolve_tree, tree_layout
from tests.support.tiny import REAL, perturbed, tiny

BATCH, T = 2, 11
KINDS = {
    "mamba": ("mamba", "mlp", "mamba"),
    "hybrid": ("mamba", "mlp", "attention", "mlp", "mamba"),
}


def test_step_scan_is_the_tree_scan_of_a_chain():
    rng = np.random.default_rng(0)
    H, G, P, N = 4, 2, 3, 5
    x, dt, a, B, C = (
        jnp.asarray(rng.normal(size=(BATCH, T, *shape)), jnp.float32)
        for shape in ((H, P), (H,), (H,), (G, N), (G, N))
    )
    dt, a = jnp.abs(dt), -jnp.abs(a)
    h0 = jnp.asarray(rng.normal(size=(BATCH, H, P, N)), jnp.float32)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool))[None], (BATCH, T, T))
    for D in (rng.normal(size=H), rng.normal(size=(H, P))):
        D = jnp.asarray(D, jnp.float32)
        inputs = ScanInputs(x, dt, a, B, C, D)
        packed = tree_scan(inputs, h0, causal)
        stepped = step_scan(inputs, h0)
        chex.assert_trees_all_close(stepped, packed, atol=2e-5)


@pytest.mark.parametrize("scan", ["step", "chunk"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_is_the_packed_pass(kind, scan):
    model = tiny(3, layers=KINDS[kind])
    config = model.config
    rng = np.random.default_rng(1)
    parents = [-1] + [int(rng.integers(max(0, t - 4), t)) for t in range(1, T)]
    tree = make_tree(parents)
    rows = tree.rows(BATCH)
    nodes, layout = tree_nodes(rows, config.conv_taps), tree_layout(tree, rows)

    def noise(z):
        return jnp.asarray(rng.normal(size=z.shape), z.dtype)

    state = jax.tree.map(noise, init_state(config, BATCH, 32, jnp.float32).layers)
    state = init_state(config, BATCH, 32, jnp.float32).replace(
        layers=state, length=jnp.asarray([5, 9], jnp.int32)
    )
    # The decay of a record is negative, its step size is positive.
    records = jax.tree_util.tree_map_with_path(
        lambda path, z: -jnp.abs(noise(z)) if path[-1].name == "a" else noise(z),
        init_records(config, BATCH, T, jnp.float32),
    )
    path = jnp.asarray([[0, 1, 2], [0, 2, 0]], jnp.int32)
    pending = Pending(records, path, jnp.asarray([3, 2], jnp.int32))
    tokens = jnp.asarray(rng.integers(8, REAL, (BATCH, T)), jnp.int32)
    leaves = len(set(range(T)) - set(parents))

    packed = forward_hidden(model, state, tokens, nodes, pending=pending)
    args = (model, state, tokens, nodes, pending, layout)
    for R in (leaves, leaves + 3):  # a bound that is too high only costs time
        unrolled = jax.jit(partial(verify_unrolled, unrolled=Unrolled(R, scan)))(*args)
        chex.assert_trees_all_close(unrolled, packed, atol=1e-4, rtol=1e-4)
    fewer = verify_unrolled(*args, Unrolled(leaves - 1, scan))
    assert np.abs(np.asarray(fewer[0] - packed[0])).max() > 1e-2


@pytest.mark.parametrize("scan", ["step", "chunk"])
@pytest.mark.parametrize(("name", "leaves"), [("binary:3", 4), ("beam:2x4", 5)])
def test_the_loop_gives_the_same_text(name, leaves, scan):
    target = tiny(1)
    drafter = target.replace(params=perturbed(target.params, 0.05, 3))
    tree = resolve_tree(name)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(8, REAL, n).tolist() for n in (4, 9)]
    done = []
    for unrolled in (None, Unrolled(leaves, scan)):
        begun, plan = begin(
            target,
            prompts,
            max_new_tokens=16,
            drafter=drafter,
            tree=tree,
            stop_tokens=(),
        )
        forever = jnp.int32(FOREVER)
        arms = (target, drafter, tree, begun, forever, plan.rule, unrolled)
        decoding = loop.advance_jit(*arms)
        done.append((decoding.tokens, decoding.calls, decoding.gained))
    chex.assert_trees_all_equal(*done)
    assert int(done[0][1].max()) < 16
