"""Test the names, shapes and dtypes of parameters."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models import (
    DeltaConfig,
    Rope,
    by_path,
    cast_params,
    init_params,
    nest,
    param_shapes,
)
from stree_jax.models.stack.param_table import param_at
from tests.models.configs import CONFIGS
from tests.support.families import FAMILIES

MOE = CONFIGS["two mixers a layer"]


def in_float32(path):
    param = param_at(MOE, path)
    return param is not None and param.float32


def arrays(config, dtype):
    return init_params(config, jax.random.key(0), dtype)


@pytest.mark.parametrize("name", CONFIGS | FAMILIES)
def test_shapes_are_those_of_the_parameters(name):
    """The table lists what the modules declare, layer by layer."""
    config = (CONFIGS | FAMILIES)[name]
    made = jax.eval_shape(lambda: arrays(config, jnp.float32))
    assert param_shapes(config) == {k: v.shape for k, v in by_path(made).items()}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mamba2", {"n_groups": 3}),
        ("mamba2", {"x_heads": 5}),
        ("llama", {"num_kv_heads": 3}),
        ("zaya", {"num_kv_heads": 3}),
        ("gemma4", {"num_heads": 9}),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(name, options):
    config = FAMILIES[name]
    mixers = {
        n: replace(c, **options)
        for n, c in config.mixers.items()
        if all(hasattr(c, field) for field in options)
    }
    with pytest.raises(ValueError, match="heads cannot share . evenly"):
        param_shapes(config.with_mixers(**mixers))


def test_some_parameters_stay_float32():
    made = by_path(jax.eval_shape(lambda: arrays(MOE, jnp.bfloat16)))
    kept = {path[-1] for path in made if in_float32(path)}
    assert kept == {"A_log", "dt_bias", "D", "router_bias"}
    for path, leaf in made.items():
        assert leaf.dtype == (jnp.float32 if in_float32(path) else jnp.bfloat16), path


def test_a_cast_equals_initialisation_in_that_dtype():
    """The router's bias stays float32, because it decides which experts are chosen."""
    made = jax.eval_shape(lambda: arrays(MOE, jnp.float32))
    third = jax.tree.map(lambda p: np.full(p.shape, 1 / 3, np.float32), made)
    rounded = cast_params(MOE, third, jnp.bfloat16)
    wanted = jax.eval_shape(lambda: arrays(MOE, jnp.bfloat16))
    assert jax.tree.structure(rounded) == jax.tree.structure(wanted)
    for (path, leaf), want in zip(
        by_path(rounded).items(), by_path(wanted).values(), strict=True
    ):
        assert leaf.dtype == want.dtype, path
        exact = bool((leaf.astype(jnp.float32) == np.float32(1 / 3)).all())
        assert exact == in_float32(path), path


def test_nest_is_the_inverse_of_by_path():
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert by_path(tree) == {("a", "b"): 1, ("a", "c", "d"): 2, ("e",): 3}
    assert nest(by_path(tree)) == tree


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Rope(1e4, 5), "dim: 5 channels rotate"),
        (lambda: Rope(1e4, 0), "dim: 0 channels rotate"),
        (lambda: DeltaConfig(3, 4, 8, 8), "key_heads: 3 do not divide 4 value"),
    ],
)
def test_configs_that_no_file_can_have_are_refused(make, problem):
    """Exports wrote them, and loading refused the files."""
    with pytest.raises(ValueError, match=f"^{problem}"):
        make()
