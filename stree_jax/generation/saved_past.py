"""Saves the cached state of a batch in a file, and reads it again.

The file is a safetensors file: the rows of the KV caches that are in use, the other
arrays of the target's state, and the tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.common.digests import digest_of
from stree_jax.common.whole_file import PRIVATE, write_whole
from stree_jax.convert.base.errors import CheckpointError
from stree_jax.models import Model, State, init_state, param_dtype
from stree_jax.models.layers.mixer import Leaf, map_leaves
from stree_jax.models.stack.state import cache_rows, recurrent_layers

FORMAT = "stree-jax past 1"
TOKENS, LENGTHS = "tokens", "lengths"


def save_past(path: Path, state: State, tokens: Sequence[list[int]], key: str) -> None:
    """Writes a file, or replaces it.

    Args:
      path: the file.
      state: the target's state.
      tokens: the tokens of each row.
      key: digest of the target, result of `key_of_target`.

    Raises:
      CheckpointError: the file cannot be written.
    """
    from safetensors.numpy import save

    used = max(int(np.asarray(state.length).max()), 1)

    def shortened(x: Any, leaf: Leaf) -> np.ndarray:
        host, axis = np.asarray(x), leaf.capacity_axis
        if axis is not None:
            host = host[(slice(None),) * axis + (slice(0, used),)]
        host = np.ascontiguousarray(host)
        return host if host.dtype.kind in "fiub" else host.view(np.uint16)

    arrays = dict(_named(map_leaves(shortened, state)))
    arrays[TOKENS] = np.asarray([x for row in tokens for x in row], np.int32)
    arrays[LENGTHS] = np.asarray([len(row) for row in tokens], np.int32)
    body = save(arrays, {"format": FORMAT, "model": key})
    try:
        write_whole(path, body, PRIVATE)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error})") from error


def key_of_target(model: Model) -> str:
    """Returns a digest of a model's config and weights, which are all read."""
    return digest_of(model.params, str(model.config))


def load_past(path: Path, model: Model) -> tuple[State, list[list[int]]]:
    """Reads a file of `save_past`. Returns the target's state and the tokens of each
    row.

    Raises:
      CheckpointError: the file cannot be read, is damaged, or belongs to another model.
    """
    from safetensors import SafetensorError, safe_open

    if model.mesh is not None:
        raise CheckpointError(f"{path}: a past is loaded on one device, without a mesh")
    try:
        with safe_open(path, framework="np") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise CheckpointError(f"{path}: not a file that `Past.save` wrote")
            if about.get("model") != key_of_target(model):
                problem = "a past of another model or other weights"
                raise CheckpointError(f"{path}: {problem}")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, AttributeError) as error:
        # NumPy does not have all dtypes.
        raise CheckpointError(f"{path}: not readable as a past ({error})") from error
    try:
        lengths = arrays[LENGTHS].tolist()
        ids, rows = arrays[TOKENS].tolist(), []
        for n in lengths:
            rows.append(ids[:n])
            ids = ids[n:]
        state = _filled(model, len(lengths), arrays)
        rows_of_caches = cache_rows(state)
        most = np.inf if rows_of_caches is None else rows_of_caches + 1
        whole = bool(lengths) and all(1 <= n <= most for n in lengths)
        if ids or not whole or [n - 1 for n in lengths] != state.length.tolist():
            raise ValueError("lengths")
        if not all(0 <= x < model.config.num_tokens for row in rows for x in row):
            raise ValueError("tokens")
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: a damaged past ({error})") from error
    return state, rows


def _filled(model: Model, rows: int, arrays: dict[str, np.ndarray]) -> State:
    """Returns a state with arrays by name.

    Raises:
      KeyError, ValueError: arrays are missing or do not fit the model.
    """
    dtype = param_dtype(model.params)
    shapes = jax.eval_shape(partial(init_state, model.config, rows, 1, dtype))
    capacities: set[int] = set()

    def placed(name: str, x: Any, leaf: Leaf) -> jax.Array:
        found, wanted = arrays[name], np.dtype(x.dtype)
        if wanted.kind not in "fiub":
            found = found.view(wanted) if found.dtype == np.uint16 else found
        sizes = [
            tuple(n for i, n in enumerate(one.shape) if i != leaf.capacity_axis)
            for one in (found, x)
        ]
        if found.dtype != wanted or sizes[0] != sizes[1] or found.ndim != x.ndim:
            raise ValueError(f"{name} has another shape or dtype")
        if leaf.capacity_axis is not None:
            capacities.add(found.shape[leaf.capacity_axis])
        return jnp.array(found)

    names = iter([name for name, _ in _named(shapes)])
    leaves = map_leaves(lambda x, leaf: placed(next(names), x, leaf), shapes)
    state: State = leaves
    if len(capacities) > 1:
        raise ValueError("caches with different numbers of rows")
    return state


def _named(state: State) -> list[tuple[str, Any]]:
    """Returns the arrays of a state by name, in the order of `jax.tree.leaves`."""
    found = jax.tree_util.tree_leaves_with_path(state)
    return [(jax.tree_util.keystr(path).lstrip("."), x) for path, x in found]


def cut_back(state: State, lengths: Sequence[int]) -> State:
    """Returns a state that is cut back to fewer tokens in each row.

    Raises:
      ValueError: the model has recurrent layers, whose states cannot be cut back.
    """
    if kinds := recurrent_layers(state):
        raise ValueError(
            f"at: the states of {' and '.join(kinds)} layers cannot be cut back; keep "
            "the past of the call that ended there, or pass these tokens as a prompt"
        )
    return replace(state, length=jnp.asarray(lengths, state.length.dtype))
