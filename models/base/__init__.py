"""The base of models: array shards, random keys, tracing and serialization."""
