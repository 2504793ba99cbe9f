"""Models: config, parameters, state and the hybrid stack as pure functions.

Axes: B batch; T tokens of a forward pass (tree nodes); Tq queried nodes, a subset of
the T; S rows of a KV cache (capacity for committed tokens); M longest path; d width of
the residual stream; V vocabulary; H SSM heads; P head size; N state size; G groups; K
conv taps; C conv channels; Hq/Hk query/KV heads; hd attention head size; E experts.

Public names are imported when they are first used, because most of them import jax. A
test compares the imports, which type checkers read, with the table.
"""

from typing import TYPE_CHECKING

from stree_jax.common.lazy import importer, modules_of

if TYPE_CHECKING:
    from stree_jax.models.base.serialization import (
        register_for_export as register_for_export,
    )
    from stree_jax.models.configs.attention import AttentionConfig as AttentionConfig
    from stree_jax.models.configs.cca import CCAConfig as CCAConfig
    from stree_jax.models.configs.delta import DeltaConfig as DeltaConfig
    from stree_jax.models.configs.eda_moe import EDAMoEConfig as EDAMoEConfig
    from stree_jax.models.configs.kda import KDAConfig as KDAConfig
    from stree_jax.models.configs.kv_reader import KVReaderConfig as KVReaderConfig
    from stree_jax.models.configs.lightning import LightningConfig as LightningConfig
    from stree_jax.models.configs.mamba1 import Mamba1Config as Mamba1Config
    from stree_jax.models.configs.mamba2 import MambaConfig as MambaConfig
    from stree_jax.models.configs.mla import MLAConfig as MLAConfig
    from stree_jax.models.configs.mlp import MLPConfig as MLPConfig
    from stree_jax.models.configs.mlp_moe import MLPMoEConfig as MLPMoEConfig
    from stree_jax.models.configs.moe import MoEConfig as MoEConfig
    from stree_jax.models.configs.params import nest as nest
    from stree_jax.models.configs.params import stored as stored
    from stree_jax.models.configs.per_layer import PerLayerConfig as PerLayerConfig
    from stree_jax.models.configs.rope import Rope as Rope
    from stree_jax.models.configs.short_conv import ShortConvConfig as ShortConvConfig
    from stree_jax.models.drafters.mtp import mtp_model as mtp_model
    from stree_jax.models.drafters.mtp import without_mtp as without_mtp
    from stree_jax.models.layers.mixer import written_over as written_over
    from stree_jax.models.layers.nodes import Nodes as Nodes
    from stree_jax.models.layers.nodes import chain_nodes as chain_nodes
    from stree_jax.models.layers.nodes import tree_nodes as tree_nodes
    from stree_jax.models.layers.params import by_path as by_path
    from stree_jax.models.layers.params import parameter_count as parameter_count
    from stree_jax.models.stack.chunks import PREFILL_CHUNK as PREFILL_CHUNK
    from stree_jax.models.stack.chunks import chunk_of as chunk_of
    from stree_jax.models.stack.chunks import reading_chunk as reading_chunk
    from stree_jax.models.stack.chunks import whole_blocks as whole_blocks
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
    from stree_jax.models.stack.param_table import param_shapes as param_shapes
    from stree_jax.models.stack.prefill import Observer as Observer
    from stree_jax.models.stack.prefill import extend as extend
    from stree_jax.models.stack.prefill import prefill as prefill
    from stree_jax.models.stack.prefill import read_observed as read_observed
    from stree_jax.models.stack.prefill import read_text as read_text
    from stree_jax.models.stack.routing import empty_routing as empty_routing
    from stree_jax.models.stack.routing import expert_taps as expert_taps
    from stree_jax.models.stack.routing import experts_of as experts_of
    from stree_jax.models.stack.routing import with_experts as with_experts
    from stree_jax.models.stack.shapes import abstract_params as abstract_params
    from stree_jax.models.stack.shapes import cast_params as cast_params
    from stree_jax.models.stack.shapes import init_params as init_params
    from stree_jax.models.stack.state import Pending as Pending
    from stree_jax.models.stack.state import Records as Records
    from stree_jax.models.stack.state import State as State
    from stree_jax.models.stack.state import cache_rows as cache_rows
    from stree_jax.models.stack.state import commit as commit
    from stree_jax.models.stack.state import grow as grow
    from stree_jax.models.stack.state import init_records as init_records
    from stree_jax.models.stack.state import init_state as init_state
    from stree_jax.models.stack.state import shortened as shortened
    from stree_jax.models.weights.format import Format as Format
    from stree_jax.models.weights.formats import FORMATS as FORMATS
    from stree_jax.models.weights.formats import format_named as format_named
    from stree_jax.models.weights.parameters import format_of as format_of
    from stree_jax.models.weights.weight import Weight as Weight

_NAMES = {
    "base.serialization": "register_for_export",
    "configs.attention": "AttentionConfig",
    "configs.cca": "CCAConfig",
    "configs.delta": "DeltaConfig",
    "configs.eda_moe": "EDAMoEConfig",
    "configs.kda": "KDAConfig",
    "configs.kv_reader": "KVReaderConfig",
    "configs.lightning": "LightningConfig",
    "configs.mamba1": "Mamba1Config",
    "configs.mamba2": "MambaConfig",
    "configs.mla": "MLAConfig",
    "configs.mlp": "MLPConfig",
    "configs.mlp_moe": "MLPMoEConfig",
    "configs.moe": "MoEConfig",
    "configs.params": "nest stored",
    "configs.per_layer": "PerLayerConfig",
    "configs.rope": "Rope",
    "configs.short_conv": "ShortConvConfig",
    "drafters.mtp": "mtp_model without_mtp",
    "layers.mixer": "written_over",
    "layers.nodes": "Nodes chain_nodes tree_nodes",
    "layers.params": "by_path parameter_count",
    "stack.config": "Block ModelConfig ResidualScales SharedConfig blocks named",
    "stack.model": (
        "Model check_model forward_hidden forward_tapped forward_tree logits_of"
        " param_dtype"
    ),
    "stack.chunks": "PREFILL_CHUNK chunk_of reading_chunk whole_blocks",
    "stack.network": "Experts Tapped Taps",
    "stack.param_table": "param_at param_shapes",
    "stack.prefill": "Observer extend prefill read_observed read_text",
    "stack.routing": "empty_routing expert_taps experts_of with_experts",
    "stack.shapes": "abstract_params cast_params init_params",
    "stack.state": (
        "Pending Records State cache_rows commit grow init_records init_state shortened"
    ),
    "weights.format": "Format",
    "weights.formats": "FORMATS format_named",
    "weights.parameters": "format_of",
    "weights.weight": "Weight",
}
_MODULE_OF = modules_of(_NAMES)

if not TYPE_CHECKING:  # type checkers would take every name for one that exists
    __getattr__ = importer(__name__, globals())
