"""Test unrolled verification, one sequence per leaf: a baseline with equal results."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.unroll import Unrolled
from stree_jax.generation.generate import begin
from stree_jax.models import init_state
from stree_jax.models.stack.state import Pending, init_records
from stree_jax.pallas_kernels import ScanInputs, step_scan, tree_scan
from stree_jax.speculation import loop
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.layout import tree_layout
from stree_jax.speculation.step import packed
from stree_jax.speculation.tree import make_tree, resolve_tree
from tests.support.tiny import REAL, perturbed, tiny

BATCH, T = 2, 11
KINDS = {
    "mamba": ("mamba", "mlp", "mamba"),
    "hybrid": ("mamba", "mlp", "attention", "mlp", "mamba"),
}


def test_step_scan_matches_the_tree_scan_of_a_chain():
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
def test_a_pass_matches_the_packed_pass(kind, scan):
    model = tiny(3, layers=KINDS[kind])
    config = model.config
    rng = np.random.default_rng(1)
    parents = [-1] + [int(rng.integers(max(0, t - 4), t)) for t in range(1, T)]
    tree = make_tree(parents)

    def noise(z):
        return jnp.asarray(rng.normal(size=z.shape), z.dtype)

    state = jax.tree.map(noise, init_state(config, BATCH, 32, jnp.float32).layers)
    state = init_state(config, BATCH, 32, jnp.float32).replace(
        layers=state, length=jnp.asarray([5, 9], jnp.int32)
    )
    # In a record, decays are negative and step sizes positive.
    records = jax.tree_util.tree_map_with_path(
        lambda path, z: -jnp.abs(noise(z)) if path[-1].name == "a" else noise(z),
        init_records(config, BATCH, T, jnp.float32),
    )
    path = jnp.asarray([[0, 1, 2], [0, 2, 0]], jnp.int32)
    pending = Pending(records, path, jnp.asarray([3, 2], jnp.int32))
    tokens = jnp.asarray(rng.integers(8, REAL, (BATCH, T)), jnp.int32)
    leaves = len(set(range(T)) - set(parents))

    args = model, state, Draft(tree_layout(tree, tree.rows(BATCH)), tokens), pending
    want = packed(*args)
    for R in (leaves, leaves + 3):  # a bound that is too high only costs time
        got = jax.jit(Unrolled(R, scan))(*args)
        chex.assert_trees_all_close(got, want, atol=1e-4, rtol=1e-4)
    fewer = Unrolled(leaves - 1, scan)(*args)
    assert np.abs(np.asarray(fewer.hidden - want.hidden)).max() > 1e-2


@pytest.mark.parametrize("scan", ["step", "chunk"])
@pytest.mark.parametrize(("name", "leaves"), [("binary:3", 4), ("beam:2x4", 5)])
def test_the_loop_gives_the_same_text(name, leaves, scan):
    target = tiny(1)
    drafter = target.replace(params=perturbed(target.params, 0.05, 3))
    tree = resolve_tree(name)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(8, REAL, n).tolist() for n in (4, 9)]
    done = []
    for verify in (packed, Unrolled(leaves, scan)):
        begun, plan = begin(
            target,
            prompts,
            max_new_tokens=16,
            drafter=drafter,
            tree=tree,
            stop_tokens=(),
        )
        steps = jnp.int32(loop.FOREVER)
        decoding = loop.advance_jit(plan.spec, begun, steps, verify=verify)
        done.append((decoding.tokens, decoding.calls, decoding.gained))
    chex.assert_trees_all_equal(*done)
    assert int(done[0][1].max()) < 16
