"""Measures one forward pass of a model by the number of nodes in its tree.

These are STree's Fig. 2 (time by number of nodes N) and Fig. 3 (full binary trees: all
nodes packed in one pass, compared with a separate sequence per leaf). Weights are
random, because the time does not depend on their values.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import median
from typing import TYPE_CHECKING, Any

import jax

from bench import method, tables
from bench.charts import POINTS, lines, panels
from bench.device_memory import (
    allocator_peaks,
    cache_row_bytes,
    peak_in_use,
    read_bandwidth,
)
from bench.method import Run, quartiles_of
from bench.options import SHAPE
from bench.passes import (
    CONTEXT,
    SCANS,
    Case,
    Program,
    compile_case,
    passes_per_dispatch,
    time_cases,
)
from bench.shapes import config_of, random_model, weight_format
from stree_jax.cli.options import add, add_dtype
from stree_jax.models import Model, ModelConfig
from stree_jax.models.stack.memory import size_of, weights_read
from stree_jax.sizing.memory import abstract_model
from stree_jax.sizing.pass_time import fit_pass_time, fit_quality
from stree_jax.speculation.tree import MAX_NODES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, REPEATS = "forward", 20


def add_options(b: argparse.ArgumentParser) -> None:
    add(b, "--shape", str, SHAPE, "of the model, random weights")
    add(b, "--sizes", int, (1, 2, 4, 8, 13, 16, 32, 64), "nodes of a packed tree", "+")
    levels = "levels of a full binary tree, the root's too"
    add(b, "--levels", int, (4, 5, 6), levels, "*")
    add_dtype(b, "float32")


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Measures time and memory of a pass over trees, batch 1.

    A pass replays a whole path of the last tree, verifies T nodes, and takes the argmax
    of their logits; attention layers read CONTEXT committed tokens. State and records
    are donated, and trees are data.

    Units: "allocator" (where the backend has statistics; first, as peaks only rise),
    "bandwidth", "sizes" (all sizes packed, taking turns), and "binary:L" for each level
    (the three ways to verify it, taking turns).

    Returns:
      the report: the units and the result of `summary`.

    Raises:
      ValueError: an unknown shape, a tree without a node or with more than MAX_NODES.
    """
    config = config_of(args.shape)
    most = {"sizes": MAX_NODES, "levels": MAX_NODES.bit_length() - 1}
    for option, limit in most.items():
        for value in getattr(args, option):
            if not 1 <= value <= limit:
                raise ValueError(f"--{option}: want 1..{limit}, got {value}")
    passes = passes_per_dispatch()
    timed = {"sizes": [Case(n, "packed") for n in args.sizes]}
    timed |= {
        f"binary:{n}": [Case(2**n - 1, scan) for scan in SCANS] for n in args.levels
    }
    settings = method.settings_of(args, "shape dtype sizes levels")
    settings |= {"context": CONTEXT, "passes_per_dispatch": passes}

    @cache
    def model() -> Model:
        return random_model(config, args.dtype)

    @cache
    def program(case: Case) -> Program:
        return compile_case(model(), case, passes)

    def use(program: Program) -> Any:  # the state exists only during the call
        return jax.block_until_ready(program.run(program.begin()))

    def peaks() -> dict[str, int | None]:
        programs = [program(c) for n, own in timed.items() if n != "sizes" for c in own]
        calls = [(p.memory["memory_bytes"], partial(use, p)) for p in programs]
        names = [f"{p.case.scan} {p.case.nodes}" for p in programs]
        return allocator_peaks(dict(zip(names, calls, strict=True)))

    def time(cases: Sequence[Case]) -> list[dict[str, Any]]:
        return time_cases([program(case) for case in cases], run.repeats, True)

    units: dict[str, Callable[[], Any]] = {"allocator": peaks}
    if peak_in_use() is None:
        units = {}
    read_bytes = bytes_of(config, args.dtype)[1]
    units["bandwidth"] = partial(read_bandwidth, read_bytes, run.repeats)
    units |= {name: partial(time, cases) for name, cases in timed.items() if cases}
    report = method.measure(settings, units, run)
    return report | summary(config, args.dtype, report["units"])


def summary(config: ModelConfig, dtype: str, units: dict[str, Any]) -> dict[str, Any]:
    """Returns the parts of a report that are computed from its units.

    Returns:
      "weight_bytes": of all weights; "read_bytes": of the weights that a pass reads,
        which leaves out an embedding that is not also the head.
      "read_bytes_per_s": measured; "floor_ms": read_bytes at that rate. None until
        measured.
      "fit": t(T) of the sizes' medians, {"degree", "c_ms", "b_ms", "a_ms", "r2",
        "largest_error"} for a T^2 + b T + c, a = 0 without attention. None if there
        are too few sizes.
      "results": see `rows_of`.
    """
    whole, read_bytes = bytes_of(config, dtype)
    rate, results = units.get("bandwidth"), rows_of(units)
    model = abstract_model(config, weight_format(config, dtype))
    degree = 2 if cache_row_bytes(model) else 1
    return {
        "weight_bytes": whole,
        "read_bytes": read_bytes,
        "read_bytes_per_s": rate,
        "floor_ms": None if rate is None else 1e3 * read_bytes / rate,
        "fit": fit_of([row for row in results if row["unit"] == "sizes"], degree),
        "results": results,
    }


def bytes_of(config: ModelConfig, dtype: str) -> tuple[int, int]:
    """Returns the bytes of all weights, and of the weights that a pass reads."""
    model = abstract_model(config, weight_format(config, dtype))
    return size_of(model.params), weights_read(model)


def rows_of(units: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each case that has been measured, sizes first.

    Returns:
      "unit"; "levels", L or None; "scan", "packed", "step" or "chunk"; "nodes", T;
      "tokens", computed in a pass (unrolled: leaves x levels); "states", in memory;
      "ms", "ms_low", "ms_high", median and quartiles of a pass over turns, None where
      it ran out of memory; "over_packed", ratio of medians, 1 for packed;
      "same_argmax", share of nodes whose argmax is the packed pass's, None in "sizes";
      "compile_s", not part of the times; "memory_bytes", "temp_bytes", of the program
      (`compiled_bytes`); "allocator_peak_bytes" (`allocator_peaks`), None in "sizes".
    """
    peaks, rows = units.get("allocator", {}), []
    for unit, records in units.items():
        if unit in ("allocator", "bandwidth"):
            continue
        kind, _, levels = unit.partition(":")
        packed = records[0]["seconds"]
        for record in records:
            row = {"unit": unit, "levels": int(levels) if levels else None} | record
            own = row.pop("seconds")
            row |= quartiles_of("ms", [1e3 * s for s in own])
            peak = peaks.get(f"{row['scan']} {row['nodes']}")
            row["allocator_peak_bytes"] = None if kind == "sizes" else peak
            compared = packed and own
            row["over_packed"] = median(own) / median(packed) if compared else None
            rows.append(row)
    return rows


def fit_of(rows: Sequence[dict[str, Any]], degree: int) -> dict[str, Any] | None:
    """Returns the fitted t(T) of rows in milliseconds, or None for too few rows."""
    rows = [row for row in rows if row["ms"] is not None]
    sizes, ms = [row["nodes"] for row in rows], [row["ms"] for row in rows]
    if len(sizes) <= degree:
        return None
    time_of = fit_pass_time(sizes, ms, degree)
    r2, largest = fit_quality(time_of, sizes, ms)
    return {
        "degree": degree,
        "c_ms": time_of.c,
        "b_ms": time_of.b,
        "a_ms": time_of.a,
        "r2": r2 if math.isfinite(r2) else None,
        "largest_error": largest,
    }


def table(report: dict[str, Any]) -> str:
    """Returns the tables of Fig. 2 and Fig. 3. Lines above them give the time of
    reading all weights once, and the fit of time by number of nodes."""
    about = (
        f"{report['shape']}, {report['dtype']}, "
        f"{report['weight_bytes'] / 1e6:.0f} MB of weights"
    )
    floor = report["floor_ms"]
    if floor is not None:
        rate = report["read_bytes_per_s"] / 1e9
        about += f", read at {rate:.1f} GB/s: floor {floor:.2f} ms"
    sizes = [row for row in report["results"] if row["unit"] == "sizes"]
    trees = [row for row in report["results"] if row["unit"] != "sizes"]
    sections, programs = [about], [("memory, MB", "memory_bytes", "MB")]
    programs += [("temporaries, MB", "temp_bytes", "MB")]
    if sizes:
        base = sizes[0]

        def of_base(row: dict[str, Any]) -> float | None:
            return tables.ratio(row["ms"], base["ms"])

        columns = [
            ("N", "nodes"),
            tables.quartiles("ms", "ms", ".2f"),
            (
                f"of N = {base['nodes']}",
                lambda r: tables.ratio(r["ms"], base["ms"]),
                ".2f",
            ),
            ("of the floor", lambda row: tables.ratio(row["ms"], floor), ".2f"),
            *programs,
            ("compiling, s", "compile_s", ".1f"),
        ]
        sections.append(tables.table(columns, sizes))
    if report["fit"] is not None:
        sections.append(_fit_line(report["fit"]))
    if trees:
        columns = [
            *((name, name) for name in ("levels", "nodes", "scan", "tokens", "states")),
            tables.quartiles("ms", "ms", ".2f"),
            ("over packed", "over_packed", ".2f"),
            *programs,
            ("allocator's peak, MB", "allocator_peak_bytes", "MB"),
            ("same argmax", "same_argmax", ".0%"),
            ("compiling, s", "compile_s", ".1f"),
        ]
        sections.append(tables.table(columns, trees))
    return "\n\n".join(sections)


def _fit_line(fit: dict[str, Any]) -> str:
    terms = [f"{fit['c_ms']:.2f}", f"{fit['b_ms']:+.3f} N"]
    terms += [f"{fit['a_ms']:+.5f} N^2"] if fit["degree"] == 2 else []
    time_of = " ".join(terms).replace(" +", " + ").replace(" -", " - ")
    quality = "" if fit["r2"] is None else f"R2 {fit['r2']:.3f}, "
    return f"t(N) = {time_of} ms ({quality}largest error {fit['largest_error']:.0%})"


def figures(report: dict[str, Any]) -> "dict[str, Figure]":
    """Draws time against nodes with its fit, and full trees packed and unrolled."""
    figure, axes = panels(3, report, f"One pass of {report['shape']}")
    sizes = [row for row in report["results"] if row["unit"] == "sizes"]
    rows = [row | {"label": "t(N)", "y": row["ms"]} for row in sizes]
    flat = []
    if fit := report["fit"]:
        label = "quadratic fit" if fit["degree"] == 2 else "linear fit"
        for n in (row["nodes"] for row in sizes):
            y = fit["c_ms"] + fit["b_ms"] * n + fit["a_ms"] * n * n
            flat.append({"label": label, "nodes": n, "y": y})
    if floor := report["floor_ms"]:
        label = "reading the weights"
        flat += [{"label": label, "nodes": r["nodes"], "y": floor} for r in sizes]
    words = "nodes in the tree", "ms", "packed, any tree"
    style = {"marker": "", "linestyle": "--"}
    lines(axes[0], flat, "nodes", "y", "label", *words, style=style)
    lines(axes[0], rows, "nodes", "y", "label", *words, style=POINTS, from_zero=True)
    names = {
        "packed": "packed",
        "step": "unrolled, by steps",
        "chunk": "unrolled, chunks",
    }
    trees = [
        row | {"label": names[row["scan"]], "MB": tables.ratio(row["temp_bytes"], 1e6)}
        for row in report["results"]
        if row["levels"]
    ]
    values = (
        ("ms", "ms", "time"),
        ("MB", "MB beside weights and states", "temporaries"),
    )
    for ax, (y, ylabel, title) in zip(axes[1:], values, strict=True):
        words = "nodes in the tree", ylabel, f"full binary trees: {title}"
        lines(ax, trees, "nodes", y, "label", *words, from_zero=True)
    return {"": figure}
