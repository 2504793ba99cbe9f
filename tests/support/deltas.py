"""Random arguments of the gated delta rule, and its results in float64.

The float64 results share no code with the library: states are kept for every node and
stepped from parent to child.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from stree_jax.pallas_kernels import DeltaInputs, DeltaReplayed
from tests.support.scans import normal, random_paths

# Relative to the largest value: a system of up to 64 equations in float32.
TOLERANCE = 2e-6


class Shape(NamedTuple):
    batch: int
    T: int
    heads: int
    groups: int
    P: int
    N: int
    by_column: bool = False  # decays by column of the state


def factors(z):
    """Returns the factors that normalize the last axis."""
    return (1 / np.sqrt(np.square(np.float32(z)).sum(-1) + 1e-6)).astype(np.float32)


def decays(rng, shape, extreme=False):
    """Returns log decays of every size; if `extreme`, also 0 and -10000."""
    a = -np.exp(rng.uniform(np.log(1e-3), np.log(8), shape))
    if extreme:
        kind = rng.integers(0, 4, shape)
        a = np.where(kind == 0, 0.0, np.where(kind == 1, -1e4, a))
    return a.astype(np.float32)


def delta_inputs(rng, s: Shape, extreme=False, dtype="float32"):
    """Returns (`DeltaInputs`, h0). Queries, keys and values have `dtype`."""
    q, k = (jnp.asarray(normal(rng, s.batch, s.T, s.groups, s.N), dtype) for _ in "qk")
    v = jnp.asarray(normal(rng, s.batch, s.T, s.heads, s.P), dtype)
    column = (s.N,) if s.by_column else ()
    a = decays(rng, (s.batch, s.T, s.heads, *column), extreme)
    beta = rng.uniform(0, 2, (s.batch, s.T, s.heads)).astype(np.float32)
    q_scale = factors(q) * np.float32(s.N**-0.5)
    inputs = DeltaInputs(*map(np.array, (q, q_scale, k, factors(k), v, a, beta)))
    return inputs, normal(rng, s.batch, s.heads, s.P, s.N)


def queries(inputs, rows):
    """Returns the inputs with only some queried tokens."""
    cut = {name: getattr(inputs, name)[:, rows] for name in ("q", "q_scale")}
    cut |= {name: getattr(inputs, name)[:, rows] for name in ("v", "beta")}
    return inputs._replace(**cut)


def past_of(inputs, u, path, length):
    """Returns the record of a tree and a path in it."""
    return DeltaReplayed(u, inputs.k, inputs.k_scale, inputs.a, path, length)


def replayed_inputs(rng, shape, T0=20, M=6, dtype="float32", extreme=False):
    """Returns (h0, `DeltaReplayed`, `DeltaInputs`): a path in a record of T0 nodes,
    then a tree of T."""
    recorded, h0 = delta_inputs(rng, shape._replace(T=T0), extreme, dtype)
    u = normal(rng, shape.batch, T0, shape.heads, shape.P)
    past = past_of(recorded, u, *random_paths(rng, shape.batch, T0, M))
    return h0, past, delta_inputs(rng, shape, extreme, dtype)[0]


def _float64(arrays):
    return [np.asarray(z).astype(np.float64) for z in arrays]


def _decayed(h, a):
    """Returns h [P, N] after a log decay, one number or one per column."""
    return h * np.exp(a)  # columns are the last axis


def delta_tree(inputs, h0, parents):
    """Computes the rule node by node, each from the state of its parent.

    Returns:
      y and u [B, T, H, P], and the state after every node [B, T, H, P, N].
    """
    q, q_scale, k, k_scale, v, a, beta = _float64(inputs)
    q, k, h0 = q * q_scale[..., None], k * k_scale[..., None], np.float64(h0)
    batch, T, heads = beta.shape
    y, u = np.zeros_like(v), np.zeros_like(v)
    states = np.zeros((batch, T, *h0.shape[1:]))
    for b, t, i in np.ndindex(batch, T, heads):
        group = i // (heads // k.shape[2])
        parent = parents[b][t]
        h = _decayed(h0[b, i] if parent < 0 else states[b, parent, i], a[b, t, i])
        u[b, t, i] = beta[b, t, i] * (v[b, t, i] - h @ k[b, t, group])
        states[b, t, i] = h + np.outer(u[b, t, i], k[b, t, group])
        y[b, t, i] = states[b, t, i] @ q[b, t, group]
    return y, u, states


def delta_path(h0, past):
    """Computes the state after the path of a record, token by token."""
    u, k, k_scale, a = _float64(past[:4])
    k, h = k * k_scale[..., None], np.float64(h0)
    per = u.shape[2] // k.shape[2]
    for b, i in np.ndindex(h.shape[:2]):
        for s in past.path[b, : past.length[b]]:
            added = np.outer(u[b, s, i], k[b, s, i // per])
            h[b, i] = _decayed(h[b, i], a[b, s, i]) + added
    return h


def delta_order(inputs, h0, mask):
    """Solves the system of a partial order, with decays by head, in float64. Returns y
    and u."""
    q, q_scale, k, k_scale, v, a, beta = _float64(inputs)
    q, k = q * q_scale[..., None], k * k_scale[..., None]
    y, u = np.zeros_like(v), np.zeros_like(v)
    batch, T, heads = beta.shape
    for b, i in np.ndindex(batch, heads):
        L, g = mask[b], i // (heads // k.shape[2])
        total = np.array([a[b, L[t], i].sum() for t in range(T)])
        decay = np.exp(np.where(L, total[:, None] - total, -np.inf))
        state, grown = h0[b, i].astype(np.float64), np.exp(total)[:, None]
        left = beta[b, :, i, None] * decay * (k[b, :, g] @ k[b, :, g].T)
        np.fill_diagonal(left, 1.0)
        right = v[b, :, i] - grown * (k[b, :, g] @ state.T)
        u[b, :, i] = np.linalg.solve(left, beta[b, :, i, None] * right)
        scores = decay * (q[b, :, g] @ k[b, :, g].T)
        y[b, :, i] = grown * (q[b, :, g] @ state.T) + scores @ u[b, :, i]
    return y, u


def equal_keys(T, heads, P, N):
    """Returns a chain whose keys are all the same, written at strength 2 without decay.

    The inverse of its system has entries of 2; its powers have entries of 2^64. An
    error in k . k grows with every token, so tests of it are less strict.
    """
    rng = np.random.default_rng(0)
    inputs, h0 = delta_inputs(rng, Shape(1, T, heads, 1, P, N))
    k = np.broadcast_to(inputs.k[:, :1], inputs.k.shape)
    scale = np.broadcast_to(inputs.k_scale[:, :1], inputs.k_scale.shape)
    a, beta = np.zeros_like(inputs.a), np.full_like(inputs.beta, 2.0)
    return inputs._replace(k=k, k_scale=scale, a=a, beta=beta), h0
