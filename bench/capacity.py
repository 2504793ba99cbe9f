"""Measures the time and temporary memory of one forward pass, for several capacities of
the KV caches and for several lengths of the text in them.

The cost of attention should grow with the length of the text, not with the capacity of
the caches. For comparison, the tables list the bytes that each pass has to read: the
weights, the rows of the text in the caches, and the rest of the state.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import jax

from bench import method, tables
from bench.charts import lines, panels
from bench.device_memory import cache_row_bytes
from bench.inputs import in_dtype
from bench.method import Run, quartiles_of, take_turns
from bench.passes import (
    Case,
    Program,
    Turns,
    compile_case,
)
from bench.shapes import NAMES, config_of, random_model
from bench.widen import sizes_of
from stree_jax.checkpoints.load import load
from stree_jax.cli.options import DTYPES, WEIGHTS, add
from stree_jax.models import Model, init_state, param_dtype
from stree_jax.models.stack.memory import weights_read
from stree_jax.sizing.traffic import state_and_caches

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, REPEATS = "capacity", 9
MODELS = ("llama-135m", "demo")
CAPACITY, TEXT = "capacity", "text"


def add_options(b: argparse.ArgumentParser) -> None:
    models = "shapes, random weights; or directory, hub id or demo"
    add(b, "--models", str, MODELS, models, "+")
    add(b, "--sizes", int, (1, 16), "nodes of a pass", "+")
    rows = "rows of the caches, with --text-tokens in them"
    add(b, "--capacities", int, (256, 1024, 4096, 16384, 65536), rows, "+")
    lengths = "tokens of text in the largest caches"
    add(b, "--lengths", int, (20, 250, 1000, 4000, 16000, 60000), lengths, "+")
    text = "tokens of text while the capacity changes"
    add(b, "--text-tokens", int, 20, text, dest="text")
    add(b, "--dtypes", str, DTYPES, "of weights", "+", WEIGHTS)


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Measures forward passes as in a decoding step: a replay, T nodes, and the argmax.

    The units are "MODEL/DTYPE/T/capacity" and "MODEL/DTYPE/T/text". In the first, all
    capacities of the caches take turns, in the second all lengths of the text. The name
    of a model may contain slashes.

    Returns:
      The report. Its "results" are the rows of `capacity_rows`.

    Raises:
      ValueError: a model does not exist, or a text is too long for the caches.
    """
    check_sizes(args)

    @lru_cache(maxsize=1)  # one model in one dtype is in memory at a time
    def compiled(name: str, dtype: str) -> tuple[Model, Callable[[Case], Program]]:
        model = model_named(name, dtype)
        return model, cache(partial(compile_case, model, passes=1))

    def work(name: str, dtype: str, size: int, kind: str) -> dict[str, Any]:
        model, program = compiled(name, dtype)
        case = Case(size, "packed", context=args.text)
        calls: list[tuple[Program, int, Callable[[], float]]] = []
        if kind == CAPACITY:
            for rows in args.capacities:
                made = program(replace(case, capacity=rows))
                calls.append((made, args.text, Turns(made)))
        else:  # one program with the largest caches, called with texts of all lengths
            made = program(replace(case, capacity=max(args.capacities)))
            turns = Turns(made)
            calls = [(made, text, partial(turns, text)) for text in args.lengths]
        arms = {str(i): call for i, (*_, call) in enumerate(calls)}
        seconds, _ = take_turns(arms, run.repeats, set(), skip_too_large=True)
        records = [
            {
                "capacity": made.case.rows,
                "text": text,
                "seconds": own,
                "compile_s": made.compile_s,
                **made.memory,
                "read_bytes": bytes_read(model, made.case.rows, text),
            }
            for (made, text, _), own in zip(calls, seconds.values(), strict=True)
        ]
        return {"parameters": sizes_of(model)[0], "records": records}

    settings = method.settings_of(args, "models dtypes sizes capacities lengths")
    settings["text_tokens"] = args.text  # "text" is a generated text, see `staged`
    axes = {"model": args.models, "dtype": args.dtypes, "nodes": args.sizes}
    axes["against"] = [CAPACITY, TEXT]
    report, found = method.measure_grid(settings, axes, work, run)
    rows = [row for case, unit in found for row in capacity_rows(case, unit)]
    return {**report, "results": rows}


def check_sizes(args: argparse.Namespace) -> None:
    """Raises ValueError for a text that is too long for the caches."""
    for text, rows, option in (
        (args.text, min(args.capacities), "--text-tokens"),
        (max(args.lengths), max(args.capacities), "--lengths"),
    ):
        needed = max(Case(n, "packed", context=text).rows for n in args.sizes)
        if needed > rows:
            raise ValueError(
                f"{option}: {text} tokens and a path need caches of {needed} rows, "
                f"and --capacities has {rows}"
            )


def model_named(name: str, dtype: str) -> Model:
    """Returns a random model of a known shape, or else what `load` finds."""
    if name in NAMES:
        return in_dtype(random_model(config_of(name), "float32"), dtype)
    return load(name, dtype=dtype)


def bytes_read(model: Model, capacity: int, text: int) -> int:
    """Counts the weights, the cache rows of the text, and the other state, once."""
    dtype = param_dtype(model.params)
    state = jax.eval_shape(lambda: init_state(model.config, 1, capacity, dtype))
    other, _ = state_and_caches(state)
    return weights_read(model) + other + cache_row_bytes(model) * text


def capacity_rows(
    case: dict[str, Any], unit: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns a row for each capacity, or text, of a unit.

    Returns:
      "model", "dtype", "nodes", "against" ("capacity" or "text"), "capacity", "text",
      "parameters"; "ms", median and quartiles, None where memory did not suffice;
      "over_first", ratio to the first of its unit turn by turn, likewise;
      "read_bytes" and "read_over_first"; "bytes_per_s", these bytes in the median time;
      "temp_bytes", "memory_bytes", "compile_s".
    """
    rows, first = [], unit["records"][0]
    for record in unit["records"]:
        row = case | {"parameters": unit["parameters"], **record}
        own = row.pop("seconds")
        row |= quartiles_of("ms", [1e3 * s for s in own])
        pairs = zip(own, first["seconds"], strict=False)
        row |= quartiles_of("over_first", [a / b for a, b in pairs])
        row["read_over_first"] = record["read_bytes"] / first["read_bytes"]
        rate = tables.ratio(record["read_bytes"], row["ms"])
        row["bytes_per_s"] = None if rate is None else 1e3 * rate
        rows.append(row)
    return rows


COLUMNS = [
    *((name, name) for name in ("nodes", "capacity", "text")),
    tables.quartiles("ms", "ms", ".2f"),
    tables.quartiles("of the first", "over_first", ".2f"),
    ("bytes read, MB", "read_bytes", "MB"),
    ("of the first", "read_over_first", ".2f"),
    ("GB/s", lambda row: tables.ratio(row["bytes_per_s"], 1e9), ".1f"),
    ("temporaries, MB", "temp_bytes", "MB"),
]


def table(report: dict[str, Any]) -> str:
    """Returns a table per model and dtype."""
    sections = []
    for (name, dtype), rows in tables.by(report["results"], "model", "dtype").items():
        size = f"{rows[0]['parameters'] / 1e6:.1f} M parameters"
        sections += [f"{name}, {size}, {dtype}", tables.table(COLUMNS, rows)]
    about = (
        "Bytes: weights, the text's rows of all caches, the other state, once each. "
        "Ratios are to the first row of the same nodes."
    )
    return "\n\n".join([*sections, about])


def figures(report: dict[str, Any]) -> "dict[str, Figure]":
    """Draws the time of a pass, the first = 1: two panels a model.

    One panel is against the capacity, one against the text; dotted are bytes read.
    """
    groups = tables.by(report["results"], "model", "against")
    title = "Time of a pass; dotted: the bytes that it reads"
    figure, axes = panels(len(groups), report, title)
    xlabels = {CAPACITY: "rows of the caches", TEXT: "tokens of text"}
    dotted = {"linestyle": ":", "linewidth": 1, "marker": ""}

    def label(row: Mapping[str, Any]) -> str:
        return f"{row['dtype']}, {row['nodes']} node{'s' * (row['nodes'] > 1)}"

    def hidden(row: Mapping[str, Any]) -> str:
        return f"_{label(row)}"  # matplotlib's legends skip labels with an underscore

    for ax, ((name, against), rows) in zip(axes, groups.items(), strict=True):
        lines(ax, rows, against, "read_over_first", hidden, style=dotted, legend=None)
        words = xlabels[against], "the first = 1", f"{name}, against the {against}"
        lines(ax, rows, against, "over_first", label, *words, log="xy")
        low, high = ax.get_ylim()
        ax.set_ylim(min(low, 0.5), max(high, 2))
    return {"": figure}
