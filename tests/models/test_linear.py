"""Products with weights: each platform's form computes the same."""

import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax.models.linear import GPU_LEAST, _product, _skinny_gpu, linear
from tests.support.lowering import lowered


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_a_gpu_gets_rows_enough(rows):
    """16-bit products of 1 to 3 rows are those of 16, cut; float32 ones as they are."""
    rng = np.random.default_rng(rows)
    x, weight = rng.standard_normal((rows, 24)), rng.standard_normal((40, 24))
    for dtype, padded in (("bfloat16", rows < 4), ("float32", False)):
        args = jnp.asarray(x, dtype), jnp.asarray(weight, dtype)
        wanted = _product("tk,mk->tm", *args)
        np.testing.assert_allclose(_skinny_gpu(*args), wanted, rtol=1e-6, atol=1e-6)
        text = lowered(linear, args, "cuda")
        assert (f"tensor<{GPU_LEAST}x40xf32>" in text) == padded
