"""Helpers that import nothing of the package: checks of arguments, whole files, version."""
