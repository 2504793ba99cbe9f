"""Helpers of all readers: files of a directory, and the error for bad checkpoints."""
