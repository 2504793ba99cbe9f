"""`python -m stree_jax.cpu_kernels`: which instructions the kernels may use here."""

from stree_jax.cpu_kernels.library import describe

print(f"CPU kernels: {describe()}")
