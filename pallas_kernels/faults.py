"""Keeps NaN and infinity away from tokens that do not depend on them.

Products over a tree multiply masked tokens by a weight of 0, and 0 times NaN or
infinity is NaN. The ops therefore replace tokens with such numbers by zeros, and set
the results of their descendants to NaN afterwards. Results of all other tokens keep
their bits.
"""

import jax
import jax.numpy as jnp


def faults_of(*arrays: jax.Array) -> jax.Array:
    """Returns which tokens have NaN or infinity in any of the arrays [B, T, ...], as
    [B, T] bool."""

    def one(z: jax.Array) -> jax.Array:
        return ~jnp.isfinite(z).all(axis=tuple(range(2, z.ndim)))

    fault = one(arrays[0])
    for z in arrays[1:]:
        fault |= one(z)
    return fault


def decay_faults(a: jax.Array) -> jax.Array:
    """Returns which tokens have NaN or infinity in their log decays a [B, T, ...], as
    [B, T] bool. Minus infinity is valid: the state is forgotten."""
    return ~(a < jnp.inf).all(axis=tuple(range(2, a.ndim)))


def _by_token(flags: jax.Array, z: jax.Array) -> jax.Array:
    """Appends axes to flags [B, T] for z [B, T, ...]."""
    return flags.reshape(*flags.shape, *[1] * (z.ndim - 2))


def cleared(fault: jax.Array, z: jax.Array) -> jax.Array:
    """Returns z [B, T, ...] with the tokens in `fault` [B, T] bool set to 0."""
    return jnp.where(_by_token(fault, z), jnp.zeros((), z.dtype), z)


def reached(mask: jax.Array, fault: jax.Array) -> jax.Array:
    """Returns which tokens descend from one in `fault`, as [B, Tq] bool.

    Args:
      mask: [B, Tq, T] bool. True if the token is the query itself or its ancestor.
      fault: [B, T] bool.
    """
    return (mask & fault[:, None]).any(axis=2)


def marked(hit: jax.Array, z: jax.Array) -> jax.Array:
    """Returns z [B, Tq, ...] with the tokens in `hit` [B, Tq] bool set to NaN."""
    return jnp.where(_by_token(hit, z), jnp.full((), jnp.nan, z.dtype), z)
