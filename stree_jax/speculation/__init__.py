"""Speculative decoding with trees: draft, verify in one pass, accept (STree)."""
