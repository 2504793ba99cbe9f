"""Reading prompts: tokens a second against their length, beside transformers.

Both have the same random weights and give the logits after the last token, with what
they need to go on. They take turns, and their logits are compared.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.bench.memory import compiled_bytes
from stree_jax.bench.method import Run, measure, quartiles_of, take_turns
from stree_jax.bench.others import in_transformers, transformers_version
from stree_jax.bench.peers import LIMITS, in_dtype, threads_of_xla
from stree_jax.bench.shapes import config_of, random_model, random_prompts
from stree_jax.bench.tables import megabytes, shown, table, with_quartiles
from stree_jax.bench.widen import sizes_of
from stree_jax.buckets import bucket
from stree_jax.checkpoints.load import Model
from stree_jax.generation import encode_prompts
from stree_jax.models import (
    State,
    chain_nodes,
    format_named,
    forward_tree,
    read_text,
)
from stree_jax.parity import Difference, quiet
from stree_jax.speculation.loop import cache_capacity

OURS, THEIRS = "ours", "transformers"
NEW_TOKENS = 1  # that the caches have room for behind the prompt

Read = Callable[[], tuple[float, np.ndarray]]
"""Reads a prompt: seconds, and the logits [num_tokens] float32 after its last token."""


@dataclass(frozen=True)
class Options:
    """What is read.

    Attributes:
      shapes: names of `stree_jax.bench.shapes`.
      lengths: tokens of the prompts.
      dtypes: of weights: "float32", "bfloat16", "int8" (ours alone).
      once: from this length on each arm has one turn, and no call before it.
    """

    shapes: tuple[str, ...]
    lengths: tuple[int, ...]
    dtypes: tuple[str, ...]
    once: int


def measure_reading(options: Options, run: Run) -> dict[str, Any]:
    """Every shape in every dtype, every length; batch 1, random token ids.

    Units: "SHAPE/DTYPE/LENGTH".

    Returns:
      settings, "machine", "complete" and "units" of `measure`, and "results", see
      `reading_rows`.

    Raises:
      ValueError: an unknown shape, or a prompt of one token.
      RuntimeError: logits are too far apart.
    """
    configs = {shape: config_of(shape) for shape in options.shapes}
    if min(options.lengths) < 2:
        raise ValueError(f"--lengths: want at least 2, got {min(options.lengths)}")
    units = {
        f"{shape}/{dtype}/{length}": (shape, dtype, length)
        for shape in options.shapes
        for dtype in options.dtypes
        for length in options.lengths
    }

    @lru_cache(maxsize=1)  # one model in one dtype is in memory at a time
    def models(shape: str, dtype: str) -> tuple[Model, Any]:
        ours = in_dtype(random_model(configs[shape], "float32"), dtype)
        return ours, _theirs(ours, dtype)

    def work(unit: str) -> dict[str, Any]:
        shape, dtype, length = units[unit]
        ours, theirs = models(shape, dtype)
        (ids,) = encode_prompts(ours, random_prompts(ours.config, 1, length))
        once = length >= options.once
        return time_reading(ours, theirs, ids, dtype, run.repeats, once)

    report = measure(_settings(options), units, work, run)
    return {**report, "results": reading_rows(report["units"])}


def _settings(options: Options) -> dict[str, Any]:
    peer = transformers_version()
    return {
        "kind": "prompts",
        "shapes": list(options.shapes),
        "lengths": list(options.lengths),
        "dtype": ", ".join(options.dtypes),
        "once": options.once,
        "threads": threads_of_xla(),
        "transformers": peer,
        "torch": None if peer is None else version("torch"),
    }


def _theirs(model: Model, dtype: str) -> Any:
    """Returns the same weights in transformers; None where it does not run them."""
    on_cpu, plain = jax.default_backend() == "cpu", format_named(dtype).plain
    if transformers_version() is None or not (plain and on_cpu):
        return None
    import torch

    torch.set_num_threads(threads_of_xla())
    return in_transformers(model, dtype)


def time_reading(
    model: Model,
    other: Any,
    ids: Sequence[int],
    dtype: str,
    repeats: int,
    once: bool,
) -> dict[str, Any]:
    """The record of a length.

    Args:
      other: the model of transformers, or None.
      once: one turn of each arm, and no call before it.

    Returns:
      "seconds" by arm and turn; "compile_s", "temp_bytes", "memory_bytes" of our
      program; "logits_apart", the largest difference of all turns, of the largest
      logit, None without `other`; "parameters".

    Raises:
      RuntimeError: logits are too far apart.
    """
    read, about = our_reader(model, ids)
    arms: dict[str, Read] = {OURS: read}
    if other is not None:
        arms[THEIRS] = their_reader(other, ids, model.config.num_tokens)
    if not once:  # before anything is timed
        _compared({name: [read()] for name, read in arms.items()}, dtype)
    turns, _ = take_turns(arms, 1 if once else repeats, warm=set(arms))
    return {
        "seconds": {arm: [s for s, _ in results] for arm, results in turns.items()},
        "logits_apart": _compared(turns, dtype),
        "parameters": sizes_of(model)[0],
        **about,
    }


def our_reader(model: Model, ids: Sequence[int]) -> tuple[Read, dict[str, Any]]:
    """A call that reads a prompt, and "compile_s" and the bytes of its program.

    As a generation does: all tokens but the last in chunks, padded to a length that
    others share, and a pass over the last one.
    """
    padded = np.zeros((1, bucket(len(ids) - 1) + 1), np.int32)
    padded[0, : len(ids)] = ids
    texts = jnp.asarray(padded), jnp.asarray([len(ids)], jnp.int32)
    capacity = cache_capacity(padded.shape[1], NEW_TOKENS, 0)

    def read(
        model: Model, ids: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, State]:
        state = read_text(model, ids, lengths, capacity)
        last = jnp.take_along_axis(ids, lengths[:, None] - 1, axis=1)
        nodes = chain_nodes(1, 1, model.config.conv_taps)
        logits, _ = forward_tree(model, state, last, nodes)
        return logits[0, 0], state

    began = time.perf_counter()
    compiled = jax.jit(read).lower(model, *texts).compile()
    about = {"compile_s": time.perf_counter() - began, **compiled_bytes(compiled)}

    def call() -> tuple[float, np.ndarray]:
        began = time.perf_counter()
        logits, _ = jax.block_until_ready(compiled(model, *texts))
        seconds = time.perf_counter() - began
        return seconds, np.asarray(logits)[: model.config.num_tokens]

    return call, about


def their_reader(other: Any, ids: Sequence[int], num_tokens: int) -> Read:
    """The same by a model of transformers: one pass that fills its cache."""
    import torch

    tokens = torch.tensor([list(ids)])

    def call() -> tuple[float, np.ndarray]:
        with quiet(), torch.inference_mode():
            began = time.perf_counter()
            out = other(tokens, use_cache=True, logits_to_keep=1)
            seconds = time.perf_counter() - began
        return seconds, out.logits[0, -1, :num_tokens].float().numpy()

    return call


def _compared(
    turns: Mapping[str, Sequence[tuple[float, np.ndarray]]], dtype: str
) -> float | None:
    """How far their logits are from ours, of the largest; None where they have none.

    Raises:
      RuntimeError: further than rounding.
    """
    if THEIRS not in turns:
        return None
    ours, theirs = ([logits for _, logits in turns[arm]] for arm in (OURS, THEIRS))
    relative = max(
        Difference(float(np.abs(a - b).max()), float(np.abs(a).max())).relative
        for a, b in zip(ours, theirs, strict=True)
    )
    if not relative <= LIMITS[dtype]:
        raise RuntimeError(
            f"transformers' logits in {dtype} are {relative:.2g} of the largest from "
            f"ours, more than {LIMITS[dtype]:g}: it computes another model"
        )
    return relative


def reading_rows(units: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per shape, dtype and length, from the records of the units.

    Returns:
      "shape", "dtype", "length"; "ours" and "transformers", tokens/s, and "ratio" of
      ours to theirs, turn by turn, with their quartiles, None without theirs; and
      "turns", how many; "compile_s", "temp_bytes", "memory_bytes", "logits_apart" and
      "parameters" of the record.
    """
    rows = []
    for unit, record in units.items():
        shape, dtype, length = unit.split("/")
        row = {"shape": shape, "dtype": dtype, "length": int(length)} | record
        seconds = row.pop("seconds")
        ours, theirs = seconds[OURS], seconds.get(THEIRS, [])
        ratios = [b / a for a, b in zip(ours, theirs, strict=False)]
        row |= quartiles_of(OURS, [int(length) / s for s in ours])
        row |= quartiles_of(THEIRS, [int(length) / s for s in theirs])
        rows.append(row | quartiles_of("ratio", ratios) | {"turns": len(ours)})
    return rows


def reading_table(report: dict[str, Any]) -> str:
    """A table per shape and dtype."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in report["results"]:
        groups.setdefault((row["shape"], row["dtype"]), []).append(row)
    sections = []
    for (shape, dtype), rows in groups.items():
        size = f"{rows[0]['parameters'] / 1e6:.0f} M parameters"
        sections += [f"{shape}, {size}, {dtype}", _length_table(rows)]
    return "\n\n".join([*sections, _note(report)])


def _length_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["tokens", "tokens/s (quartiles)", "transformers (quartiles)"]
    head += ["over transformers (quartiles)", "turns", "temporaries, MB"]
    head += ["logits apart", "compiling, s"]
    lines = []
    for row in rows:
        cells = [f"{row['length']}", with_quartiles(row, OURS, ".0f")]
        for name, form in ((THEIRS, ".0f"), ("ratio", ".2f")):
            there = row[name] is not None
            cells.append(with_quartiles(row, name, form) if there else "-")
        cells += [f"{row['turns']}", megabytes(row["temp_bytes"])]
        cells += [shown(row["logits_apart"], ".1e"), f"{row['compile_s']:.1f}"]
        lines.append(cells)
    return table(head, lines)


def _note(report: dict[str, Any]) -> str:
    threads = f"{report['threads']} threads each"
    if report["transformers"] is None:
        return f"transformers is not installed; {threads}"
    return (
        f"transformers {report['transformers']}, torch {report['torch']}, {threads}. "
        "Its Mamba2 mixers have no kernels for a CPU: they run in plain torch, which "
        "is what its users get there. In int8 it has no such model."
    )
