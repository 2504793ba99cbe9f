"""Models: config, parameters, state and the hybrid stack as pure functions.

Axes: B batch; T tokens of a forward pass (tree nodes); Tq queried nodes, a subset of
the T; S rows of a KV cache (capacity for committed tokens); M longest path; d width of
the residual stream; V vocabulary; H SSM heads; P head size; N state size; G groups; K
conv taps; C conv channels; Hq/Hk query/KV heads; hd attention head size; E experts.
"""

from stree_jax.models.drafters.mtp import mtp_model as mtp_model
from stree_jax.models.drafters.mtp import without_mtp as without_mtp
from stree_jax.models.export import register_for_export as register_for_export
from stree_jax.models.layers.mixer import written_over as written_over
from stree_jax.models.layers.nodes import Nodes as Nodes
from stree_jax.models.layers.nodes import chain_nodes as chain_nodes
from stree_jax.models.layers.nodes import tree_nodes as tree_nodes
from stree_jax.models.layers.params import by_path as by_path
from stree_jax.models.layers.params import nest as nest
from stree_jax.models.layers.params import parameter_count as parameter_count
from stree_jax.models.layers.params import stored as stored
from stree_jax.models.layers.rope import Rope as Rope
from stree_jax.models.mixers.attention import AttentionConfig as AttentionConfig
from stree_jax.models.mixers.cca import CCAConfig as CCAConfig
from stree_jax.models.mixers.delta import DeltaConfig as DeltaConfig
from stree_jax.models.mixers.eda_moe import EDAMoEConfig as EDAMoEConfig
from stree_jax.models.mixers.kda import KDAConfig as KDAConfig
from stree_jax.models.mixers.kv_reader import KVReaderConfig as KVReaderConfig
from stree_jax.models.mixers.lightning import LightningConfig as LightningConfig
from stree_jax.models.mixers.mamba1 import Mamba1Config as Mamba1Config
from stree_jax.models.mixers.mamba2 import MambaConfig as MambaConfig
from stree_jax.models.mixers.mla import MLAConfig as MLAConfig
from stree_jax.models.mixers.mlp import MLPConfig as MLPConfig
from stree_jax.models.mixers.mlp_moe import MLPMoEConfig as MLPMoEConfig
from stree_jax.models.mixers.moe import MoEConfig as MoEConfig
from stree_jax.models.mixers.per_layer import PerLayerConfig as PerLayerConfig
from stree_jax.models.mixers.short_conv import ShortConvConfig as ShortConvConfig
from stree_jax.models.stack.config import Block as Block
from stree_jax.models.stack.config import ModelConfig as ModelConfig
from stree_jax.models.stack.config import ResidualScales as ResidualScales
from stree_jax.models.stack.config import SharedConfig as SharedConfig
from stree_jax.models.stack.config import blocks as blocks
from stree_jax.models.stack.config import named as named
from stree_jax.models.stack.model import Model as Model
from stree_jax.models.stack.model import check_model as check_model
from stree_jax.models.stack.model import forward_hidden as forward_hidden
from stree_jax.models.stack.model import forward_tapped as forward_tapped
from stree_jax.models.stack.model import forward_tree as forward_tree
from stree_jax.models.stack.model import logits_of as logits_of
from stree_jax.models.stack.model import param_dtype as param_dtype
from stree_jax.models.stack.network import Experts as Experts
from stree_jax.models.stack.network import Tapped as Tapped
from stree_jax.models.stack.network import Taps as Taps
from stree_jax.models.stack.param_table import param_at as param_at
from stree_jax.models.stack.prefill import PREFILL_CHUNK as PREFILL_CHUNK
from stree_jax.models.stack.prefill import Observer as Observer
from stree_jax.models.stack.prefill import chunk_of as chunk_of
from stree_jax.models.stack.prefill import extend as extend
from stree_jax.models.stack.prefill import prefill as prefill
from stree_jax.models.stack.prefill import read_observed as read_observed
from stree_jax.models.stack.prefill import read_text as read_text
from stree_jax.models.stack.prefill import reading_chunk as reading_chunk
from stree_jax.models.stack.routing import empty_routing as empty_routing
from stree_jax.models.stack.routing import expert_taps as expert_taps
from stree_jax.models.stack.routing import experts_of as experts_of
from stree_jax.models.stack.routing import with_experts as with_experts
from stree_jax.models.stack.shapes import abstract_params as abstract_params
from stree_jax.models.stack.shapes import cast_params as cast_params
from stree_jax.models.stack.shapes import init_params as init_params
from stree_jax.models.stack.shapes import param_shapes as param_shapes
from stree_jax.models.stack.state import Pending as Pending
from stree_jax.models.stack.state import Records as Records
from stree_jax.models.stack.state import State as State
from stree_jax.models.stack.state import cache_rows as cache_rows
from stree_jax.models.stack.state import commit as commit
from stree_jax.models.stack.state import grow as grow
from stree_jax.models.stack.state import init_records as init_records
from stree_jax.models.stack.state import init_state as init_state
from stree_jax.models.stack.state import shortened as shortened
from stree_jax.models.stack.state import whole_blocks as whole_blocks
from stree_jax.models.weights.formats import FORMATS as FORMATS
from stree_jax.models.weights.formats import format_named as format_named
from stree_jax.models.weights.formats import format_of as format_of
from stree_jax.models.weights.weight import Format as Format
from stree_jax.models.weights.weight import Weight as Weight
