"""What a target makes of text, kept in files: its hidden states, and text of its own.

Letters: B rows of a pass, S tokens of a prompt, L tokens of a window, d width.
"""

import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tqdm import tqdm

from stree_jax.convert.files import read_text
from stree_jax.models import (
    Model,
    chain_nodes,
    forward_hidden,
    init_state,
    param_dtype,
)
from stree_jax.speculation.loop import generate_tokens
from stree_jax.speculation.tree import chain

READ_AT_ONCE, SPEAK_AT_ONCE = 8, 128  # windows of a pass; texts written together
SAMPLED = 1024  # numbers of a parameter that tell targets apart
PROMPT, SPOKEN = 64, 129  # tokens of a text of its own: given, and said


@jax.jit
def hidden_states(model: Model, tokens: jax.Array) -> jax.Array:
    """[B, L, d] float32 after each token of [B, L], from empty states."""
    batch, L = tokens.shape
    state = init_state(model.config, batch, 1, param_dtype(model.params))
    nodes = chain_nodes(batch, L, model.config.conv_taps)
    return forward_hidden(model, state, tokens, nodes)[0]


def keep_hidden(target: Model, windows: np.ndarray, file: Path) -> np.ndarray:
    """Its states [n, L, d] bfloat16 in windows [n, L + 1], each from an empty state."""
    n, L, d = len(windows), windows.shape[1] - 1, target.config.d_model

    def read(begin: int, end: int) -> np.ndarray:
        part = _padded(windows[begin:end, :L], READ_AT_ONCE)
        states = np.asarray(hidden_states(target, jnp.asarray(part)))
        return states[: end - begin].astype(ml_dtypes.bfloat16).view(np.uint16)

    facts = _facts(target, windows)
    kept = filled(file, (n, L, d), np.uint16, facts, READ_AT_ONCE, read, "states")
    return kept.view(ml_dtypes.bfloat16)


def keep_own_text(target: Model, windows: np.ndarray, file: Path) -> np.ndarray:
    """Texts [n, PROMPT + SPOKEN] int32: beginnings of windows, continued greedily."""
    prompts = windows[:, :PROMPT]

    def write(begin: int, end: int) -> np.ndarray:
        part = _padded(prompts[begin:end], SPEAK_AT_ONCE)
        return own_text(target, part, SPOKEN)[: end - begin]

    shape, facts = (len(prompts), PROMPT + SPOKEN), _facts(target, prompts)
    return filled(file, shape, np.int32, facts, SPEAK_AT_ONCE, write, "own text")


def own_text(target: Model, prompts: np.ndarray, new_tokens: int) -> np.ndarray:
    """Prompts [B, S] and what the target says after them, greedily, [B, S + new]."""
    lengths = jnp.full((len(prompts),), prompts.shape[1], jnp.int32)
    tokens = jnp.asarray(prompts, jnp.int32)
    said = np.asarray(_speak(target, tokens, lengths, new_tokens))
    return np.concatenate([prompts, said], axis=1)


@partial(jax.jit, static_argnums=3)
def _speak(target: Model, prompts: jax.Array, lengths: jax.Array, new: int) -> Any:
    said = generate_tokens(
        target,
        None,
        chain(0),
        prompts,
        lengths,
        max_new_tokens=new,
        stop_tokens=(),  # a row that ended would be padded
    )
    return said.tokens


def filled(
    file: Path,
    shape: tuple[int, ...],
    dtype: Any,
    facts: dict[str, Any],
    step: int,
    make: Callable[[int, int], np.ndarray],
    what: str,
) -> np.ndarray:
    """An array in a file, whose rows are made `step` at a time, with a progress bar.

    A run that was killed goes on behind the rows that it had told of in FILE.json.

    Args:
      facts: what the rows depend on.
      make: rows from one place to another.

    Raises:
      ValueError: the file was made from other facts.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    told, done = file.with_name(f"{file.name}.json"), 0
    wanted = {**facts, "shape": list(shape)}
    if told.is_file() and file.is_file():
        found = json.loads(read_text(told))
        done = found.pop("done")
        if found != wanted:
            raise ValueError(
                f"{file}: of another target, text or size; take another --work, or "
                "delete it"
            )
    _make_room(file, int(np.prod(shape)) * np.dtype(dtype).itemsize, is_new=not done)
    kept = np.memmap(file, dtype, "r+", shape=shape)
    with tqdm(total=shape[0], initial=done, unit="row", desc=what) as bar:
        while done < shape[0]:
            end = min(done + step, shape[0])
            kept[done:end] = make(done, end)
            bar.update(end - done)
            done = end
            if done % (8 * step) == 0 or done == shape[0]:
                kept.flush()
                told.write_text(json.dumps({**wanted, "done": done}), "utf-8")
    return kept


def _make_room(file: Path, size: int, is_new: bool) -> None:
    """Gives a file that will be mapped all its bytes: a mapped file with holes would
    end the process by a signal where the disk is full.

    Raises:
      ValueError: the disk has not so many.
    """
    try:
        with open(file, "wb" if is_new else "r+b") as opened:
            if hasattr(os, "posix_fallocate"):  # macOS has none
                os.posix_fallocate(opened.fileno(), 0, size)
            else:
                opened.truncate(size)
    except OSError as error:
        if is_new:
            file.unlink(missing_ok=True)
        problem = f"{error.strerror}; {size / 1e9:.3f} GB are needed"
        raise ValueError(f"{file}: cannot be written ({problem})") from error


def spread_windows(tokens: np.ndarray, length: int, count: int) -> np.ndarray:
    """At most `count` windows [n, length + 1], evenly over a stream.

    Raises:
      ValueError: there is not one.
    """
    most = (len(tokens) - 1) // length
    if most < 1:
        raise ValueError(f"text: {len(tokens)} tokens; want {length + 1} at least")
    starts = np.linspace(0, most - 1, min(most, count)).astype(int) * length
    return np.stack([tokens[s : s + length + 1] for s in starts])


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    """As many rows as all passes have."""
    more = count - len(rows)
    return np.pad(rows.astype(np.int32), ((0, more), (0, 0)))


def _facts(target: Model, windows: np.ndarray) -> dict[str, Any]:
    """Returns what identifies a target and its text."""
    weights = hashlib.sha256()
    for leaf in jax.tree.leaves(target.params):
        some = leaf.reshape(-1)[:: max(leaf.size // SAMPLED, 1)]
        weights.update(np.asarray(some).tobytes())
    text = np.ascontiguousarray(windows, np.int64).tobytes()
    return {
        "target": repr(target.config),
        "weights": weights.hexdigest(),
        "text": hashlib.sha256(text).hexdigest(),
    }
