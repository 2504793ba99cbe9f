"""Kinds of drafters: how each is found, read, described, trimmed and written."""
