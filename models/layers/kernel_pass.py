"""Conversions between a `Pass` and the arguments of the compiled mixer kernels."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.cpu_kernels import MixerTree
from stree_jax.models.configs.mixer import Mixer
from stree_jax.models.layers.mixer import MixerPending, written_over, zeros
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


def by_kernel(
    kernel: Any,
    arrays: tuple[Any, ...],
    c: Any,
    pass_: Pass[Any],
    state: Any,
    record: Any,
    *,
    memory: Callable[..., Any],
    record_type: type,
    mixer: Mixer[Any],
) -> tuple[jax.Array, Any, Any] | None:
    """Runs a mixer between its projections with a CPU kernel. Returns None if the
    kernel does not support the arguments.

    Args:
      kernel: the kernel, whose definition is `reference`.
      arrays: outputs [B, Tq, ...] of the projections, and the weights.
      c: the mixer's config.
      pass_, state, record: see `Pass`.
      memory: makes the kernel's memory of the arrays of a state and a record.
      record_type, mixer: the type of the record, and the mixer that knows its arrays.
    """
    pending = pass_.pending
    if pass_.nodes.scan not in ("tree", "chain"):
        return None
    last = record if pending is None else pending.record
    if last is None:
        # The kernel always takes the last tree's records; without a last tree it gets
        # an empty record and a path of length 0.
        sizes = state.ssm.shape[0], 1, state.conv.dtype
        last = zeros(record_type, mixer.record_arrays(c, *sizes))
    tree = kernel_tree(pass_, arrays[0].shape[0], c.d_conv)
    args = *arrays, memory(state.ssm, state.conv, *_arrays_of(last)), tree
    options = dict(config=c, **kernel_options(pass_, record))
    if kernel.unsupported(*args, **options) is not None:
        return None
    with jax.named_scope("mixer"):
        y, new = kernel(*args, **options)
    if pending is not None:
        state = type(state)(new.ssm, new.conv)
    return y, type(last)(*new[2:]), state


def reference(
    equations: Callable[..., tuple[jax.Array, Any, Any]],
    arrays: tuple[Any, ...],
    memory: Any,
    tree: MixerTree,
    kinds: tuple[type, type],
    *,
    config: Any,
    replays: bool,
    **options: Any,
) -> tuple[jax.Array, Any]:
    """Replays the pending path and computes a mixer on a tree, with the array layout of
    a CPU kernel. This is the reference implementation of the kernel.

    Args:
      equations: function (config, *arrays, pass, state, record) that computes the mixer
        between its projections, and returns its output, record and state.
      arrays: as in `by_kernel`.
      memory: the state before the pending path, and the records.
      tree: the pending path, and the topology of this tree of T nodes.
      kinds: types of the state and the record.
      config: the mixer's config.
      replays: True if there is a pending path.
      **options: see `pass_of`.

    Returns:
      The input of out_proj, and the new memory: the state after the pending path (only
      if `replays`), and records whose first T rows are this tree's. If the last tree
      was larger, the rows from T on keep its records.
    """
    State, Record = kinds
    record = Record(*memory[2:])
    pass_, so_far = pass_of(tree, record, **options)
    y, new, state = equations(config, *arrays, pass_, State(*memory[:2]), so_far)
    new = jax.tree.map(written_over, record, new)
    ssm, conv = kept_state(state.ssm, state.conv, replays)
    return y, type(memory)(ssm, conv, *_arrays_of(new))


def _arrays_of(record: Any) -> tuple[jax.Array, ...]:
    return tuple(getattr(record, field.name) for field in fields(record))


def kept_state(
    ssm: jax.Array, conv: jax.Array, replays: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the state as a kernel does: empty arrays [B, 0] if it replays no path."""
    if replays:
        return ssm, conv
    empty = (jnp.zeros((z.shape[0], 0), z.dtype) for z in (ssm, conv))
    return next(empty), next(empty)
