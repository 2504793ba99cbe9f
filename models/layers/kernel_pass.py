"""Conversions between a `Pass` and the arguments of the compiled mixer kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.cpu_kernels import MixerTree
from stree_jax.models.layers.mixer import MixerPending
from stree_jax.models.layers.nodes import Nodes, Pass, Scan


def kernel_tree(pass_: Pass[Any], batch: int, conv_taps: int) -> MixerTree:
    """Returns the pending path and this tree; without a pending path, one of length
    0."""
    nodes, pending = pass_.nodes, pass_.pending
    if pending is None:
        path = jnp.zeros((batch, 1), jnp.int32)
        length = jnp.zeros((batch,), jnp.int32)
    else:
        path, length = pending.path, pending.length
    return MixerTree(path, length, pass_.rows, nodes.mask, nodes.taps(conv_taps))


def kernel_options(pass_: Pass[Any], record: Any) -> dict[str, Any]:
    """Returns the options of a mixer kernel that `pass_of` converts back.

    Args:
      pass_: the forward pass.
      record: the record of the nodes that earlier passes over the tree have computed.
    """
    return dict(
        scan=pass_.nodes.scan,
        records_of_last_tree=record is None,
        replays=pass_.pending is not None,
        has_padding=pass_.valid_count is not None and pass_.rows is None,
    )


def pass_of(
    tree: MixerTree,
    record: Any,
    *,
    scan: Scan,
    records_of_last_tree: bool,
    has_padding: bool,
) -> tuple[Pass[Any], Any]:
    """Returns the forward pass that a kernel's arguments describe, and the record of
    the nodes that earlier passes over the tree have computed.

    Args:
      tree: the pending path and this tree.
      record: the record that the kernel receives.
      scan: see `Nodes.scan`.
      records_of_last_tree: True if `record` is that of the last tree, which contains
        the pending path; False if it is that of this tree's earlier nodes.
      has_padding: True if the tree may have padding, which is not its own ancestor.
    """
    is_node = jnp.diagonal(tree.mask, axis1=1, axis2=2)
    pass_ = Pass(
        Nodes(tree.mask, tree.window[..., 0], tree.window, scan=scan),
        tree.rows,
        MixerPending(record, tree.path, tree.length) if records_of_last_tree else None,
        tree.length,
        is_node.sum(axis=1, dtype=jnp.int32) if has_padding else None,
    )
    return pass_, None if records_of_last_tree else record


def kept_state(
    ssm: jax.Array, conv: jax.Array, replays: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the state as a kernel does: empty arrays [B, 0] if it replays no path."""
    if replays:
        return ssm, conv
    empty = (jnp.zeros((z.shape[0], 0), z.dtype) for z in (ssm, conv))
    return next(empty), next(empty)
