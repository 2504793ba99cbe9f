"""Supported arguments of the kernels for weights in panels (`src/panels.h`).

A row's result does not depend on the other rows, the number of threads or the
instruction set, bit for bit.
"""

import jax


def panels_unsupported(
    rows: jax.Array, panels: jax.Array, valid_count: jax.Array | None
) -> str | None:
    """Returns why the kernel does not support the product. None if it does.

    Args:
      rows: [t, k].
      panels: [P, n, nbytes] uint8.
      valid_count: as in `product_unsupported`.
    """
    if rows.shape[0] < 1:
        return "wants at least one row"
    return None if panels.size else f"wants panels, got {panels.shape}"
