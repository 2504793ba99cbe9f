"""Test that dtypes and values are the same with JAX_ENABLE_X64."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models import (
    Model,
    Pending,
    chain_nodes,
    commit,
    forward_hidden,
    init_params,
    init_records,
    logits_of,
    read_text,
    tree_nodes,
)
from stree_jax.pallas_kernels import (
    Replayed,
    ScanInputs,
    replay_tree_scan,
    triton_attention,
    triton_scan,
)
from tests.models.configs import CONFIGS
from tests.support.lowering import lowered
from tests.support.reference import assert_near

EVERY_KIND = ("mamba", "attention", "mlp", "mamba+attention", "moe", "mamba+shared")
CONFIG = replace(CONFIGS["two mixers a layer"], layers=EVERY_KIND)
TOKENS = np.array([[3, 1, 2, 5]], np.int32)
PARENTS = np.array([[-1, 0, 0, 1]], np.int32)


def outputs(config):
    """Returns the results of every function of a model with fixed parameters."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.float32))

    def fixed(s):
        values = np.sin(np.arange(np.prod(s.shape, dtype=int)) + 1.0)
        return jnp.asarray(0.3 * values.reshape(s.shape), s.dtype)

    model, taps = Model(jax.tree.map(fixed, shapes), config), config.conv_taps
    length = jnp.full((1,), 3, jnp.int32)
    state = read_text(model, jnp.asarray(np.tile(TOKENS, 20)), length + 70, 96)
    nodes, tokens = tree_nodes(jnp.asarray(PARENTS), taps), jnp.asarray(TOKENS)
    hidden, records, _ = forward_hidden(model, state, tokens, nodes)
    pending = Pending(records, jnp.array([[0, 1, 3]], jnp.int32), length)
    chain = chain_nodes(1, 4, taps)
    after = forward_hidden(model, state, tokens, chain, pending=pending)
    empty, rows = init_records(config, 1, 4, jnp.float32), jnp.arange(4, dtype="int32")
    level = forward_hidden(model, state, tokens, nodes, records=empty, rows=rows)
    committed = commit(state, records, pending.path, length)
    return logits_of(model, hidden), after, level, committed, nodes


def kernel_outputs():
    """Returns the results of the Triton kernels, interpreted."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    dt, mask = jnp.abs(normal(1, 5, 2)), jnp.tril(jnp.ones((1, 5, 5), bool))
    B, C = normal(1, 5, 1, 16), normal(1, 5, 1, 16)
    tree = ScanInputs(normal(1, 5, 2, 16), dt, -dt, B, C, normal(2))
    path, length = jnp.array([[0, 2, 4]], jnp.int32), jnp.array([2], jnp.int32)
    args = normal(1, 2, 16, 16), Replayed(*tree[:4], path, length), tree, mask
    q, k, v = normal(1, 5, 4, 16), normal(1, 5, 2, 16), normal(1, 5, 2, 16)
    cache = normal(2, 1, 2, 40, 16)
    attended = triton_attention.tree_attention(
        *(q, k, v, *cache, jnp.array([33], jnp.int32), mask, 0.25), interpret=True
    )
    scanned = triton_scan.replay_tree_scan(*args, interpret=True)
    lowered(replay_tree_scan, args, "cuda")
    return scanned, attended


def written():
    """Returns dtype and a few values of every leaf as text; of kernels only dtypes."""

    def leaf(z):
        return [str(z.dtype), np.asarray(z, np.float64).reshape(-1)[:50].tolist()]

    quick = {"xla_backend_optimization_level": 0}
    computed = jax.jit(lambda: outputs(CONFIG), compiler_options=quick)()
    of_kernels = jax.tree.leaves(jax.eval_shape(kernel_outputs))
    return [
        *map(leaf, jax.tree.leaves(computed)),
        *([str(z.dtype), [0]] for z in of_kernels),
    ]


def test_64_bits_change_nothing():
    """Compares dtypes and values of carries, caches, records and tables."""
    code = (
        "import json, warnings, tests.conftest\n"
        "warnings.simplefilter('ignore')\n"
        "from tests.models.test_x64 import written\n"
        "print(json.dumps(written()))"
    )
    env = os.environ | {"JAX_ENABLE_X64": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, env=env)
    assert out.returncode == 0, out.stderr[-2000:]
    found, wanted = json.loads(out.stdout), written()
    for mine, other in zip(found, wanted, strict=True):
        assert mine[0] == other[0] and mine[0] in ("float32", "int32", "bool")
        assert_near(mine[1], other[1], 1e-5)
