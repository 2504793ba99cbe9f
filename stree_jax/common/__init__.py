"""Helpers that import nothing else of the package."""
