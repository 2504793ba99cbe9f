"""The earlier place of `stree_jax.sizing.memory`, kept for one release."""

from stree_jax.sizing.memory import BufferSizes as BufferSizes
from stree_jax.sizing.memory import Memory as Memory
from stree_jax.sizing.memory import compiled_bytes as compiled_bytes
from stree_jax.sizing.memory import memory_of as memory_of
