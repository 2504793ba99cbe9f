"""Draft a tree, verify it in one pass, accept what is right: STree's Algorithm 1."""
