"""The `stree-jax` command."""
