"""Reads and writes tokenizers in the formats of checkpoints."""
