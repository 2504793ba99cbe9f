"""Registers pytrees with `jax.export`, so that exported functions can take and return
them."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from jax import export

Node = TypeVar("Node", bound=type)


def register_for_export(
    node: Node,
    write: Callable[[tuple], list] = list,
    read: Callable[[list], tuple] = tuple,
    build: Callable[..., Any] | None = None,
) -> Node:
    """Registers the class of a pytree with `jax.export`, and returns it.

    A class can use it as a decorator if it has no static fields, or only numbers and
    texts.

    Args:
      node: the class, such as a `flax.struct.dataclass`.
      write: converts the tuple of the class's static fields to a list for JSON.
      read: converts the list back to the tuple.
      build: makes the node that stands for the class in a program that was read, from
        the tuple and the children. If None, as any function of JAX makes one.
    """
    export.register_pytree_node_serialization(
        node,
        serialized_name=f"stree_jax.{node.__name__}",
        serialize_auxdata=lambda fields: json.dumps(write(fields)).encode(),
        deserialize_auxdata=lambda data: read(json.loads(data)),
        from_children=build,
    )
    return node
