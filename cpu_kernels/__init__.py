"""Kernels for CPUs, compiled when the package is installed; absent without harm.

Axes: t rows, k and m columns and rows of a weight; others as in `pallas_kernels`.
`src/` holds the C++; `docs/cpu.md` says what runs when, and how to switch it off.
"""

from stree_jax.cpu_kernels.commit import appended_rows as appended_rows
from stree_jax.cpu_kernels.commit import committed_window as committed_window
from stree_jax.cpu_kernels.gate import silu_gated as silu_gated
from stree_jax.cpu_kernels.heads import HeadOptions as HeadOptions
from stree_jax.cpu_kernels.heads import turned_heads as turned_heads
from stree_jax.cpu_kernels.library import at_hand as at_hand
from stree_jax.cpu_kernels.library import describe as describe
from stree_jax.cpu_kernels.library import level as level
from stree_jax.cpu_kernels.lowered import by_platform as by_platform
from stree_jax.cpu_kernels.mixer import MixerMemory as MixerMemory
from stree_jax.cpu_kernels.mixer import MixerOptions as MixerOptions
from stree_jax.cpu_kernels.mixer import MixerTree as MixerTree
from stree_jax.cpu_kernels.mixer import MixerWeights as MixerWeights
from stree_jax.cpu_kernels.mixer import mixer_pass as mixer_pass
from stree_jax.cpu_kernels.mixer import mixer_unsupported as mixer_unsupported
from stree_jax.cpu_kernels.mixer import parted as parted
from stree_jax.cpu_kernels.native_call import counts as counts
from stree_jax.cpu_kernels.noise import best_drawn as best_drawn
from stree_jax.cpu_kernels.noise import best_scores as best_scores
from stree_jax.cpu_kernels.noise import gumbel_noise as gumbel_noise
from stree_jax.cpu_kernels.norm import norm_unsupported as norm_unsupported
from stree_jax.cpu_kernels.norm import scaled_norm as scaled_norm
from stree_jax.cpu_kernels.product import MOST_ROOM as MOST_ROOM
from stree_jax.cpu_kernels.product import MOST_ROWS as MOST_ROWS
from stree_jax.cpu_kernels.product import skinny_product as skinny_product
from stree_jax.cpu_kernels.product import skinny_product_int8 as skinny_product_int8
from stree_jax.cpu_kernels.product import unsupported as unsupported
from stree_jax.cpu_kernels.rows import table_rows as table_rows
from stree_jax.cpu_kernels.steps import cut as cut
from stree_jax.cpu_kernels.steps import record as record
from stree_jax.cpu_kernels.trees import Levels as Levels
from stree_jax.cpu_kernels.trees import accept_greedy as accept_greedy
from stree_jax.cpu_kernels.trees import argmax as argmax
from stree_jax.cpu_kernels.trees import best_nodes as best_nodes
from stree_jax.cpu_kernels.trees import gains as gains
from stree_jax.cpu_kernels.trees import look_up as look_up
from stree_jax.cpu_kernels.trees import merged as merged
from stree_jax.cpu_kernels.trees import next_level as next_level
from stree_jax.cpu_kernels.trees import tree_layout as tree_layout
from stree_jax.cpu_kernels.trees import tree_nodes as tree_nodes
