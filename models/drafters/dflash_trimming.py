"""Trims the heads of block drafters to some of the tokens; see `trimming`.

Letters: D rows of the head.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from stree_jax.models.drafters.dflash import DFlash, DFlashConfig
from stree_jax.models.drafters.trimming import trimmed_head
from stree_jax.models.stack.model import Model
from stree_jax.models.weights.formats import gathered

TRIMMED = {
    ("head",),
    ("pairs", "following"),
}  # matrices with a row for each draft token


def trimmed_dflash_config(
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


def trimmed_dflash(drafter: DFlash, target: Model, ids: Any) -> DFlash:
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
    config = trimmed_dflash_config(config, len(ids), target.config.logits_divisor)
    return DFlash(params, config, jnp.asarray(ids, jnp.int32))
