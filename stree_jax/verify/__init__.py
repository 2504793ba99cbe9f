"""Compares models with other programs, and outputs with the target's own."""
