"""One pass of a model against the nodes of its tree, packed and unrolled.

STree's Fig. 2 (time against N) and Fig. 3 (full binary trees, packed against a sequence
per leaf), with random weights: time does not depend on what they are.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.bench.memory import allocator_peaks, peak_in_use, read_bandwidth
from stree_jax.bench.method import Run, measure, quartiles_of
from stree_jax.bench.passes import (
    CONTEXT,
    SCANS,
    Case,
    Program,
    compile_case,
    time_cases,
)
from stree_jax.bench.shapes import config_of, random_model
from stree_jax.bench.tables import megabytes, ratio, shown, table, with_quartiles
from stree_jax.checkpoints.checkpoint import Model
from stree_jax.models import ModelConfig
from stree_jax.models.memory import size_of, weights_read
from stree_jax.sizing.memory import abstract_model
from stree_jax.sizing.pass_time import fit_pass_time, fit_quality
from stree_jax.speculation.tree import MAX_NODES

DISPATCH = 128  # passes a dispatch, but on a CPU: see `measure_forward`


def measure_forward(
    shape: str, sizes: Sequence[int], levels: Sequence[int], dtype: str, run: Run
) -> dict[str, Any]:
    """Time and memory of a pass over trees, random weights, batch 1.

    A pass replays a whole path of the last tree, verifies T nodes, and takes the argmax
    of their logits; attention layers read CONTEXT committed tokens, whatever the size.
    On a GPU a dispatch runs DISPATCH passes: handing over the arrays of all layers and
    preparing CUDA graphs takes as long as several. State and records are donated; trees
    are data.

    Units: "allocator" (where the backend has statistics; first, as peaks only rise),
    "bandwidth", "sizes" (all sizes packed, taking turns), and "binary:L" a level (the
    three ways to verify it, taking turns).

    Args:
      shape: a name of `stree_jax.bench.shapes`.
      sizes: T, the N of Fig. 2; binary trees filled level by level.
      levels: L of Fig. 3's full binary trees, the root's level included.

    Returns:
      settings, "machine", "complete" and "units" of `measure`, and what `summary` adds.

    Raises:
      ValueError: an unknown shape, a tree without a node or with more than MAX_NODES.
    """
    config = config_of(shape)
    most = {"--sizes": MAX_NODES, "--levels": MAX_NODES.bit_length() - 1}
    for option, values in (("--sizes", sizes), ("--levels", levels)):
        for value in values:
            if not 1 <= value <= most[option]:
                raise ValueError(f"{option}: want 1..{most[option]}, got {value}")
    passes = 1 if jax.default_backend() == "cpu" else DISPATCH
    timed = {"sizes": [Case(n, "packed") for n in dict.fromkeys(sizes)]}
    timed |= {f"binary:{n}": [Case(2**n - 1, scan) for scan in SCANS] for n in levels}
    settings = {
        "kind": "forward",
        "shape": shape,
        "dtype": dtype,
        "sizes": list(sizes),
        "levels": list(levels),
        "context": CONTEXT,
        "passes_per_dispatch": passes,
    }
    first = ["bandwidth"] if peak_in_use() is None else ["allocator", "bandwidth"]
    units = first + [name for name, cases in timed.items() if cases]
    work = _worker(config, dtype, passes, timed, run.repeats)
    report = measure(settings, units, work, run)
    return report | summary(config, dtype, report["units"])


def _worker(
    config: ModelConfig,
    dtype: str,
    passes: int,
    timed: dict[str, list[Case]],
    repeats: int,
) -> Callable[[str], Any]:
    """What measures a unit; the model and its programs are made at their first use."""

    @cache
    def model() -> Model:
        return random_model(config, dtype)

    @cache
    def program(case: Case) -> Program:
        return compile_case(model(), case, passes)

    def work(unit: str) -> Any:
        match unit:
            case "allocator":
                trees = (cases for name, cases in timed.items() if name != "sizes")
                return _peaks([program(case) for cases in trees for case in cases])
            case "bandwidth":
                return read_bandwidth(bytes_of(config, dtype)[1], repeats)
        programs = [program(case) for case in timed[unit]]
        return time_cases(programs, repeats, skip_too_large=True)

    return work


def summary(config: ModelConfig, dtype: str, units: dict[str, Any]) -> dict[str, Any]:
    """What a report says beside its units.

    Returns:
      "weight_bytes": of all weights; "read_bytes": of those that a pass reads whole,
        which leaves out an embedding that is not also the head.
      "read_bytes_per_s": measured; "floor_ms": read_bytes at that rate. None until
        measured.
      "fit": t(T) of the sizes' medians, {"degree", "c_ms", "b_ms", "a_ms", "r2",
        "largest_error"} for a T^2 + b T + c, a = 0 without attention; None where the
        sizes are too few.
      "results": see `rows_of`.
    """
    whole, read_bytes = bytes_of(config, dtype)
    rate, results = units.get("bandwidth"), rows_of(units)
    degree = 1 if set(config.layers) <= {"mamba", "mlp", "moe"} else 2
    return {
        "weight_bytes": whole,
        "read_bytes": read_bytes,
        "read_bytes_per_s": rate,
        "floor_ms": None if rate is None else 1e3 * read_bytes / rate,
        "fit": fit_of([row for row in results if row["unit"] == "sizes"], degree),
        "results": results,
    }


def bytes_of(config: ModelConfig, dtype: str) -> tuple[int, int]:
    """Bytes of all weights, and of those that a pass reads whole."""
    model = abstract_model(config, jnp.dtype(dtype))
    return size_of(model.params), weights_read(model)


def _peaks(programs: Sequence[Program]) -> dict[str, int | None]:
    """The allocator's peak by case; carries are made, used and dropped in turn."""

    def call(program: Program) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(program.run(program.begin()))

    arms = {
        f"{p.case.scan} {p.case.nodes}": (p.memory["memory_bytes"], call(p))
        for p in programs
    }
    return allocator_peaks(arms)


def rows_of(units: dict[str, Any]) -> list[dict[str, Any]]:
    """The report's rows, from the records of the units that are there.

    Returns:
      a row a case, sizes first: "unit"; "levels", L or None; "scan", "packed", "step"
      or "chunk"; "nodes", T; "tokens", computed in a pass (unrolled: leaves x levels);
      "states", held; "ms", "ms_low", "ms_high", median and quartiles of a pass over
      turns, None where it ran out of memory; "over_packed", ratio of medians, 1 for
      packed; "same_argmax", share of nodes whose argmax is the packed pass's, None in
      "sizes"; "compile_s", apart from all times; "memory_bytes", "temp_bytes", of the
      program (`compiled_bytes`); "allocator_peak_bytes" (`allocator_peaks`), None in
      "sizes".
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
    """The fitted t(T) of rows, in milliseconds."""
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


def forward_table(report: dict[str, Any]) -> str:
    """Fig. 2 and Fig. 3 as tables, the floor and the fit above them."""
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
    sections = [about]
    if sizes:
        sections.append(_size_table(sizes, floor))
    if report["fit"] is not None:
        sections.append(_fit_line(report["fit"]))
    if trees:
        sections.append(_tree_table(trees))
    return "\n\n".join(sections)


def _fit_line(fit: dict[str, Any]) -> str:
    terms = [f"{fit['c_ms']:.2f}", f"{fit['b_ms']:+.3f} N"]
    terms += [f"{fit['a_ms']:+.5f} N^2"] if fit["degree"] == 2 else []
    time_of = " ".join(terms).replace(" +", " + ").replace(" -", " - ")
    quality = "" if fit["r2"] is None else f"R2 {fit['r2']:.3f}, "
    return f"t(N) = {time_of} ms ({quality}largest error {fit['largest_error']:.0%})"


def _size_table(rows: Sequence[dict[str, Any]], floor: float | None) -> str:
    base = rows[0]
    head = ["N", "ms (quartiles)", f"of N = {base['nodes']}", "of the floor"]
    head += ["memory, MB", "temporaries, MB", "compiling, s"]
    lines = []
    for row in rows:
        cells = [f"{row['nodes']}", with_quartiles(row, "ms", ".2f")]
        cells += [ratio(row["ms"], base["ms"]), ratio(row["ms"], floor)]
        cells += [megabytes(row["memory_bytes"]), megabytes(row["temp_bytes"])]
        lines.append([*cells, f"{row['compile_s']:.1f}"])
    return table(head, lines)


def _tree_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["levels", "nodes", "scan", "tokens", "states", "ms (quartiles)"]
    head += ["over packed", "memory, MB", "temporaries, MB", "allocator's peak, MB"]
    head += ["same argmax", "compiling, s"]
    sizes = ("memory_bytes", "temp_bytes", "allocator_peak_bytes")
    lines = []
    for row in rows:
        cells = [f"{row[name]}" for name in head[:5]]
        cells += [with_quartiles(row, "ms", ".2f"), shown(row["over_packed"], ".2f")]
        cells += [megabytes(row[name]) for name in sizes]
        cells += [shown(row["same_argmax"], ".0%"), f"{row['compile_s']:.1f}"]
        lines.append(cells)
    return table(head, lines)
