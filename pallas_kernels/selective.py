"""Computes, in plain JAX, the selective scan of Mamba-1 over a tree of draft tokens
(`selective_scan`) and the replay of an accepted path into its state
(`selective_replay`).

Every channel d has a state of N numbers, each with its own decay (Gu and Dao 2023):

    h_t[n, d] = exp(dt_t[d] A[n, d]) h_p[n, d] + dt_t[d] x_t[d] B_t[n]
    y_t[d] = sum_n C_t[n] h_t[n, d] + D[d] x_t[d]

Here p is the parent of t. Since decays differ by channel and by n, a sum over ancestors
has no matrix product, and needs T times as many exponentials as the recurrence. So the
recurrence itself runs, node after node, from the parent's state. The states of nodes
are temporary: only inputs are kept, from which an accepted path is replayed.

Axes: B batch, T tokens (tree nodes), Tq queried tokens (a subset), D channels, N
states per channel, M longest path. The state is [B, N, D] float32. Inputs, in any float
dtype (computation is in float32):

    x   [B, T, D]    input, after the convolution
    dt  [B, T, D]    step size, after softplus (0 makes a token a no-op)
    B   [B, T, N]    input projection
    C   [B, Tq, N]   output projection
    A   [B, N, D]    decay per unit of dt, negative; a parameter, the same in all rows
    D   [D]          skip weight
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.cpu_kernels import (
    cpu_kernel,
    floats,
    path_unsupported,
    selective_unsupported,
)

MAX_UNROLLED = 8  # tokens of a path that is replayed without a loop


class SelectiveInputs(NamedTuple):
    """The inputs of a selective scan, with shapes as in the module's docstring."""

    x: jax.Array
    dt: jax.Array
    B: jax.Array
    C: jax.Array
    A: jax.Array
    D: jax.Array


class SelectiveReplayed(NamedTuple):
    """The records of the T nodes of the last tree, and the accepted path in it.

    Attributes:
      x, dt, B: as in the module's docstring.
      path: [B, M] int32, indices of the accepted nodes among the T, in order.
      length: [B] int32, number of valid entries of `path`; 0 leaves the state
        unchanged.
    """

    x: jax.Array
    dt: jax.Array
    B: jax.Array
    path: jax.Array
    length: jax.Array


def parents_of(mask: jax.Array) -> jax.Array:
    """Returns the parent of each node: its ancestor in the last row.

    Args:
      mask: [B, T, T] bool, see `Nodes.mask`; ancestors come before descendants.

    Returns:
      [B, T] int32; -1 for a child of the committed text, and -2 for padding.
    """
    row = jnp.arange(mask.shape[1], dtype=jnp.int32)
    strict = mask & (row[None, :, None] > row[None, None, :])
    parents = jnp.where(strict, row[None, None, :], -1).max(axis=2)
    return jnp.where(jnp.diagonal(mask, axis1=1, axis2=2), parents, -2)


def _next(
    h: jax.Array, x: jax.Array, dt: jax.Array, B: jax.Array, A: jax.Array
) -> jax.Array:
    """Computes the state [B, N, D] after a token, from that of its parent."""
    kept = jnp.exp(dt[:, None] * A) * h
    return kept + (dt * x)[:, None] * B[:, :, None]


def _read(h: jax.Array, x: jax.Array, C: jax.Array, D: jax.Array) -> jax.Array:
    """Computes the output [B, D] of a token from its state."""
    return (h * C[:, :, None]).sum(axis=1) + D[None] * x


def selective_scan(
    inputs: SelectiveInputs,
    h0: jax.Array,
    parents: jax.Array,
    rows: jax.Array | None = None,
) -> jax.Array:
    """Computes the selective scan along every path of a tree.

    Args:
      inputs: x, dt and B of all T tokens; C of the Tq queried ones.
      h0: [B, N, D] float32, state before the tree's root.
      parents: [B, T] int32, see `parents_of`.
      rows: [Tq] int32, indices of the queried tokens; indices >= T are dropped. If
        None, all T are queried.

    Returns:
      y [B, Tq, D] float32.
    """
    x, dt, B, C, A, D = (z.astype(jnp.float32) for z in inputs)
    batch, T, width = x.shape
    if T == 1 and rows is None:
        h = _next(h0, x[:, 0], dt[:, 0], B[:, 0], A)
        return _read(h, x[:, 0], C[:, 0], D)[:, None]
    if rows is not None:
        C = jnp.zeros_like(B).at[:, rows].set(C, mode="drop")
    states = jnp.zeros((batch, T + 1, *h0.shape[1:]), jnp.float32)
    states = states.at[:, 0].set(h0)  # row t + 1 has the state of node t

    def node(states: jax.Array, token: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        t, parent, x, dt, B, C = token
        above = jax.vmap(lambda s, p: s[p])(states, jnp.maximum(parent, -1) + 1)
        h = _next(above, x, dt, B, A)
        states = lax.dynamic_update_index_in_dim(states, h, t + 1, axis=1)
        return states, _read(h, x, C, D)

    each = jnp.arange(T, dtype=jnp.int32)
    by_token = (jnp.moveaxis(z, 1, 0) for z in (parents, x, dt, B, C))
    _, y = lax.scan(node, states, (each, *by_token))
    y = jnp.moveaxis(y, 0, 1)
    return y if rows is None else y[:, rows]


def selective_steps(inputs: SelectiveInputs, h0: jax.Array) -> jax.Array:
    """Computes `selective_scan` for a chain of tokens, without keeping their states.

    Args:
      inputs, h0: as in `selective_scan`, with Tq = T.

    Returns:
      y [B, T, D] float32.
    """
    *tokens, A, D = (z.astype(jnp.float32) for z in inputs)

    def step(h: jax.Array, token: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        x, dt, B, C = token
        h = _next(h, x, dt, B, A)
        return h, _read(h, x, C, D)

    _, y = lax.scan(step, h0, tuple(jnp.moveaxis(z, 1, 0) for z in tokens))
    return jnp.moveaxis(y, 0, 1)


@cpu_kernel(
    "stree_selective_replay",
    outputs=lambda h0, *_: floats(*h0.shape),
    unsupported=path_unsupported,
    aliases={"h0": None},
)
def selective_replay(h0: jax.Array, past: SelectiveReplayed, A: jax.Array) -> jax.Array:
    """Computes the state after an accepted path from the records of its tokens.

    Args:
      h0: [B, N, D] float32, state before the path.
      past: the T nodes of the last tree and the accepted path. A path of length 0
        returns h0.
      A: as in the module's docstring.

    Returns:
      [B, N, D] float32.
    """
    A, M = A.astype(jnp.float32), past.path.shape[1]
    place = jnp.arange(M, dtype=jnp.int32)
    valid = place[None] < past.length[:, None]  # [B, M]

    def taken(z: jax.Array) -> jax.Array:
        rows = jax.vmap(lambda z, p: z[p].astype(jnp.float32))(z, past.path)
        # Rows of padding may be NaN.
        return jnp.moveaxis(jnp.where(valid[..., None], rows, 0.0), 1, 0)

    def step(h: jax.Array, token: tuple[Any, ...]) -> tuple[jax.Array, None]:
        x, dt, B = token
        return _next(h, x, dt, B, A), None

    unroll = M if M <= MAX_UNROLLED else 1
    return lax.scan(step, h0, tuple(map(taken, past[:3])), unroll=unroll)[0]


def _outputs(
    h0: jax.Array, past: Any, inputs: Any, *_: Any, replays: bool, **options: Any
) -> tuple[Any, Any]:
    batch, N, D = h0.shape
    kept = (batch, N, D) if replays else (batch, 0)
    return floats(batch, inputs.C.shape[1], D), floats(*kept)


@cpu_kernel(
    "stree_selective",
    outputs=_outputs,
    unsupported=selective_unsupported,
    shared=("inputs.D", "rows"),
    aliases={"h0": 1},
    attributes=lambda chain, replays: {"chain": chain},
)
def selective_replay_scan(
    h0: jax.Array,
    past: SelectiveReplayed,
    inputs: SelectiveInputs,
    parents: jax.Array,
    rows: jax.Array | None,
    *,
    chain: bool,
    replays: bool,
) -> tuple[jax.Array, jax.Array]:
    """Computes `selective_replay` of the last step's path, then the scan of this step's
    tree. In this order a kernel reads and writes the state once.

    Args:
      h0: [B, N, D] float32, state before the last step's path.
      past: the last step's tree and the accepted path in it.
      inputs, parents, rows: this step's tree, as in `selective_scan`.
      chain: True if all tokens are queried, and the parent of each is the one before
        it.
      replays: False if there is no path to replay, even if `past` has one.

    Returns:
      y [B, Tq, D] float32, and the replayed state [B, N, D] float32; an empty array
      [B, 0] if `replays` is False.
    """
    h = selective_replay(h0, past, inputs.A) if replays else h0
    if chain:
        y = selective_steps(inputs, h)
    else:
        y = selective_scan(inputs, h, parents, rows)
    return y, h if replays else jnp.zeros((h0.shape[0], 0), jnp.float32)
