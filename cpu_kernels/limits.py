"""Limits of the compiled kernels, for modules that do not import jax."""

MAX_NODES = 64  # nodes of a tree, and tokens of a path that is replayed without a tree
ATTENTION_BLOCK = 128  # cache rows per block: the scores fit in a core's own cache
