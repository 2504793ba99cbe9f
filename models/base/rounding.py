"""Products whose bits do not depend on the program that they are part of."""

import jax
import jax.numpy as jnp


def uncontracted(product: jax.Array) -> jax.Array:
    """Returns a product [...] float32 that is rounded before it is added to a sum.

    XLA:CPU may compile a product and a sum to one instruction that rounds once, in some
    programs only, even across a barrier. It does not do so across a bound. Infinity
    becomes the largest finite number; -infinity stays.
    """
    return jnp.minimum(product, jnp.finfo(jnp.float32).max)
