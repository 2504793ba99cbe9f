"""How `jax.export` writes our values that go in and out of jitted functions."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from jax import export

from stree_jax.models.config_json import from_json, to_json
from stree_jax.models.heads import Heads, HeadsConfig
from stree_jax.models.mixers import MIXERS
from stree_jax.models.model import Model
from stree_jax.models.nodes import Nodes
from stree_jax.models.state import Pending, State
from stree_jax.models.weights.int8 import Quantized


def register_for_export(
    node: type,
    write: Callable[[tuple], list] = list,
    read: Callable[[list], tuple] = tuple,
) -> None:
    """Let `jax.export` serialize a `flax.struct.dataclass`.

    Args:
      write, read: its static fields, in order, to JSON and back.
    """
    export.register_pytree_node_serialization(
        node,
        serialized_name=f"stree_jax.{node.__name__}",
        serialize_auxdata=lambda fields: json.dumps(write(fields)).encode(),
        deserialize_auxdata=lambda data: read(json.loads(data)),
    )


def _heads_config(fields: dict[str, Any]) -> HeadsConfig:
    rows = tuple(map(tuple, fields.pop("accuracy")))
    return HeadsConfig(**fields, accuracy=rows)


register_for_export(
    Model, lambda fields: [to_json(fields[0])], lambda values: (from_json(values[0]),)
)
register_for_export(
    Heads,
    lambda fields: [asdict(fields[0])],
    lambda values: (_heads_config(values[0]),),
)
register_for_export(Quantized)
register_for_export(Nodes)  # its `scan` is a string
_NODES = [State, Pending]
_NODES += [n for m in MIXERS.values() for n in (m.State, m.Record) if n is not None]
for node in _NODES:
    register_for_export(node)
