"""`python -m stree_jax.cpu_kernels`: which instructions the kernels may use here."""

import sys

from stree_jax.cpu_kernels.library import describe

try:
    print(f"CPU kernels: {describe()}")
except ValueError as error:  # of STREE_JAX_CPU_KERNELS
    print(error, file=sys.stderr)
    sys.exit(2)
