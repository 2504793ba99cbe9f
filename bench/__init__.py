"""The benchmarks that `stree-jax bench` runs; README.md has the method and
RESULTS.md the figures.

Imports run one way: everything here uses the library, nothing in it uses this.
"""
