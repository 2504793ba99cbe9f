"""Reads published drafters."""
