"""Random arguments of the scans, and their results in float64."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from stree_jax.pallas_kernels import Replayed, ScanInputs
from tests.support.reference import mask_of, scan_tree, step_path


class Shape(NamedTuple):
    batch: int
    T: int
    heads: int
    groups: int
    P: int
    N: int
    D_per_channel: bool = False


def of_arrays(op):
    """Wraps a scan so that it takes x, dt, a, B, C, D and h0 as separate arguments."""

    def run(*args, **options):
        return op(ScanInputs(*args[:6]), *args[6:], **options)

    return run


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def scan_inputs(rng, s: Shape, extreme=False):
    """Returns (x, dt, a, B, C, D, h0). If `extreme`, dt is 0 to 50 and A down to
    -100."""
    A = -np.exp(rng.uniform(np.log(0.05), np.log(16), s.heads))
    dt = np.exp(rng.uniform(np.log(1e-3), np.log(2), (s.batch, s.T, s.heads)))
    if extreme:
        A[rng.integers(s.heads)] = -100.0
        kind = rng.integers(0, 4, dt.shape)
        dt = np.where(kind == 0, 0.0, np.where(kind == 1, 50.0, dt))
    dt = dt.astype(np.float32)
    a = dt * A.astype(np.float32)
    x = normal(rng, s.batch, s.T, s.heads, s.P)
    B = normal(rng, s.batch, s.T, s.groups, s.N)
    C = normal(rng, s.batch, s.T, s.groups, s.N)
    D = normal(rng, s.heads, s.P) if s.D_per_channel else normal(rng, s.heads)
    return x, dt, a, B, C, D, normal(rng, s.batch, s.heads, s.P, s.N)


def masks_of(parents):
    return np.stack([mask_of(row) for row in parents])


def random_paths(rng, batch, T, M):
    """Returns a random path per sequence, in any order, and its valid lengths."""
    path = np.stack([rng.permutation(T)[:M] for _ in range(batch)]).astype(np.int32)
    return path, rng.integers(0, M + 1, batch).astype(np.int32)


def replay_inputs(rng, shape, parents, T0=20, M=6, dtype="float32", extreme=False):
    """Returns arguments of replay_tree_scan: a path in a tree of T0 nodes, then a tree
    of T."""
    x0, dt0, a0, B0, _, _, h0 = scan_inputs(rng, shape._replace(T=T0), extreme)
    x, dt, a, B, C, D, _ = scan_inputs(rng, shape, extreme)
    path, length = random_paths(rng, shape.batch, T0, M)
    x0, B0, x, B, C = (jnp.asarray(z, dtype) for z in (x0, B0, x, B, C))
    past = Replayed(x0, dt0, a0, B0, path, length)
    return h0, past, ScanInputs(x, dt, a, B, C, D), masks_of(parents)


def definition(inputs, parents):
    """Returns (y, h) in float64, computed token by token."""
    h0, (*tokens, path, length), tree, _ = inputs
    h = np.stack(
        [
            step_path(h0[b], *(np.asarray(z[b]) for z in tokens), path[b, : length[b]])
            for b in range(len(h0))
        ]
    )
    return scan_tree(*map(np.asarray, tree), h, parents), h
