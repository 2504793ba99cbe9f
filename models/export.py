"""Lets `jax.export` write models, states and records."""

from dataclasses import asdict
from functools import partial
from typing import Any

from stree_jax.models.base.content import Content
from stree_jax.models.base.serialization import register_for_export
from stree_jax.models.base.shards import WHOLE
from stree_jax.models.drafters.eagle import Eagle, EagleConfig, EagleModel
from stree_jax.models.drafters.heads import Heads, HeadsConfig
from stree_jax.models.layers.nodes import Nodes
from stree_jax.models.mixers import MIXERS
from stree_jax.models.stack.config import ModelConfig
from stree_jax.models.stack.config_json import from_json, to_json
from stree_jax.models.stack.model import Model, Static
from stree_jax.models.stack.state import Pending, State


def _written(static: Static) -> list[Any]:
    """Returns the static fields of a model for JSON."""
    config, tokenizer, mesh, _ = static
    if mesh is not None:
        raise ValueError("model: it is on a mesh; export a model on one device")
    return [to_json(config), tokenizer.text]


def _read(values: list[Any], kind: type = ModelConfig) -> Static:
    """Returns the static fields that `_written` wrote. `kind` is the config's class."""
    config, text = values
    if text is not None:
        from tokenizers import Tokenizer

        text = Tokenizer.from_str(text)
    return from_json(config, kind), Content(text), None, WHOLE


def _heads_config(fields: dict[str, Any]) -> HeadsConfig:
    rows = tuple(map(tuple, fields.pop("accuracy")))
    return HeadsConfig(**fields, accuracy=rows)


register_for_export(Model, _written, _read)
register_for_export(EagleModel, _written, partial(_read, kind=EagleConfig))
register_for_export(
    Eagle,
    lambda fields: [to_json(fields[0])],
    lambda values: (from_json(values[0], EagleConfig),),
)
register_for_export(
    Heads,
    lambda fields: [asdict(fields[0])],
    lambda values: (_heads_config(values[0]),),
)
register_for_export(Nodes)  # its only static field, `scan`, is a string
_NODES = [State, Pending]
_NODES += [n for m in MIXERS.values() for n in (m.State, m.Record) if n is not None]
for node in dict.fromkeys(_NODES):  # two mixers may have the same state
    register_for_export(node)
