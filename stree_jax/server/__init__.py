"""`stree-jax serve`: the library behind an HTTP protocol that many clients speak."""
