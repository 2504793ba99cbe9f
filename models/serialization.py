"""How `jax.export` writes pytrees that go in and out of exported functions."""

import json
from collections.abc import Callable

from jax import export


def register_for_export(
    node: type,
    write: Callable[[tuple], list] = list,
    read: Callable[[list], tuple] = tuple,
) -> None:
    """Lets `jax.export` serialize a `flax.struct.dataclass`.

    Args:
      write, read: convert its static fields, in order, to JSON and back.
    """
    export.register_pytree_node_serialization(
        node,
        serialized_name=f"stree_jax.{node.__name__}",
        serialize_auxdata=lambda fields: json.dumps(write(fields)).encode(),
        deserialize_auxdata=lambda data: read(json.loads(data)),
    )
