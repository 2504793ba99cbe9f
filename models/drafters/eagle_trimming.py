"""Trims the heads of EAGLE drafters to some of the tokens; see `trimming`.

Letters: D rows of the head.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from stree_jax.models.drafters.eagle import Eagle, EagleConfig
from stree_jax.models.drafters.trimming import head_name, trimmed_rows
from stree_jax.models.stack.model import Model
from stree_jax.models.weights.formats import gathered


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


def trimmed_eagle(drafter: Eagle, target: Model, ids: Any) -> Eagle:
    """Returns an EAGLE drafter that drafts only some of the tokens.

    Args:
      drafter, target, ids: as in `trimmed_dflash`.

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
        params["lm_head"] = trimmed_rows(target, name, rows)
    params["head_ids"] = jnp.asarray(ids, jnp.int32)
    return Eagle(params, config)
