"""Trims the heads of draft models to some of the tokens.

A drafter with a large vocabulary reads most of its bytes for the head, and most tokens
are rare. A drafter without them is faster and misses few tokens. The target can still
choose them, so the output does not change.

Letters: V tokens of the vocabulary, D rows of the head.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.models.stack.config import ModelConfig
from stree_jax.models.stack.model import Model
from stree_jax.models.weights.parameters import gathered


def head_name(config: ModelConfig) -> str:
    """Returns the name of the parameter that is the model's head."""
    return "embedding" if config.tie_embeddings else "lm_head"


def trimmed_head(target: Model, ids: Any) -> Any:
    """Returns the rows of a model's head for the tokens `ids` [D] int32. On a mesh,
    every device has all of them."""
    return trimmed_rows(target, head_name(target.config), ids)


def trimmed_rows(target: Model, name: str, ids: Any) -> Any:
    """Returns the rows `ids` of a matrix of a model; see `trimmed_head`."""
    found = gathered(target.params[name], jnp.asarray(ids))
    if target.mesh is None:
        return found
    whole = jax.sharding.NamedSharding(target.mesh, jax.sharding.PartitionSpec())
    return jax.device_put(found, whole)


def with_head(model: Model, head: Any, ids: jax.Array) -> Model:
    """Returns a model with another head, see `ModelConfig.head_rows`.

    Args:
      model: the model.
      head: [D, d], as `trimmed_head` returns it.
      ids: [D] int32. The tokens of its rows, all different.
    """
    params = {**model.params, "lm_head": head, "head_ids": ids}
    config = replace(model.config, tie_embeddings=False, head_rows=ids.shape[0])
    return replace(model, params=params, config=config)
