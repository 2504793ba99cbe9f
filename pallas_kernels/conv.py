"""The depthwise convolution in front of the scan, along tree paths."""

import jax
import jax.numpy as jnp

from stree_jax.cpu_kernels import cpu_kernel, like


def _gather_rows(z: jax.Array, rows: jax.Array) -> jax.Array:
    """Gathers rows [B, ..., C] of z [B, T, C] with indices `rows` [B, ...]."""
    return jax.vmap(lambda z, r: z[r])(z, rows)


def tree_conv(
    u: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    window0: jax.Array,
    window: jax.Array,
) -> jax.Array:
    """Computes the causal depthwise convolution of each node with its nearest
    ancestors.

        y_t = bias + sum_k weight[:, k] * z[window[t, k]],  z = concat(window0, u)

    Args:
      u: [B, T, C], inputs of the tree's nodes.
      weight: [C, K]. The last tap is that of the node itself.
      bias: [C] or None.
      window0: [B, K-1, C], inputs of the last K-1 committed tokens, oldest first.
      window: [B, Tq, K] int32, the row of z that each tap reads, see `Nodes.window`.

    Returns:
      y [B, Tq, C] float32, before the activation.
    """
    z = jnp.concatenate([window0.astype(u.dtype), u], axis=1)
    weight = weight.astype(jnp.float32)
    y = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32)
    y = y.reshape(1, 1, -1)
    for k in range(weight.shape[1]):
        tap = _gather_rows(z, window[:, :, k]).astype(jnp.float32)
        y = y + weight[:, k].reshape(1, 1, -1) * tap
    return y


def _unsupported(
    window0: jax.Array, u: jax.Array, path: jax.Array, length: jax.Array
) -> bool:
    known = u.dtype == window0.dtype and path.dtype == length.dtype == jnp.int32
    return not known or 0 in (window0.size, u.size, path.size)


@cpu_kernel(
    "stree_window",
    outputs=lambda window0, *_: like(window0),
    unsupported=_unsupported,
    aliases={"window0": None},
)
def commit_window(
    window0: jax.Array, u: jax.Array, path: jax.Array, length: jax.Array
) -> jax.Array:
    """Returns the last K-1 inputs of the committed sequence after an accepted path.

    Args:
      window0: [B, K-1, C], the last K-1 inputs before the path, oldest first.
      u: [B, T, C], inputs of the tree's nodes.
      path: [B, M] int32, rows of the accepted nodes in order.
      length: [B] int32, number of valid entries of `path`.

    Returns:
      [B, K-1, C] in the dtype of window0.
    """
    K1 = window0.shape[1]
    z = jnp.concatenate([window0, u.astype(window0.dtype)], axis=1)
    place = jnp.arange(K1, dtype=jnp.int32)[None]
    keep = jnp.broadcast_to(place, (path.shape[0], K1))
    order = jnp.concatenate([keep, K1 + path], axis=1)  # rows of z, oldest first
    last = length[:, None] + place
    return _gather_rows(z, jnp.take_along_axis(order, last, axis=1))
