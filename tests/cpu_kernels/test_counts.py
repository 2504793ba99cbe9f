"""Test that kernels skip padding rows, which do not affect other rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models import ModelConfig
from stree_jax.models.configs.attention import AttentionConfig
from stree_jax.models.configs.rope import Rope
from stree_jax.models.layers.norm import ScaledNorm, scaled_rms_norm
from stree_jax.models.mixers.attention import angles, cut_heads
from stree_jax.models.mixers.mlp import _gated, activate_gated
from stree_jax.models.stack.config import blocks
from stree_jax.models.stack.network import LanguageModel
from stree_jax.models.weights.int8 import quantize
from stree_jax.models.weights.linear import linear
from stree_jax.models.weights.plain import in_pool_thread, table_rows
from tests.support.native import built, each_level, use
from tests.support.reference import assert_near

pytestmark = built
T, D = 5, 24
COUNTS = [[5], [2], [0], [3, 5], [0, 4], [1, 0, 2]]  # of one row of a batch, two, three


def some(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def functions(rng):
    """Returns functions of rows [B, T, ..] and valid counts, by name."""
    weight, scale = some(rng, 40, D), some(rng, D)
    config = AttentionConfig(2, 1, 6, rope=Rope(theta=20.0, dim=4))

    def heads(x, valid_count):
        place = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], x.shape[:2])
        turns = angles(place, config.rope)
        return cut_heads(x, *turns, valid_count, config=config, dtype=jnp.bfloat16)

    made = {
        "norm": lambda x, count: scaled_rms_norm(x, scale, ScaledNorm(1e-5), count),
        "gate": lambda x, valid_count: activate_gated(x, "silu", 0.5, valid_count),
        "heads": heads,
    }
    for kind in (weight, weight.astype(jnp.bfloat16), quantize(weight)):
        name = f"linear {getattr(kind, 'dtype', 'int8')}"
        made[name] = lambda x, count, kind=kind: linear(x, kind, valid_count=count)
    return made


@each_level
def test_valid_rows_do_not_depend_on_padding(level, monkeypatch):
    use(monkeypatch, level)
    rng = np.random.default_rng(0)
    for name, function in functions(rng).items():
        run = jax.jit(function)
        for counts in COUNTS:
            x = some(rng, len(counts), T, D)
            counts = np.asarray(counts, np.int32)
            real = np.arange(T)[None] < counts[:, None]
            strange = jnp.where(real[..., None], x, jnp.nan)
            ours, wanted = run(strange, jnp.asarray(counts)), run(x, None)
            for mine, other in zip(*map(jax.tree.leaves, (ours, wanted)), strict=True):
                np.testing.assert_array_equal(mine[real], other[real], err_msg=name)


def test_keys_of_padding_are_0():
    rng = np.random.default_rng(1)
    run, counts = jax.jit(functions(rng)["heads"]), jnp.asarray([2, 4], jnp.int32)
    _, k, v = run(jnp.full((2, T, D), jnp.nan), counts)
    for z in (k, v):
        assert (z[0, 2:] == 0).all() and (z[1, 4:] == 0).all()


def test_vmap_over_counts():
    rng = np.random.default_rng(2)
    x, counts = some(rng, 3, 2, T, D), jnp.asarray([[1, 5], [0, 3], [4, 2]], jnp.int32)
    real = np.arange(T) < np.asarray(counts)[..., None]
    for name, function in functions(rng).items():
        mapped, alone = jax.jit(jax.vmap(function)), jax.jit(jax.vmap(function))
        ours, wanted = mapped(x, counts), alone(x, None)
        for mine, other in zip(*map(jax.tree.leaves, (ours, wanted)), strict=True):
            np.testing.assert_array_equal(mine[real], other[real], err_msg=name)


def test_wrong_numbers_of_counts_raise():
    x, counts = jnp.ones((2, T, D)), jnp.ones((3,), jnp.int32)
    for name, function in functions(np.random.default_rng(3)).items():
        with pytest.raises(jax.errors.JaxRuntimeError, match="want counts"):
            jax.block_until_ready(jax.jit(function)(x, counts))
            pytest.fail(name)


@each_level
@pytest.mark.parametrize("size", [1, 7, 16, 131])
def test_gates_match_the_definition(level, size, monkeypatch):
    """Up to the rounding of an exp and three products, also where silu is nearly 0."""
    rng = np.random.default_rng(size)
    h = 20 * some(rng, 2, 3, 2 * size)
    use(monkeypatch, level)
    run = jax.jit(lambda h: activate_gated(h, "silu", 0.25))
    assert "stree_gate" in run.lower(h).as_text()
    gate, up = np.split(np.asarray(h, np.float64), 2, axis=-1)
    gate = 0.25 * gate
    np.testing.assert_allclose(run(h), gate / (1 + np.exp(-gate)) * up, rtol=1e-6)
    big = jnp.full((1, 1, 2), 1e4).at[..., 0].set(-1e4)
    assert jnp.isfinite(run(big)).all()


@pytest.mark.parametrize("rope", [None, Rope(theta=20.0, dim=8), Rope(50.0, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_match_the_definition(rope, dtype):
    config = AttentionConfig(3, 2, 8, rope=rope, key_multiplier=0.5)
    rng = np.random.default_rng(4)
    qkv, place = some(rng, 2, T, 7 * 8), jnp.arange(2 * T, dtype=jnp.int32)
    turns = angles(place.reshape(2, T), rope)
    options = dict(config=config, dtype=jnp.dtype(dtype))
    run = jax.jit(lambda *a: cut_heads(*a, None, **options))
    assert "stree_heads" in run.lower(qkv, *turns).as_text()
    wanted = jax.jit(lambda *a: cut_heads.definition(*a, None, **options))(qkv, *turns)
    for mine, other in zip(run(qkv, *turns), wanted, strict=True):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        assert_near(mine, other, 1e-6 if mine.dtype == jnp.float32 else 2.0**-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_table(dtype):
    """Negative ids count from the end and others are clamped, as in JAX."""
    rng = np.random.default_rng(5)
    table = some(rng, 9, 13).astype(dtype)
    ids = jnp.asarray([[0, 8, 3], [-1, -9, 9], [100, -100, 3]], jnp.int32)

    run, looked_up = jax.jit(table_rows), table_rows.definition
    assert "stree_rows" in run.lower(table, ids).as_text()
    np.testing.assert_array_equal(run(table, ids), jax.jit(looked_up)(table, ids))
    mapped = jax.vmap(lambda ids: table_rows(table, ids))
    np.testing.assert_array_equal(jax.jit(mapped)(ids), looked_up(table, ids))
    few = jnp.abs(ids).astype(jnp.uint32)
    np.testing.assert_array_equal(run(table, few), jax.jit(looked_up)(table, few))
    of_none = table_rows(table, ids[:0])
    assert of_none.shape == (0, 3, 13)


def test_quantized_embeddings_move_the_program_to_the_pool():
    rng = np.random.default_rng(6)
    ids = jnp.asarray([[0, 8, 3], [1, 2, 9]], jnp.int32)
    config = ModelConfig(16, 16, 8, blocks(()), tie_embeddings=True)
    params = {"embedding": quantize(some(rng, 16, 8)), "norm": {"scale": jnp.ones(8)}}

    def embed(params, ids):
        return LanguageModel(config).apply({"params": params}, ids, method="embed")

    run = jax.jit(embed)
    assert run.lower(params, ids).as_text().count("@stree_rows") == 1
    np.testing.assert_array_equal(run(params, ids), params["embedding"].rows(ids))
    rows = some(rng, 3, 2, 8)
    mapped = jax.jit(jax.vmap(in_pool_thread))
    assert mapped.lower(rows).as_text().count("@stree_rows") == 1
    np.testing.assert_array_equal(mapped(rows), rows)
    for other in (rows[:0], rows[0, 0], rows.astype(jnp.bfloat16)):
        np.testing.assert_array_equal(in_pool_thread(other), other)


def test_unsupported_gates_use_xla():
    h, options = jnp.ones((4,)), dict(name="silu", multiplier=1.0)
    done = _gated(h, None, **options)
    np.testing.assert_array_equal(done, _gated.definition(h, None, **options))
    assert (
        "stree_gate" not in jax.jit(partial(_gated, **options)).lower(h, None).as_text()
    )
