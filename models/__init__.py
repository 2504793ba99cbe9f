"""Models: config, state and the hybrid stack as pure functions."""

from stree_jax.models.config import AttentionConfig as AttentionConfig
from stree_jax.models.config import LayerKind as LayerKind
from stree_jax.models.config import MambaConfig as MambaConfig
from stree_jax.models.config import MLPConfig as MLPConfig
from stree_jax.models.config import ModelConfig as ModelConfig
from stree_jax.models.config import MoEConfig as MoEConfig
from stree_jax.models.config import Rope as Rope
from stree_jax.models.config import SharedConfig as SharedConfig
from stree_jax.models.model import Records as Records
from stree_jax.models.model import extend as extend
from stree_jax.models.model import forward_hidden as forward_hidden
from stree_jax.models.model import forward_tree as forward_tree
from stree_jax.models.model import init_params as init_params
from stree_jax.models.model import logits_of as logits_of
from stree_jax.models.model import param_dtype as param_dtype
from stree_jax.models.model import prefill as prefill
from stree_jax.models.nodes import Nodes as Nodes
from stree_jax.models.nodes import chain_nodes as chain_nodes
from stree_jax.models.nodes import tree_nodes as tree_nodes
from stree_jax.models.state import Pending as Pending
from stree_jax.models.state import State as State
from stree_jax.models.state import commit as commit
from stree_jax.models.state import grow as grow
from stree_jax.models.state import init_records as init_records
from stree_jax.models.state import init_state as init_state
