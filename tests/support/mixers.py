"""Random arguments of the mixers that have a compiled kernel, and ways to run them."""

import math
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models import MambaConfig, tree_nodes
from stree_jax.models.layers.mixer import MixerPending
from stree_jax.models.layers.nodes import Nodes, Pass
from stree_jax.models.mixers import delta, mamba2
from tests.support.reference import OP_TOLERANCE, assert_near, random_parents

BATCH = 2


class Case(NamedTuple):
    """The arguments of a mixer between its projections, without its config.

    Attributes:
      projected: outputs of the first projections.
      weights, state, record: as the mixer defines them.
      nodes: this tree.
      path, length: the accepted path in the last tree.
    """

    projected: tuple[jax.Array, ...]
    weights: Any
    nodes: Nodes
    state: Any
    record: Any
    path: jax.Array
    length: jax.Array


def module_of(c) -> ModuleType:
    return mamba2 if isinstance(c, MambaConfig) else delta


def kernel_name(c):
    return "stree_mixer" if isinstance(c, MambaConfig) else "stree_delta"


def mixed(c, *args):
    return module_of(c).mixed(c, *args)


def equations(c, *args):
    return module_of(c).equations(c, *args)


def case(c, T=6, last=6, dtype="float32", seed=0, parents=None):
    """Returns a tree of T nodes after one of `last`, with accepted paths of 2 and 0."""
    rng = np.random.default_rng(seed)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)

    make = _mamba2 if isinstance(c, MambaConfig) else _delta
    projected, weights, state, record = make(c, T, last, normal)
    parents = random_parents(rng, BATCH, T) if parents is None else parents
    path = jnp.broadcast_to(jnp.array([[0, last - 1, 0]], jnp.int32), (BATCH, 3))
    return Case(
        projected,
        weights,
        tree_nodes(jnp.asarray(parents), max(4, c.d_conv)),
        state,
        record,
        path,
        jnp.array([2, 0], jnp.int32),
    )


def _mamba2(c, T, last, normal):
    H, P, K = c.num_heads, c.head_dim, c.d_conv
    wide = partial(normal, dtype="float32")
    weights = mamba2.MixerWeights(
        normal(c.d_xBC, K),
        normal(c.d_xBC) if c.conv_bias else None,
        normal(c.d_inner) if c.norm else None,
        wide(H),
        wide(H),
        wide(c.d_inner if c.D_per_channel else H),
    )
    record = mamba2.MambaRecord(
        normal(BATCH, last, H, P),
        jnp.abs(wide(BATCH, last, H)),
        -jnp.abs(wide(BATCH, last, H)),
        normal(BATCH, last, c.n_groups, c.d_state),
        normal(BATCH, last, c.d_xBC),
    )
    ssm = wide(BATCH, H, P, c.d_state)
    state = mamba2.MambaState(ssm, normal(BATCH, K - 1, c.d_xBC))
    return (2 * wide(BATCH, T, c.d_in_proj),), weights, state, record


def _delta(c, T, last, normal):
    H, P, G, N = c.value_heads, c.value_dim, c.key_heads, c.key_dim
    wide = partial(normal, dtype="float32")
    of_decays = (None, None) if c.by_channel else (wide(H), wide(H))
    weights = delta.DeltaWeights(normal(c.d_qkv, c.d_conv), normal(P), *of_decays)
    record = delta.DeltaRecord(
        wide(BATCH, last, H, P),
        normal(BATCH, last, G, N),
        jnp.abs(wide(BATCH, last, G)),
        -jnp.abs(wide(BATCH, last, *c.decays)),
        normal(BATCH, last, c.d_qkv),
    )
    ssm = wide(BATCH, H, P, N)
    state = delta.DeltaState(ssm, normal(BATCH, c.d_conv - 1, c.d_qkv))
    gates = 2 * wide(BATCH, T, H), 2 * wide(BATCH, T, math.prod(c.decays))
    if c.by_channel:
        gates = gates[0], -jnp.abs(gates[1])  # log decays themselves
    projected = 2 * wide(BATCH, T, c.d_qkv + c.d_inner), jnp.concatenate(gates, axis=-1)
    return projected, weights, state, record


def replaying(function, c):
    """Replays the last path of a case and runs a new tree."""

    @jax.jit
    def run(case):
        pending = MixerPending(case.record, case.path, case.length)
        pass_ = Pass(case.nodes, None, pending, case.length)
        return function(c, *case.projected, case.weights, pass_, case.state, None)

    return run


def reading(function, c):
    """Runs a tree of a case from its state, without a path to replay."""

    @jax.jit
    def run(case):
        pass_ = Pass(case.nodes, None, None, case.length)
        return function(c, *case.projected, case.weights, pass_, case.state, None)

    return run


def adding(function, c, rows):
    """Adds nodes at these rows to the records of a tree's other nodes."""
    rows = jnp.array(rows, jnp.int32)

    @jax.jit
    def run(case):
        pass_ = Pass(case.nodes, rows, None, case.length)
        projected = (z[:, : len(rows)] for z in case.projected)
        args = case.weights, pass_, case.state, case.record
        return function(c, *projected, *args)

    return run


def agree(ours, wanted, dtype):
    """Asserts equality; in bfloat16 a number may be rounded to either neighbour."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(z, np.float32) for z in (a, b))
        if dtype == "bfloat16":
            assert_near(a, b, 4e-3)
            assert np.mean(np.abs(a - b) > 1e-5 * np.abs(b).max()) < 0.02
        else:
            assert_near(a, b, OP_TOLERANCE["float32"])
