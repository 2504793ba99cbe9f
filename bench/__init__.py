"""The benchmarks, which run from a clone: `python -m bench NAME`, or `stree-jax bench
NAME`. README.md has the method and RESULTS.md the figures.

Imports run one way: everything here uses the library, nothing in it uses this.
"""
