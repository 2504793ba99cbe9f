"""One pass against the capacity of its caches, and against the length of its text.

What attention costs is to be the text's length, whatever room the caches have: time and
temporaries beside the bytes that a pass has to read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import jax

from stree_jax.bench.method import Run, measure, quartiles_of, take_turns
from stree_jax.bench.passes import Case, Program, Turns, compile_case
from stree_jax.bench.peers import in_dtype
from stree_jax.bench.shapes import NAMES, config_of, random_model
from stree_jax.bench.tables import megabytes, shown, table, with_quartiles
from stree_jax.bench.widen import sizes_of
from stree_jax.checkpoints.checkpoint import Model, load
from stree_jax.models import cache_rows, init_state, param_dtype
from stree_jax.models.memory import weights_read
from stree_jax.sizing.traffic import state_and_caches

CAPACITY, TEXT = "capacity", "text"


@dataclass(frozen=True)
class Options:
    """What is timed.

    Attributes:
      models: names of `stree_jax.bench.shapes` (random weights), or what `load` takes.
      sizes: T, nodes of a pass.
      capacities: rows of the caches, with `text` tokens in them.
      lengths: tokens of text, in caches of the largest capacity.
      text: tokens, while the capacity changes.
      dtypes: of weights: "float32", "bfloat16", "int8".
    """

    models: tuple[str, ...]
    sizes: tuple[int, ...]
    capacities: tuple[int, ...]
    lengths: tuple[int, ...]
    text: int
    dtypes: tuple[str, ...]


def measure_capacity(options: Options, run: Run) -> dict[str, Any]:
    """Passes as `bench.passes` makes them: a path replayed, T nodes, their argmax.

    Units: "MODEL/DTYPE/T/capacity" and "MODEL/DTYPE/T/text"; all capacities, and all
    lengths, of one take turns. The model's name may have slashes.

    Returns:
      settings, "machine", "complete" and "units" of `measure`, and "results", see
      `capacity_rows`.

    Raises:
      ValueError: a model that is not there, or a text that the caches have no room for.
    """
    check_room(options)
    units = {
        f"{name}/{dtype}/{size}/{kind}": (name, dtype, size, kind)
        for name in options.models
        for dtype in options.dtypes
        for size in options.sizes
        for kind in (CAPACITY, TEXT)
    }

    @lru_cache(maxsize=1)  # one model in one dtype is in memory at a time
    def compiled(name: str, dtype: str) -> tuple[Model, Callable[[Case], Program]]:
        model = model_named(name, dtype)
        return model, cache(partial(compile_case, model, passes=1))

    def work(unit: str) -> dict[str, Any]:
        name, dtype, size, kind = units[unit]
        model, program = compiled(name, dtype)
        least = Case(size, "packed", context=options.text)
        if kind == CAPACITY:
            cases = [replace(least, capacity=rows) for rows in options.capacities]
            timed = time_capacities([program(case) for case in cases], run.repeats)
        else:
            largest = replace(least, capacity=max(options.capacities))
            timed = time_lengths(program(largest), options.lengths, run.repeats)
        records = [
            record | {"read_bytes": bytes_read(model, record)} for record in timed
        ]
        return {"parameters": sizes_of(model)[0], "records": records}

    settings = {
        "kind": "capacity",
        "models": list(options.models),
        "dtype": ", ".join(options.dtypes),
        "sizes": list(options.sizes),
        "capacities": list(options.capacities),
        "lengths": list(options.lengths),
        "text_tokens": options.text,  # "text" is what --explain prints
    }
    report = measure(settings, units, work, run)
    return {**report, "results": capacity_rows(report["units"])}


def check_room(options: Options) -> None:
    """Raises ValueError where a text does not fit, or there is nothing to time."""
    for option, values in (
        ("--sizes", options.sizes),
        ("--capacities", options.capacities),
        ("--lengths", options.lengths),
    ):
        if min(values) < 1:
            raise ValueError(f"{option}: want at least 1, got {min(values)}")
    for text, rows, option in (
        (options.text, min(options.capacities), "--text"),
        (max(options.lengths), max(options.capacities), "--lengths"),
    ):
        needed = max(Case(n, "packed", context=text).rows for n in options.sizes)
        if needed > rows:
            raise ValueError(
                f"{option}: {text} tokens and a path need caches of {needed} rows, "
                f"and --capacities has {rows}"
            )


def model_named(name: str, dtype: str) -> Model:
    """Random weights of a shape, or a model from where `load` finds it."""
    if name in NAMES:
        return in_dtype(random_model(config_of(name), "float32"), dtype)
    return load(name, dtype=dtype)


def time_capacities(programs: Sequence[Program], repeats: int) -> list[dict[str, Any]]:
    """A raw record of each program, after the text of its case; they take turns."""
    arms = {str(p.case.rows): Turns(p) for p in programs}
    seconds, _ = take_turns(dict(arms), repeats, set(), skip_too_large=True)
    return [
        _record(p, p.case.context, seconds[name])
        for name, p in zip(arms, programs, strict=True)
    ]


def time_lengths(
    program: Program, lengths: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """A raw record of each length, by one program and in the same caches, in turns."""
    turns = Turns(program)
    arms: dict[str, Callable[[], float]] = {str(n): partial(turns, n) for n in lengths}
    seconds, _ = take_turns(arms, repeats, set(), skip_too_large=True)
    return [_record(program, n, seconds[str(n)]) for n in lengths]


def _record(program: Program, text: int, seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "capacity": program.case.rows,
        "text": text,
        "seconds": list(seconds),
        "compile_s": program.compile_s,
        **program.memory,
    }


def bytes_read(model: Model, record: Mapping[str, Any]) -> int:
    """Of the weights, the cache rows of a text, and the other state, once each."""
    dtype, capacity = param_dtype(model.params), record["capacity"]
    state = jax.eval_shape(lambda: init_state(model.config, 1, capacity, dtype))
    other, caches = state_and_caches(state)
    rows = cache_rows(state)
    of_text = 0 if rows is None else caches // rows * record["text"]
    return weights_read(model) + other + of_text


def capacity_rows(units: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per model, dtype, size and capacity or text, from the records of the units.

    Returns:
      "model", "dtype", "nodes", "against" ("capacity" or "text"), "capacity", "text",
      "parameters"; "ms", median and quartiles, None where memory did not suffice;
      "over_first", ratio to the first of its unit turn by turn, likewise;
      "read_bytes" and "read_over_first"; "bytes_per_s", these bytes in the median time;
      "temp_bytes", "memory_bytes", "compile_s".
    """
    rows = []
    for unit, found in units.items():
        name, dtype, size, against = unit.rsplit("/", 3)
        first = found["records"][0]
        for record in found["records"]:
            row: dict[str, Any] = {"model": name, "dtype": dtype, "nodes": int(size)}
            row |= {"against": against, "parameters": found["parameters"], **record}
            own = row.pop("seconds")
            row |= quartiles_of("ms", [1e3 * s for s in own])
            pairs = zip(own, first["seconds"], strict=False)
            row |= quartiles_of("over_first", [a / b for a, b in pairs])
            row["read_over_first"] = record["read_bytes"] / first["read_bytes"]
            ms = row["ms"]
            row["bytes_per_s"] = None if ms is None else 1e3 * row["read_bytes"] / ms
            rows.append(row)
    return rows


def capacity_table(report: dict[str, Any]) -> str:
    """A table per model and dtype."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in report["results"]:
        groups.setdefault((row["model"], row["dtype"]), []).append(row)
    sections = []
    for (name, dtype), rows in groups.items():
        size = f"{rows[0]['parameters'] / 1e6:.1f} M parameters"
        sections += [f"{name}, {size}, {dtype}", _pass_table(rows)]
    about = (
        "Bytes: weights, the text's rows of all caches, the other state, once each. "
        "Ratios are to the first row of the same nodes."
    )
    return "\n\n".join([*sections, about])


def _pass_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["nodes", "capacity", "text", "ms (quartiles)", "of the first (quartiles)"]
    head += ["bytes read, MB", "of the first", "GB/s", "temporaries, MB"]
    lines = []
    for row in rows:
        cells = [f"{row[name]}" for name in head[:3]]
        cells += [
            with_quartiles(row, "ms", ".2f"),
            with_quartiles(row, "over_first", ".2f"),
        ]
        cells += [megabytes(row["read_bytes"]), f"{row['read_over_first']:.2f}"]
        rate = row["bytes_per_s"]
        cells += [shown(None if rate is None else rate / 1e9, ".1f")]
        lines.append([*cells, megabytes(row["temp_bytes"])])
    return table(head, lines)
