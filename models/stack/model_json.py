"""Writes the static fields of models as JSON, for `jax.export`."""

from typing import Any

from stree_jax.models.base.content import Content
from stree_jax.models.base.shards import WHOLE
from stree_jax.models.stack.config import ModelConfig
from stree_jax.models.stack.config_json import from_json, to_json
from stree_jax.models.stack.model import Static


def static_to_json(static: Static) -> list[Any]:
    """Returns the static fields of a model as a list for JSON.

    Raises:
      ValueError: the model is on a mesh.
    """
    config, tokenizer, mesh, _ = static
    if mesh is not None:
        raise ValueError("model: it is on a mesh; export a model on one device")
    return [to_json(config), tokenizer.text]


def static_from_json(values: list[Any], kind: type = ModelConfig) -> Static:
    """Returns what `static_to_json` wrote. `kind` is the config's class."""
    config, text = values
    if text is not None:
        from tokenizers import Tokenizer

        text = Tokenizer.from_str(text)
    return from_json(config, kind), Content(text), None, WHOLE
