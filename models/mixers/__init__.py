"""Mixers, one per file: config, parameters, state and forward pass."""
