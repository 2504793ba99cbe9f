"""Test `by_platform`: it traces only the function for the program's platform."""

from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.cpu_kernels import by_platform
from stree_jax.models.weights.linear import linear
from tests.support.reference import assert_near

X = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
SCALE = 3.0
PLUS = {"default": 1.0, "cpu": 20.0, "cuda": 300.0, "tpu": 4000.0}


class Ways:
    """Functions of (x, (y, None), scale), and a list of those that have been traced."""

    def __init__(self):
        self.traced = []
        self.functions = {name: partial(self.run, name, n) for name, n in PLUS.items()}

    def run(self, name, plus, x, pair, scale):
        self.traced.append(name)
        y, none = pair
        assert none is None
        return {"sum": (x + y) * scale + plus, "none": None}, y

    def __call__(self, x, y, scale=SCALE):
        return by_platform(x, (y, None), scale, **self.functions)


def wanted(x, y, plus):
    return (x + y) * SCALE + plus


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu", "rocm"])
def test_the_function_for_the_platform_is_lowered(platform):
    ways = Ways()
    traced = jax.jit(ways).trace(X, X)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    ours = platform if platform in ways.functions else "default"
    written = {name: f"{number:e}" for name, number in PLUS.items()}
    assert {name for name, number in written.items() if number in text} == {ours}
    assert set(ways.traced) == {"cpu", ours}  # the first for the shapes of all


def test_in_a_program_and_outside():
    ways = Ways()
    for run in (ways, jax.jit(ways)):
        out, y = run(X, 2 * X)
        assert out["none"] is None
        np.testing.assert_array_equal(out["sum"], wanted(X, 2 * X, 20.0))
        np.testing.assert_array_equal(y, 2 * X)
    assert set(ways.traced) == {"cpu"}


def test_shapes_come_from_the_default_without_a_cpu_function():
    add = partial(by_platform, default=jnp.add, cuda=jnp.subtract)
    assert jax.eval_shape(add, X, X).shape == X.shape
    np.testing.assert_array_equal(jax.jit(add)(X, X), 2 * X)


def test_a_program_for_two_platforms_has_both_functions():
    if jax.__version_info__ >= (0, 11):
        pytest.skip("from jax 0.11 on the exporter wants a device of each kind")
    ways = Ways()
    exported = jax.export.export(jax.jit(ways), platforms=["cpu", "cuda"])(X, X)
    assert {"cpu", "cuda"} <= set(ways.traced)
    np.testing.assert_array_equal(exported.call(X, X)[0]["sum"], wanted(X, X, 20.0))


def test_vmap():
    both = jax.vmap(Ways(), (1, None), 1)(jnp.stack([X, 5 * X], axis=1), X)
    got = both[0]["sum"]
    np.testing.assert_array_equal(got[:, 0], wanted(X, X, 20.0))
    np.testing.assert_array_equal(got[:, 1], wanted(5 * X, X, 20.0))


@pytest.mark.parametrize("derivative", [jax.grad, jax.jacfwd])
def test_derivatives_come_from_the_default(derivative):
    """The values still come from the platform's function."""

    def run(x):
        return by_platform(
            x, default=lambda x: (x**3).sum(), cpu=lambda x: (x**2).sum()
        )

    assert_near(derivative(run)(X), 3 * X**2, 1e-6)
    value, _ = jax.value_and_grad(run)(X)
    assert_near(value, (X**2).sum(), 1e-6)


def test_inside_shard_map_with_checks():
    """Inside a user's `shard_map` it behaves like other operations: on one device's
    rows and on replicated weights, whose derivative is a sum over devices."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, weight = jax.P("rows"), jnp.ones((4, 3))

    def of_part(x, weight):
        return jax.lax.psum(jnp.sin(linear(x, weight)).sum(), "rows")

    def total(weight):
        specs = dict(in_specs=(rows, jax.P()), out_specs=jax.P())
        return jax.shard_map(of_part, mesh=mesh, **specs)(X, weight)

    def wanted(weight):
        return jnp.sin(X @ weight.T).sum()

    assert_near(jax.jit(total)(weight), wanted(weight), 1e-6)
    assert_near(jax.jit(jax.grad(total))(weight), jax.grad(wanted)(weight), 1e-6)


def test_python_numbers_stay_weak():
    """A Python number does not change the dtype of a bfloat16 result."""
    out = by_platform(X.astype(jnp.bfloat16), 0.5, default=jnp.multiply)
    assert out.dtype == jnp.bfloat16
