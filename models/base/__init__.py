"""What models are built on: array shards, random keys, tracing and serialization."""
