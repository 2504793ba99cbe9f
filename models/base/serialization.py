"""Registers pytrees with `jax.export`, so that exported functions can take and return
them."""

import json
from collections.abc import Callable

from jax import export


def register_for_export(
    node: type,
    write: Callable[[tuple], list] = list,
    read: Callable[[list], tuple] = tuple,
) -> None:
    """Registers the class of a pytree with `jax.export`.

    Args:
      node: the class, such as a `flax.struct.dataclass`.
      write: converts the tuple of the class's static fields to a list for JSON.
      read: converts the list back to the tuple.
    """
    export.register_pytree_node_serialization(
        node,
        serialized_name=f"stree_jax.{node.__name__}",
        serialize_auxdata=lambda fields: json.dumps(write(fields)).encode(),
        deserialize_auxdata=lambda data: read(json.loads(data)),
    )
