"""The operations of tree verification: definitions in plain JAX, and Pallas kernels for
GPUs and TPUs.

Axes: B batch, T tokens of a call (tree nodes), S capacity of the KV cache, H SSM heads,
P head size, N state size, G groups, K conv taps, C conv channels, Hq/Hk query/KV heads,
M longest path.
"""

from stree_jax.cpu_kernels import without_kernels as without_kernels
from stree_jax.cpu_kernels.limits import ATTENTION_BLOCK as ATTENTION_BLOCK
from stree_jax.pallas_kernels.attention import as_bits as as_bits
from stree_jax.pallas_kernels.conv import commit_window as commit_window
from stree_jax.pallas_kernels.conv import tree_conv as tree_conv
from stree_jax.pallas_kernels.delta import DeltaInputs as DeltaInputs
from stree_jax.pallas_kernels.delta import DeltaReplayed as DeltaReplayed
from stree_jax.pallas_kernels.delta import delta_chunks as delta_chunks
from stree_jax.pallas_kernels.delta import delta_steps as delta_steps
from stree_jax.pallas_kernels.dispatch import Implementation as Implementation
from stree_jax.pallas_kernels.ops import chunk_scan as chunk_scan
from stree_jax.pallas_kernels.ops import delta_replay as delta_replay
from stree_jax.pallas_kernels.ops import delta_replay_scan as delta_replay_scan
from stree_jax.pallas_kernels.ops import delta_scan as delta_scan
from stree_jax.pallas_kernels.ops import replay as replay
from stree_jax.pallas_kernels.ops import replay_tree_scan as replay_tree_scan
from stree_jax.pallas_kernels.ops import tree_attention as tree_attention
from stree_jax.pallas_kernels.ops import tree_scan as tree_scan
from stree_jax.pallas_kernels.rounding import rounded_to as rounded_to
from stree_jax.pallas_kernels.scan import Replayed as Replayed
from stree_jax.pallas_kernels.scan import ScanInputs as ScanInputs
from stree_jax.pallas_kernels.scan import step_scan as step_scan
from stree_jax.pallas_kernels.selective import SelectiveInputs as SelectiveInputs
from stree_jax.pallas_kernels.selective import SelectiveReplayed as SelectiveReplayed
from stree_jax.pallas_kernels.selective import parents_of as parents_of
from stree_jax.pallas_kernels.selective import selective_replay as selective_replay
from stree_jax.pallas_kernels.selective import (
    selective_replay_scan as selective_replay_scan,
)
