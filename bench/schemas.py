"""Measures decoding under JSON schemas: plain and speculative, with and without the
constraint.

Forced text is drafted at no drafter's cost, so constrained text is faster than free
text where the schema says much. Each constrained text is checked against its schema.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from bench import method, tables
from bench.method import Run, take_turns
from bench.options import add_temperatures
from bench.schema_tasks import Task, tasks
from bench.widen import sizes_of
from stree_jax import Constraint, Sampling, generate
from stree_jax.checkpoints.pair import load_pair
from stree_jax.cli.options import add, add_model_options
from stree_jax.constraints.rows import constraint_rows, vocabulary_of
from stree_jax.speculation.draft import FORCED

NAME, REPEATS = "schemas", 1
FREE, PLAIN, LOOKUP, AUTO = "plain, free", "plain", "lookup", "auto"


def add_options(b: argparse.ArgumentParser) -> None:
    add_model_options(b)
    add(b, "--count", int, 40, "tasks, of 200")
    add_temperatures(b, (0, 1))
    add(b, "--max-new-tokens", int, 96, "most tokens of an answer")


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Measures every task at every temperature. The units are named "TASK/T".

    Raises:
      RuntimeError: a speculative text differs from the plain one, or a text breaks its
        schema.
    """
    target, drafter = load_pair(args.model, args.drafter, args.dtype)
    drafters = {FREE: None, PLAIN: None, LOOKUP: "lookup", AUTO: drafter}
    if drafter in (None, "lookup", "auto"):
        del drafters[AUTO]
    listed = {task.name: task for task in tasks(args.count)}
    warm: set[str] = set()

    def arm(name: str, task: Task, sampling: Any, most: int) -> Any:
        return generate(
            target,
            task.prompt,
            max_new_tokens=most,
            drafter=drafters[name],
            sampling=sampling,
            constraint=None if name == FREE else Constraint.json(task.schema),
            stop_tokens=() if name == FREE else None,
        )

    def work(name: str, temperature: float) -> dict[str, Any]:
        task = listed[name]
        sampling = None if temperature == 0 else Sampling(temperature, seed=1)
        began = time.perf_counter()
        tables_ = vocabulary_of(target).tables(Constraint.json(task.schema))
        build = time.perf_counter() - began
        first = arm(PLAIN, task, sampling, args.max_new_tokens)
        # The free text gets as many tokens, so that it runs as many plain steps.
        count = len(first.tokens[0])
        most = dict.fromkeys(drafters, args.max_new_tokens) | {FREE: count}
        arms: dict[str, Callable[[], Any]] = {
            name: partial(arm, name, task, sampling, most[name]) for name in drafters
        }
        sizes = f"{temperature > 0} {_shape(target, task)}"
        known = {a for a in arms if f"{a} {sizes}" in warm}
        turns, _ = take_turns(arms, run.repeats, known)
        warm.update(f"{a} {sizes}" for a in arms)
        _check(task, first, {a: r[-1] for a, r in turns.items() if a != FREE})
        forced = turns[LOOKUP][-1]
        return {
            "tokens": count,
            "ended": first.finish_reasons[0] == "stop",
            "forced": sum(int(o) == FORCED for o in forced.origins[0]),
            "passes": {a: int(r[-1].target_calls[0]) for a, r in turns.items()},
            "seconds": {a: [x.decode_s for x in r] for a, r in turns.items()},
            "build_s": build,
            "states": len(tables_.may_end),
            "classes": tables_.following.shape[1],
        }

    settings = method.settings_of(args, "model drafter count temperatures")
    settings |= {
        "dtype": str(target.weight_format),
        "max_new_tokens": args.max_new_tokens,
        "parameters": {"": sizes_of(target, None)},
    }
    axes = {"task": list(listed), "temperature": args.temperatures}
    report, found = method.measure_grid(settings, axes, work, run)
    return {**report, "results": [case | record for case, record in found]}


def _shape(target: Any, task: Task) -> str:
    """Returns the sizes of a task's automaton, which decide its program."""
    return str(_sizes(target, json.dumps(task.schema)))


@lru_cache(maxsize=256)
def _sizes(target: Any, schema: str) -> tuple[int, ...]:
    rows = constraint_rows(target, [Constraint.json(json.loads(schema))])
    assert rows is not None
    return rows.following.shape


def _check(task: Task, first: Any, others: dict[str, Any]) -> None:
    """Raises RuntimeError unless all texts are the first one, and that is valid."""
    for arm, found in others.items():
        if found.tokens != first.tokens:
            raise RuntimeError(f"{task.name}: {arm} wrote another text")
    if first.finish_reasons[0] == "stop":
        found = json.loads(first.texts[0])
        if not set(found) <= set(task.schema["properties"]):
            raise RuntimeError(f"{task.name}: {first.texts[0]} breaks its schema")


def table(report: dict[str, Any]) -> str:
    """Returns a row per temperature and arm."""
    rows = []
    for temperature, found in tables.by(report["results"], "temperature").items():
        speeds = {arm: _speed(found, arm) for arm in found[0]["seconds"]}
        tokens = sum(row["tokens"] for row in found)
        for arm, speed in speeds.items():
            passes = sum(row["passes"][arm] for row in found)
            rows.append(
                {
                    "T": temperature,
                    "arm": arm,
                    "speed": speed,
                    "over": speed / speeds[PLAIN],
                    "tau": tokens / passes,
                    "forced": sum(r["forced"] for r in found) / tokens,
                    "ended": sum(r["ended"] for r in found) / len(found),
                }
            )
    builds = sorted(row["build_s"] for row in report["results"])
    states = sorted(row["states"] for row in report["results"])
    middle = len(builds) // 2
    columns: list[Any] = [
        ("T", lambda r: f"{r['T']:g}"),
        ("decoding", lambda r: r["arm"]),
        ("tokens/s", lambda r: f"{r['speed']:.0f}"),
        ("over plain", lambda r: f"{r['over']:.2f}"),
        ("tokens per pass", lambda r: f"{r['tau']:.2f}"),
        ("forced", lambda r: f"{100 * r['forced']:.0f} %"),
        ("complete", lambda r: f"{100 * r['ended']:.0f} %"),
    ]
    text = f"Automata: {states[middle]} states (most {states[-1]}), built or read in "
    text += f"{builds[middle]:.2f} s (longest {builds[-1]:.2f} s)."
    return tables.table(columns, rows) + "\n\n" + text


def _speed(rows: list[dict[str, Any]], arm: str) -> float:
    """Returns the tokens per second of an arm over all tasks."""
    seconds = sum(min(row["seconds"][arm]) for row in rows)
    return sum(row["tokens"] for row in rows) / seconds
