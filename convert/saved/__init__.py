"""Reads and writes the package's own directories of converted weights."""
