"""Writes the static fields of models as JSON, for `jax.export`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from stree_jax.models.base.content import Content
from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.base.shards import WHOLE, Cut
from stree_jax.models.stack.config import ModelConfig
from stree_jax.models.stack.config_json import from_json, to_json

Static = tuple[ModelConfig, Content, jax.sharding.Mesh | None, Cut]  # of a model


def static_to_json(static: Static) -> list[Any]:
    """Returns the static fields of a model as a list for JSON, without the tokenizer.

    Raises:
      ValueError: the model is on a mesh.
    """
    config, _, mesh, _ = static
    if mesh is not None:
        raise ValueError("model: it is on a mesh; export a model on one device")
    return [to_json(config)]


def static_from_json(values: list[Any], kind: type = ModelConfig) -> Static:
    """Returns static fields that are equal to those of models with any tokenizer.

    Args:
      values: what `static_to_json` wrote. Older files also have the tokenizer's text,
        which is ignored.
      kind: the config's class.
    """
    any_tokenizer = Content(None, accepts_all=True)
    return from_json(values[0], kind), any_tokenizer, None, WHOLE


def register_model(kind: Any, config: type = ModelConfig) -> None:
    """Registers `Model`, or a subclass of it with another config, with `jax.export`."""

    def build(static: Static, children: Sequence[Any]) -> Any:
        # JAX takes the structure of this model for that of the program's argument.
        model = kind(*children, static[0])
        model.__dict__["_content"] = static[1]
        return model

    read = partial(static_from_json, kind=config)
    register_for_export(kind, static_to_json, read, build)
