"""`python -m stree_jax.cpu_kernels` prints which CPU instructions the kernels use."""

import sys

from stree_jax.cpu_kernels.library import describe

try:
    print(f"CPU kernels: {describe()}")
except ValueError as error:  # STREE_JAX_CPU_KERNELS has a bad value
    print(error, file=sys.stderr)
    sys.exit(2)
