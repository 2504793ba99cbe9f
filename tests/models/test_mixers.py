"""Test the Mamba2 mixer with every option against its equations in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models import MambaConfig, by_path, nest, tree_nodes
from stree_jax.models.layers.nodes import Pass
from stree_jax.models.mixers.mamba2 import Mamba2Module, MambaState
from tests.support.reference import (
    MODEL_TOLERANCE,
    assert_near,
    conv_tree,
    random_parents,
    scan_tree,
)

BATCH, T, D_MODEL = 2, 6, 5
OPTIONS = {
    "gate first": dict(n_groups=2, norm_groups=2, d_mlp=3, dt_limit=(0.3, 0.6)),
    "norm first": dict(
        n_groups=4,
        x_heads=2,
        norm="norm_first",
        D_per_channel=True,
        proj_in_bias=True,
        proj_out_bias=True,
        part_multipliers=(0.5, 2.0, 1.5, 0.7, 1.2),
    ),
    "no norm": dict(norm=None, conv_bias=False, in_multiplier=2.0, out_multiplier=0.5),
}


def silu(x):
    return x / (1 + np.exp(-x))


def rms_norm(x, groups, eps):
    parts = x.reshape(*x.shape[:-1], groups, -1)
    mean = (parts**2).mean(-1, keepdims=True)
    return (parts / np.sqrt(mean + eps)).reshape(x.shape)


def mixed(c, p, u, state, parents):
    """Computes the equations in NumPy, without the library's functions."""
    zxbcdt = c.in_multiplier * u @ p["in_proj"].T + p.get("in_proj_bias", 0)
    sizes = [c.d_mlp, c.d_mlp, c.d_inner, *c.widths]
    z0, x0, *parts = np.split(zxbcdt, np.cumsum(sizes), axis=-1)
    scales = zip(c.part_multipliers, parts, strict=True)
    z, x, B, C, dt = (multiplier * part for multiplier, part in scales)
    dt = np.clip(np.log1p(np.exp(dt + p["dt_bias"])), *c.dt_limit)
    a = dt * -np.exp(p["A_log"])

    xBC = np.concatenate([x, B, C], axis=-1)
    bias = p.get("conv_bias")
    xBC = silu(conv_tree(xBC, p["conv_weight"], bias, state.conv, parents))
    x, B, C = np.split(xBC, np.cumsum(c.widths)[:2], axis=-1)
    x = x.reshape(BATCH, T, -1, c.head_dim)
    B, C = (w.reshape(BATCH, T, -1, c.d_state) for w in (B, C))
    if c.x_heads is not None:
        x, B = (np.repeat(w, c.num_heads // c.x_heads, axis=2) for w in (x, B))

    D = p["D"].reshape(c.num_heads, -1) * np.ones((c.num_heads, c.head_dim))
    y = scan_tree(x, dt, a, B, C, D, state.ssm, parents).reshape(z.shape)
    match c.norm:
        case "gate_first":
            y = rms_norm(y * silu(z), c.norm_groups, c.norm_eps) * p["norm"]
        case "norm_first":
            y = rms_norm(y, c.norm_groups, c.norm_eps) * p["norm"] * silu(z)
        case None:
            y = y * silu(z)
    y = np.concatenate([silu(z0) * x0, y], axis=-1)
    return c.out_multiplier * (y @ p["out_proj"].T + p.get("out_proj_bias", 0))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_mamba2_matches_its_equations(options):
    rng = np.random.default_rng(0)
    config = MambaConfig(4, 3, 5, **options)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    state = MambaState(normal(BATCH, 4, 3, 5), normal(BATCH, 3, config.d_xBC))
    u, parents = normal(BATCH, T, D_MODEL), random_parents(rng, BATCH, T)
    nodes = tree_nodes(jnp.asarray(parents), config.d_conv)
    pass_ = Pass(nodes, None, None, jnp.zeros((BATCH,), jnp.int32))
    mixer = Mamba2Module(config, jnp.float32)
    shapes = jax.eval_shape(mixer.init, jax.random.key(0), u, pass_, state, None)
    params = {path: normal(*leaf.shape) for path, leaf in by_path(shapes).items()}
    out, _, after = jax.jit(mixer.apply)(nest(params), u, pass_, state, None)
    exact = {path[-1]: p.astype(np.float64) for path, p in params.items()}
    expected = mixed(config, exact, u, state, parents)
    assert_near(out, expected, MODEL_TOLERANCE["float32"])
    jax.tree.map(np.testing.assert_array_equal, after, state)
