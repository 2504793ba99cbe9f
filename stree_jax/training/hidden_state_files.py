"""Files with a target's hidden states in a text, and with text that it generated.

Letters: B rows of a pass, S tokens of a prompt, L tokens of a window, d width of hidden
states.
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
from jax import lax
from tqdm import tqdm

from stree_jax.convert.base.files import read_text
from stree_jax.generation.tokens import generate_tokens
from stree_jax.models import (
    Model,
    Taps,
    chain_nodes,
    forward_hidden,
    init_state,
    param_dtype,
)
from stree_jax.models.stack.prefill import Observer, prefill, reading_chunk

# Windows per forward pass, and texts that are generated together
READ_AT_ONCE, SPEAK_AT_ONCE = 8, 128
SAMPLED = 1024  # values per parameter in the hash that identifies a target
PROMPT, GENERATED = 64, 129  # tokens of a prompt, and of the text generated after it


@jax.jit
def hidden_states(model: Model, tokens: jax.Array) -> jax.Array:
    """Returns the hidden states [B, L, d] float32 after each token of [B, L], starting
    from empty states."""
    batch, L = tokens.shape
    state = init_state(model.config, batch, 1, param_dtype(model.params))
    nodes = chain_nodes(batch, L, model.config.conv_taps)
    return forward_hidden(model, state, tokens, nodes)[0]


def keep_hidden(target: Model, windows: np.ndarray, file: Path) -> np.ndarray:
    """Returns a target's hidden states [n, L, d] bfloat16 in windows [n, L + 1], each
    from an empty state; computes them into a file unless it has them."""
    n, L, d = len(windows), windows.shape[1] - 1, target.config.d_model

    def read(begin: int, end: int) -> np.ndarray:
        part = _padded(windows[begin:end, :L], READ_AT_ONCE)
        states = np.asarray(hidden_states(target, jnp.asarray(part)))
        return states[: end - begin].astype(ml_dtypes.bfloat16).view(np.uint16)

    source = _source(target, windows)
    kept = filled(file, (n, L, d), np.uint16, source, READ_AT_ONCE, read, "states")
    return kept.view(ml_dtypes.bfloat16)


@partial(jax.jit, static_argnums=2)
def tapped_states(model: Model, tokens: jax.Array, taps: Taps) -> jax.Array:
    """Returns the hidden states and, for each tap, the residual streams, joined to [B,
    L, 1 + m, d] float32, after each token of [B, L], starting from empty states.

    The text is read in chunks, which bounds the memory."""
    (batch, L), config = tokens.shape, model.config
    chunk = reading_chunk(config, L)
    S = -(-L // chunk) * chunk
    Found = tuple[jax.Array, jax.Array]  # the chunk's first token, and all states

    def observe(value: Found, _: Any, hidden: jax.Array, tapped: Any, __: Any) -> Found:
        new = jnp.stack([hidden, *tapped], axis=2)
        start, found = value
        return start + chunk, lax.dynamic_update_slice_in_dim(found, new, start, axis=1)

    found = jnp.zeros((batch, S, 1 + len(taps), config.d_model), jnp.float32)
    observer = Observer(observe, (jnp.zeros((), jnp.int32), found), taps)
    state = init_state(config, batch, S, param_dtype(model.params))
    tokens, lengths = jnp.pad(tokens, ((0, 0), (0, S - L))), jnp.full((batch,), L)
    return prefill(model, state, tokens, lengths, chunk, observer)[1][1][:, :L]


def keep_tapped(
    target: Model, windows: np.ndarray, file: Path, taps: Taps
) -> np.ndarray:
    """Returns a target's hidden state and m residual streams at each token of windows:
    [n, L, 1 + m, d] bfloat16. Computes them into a file unless it has them.

    Args:
      target: the target.
      windows: [n, L + 1]. Token ids; the last one of each window is not read.
      file: the file.
      taps: m layers, as in `models.forward_tapped`.
    """
    n, L, d = len(windows), windows.shape[1] - 1, target.config.d_model

    def read(begin: int, end: int) -> np.ndarray:
        part = _padded(windows[begin:end, :L], READ_AT_ONCE)
        states = np.asarray(tapped_states(target, jnp.asarray(part), taps))
        return states[: end - begin].astype(ml_dtypes.bfloat16).view(np.uint16)

    source = {**_source(target, windows), "taps": list(taps)}
    shape = n, L, 1 + len(taps), d
    kept = filled(file, shape, np.uint16, source, READ_AT_ONCE, read, "states")
    return kept.view(ml_dtypes.bfloat16)


def keep_own_text(target: Model, windows: np.ndarray, file: Path) -> np.ndarray:
    """Returns texts [n, PROMPT + GENERATED] int32: the first tokens of windows,
    continued greedily by the target. Generates them into a file unless it has them."""
    prompts = windows[:, :PROMPT]

    def write(begin: int, end: int) -> np.ndarray:
        part = _padded(prompts[begin:end], SPEAK_AT_ONCE)
        return own_text(target, part, GENERATED)[: end - begin]

    shape, source = (len(prompts), PROMPT + GENERATED), _source(target, prompts)
    return filled(file, shape, np.int32, source, SPEAK_AT_ONCE, write, "own text")


def own_text(target: Model, prompts: np.ndarray, new_tokens: int) -> np.ndarray:
    """Returns prompts [B, S] followed by the target's greedy continuations, [B, S +
    new_tokens]."""
    lengths = jnp.full((len(prompts),), prompts.shape[1], jnp.int32)
    tokens = jnp.asarray(prompts, jnp.int32)
    generated = np.asarray(_generate(target, tokens, lengths, new_tokens))
    return np.concatenate([prompts, generated], axis=1)


@partial(jax.jit, static_argnums=3)
def _generate(target: Model, prompts: jax.Array, lengths: jax.Array, new: int) -> Any:
    """Generates `new` tokens per prompt greedily, without stop tokens."""
    decoding = generate_tokens(
        target,
        prompts,
        lengths,
        drafter=None,
        max_new_tokens=new,
        stop_tokens=(),  # because finished rows would be padded
    )
    return decoding.tokens


def filled(
    file: Path,
    shape: tuple[int, ...],
    dtype: Any,
    source: dict[str, Any],
    step: int,
    make: Callable[[int, int], np.ndarray],
    what: str,
) -> np.ndarray:
    """Returns an array that is memory-mapped from a file, and computes missing rows.

    Finished rows are recorded in FILE.json, so that a killed run continues after them.

    Args:
      file: the file.
      shape, dtype: shape and dtype of the array.
      source: hashes or names that identify the data from which the array is computed.
      step: number of rows (entries of the first axis) that are computed at a time.
      make: function (begin, end) that returns the rows from `begin` to `end` - 1.
      what: name of the rows, for the progress bar.

    Raises:
      ValueError: the file was made from another source, or cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    record, done = file.with_name(f"{file.name}.json"), 0
    wanted = {**source, "shape": list(shape)}
    if record.is_file() and file.is_file():
        found = json.loads(read_text(record))
        done = found.pop("done")
        if found != wanted:
            raise ValueError(
                f"{file}: of another target, text or size; take another --work, or "
                "delete it"
            )
    _allocate(file, int(np.prod(shape)) * np.dtype(dtype).itemsize, is_new=not done)
    kept = np.memmap(file, dtype, "r+", shape=shape)
    with tqdm(total=shape[0], initial=done, unit="row", desc=what) as bar:
        while done < shape[0]:
            end = min(done + step, shape[0])
            kept[done:end] = make(done, end)
            bar.update(end - done)
            done = end
            if done % (8 * step) == 0 or done == shape[0]:
                kept.flush()
                record.write_text(json.dumps({**wanted, "done": done}), "utf-8")
    return kept


def _allocate(file: Path, size: int, is_new: bool) -> None:
    """Allocates all bytes of a file that will be memory-mapped. If the disk were full,
    writing to a hole of a mapped file would kill the process with a signal.

    Raises:
      ValueError: the disk has too little free space.
    """
    try:
        with open(file, "wb" if is_new else "r+b") as opened:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(opened.fileno(), 0, size)
            else:
                opened.truncate(size)
    except OSError as error:
        if is_new:
            file.unlink(missing_ok=True)
        problem = f"{error.strerror}; {size / 1e9:.3f} GB are needed"
        raise ValueError(f"{file}: cannot be written ({problem})") from error


def spread_windows(tokens: np.ndarray, length: int, count: int) -> np.ndarray:
    """Returns at most `count` windows [n, length + 1], evenly spread over a stream of
    tokens.

    Raises:
      ValueError: the stream is too short for one window.
    """
    most = (len(tokens) - 1) // length
    if most < 1:
        raise ValueError(f"text: {len(tokens)} tokens; want {length + 1} at least")
    starts = np.linspace(0, most - 1, min(most, count)).astype(int) * length
    return np.stack([tokens[s : s + length + 1] for s in starts])


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    """Returns the rows as int32, padded to `count` rows."""
    more = count - len(rows)
    return np.pad(rows.astype(np.int32), ((0, more), (0, 0)))


def _source(target: Model, windows: np.ndarray) -> dict[str, Any]:
    """Returns hashes that identify a target and its text."""
    weights = hashlib.sha256()
    for leaf in jax.tree.leaves(target.params):
        sample = leaf.reshape(-1)[:: max(leaf.size // SAMPLED, 1)]
        weights.update(np.asarray(sample).tobytes())
    return {
        "target": repr(target.config),
        "weights": weights.hexdigest(),
        "text": digest(windows),
    }


def digest(*arrays: Any) -> str:
    """Returns a hash of arrays of integers."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array, np.int64).tobytes())
    return found.hexdigest()
