"""Adds low-rank matrices to those of a model, without changing its parameters."""

from typing import Any

import jax

from stree_jax.common.checks import with_hints
from stree_jax.models.configs.params import Params, nest
from stree_jax.models.layers.params import by_path
from stree_jax.models.stack.model import Model, check_model
from stree_jax.models.weights.adapted import Adapted, LowRank


@with_hints
def with_adapter(model: Model, adapter: Params) -> Model:
    """Returns a model that computes with an adapter, which is not merged.

    The parameters are shared with `model`. Functions of `jax.grad` can take the adapter
    as their argument, and adapters of equal shapes share compiled programs.

    Args:
      model: a model on one device, in any weight format.
      adapter: nested dictionary of `LowRank` matrices, by the names of the parameters
        that they are added to; from `load_adapter`, or your own.

    Raises:
      ValueError: the model is on a mesh or has no such matrix.

    Example:
      >>> model = stree_jax.load("demo", dtype="float32")
      >>> layer = model.params["layers_0"]
      >>> mixer = layer["mamba"]
      >>> m, k = mixer["in_proj"].shape
      >>> zero = adapters.LowRank(up=jnp.zeros((m, 4)), down=jnp.ones((4, k)))
      >>> adapter = {"layers_0": {"mamba": {"in_proj": zero}}}
      >>> adapters.with_adapter(model, adapter).config == model.config
      True
    """
    check_model("model", model)
    if model.mesh is not None:
        raise ValueError("model: on a mesh; load it with the adapter merged")
    flat = by_path(model.params)
    for path, added in _by_path(adapter).items():
        name = "/".join(path)
        if path not in flat or len(flat[path].shape) != 2:
            raise ValueError(f"adapter: {name}: the model has no such matrix")
        if added.shape != flat[path].shape:
            shapes = f"{flat[path].shape}, got {added.shape}"
            raise ValueError(f"adapter: {name}: want shape {shapes}")
        flat[path] = Adapted(flat[path], added)
    return model.replace(params=nest(flat))


def has_adapter(params: Params) -> bool:
    """True if a model's parameters are used with an adapter that is not merged."""
    return any(isinstance(leaf, Adapted) for leaf in by_path(params).values())


def _by_path(adapter: Any) -> dict[tuple[str, ...], LowRank]:
    """Flattens an adapter; keys are paths.

    Raises:
      ValueError: it is not a nested dictionary of `LowRank` matrices.
    """

    def is_leaf(leaf: Any) -> bool:
        return isinstance(leaf, LowRank)

    found = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(adapter, is_leaf)[0]:
        if not is_leaf(leaf) or not all(hasattr(key, "key") for key in keys):
            raise ValueError("adapter: want a nested dictionary of LowRank matrices")
        found[tuple(str(key.key) for key in keys)] = leaf
    return found
