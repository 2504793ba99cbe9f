"""Measurements: what `stree-jax bench` runs; README.md has the method and the figures.

Imports run one way: everything here uses the library, nothing in it uses this.
"""
