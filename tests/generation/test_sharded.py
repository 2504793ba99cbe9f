"""Rows on two devices: the same tokens, and the output stays where its rows are."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import jax, jax.numpy as jnp, numpy as np
import stree_jax
from tests.support.tiny import REAL, perturbed, tiny

target = tiny(1)
drafter = target.replace(params=perturbed(target.params, 0.05, 3))
auto = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((2,), ("rows",), axis_types=auto)
rows = jax.NamedSharding(mesh, jax.P("rows"))
ids = np.random.default_rng(0).integers(8, REAL, (4, 9)).astype(np.int32)
lengths = np.full((4,), 9, np.int32)

@jax.jit
def run(target, drafter, prompts, lengths):
    done = stree_jax.generate_tokens(
        target, prompts, lengths, drafter=drafter, tree="A", max_new_tokens=8
    )
    return done.tokens, done.length, done.calls

one = run(target, drafter, jnp.asarray(ids), jnp.asarray(lengths))
models = jax.device_put((target, drafter), jax.NamedSharding(mesh, jax.P()))
two = run(*models, jax.device_put(ids, rows), jax.device_put(lengths, rows))
for a, b in zip(one, two, strict=True):
    np.testing.assert_array_equal(a, b)
    assert b.sharding.is_equivalent_to(rows, b.ndim), b.sharding
"""


def test_the_output_is_sharded_as_the_prompts():
    devices = "--xla_force_host_platform_device_count=2"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
