"""Rotary position embeddings: frequencies, their scaling, and rotation."""

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models.configs.rope import Rope, Temperature, rope_frequencies
from stree_jax.models.weights.linear import scaled


def angles(positions: jax.Array, rope: Rope | None) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines [B, T, half] float32 of the angles at positions [B, T].

    Both are multiplied by YaRN's attention factor, if any. Without an embedding (`rope`
    is None), half is 0.
    """
    half = 0 if rope is None else rope.dim // 2
    f = np.zeros(0, np.float32) if rope is None else rope_frequencies(rope)
    frequencies = jnp.asarray(f).reshape(1, 1, half)
    angle = positions.astype(jnp.float32)[..., None] * frequencies
    factor = 1.0 if rope is None or rope.yarn is None else rope.yarn.attention_factor
    return scaled(jnp.cos(angle), factor), scaled(jnp.sin(angle), factor)


def temperatures(positions: jax.Array, temperature: Temperature) -> jax.Array:
    """Returns the factors [B, T] float32 of the queries at positions [B, T]."""
    whole = jnp.floor(positions.astype(jnp.float32) / np.float32(temperature.length))
    return 1 + np.float32(temperature.growth) * jnp.log(1 + whole)


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the channel pairs (i, i + half) of each head.

    Args:
      x: [B, T, heads, hd].
      cos, sin: [B, T, half], cosines and sines of the angles.

    Returns:
      [B, T, heads, hd]. Channels from 2 * half on are unchanged.
    """
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate(
        [left * cos - right * sin, right * cos + left * sin, rest], axis=-1
    )


def rotated_pairs(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the channel pairs (2 i, 2 i + 1) of each head (GPT-J).

    Args:
      x: [B, T, heads, 2 * half].
      cos, sin: [B, T, half], cosines and sines of the angles.

    Returns:
      [B, T, heads, 2 * half], with the first channels of all pairs before the second
      ones. Products of queries and keys do not depend on the order of channels.
    """
    return rotated(jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1), cos, sin)
