"""Lets `jax.export` write models, states and records."""

from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.layers.nodes import Nodes
from stree_jax.models.mixers import MIXERS
from stree_jax.models.stack.model import Model
from stree_jax.models.stack.model_json import register_model
from stree_jax.models.stack.state import Pending, State

register_model(Model)
register_for_export(Nodes)  # its only static field, `scan`, is a string
_NODES = [State, Pending]
_NODES += [n for m in MIXERS.values() for n in (m.State, m.Record) if n is not None]
for node in dict.fromkeys(_NODES):  # two mixers may have the same state
    register_for_export(node)
