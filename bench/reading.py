"""Measures the throughput of prefill by prompt length, and compares it with
transformers.

Both programs have the same random weights, and return the logits after the last token
and the state from which decoding continues. They run alternately, and their logits are
compared.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import method, tables
from bench.charts import lines, panels
from bench.device_memory import compiled_bytes
from bench.inputs import in_dtype
from bench.method import Run, quartiles_of, take_turns
from bench.others import (
    LIMITS,
    in_transformers,
    threads_of_xla,
    transformers_version,
)
from bench.shapes import config_of, random_model, random_prompts
from bench.widen import sizes_of
from stree_jax.cli.options import DTYPES, WEIGHTS, add
from stree_jax.generation.generate import encode_prompts
from stree_jax.models import (
    Model,
    State,
    chain_nodes,
    format_named,
    forward_tree,
    read_text,
)
from stree_jax.speculation.buckets import bucket, cache_capacity
from stree_jax.verify.parity import Difference, quiet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, REPEATS = "prompts", 5
SHAPES = ("llama-135m", "hybrid-130m", "mamba2-130m")
OURS, THEIRS = "ours", "transformers"
NEW_TOKENS = 1  # tokens for which the KV caches have space in addition to the prompt

Read = Callable[[], tuple[float, np.ndarray]]
"""Processes a prompt: seconds, and the last token's logits [num_tokens] float32."""


def add_options(b: argparse.ArgumentParser) -> None:
    shapes = "model shapes; both programs get the same random weights"
    add(b, "--shapes", str, SHAPES, shapes, "+")
    add(b, "--lengths", int, (128, 512, 2048, 8192), "tokens of a prompt", "+")
    dtypes = "dtypes of the weights; int8 is measured here only"
    add(b, "--dtypes", str, DTYPES, dtypes, "+", WEIGHTS)
    once = "prompts of this length or more are timed once, without a first run"
    add(b, "--once", int, 4096, once)


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Measures every shape in every dtype at every prompt length, with batch size 1 and
    random token ids.

    The units are named "SHAPE/DTYPE/LENGTH".

    Returns:
      The report. Its "results" are the rows of `reading_row`.

    Raises:
      ValueError: a shape is unknown, or a prompt has one token.
      RuntimeError: the logits differ by more than rounding.
    """
    configs = {shape: config_of(shape) for shape in args.shapes}
    if min(args.lengths) < 2:
        raise ValueError(f"--lengths: want at least 2, got {min(args.lengths)}")

    @lru_cache(maxsize=1)  # one model in one dtype is in memory at a time
    def models(shape: str, dtype: str) -> tuple[Model, Any]:
        ours = in_dtype(random_model(configs[shape], "float32"), dtype)
        return ours, _theirs(ours, dtype)

    def work(shape: str, dtype: str, length: int) -> dict[str, Any]:
        ours, theirs = models(shape, dtype)
        (ids,) = encode_prompts(ours, random_prompts(ours.config, 1, length))
        once = length >= args.once
        return time_reading(ours, theirs, ids, dtype, run.repeats, once)

    peer = transformers_version()
    settings = method.settings_of(args, "shapes lengths dtypes once") | {
        "threads": threads_of_xla(),
        "transformers": peer,
        "torch": None if peer is None else version("torch"),
    }
    axes = {"shape": args.shapes, "dtype": args.dtypes, "length": args.lengths}
    report, found = method.measure_grid(settings, axes, work, run)
    return {**report, "results": [reading_row(*one) for one in found]}


def _theirs(model: Model, dtype: str) -> Any:
    """Loads the weights in transformers; None where it does not run, or differently."""
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
    """Times the prefill of a prompt and returns the record.

    Args:
      other: the model loaded in transformers, or None.
      once: if True, each program is called only once, without a call to warm up.

    Returns:
      "seconds": the times by program. "compile_s", "temp_bytes", "memory_bytes": those
      of our program. "logits_apart": the largest difference of two logits, divided by
      our largest logit; None without `other`. "parameters": their number.

    Raises:
      RuntimeError: the logits differ by more than rounding.
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
    """Returns a function that processes a prompt as `generate` does, and properties of
    its compiled program.

    All tokens except the last are prefilled in chunks, padded to the length of a
    bucket. A pass over the last token follows. The properties are "compile_s" and the
    memory counted by `compiled_bytes`.
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
    """Returns such a call of a model of transformers: one pass that fills its cache."""
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
    """Returns the largest difference of two logits, divided by our largest logit. None
    if transformers is not measured.

    Raises:
      RuntimeError: the difference is larger than rounding explains.
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


def reading_row(case: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a shape, dtype and length.

    Returns:
      "shape", "dtype", "length"; "ours" and "transformers", tokens/s, and "ratio" of
      ours to theirs, turn by turn, with their quartiles, None without theirs; "turns",
      how many; "compile_s", "temp_bytes", "memory_bytes", "logits_apart" and
      "parameters" of the record.
    """
    row, length = case | record, case["length"]
    seconds = row.pop("seconds")
    ours, theirs = seconds[OURS], seconds.get(THEIRS, [])
    row |= quartiles_of(OURS, [length / s for s in ours])
    row |= quartiles_of(THEIRS, [length / s for s in theirs])
    ratios = [b / a for a, b in zip(ours, theirs, strict=False)]
    return row | quartiles_of("ratio", ratios) | {"turns": len(ours)}


COLUMNS = [
    ("tokens", "length"),
    tables.quartiles("tokens/s", OURS, ".0f"),
    tables.quartiles("transformers", THEIRS, ".0f", "-"),
    tables.quartiles("over transformers", "ratio", ".2f", "-"),
    ("turns", "turns"),
    ("temporaries, MB", "temp_bytes", "MB"),
    ("logits apart", "logits_apart", ".1e"),
    ("compiling, s", "compile_s", ".1f"),
]


def table(report: dict[str, Any]) -> str:
    """Returns a table per shape and dtype."""
    sections = []
    for (shape, dtype), rows in tables.by(report["results"], "shape", "dtype").items():
        size = f"{rows[0]['parameters'] / 1e6:.0f} M parameters"
        sections += [f"{shape}, {size}, {dtype}", tables.table(COLUMNS, rows)]
    return "\n\n".join([*sections, _note(report)])


def _note(report: dict[str, Any]) -> str:
    threads = f"{report['threads']} threads each"
    if report["transformers"] is None:
        return f"transformers is not installed; {threads}"
    return (
        f"transformers {report['transformers']}, torch {report['torch']}, {threads}. "
        "Its Mamba2 mixers have no kernels for a CPU: they run in plain torch, which "
        "is what its users get there. In int8 it has no such model."
    )


def figures(report: dict[str, Any]) -> "dict[str, Figure]":
    """Draws tokens a second against the prompt's length, a panel for each shape."""
    groups = tables.by(report["results"], "shape")
    figure, axes = panels(len(groups), report, "Reading a prompt")
    lengths = list(dict.fromkeys(row["length"] for row in report["results"]))
    for ax, (shape, rows) in zip(axes, groups.items(), strict=True):
        for arm, linestyle in ((THEIRS, "--"), (OURS, "-")):
            made = [row | {"label": f"{arm}, {row['dtype']}"} for row in rows]
            words = "tokens of the prompt", "tokens/s", shape
            style = {"linestyle": linestyle}
            lines(ax, made, "length", arm, "label", *words, style, log="xy")
        ax.set_xticks(lengths, lengths, minor=False)
        ax.set_xticks([], minor=True)
    return {"": figure}
