"""The ops of tree verification, each defined by its plain-JAX reference.

Axes: B batch, T tokens of this call (tree nodes), S cache capacity, H SSM heads,
P head size, N state size, G groups, K conv taps, C conv channels,
Hq/Hk query/KV heads, M longest path.
"""

from stree_jax.pallas_kernels.attention import tree_attention as tree_attention
from stree_jax.pallas_kernels.conv import commit_window as commit_window
from stree_jax.pallas_kernels.conv import tree_conv as tree_conv
from stree_jax.pallas_kernels.scan import chunk_scan as chunk_scan
from stree_jax.pallas_kernels.scan import replay as replay
from stree_jax.pallas_kernels.scan import replay_tree_scan as replay_tree_scan
from stree_jax.pallas_kernels.scan import tree_scan as tree_scan
