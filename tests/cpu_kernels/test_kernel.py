"""Test when a program runs the compiled kernels and when their definitions."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.cpu_kernels import cpu_kernel
from stree_jax.models.weights.linear import linear
from tests.support.native import built, use
from tests.support.reference import assert_near

pytestmark = built
ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((6, 40)), jnp.float32)
WEIGHT = jnp.asarray(RNG.standard_normal((9, 40)), jnp.float32)
CALL = "stree_product"


def plain(x, weight):
    return jnp.einsum("...k,mk->...m", x, weight, precision="highest")


def test_programs_for_one_cpu_use_the_kernel(monkeypatch):
    assert CALL in jax.jit(linear).lower(X, WEIGHT).as_text()
    use(monkeypatch, "off")
    assert CALL not in jax.jit(lambda *a: linear(*a)).lower(X, WEIGHT).as_text()


def test_outside_jit():
    assert_near(linear(X, WEIGHT), plain(X, WEIGHT), 1e-6)


@pytest.mark.parametrize("platforms", [["cpu"], ["cpu", "cuda"]])
def test_exported_programs_have_no_kernels(platforms):
    if platforms[-1] == "cuda" and jax.__version_info__ >= (0, 11):
        pytest.skip("from jax 0.11 on the exporter wants a device of that kind")
    exported = jax.export.export(jax.jit(linear), platforms=platforms)(X, WEIGHT)
    assert CALL not in exported.mlir_module()
    assert_near(exported.call(X, WEIGHT), plain(X, WEIGHT), 1e-6)


def test_vmap_adds_rows_to_one_product():
    """If `jax.vmap` maps over weights, XLA computes the product."""
    mapped = jax.jit(jax.vmap(linear, (0, None)))
    text = mapped.lower(X.reshape(3, 2, 40), WEIGHT).as_text()
    assert text.count(f"@{CALL}") == 1 and "6x40" in text
    y = mapped(X.reshape(3, 2, 40), WEIGHT).reshape(6, 9)
    np.testing.assert_array_equal(y, jax.jit(linear)(X, WEIGHT))
    middle = jax.jit(jax.vmap(linear, (1, None), 1))(X.reshape(2, 3, 40), WEIGHT)
    np.testing.assert_array_equal(middle.reshape(6, 9), y)
    both = jax.jit(jax.vmap(linear, (None, 0)))
    weights = jnp.stack([WEIGHT, 2 * WEIGHT])
    assert CALL not in both.lower(X, weights).as_text()
    assert_near(both(X, weights)[1], 2 * plain(X, WEIGHT), 1e-6)


def test_many_rows_under_vmap_use_the_kernel():
    mapped, x = jax.jit(jax.vmap(linear, (0, None))), jnp.ones((2, 513, 40))
    assert CALL in mapped.lower(x, WEIGHT).as_text()
    assert_near(mapped(x, WEIGHT)[1], plain(x[1], WEIGHT), 1e-6)


class Pair(NamedTuple):
    left: jax.Array
    right: jax.Array | None


def test_arguments_are_found_by_name():
    @cpu_kernel("stree_no_such", outputs=lambda *args: None)
    def function(first, second, third):
        """A definition."""

    args = Pair(1, None), Pair(2, 3), 4
    tree = jax.tree.structure(args)
    found = {"first": [0], "second": [1, 2], "second.right": [2], "third": [3]}
    for name, places in found.items():
        assert function.leaf_indices(tree, name) == places
    whole = jax.tree.structure(args, is_leaf=lambda z: z is None)
    assert function.leaf_indices(whole, "first.right") == [1]
    with pytest.raises(AttributeError, match="fourth"):
        function.leaf_indices(tree, "fourth")
    assert function.__doc__ == "A definition."


def test_derivatives_come_from_the_definition():
    def loss(product, x, weight):
        return jnp.sin(product(x, weight)).sum()

    for first, second in ((jax.grad, jax.grad), (jax.jacfwd, jax.jacfwd)):
        for argnum in (0, 1):
            ours = first(partial(loss, linear), argnum)(X, WEIGHT)
            assert_near(ours, second(partial(loss, plain), argnum)(X, WEIGHT), 1e-5)


def test_in_a_loop():
    def body(carry):
        n, x = carry
        return n + 1, x + 1e-3 * linear(linear(x, WEIGHT), WEIGHT.T)

    run = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 5, body, (0, x))[1])
    x = np.asarray(X, np.float64)
    weight = np.asarray(WEIGHT, np.float64)
    for _ in range(5):
        x = x + 1e-3 * (x @ weight.T) @ weight
    assert_near(run(X), x, 1e-6)


def test_with_x64():
    with jax.enable_x64(True):
        y = jax.jit(linear)(X, WEIGHT)
        assert CALL in jax.jit(linear).lower(X, WEIGHT).as_text()
    np.testing.assert_array_equal(y, jax.jit(linear)(X, WEIGHT))


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from stree_jax.models.weights.linear import linear
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.ones((4, 40)); weight = jnp.arange(8 * 40.0).reshape(8, 40)
cut = jax.device_put(weight, jax.NamedSharding(mesh, jax.P("d")))
whole = jax.device_put(x, jax.NamedSharding(mesh, jax.P()))
run = jax.jit(linear)
assert "stree_product" not in run.lower(whole, cut).as_text()
text = run.lower(whole, cut).compile().as_text()
assert "all-gather" not in text and "stree_product" not in text, text
np.testing.assert_allclose(run(whole, cut), x @ weight.T, rtol=1e-6)
assert "stree_product" in run.lower(x, weight).as_text()
"""
BITS = """
import jax, jax.numpy as jnp, numpy as np, hashlib
from stree_jax.models.weights.linear import linear
from stree_jax.pallas_kernels import replay_tree_scan
from tests.support.scans import Shape, replay_inputs
rng = np.random.default_rng(0)
x = jnp.asarray(rng.standard_normal((7, 1024)), jnp.float32)
weight = jnp.asarray(rng.standard_normal((900, 1024)), jnp.float32)
parents = np.arange(-1, 8)[None]
args = replay_inputs(rng, Shape(1, 9, 32, 1, 64, 32), parents)
outs = [linear(x, w) for w in (weight, weight.astype(jnp.bfloat16))]
outs += jax.jit(lambda *a: replay_tree_scan(*a, implementation="native"))(*args)
print(hashlib.sha256(b"".join(np.asarray(y).tobytes() for y in outs)).hexdigest())
"""


def run_code(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_programs_for_several_devices_use_the_definition():
    devices = "--xla_force_host_platform_device_count=2"
    run_code(SHARDED, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {devices}")


def test_results_do_not_depend_on_the_number_of_threads():
    """XLA uses NPROC threads."""
    assert run_code(BITS, NPROC="1") == run_code(BITS, NPROC="5")
