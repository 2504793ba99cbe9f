"""Converts an adapter to low-rank matrices of a model's parameters."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from stree_jax.convert.adapters.merged import Change, Merged
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.families.tensor_map import Names, Row, join
from stree_jax.convert.families.tensors import rows_of
from stree_jax.models import ModelConfig, nest
from stree_jax.models.weights.adapted import LowRank

BY_ROWS = ("copy", "concat", "swap")  # conversions that only order rows of matrices


def unmerged(source: Merged, names: Names, config: ModelConfig) -> Any:
    """Returns the nested `LowRank` matrices that an adapter adds to a model's
    parameters.

    Args:
      source: the tensors with the adapter, from `merge.merge_adapter`.
      names: the names of the base's tensors.
      config: the architecture with the adapter.

    Raises:
      CheckpointError: the adapter does more than to add low-rank matrices.
    """
    found = {
        row.path: _low_rank(source, row)
        for row in rows_of(names, config)
        if not source.changes.keys().isdisjoint(row.sources)
    }
    return nest(found)


def _low_rank(source: Merged, row: Row) -> LowRank:
    """Returns the low-rank matrix that is added to the parameter of a `Row`.

    The matrix of several sources has the sum of their ranks.
    """
    for name in row.sources:
        problem = _problem(row, source.changes.get(name))
        if problem is not None:
            raise CheckpointError(
                f"{source.adapter.directory}: {name} {problem}; load the model with "
                "the adapter merged"
            )
    added = [source.factors(name) for name in row.sources]
    downs = [down for _, down in added]
    columns = np.cumsum([0, *map(len, downs)])
    ups = [np.zeros((len(up), columns[-1]), np.float32) for up, _ in added]
    for i, (up, _) in enumerate(added):
        ups[i][:, columns[i] : columns[i + 1]] = up
    return LowRank(jnp.asarray(join(row, ups)), jnp.asarray(np.concatenate(downs)))


def _problem(row: Row, change: Change | None) -> str | None:
    """Returns why a change of a tensor is not the sum with a low-rank matrix of the
    parameter. None if it is."""
    if change is None:
        return None
    if change.whole is not None:
        return "is replaced"
    if change.added is None:
        return "is no longer tied to the embedding"
    if change.added.norms is not None:
        return "is normalized (DoRA)"
    by_rows = row.how in BY_ROWS and row.group_axis == 0
    return None if by_rows else "is not a matrix of its own in the model"
