"""Digests of arrays, which tell whether two models are the same."""

import hashlib
from typing import Any


def digest_of(values: Any, facts: object) -> str:
    """Returns a digest of the arrays of a pytree: 64 hexadecimal digits.

    Args:
      values: the pytree, such as a model's parameters. All bytes are read.
      facts: anything else that the digest depends on, by its `repr`.
    """
    import jax
    import numpy as np

    digest = hashlib.sha256(repr(facts).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(values):
        x = np.ascontiguousarray(leaf)
        about = f"{jax.tree_util.keystr(path)} {x.dtype} {np.shape(leaf)}"
        digest.update(about.encode())
        digest.update(x.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
