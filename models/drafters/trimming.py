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
import numpy as np

from stree_jax.models.drafters.dflash import DFlash, DFlashConfig
from stree_jax.models.drafters.eagle import Eagle, EagleConfig
from stree_jax.models.stack.config import ModelConfig
from stree_jax.models.stack.model import Model
from stree_jax.models.weights.formats import gathered

TRIMMED = {
    ("head",),
    ("pairs", "following"),
}  # matrices with a row for each draft token


def head_name(config: ModelConfig) -> str:
    """Returns the name of the parameter that is the model's head."""
    return "embedding" if config.tie_embeddings else "lm_head"


def trimmed_head(target: Model, ids: Any) -> Any:
    """Returns the rows of a model's head for the tokens `ids` [D] int32. On a mesh,
    every device has all of them."""
    return _trimmed(target, head_name(target.config), ids)


def _trimmed(target: Model, name: str, ids: Any) -> Any:
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


def with_trimmed_head(model: Model, ids: Any) -> Model:
    """Returns a model whose head predicts only the tokens `ids` [D] int32, which are
    all different."""
    ids = jnp.asarray(ids, jnp.int32)
    return with_head(model, trimmed_head(model, ids), ids)


def trimmed_config(
    config: DFlashConfig, rows: int, divisor: float = 1.0
) -> DFlashConfig:
    """Returns the architecture of a block drafter whose head has at most `rows` rows.

    Args:
      config: the architecture.
      rows: D.
      divisor: `logits_divisor` of the target, whose head may be used.
    """
    if config.head_rows:
        return replace(config, head_rows=min(rows, config.head_rows))
    return replace(config, head_rows=rows, head_divisor=divisor)


def trimmed_eagle_config(config: EagleConfig, rows: int) -> EagleConfig:
    """Returns the architecture of an EAGLE drafter whose head has `rows` rows.

    Raises:
      ValueError: the drafter's head has no more rows.
    """
    if config.own_head and 0 < config.head_rows <= rows:
        raise ValueError(
            f"draft vocabulary: the drafter's head has only {config.head_rows} tokens; "
            "give fewer, or leave the option out"
        )
    return replace(config, own_head=True, tie_embeddings=False, head_rows=rows)


def trimmed(drafter: DFlash, target: Model, ids: Any) -> DFlash:
    """Returns a block drafter that drafts only some of the tokens.

    Args:
      drafter: the drafter. If it has a head of its own, tokens without a row in it are
        left out.
      target: the model whose head is used if the drafter has none.
      ids: [D] int32. The tokens, all different.

    Raises:
      ValueError: the drafter's head has none of the tokens.
    """
    config, params = drafter.config, dict(drafter.params)
    ids = np.unique(np.asarray(ids, np.int32))
    rows = ids
    if config.head_rows:
        own = np.arange(config.head_rows, dtype=np.int32)
        own = own if drafter.ids is None else np.asarray(drafter.ids)
        ids, rows, _ = np.intersect1d(own, ids, return_indices=True)
        if not len(ids):
            raise ValueError("ids: the drafter's head has none of these tokens")
    rows = jnp.asarray(rows, jnp.int32)
    if config.head_rows:
        params["head"] = gathered(params["head"], rows)
    else:
        params["head"] = trimmed_head(target, rows)
    if config.pairs:
        following = gathered(params["pairs"]["following"], rows)
        params["pairs"] = params["pairs"] | {"following": following}
    config = trimmed_config(config, len(ids), target.config.logits_divisor)
    return DFlash(params, config, jnp.asarray(ids, jnp.int32))


def trimmed_eagle(drafter: Eagle, target: Model, ids: Any) -> Eagle:
    """Returns an EAGLE drafter that drafts only some of the tokens.

    Args:
      drafter, target, ids: as in `trimmed`.

    Raises:
      ValueError: the drafter's head has no more tokens, or none of these.
    """
    c, params = drafter.config, dict(drafter.params)
    ids = np.unique(np.asarray(ids, np.int32))
    rows, config = ids, trimmed_eagle_config(c, len(ids))
    if c.own_head and c.head_rows:
        ids, rows, _ = np.intersect1d(params["head_ids"], ids, return_indices=True)
        if not len(ids):
            raise ValueError("ids: the drafter's head has none of these tokens")
        config = replace(config, head_rows=len(ids))
    rows = jnp.asarray(rows, jnp.int32)
    if c.own_head:
        params["lm_head"] = gathered(params["lm_head"], rows)
    elif c.tie_embeddings and c.own_embedding:
        params["lm_head"] = gathered(params["embedding"], rows)
    else:
        name = "embedding" if c.tie_embeddings else head_name(target.config)
        params["lm_head"] = _trimmed(target, name, rows)
    params["head_ids"] = jnp.asarray(ids, jnp.int32)
    return Eagle(params, config)
