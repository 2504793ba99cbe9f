"""Finds, loads, saves and describes models, Medusa heads and n-gram tables on disk."""
