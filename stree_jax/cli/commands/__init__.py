"""The commands of `stree-jax`, a module each."""
