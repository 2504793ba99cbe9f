"""Functions of parameters in any weight format."""

from typing import Any

import jax

# Registers their weights with `jax.export`: a file may hold any of them.
from stree_jax.models.weights import int8, kept  # noqa: F401
from stree_jax.models.weights.experts import Experts
from stree_jax.models.weights.format import Format
from stree_jax.models.weights.plain import PlainWeight
from stree_jax.models.weights.weight import Stored, Weight


def is_weight(leaf: Any) -> bool:
    """True if a parameter is a `Weight` or `Experts`, and not a plain array."""
    return isinstance(leaf, Stored)


def as_weight(leaf: Any) -> Weight:
    """Returns a parameter as a `Weight`; wraps a plain array in `PlainWeight`."""
    return leaf if isinstance(leaf, Weight) else PlainWeight(leaf)


def gathered(matrix: Any, ids: jax.Array) -> Any:
    """Returns the rows with ids [D] int32 of a parameter, in its storage."""
    found = as_weight(matrix).gathered(ids)
    return found.array if type(found) is PlainWeight else found


def stack_of(experts: Any) -> Weight:
    """Returns the matrices [E, m, k] of experts as a weight whose arrays have a leading
    axis of E experts."""
    return experts.stack if isinstance(experts, Experts) else as_weight(experts)


def format_of(params: Any) -> Format:
    """Returns the format of a model's weights, as seen from its embedding."""
    return as_weight(params["embedding"]).format


def storage_named(params: Any) -> str:
    """Returns the name of the format of a model's weights, with what a kept model's
    matrices consist of."""
    return format_of(params).storage(params)
