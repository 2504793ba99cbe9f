"""Drafters, one per file; each proposes a tree of draft tokens."""
