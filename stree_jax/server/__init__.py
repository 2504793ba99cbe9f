"""`stree-jax serve`: an HTTP server with the protocol of OpenAI's API."""
