"""Layers that mixers share, and the interface of a mixer."""
