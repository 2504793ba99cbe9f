"""Where the time of a decoding step goes, from the device's own trace."""

import gzip
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from stree_jax.bench.method import Run, measure
from stree_jax.bench.prompts import Prompt
from stree_jax.bench.speculation import PLAIN, settings_of
from stree_jax.bench.tables import table
from stree_jax.checkpoints.load import Model
from stree_jax.generation import begin
from stree_jax.speculation import loop

STEPS = 16
# Scopes that `models` and `step` name, by what a table calls them; the first that
# occurs in an operation's name counts.
PARTS = {
    "products with weights": ("in_proj", "out_proj", "qkv", "mlp", "moe", "linear"),
    "head": ("head",),
    "mixers, in one kernel": ("mixer",),
    "scan and replay": ("scan",),
    "convolution": ("conv",),
    "attention": ("attention",),
    "norms": ("norm",),
}
STAGES = ("choose", "draft", "verify", "accept")
COPIES = ("memcpy", "MemcpyD2D")  # of a GPU, where no operation of the program is named
CONTAINERS = ("while", "call", "conditional")  # their events hold those of others


def stage_and_part(scope: str) -> tuple[str, str]:
    """Of an operation, from the scopes in its name."""
    words = re.split(r"[/.]", scope)
    stage = next((s for s in STAGES if s in words), "between")
    if stage == "accept":
        return stage, "rule and bookkeeping"
    for part, scopes in PARTS.items():
        if any(word in scopes for word in words):
            return stage, part
    return stage, "rest"


class Operation(NamedTuple):
    """An operation of a compiled program: its opcode, operands and scope."""

    kind: str
    shape: str
    operands: list[str]
    scope: str | None


# A shape is one word, or several in brackets.
# Long tuples are counted in comments.
TUPLE = r"\((?:[^=]|/\*index=)*?\)"
LINE = re.compile(rf"\s*(?:ROOT )?%([\w.\-]+) = ({TUPLE}|\S+) ([a-z][a-z\-]*)\((.*)")


def operations_of(compiled: str) -> dict[str, Operation]:
    """Every operation of a compiled program's text, by name, in order."""
    found = {}
    for line in compiled.splitlines():
        if match := LINE.match(line):
            name, shape, kind, rest = match.groups()
            scope = re.search(r'op_name="([^"]*)"', rest)
            operands = re.findall(r"%([\w.\-]+)", rest.partition(")")[0])
            found[name] = Operation(kind, shape, operands, scope and scope.group(1))
    return found


def scopes_of(operations: dict[str, Operation]) -> dict[str, str]:
    """The scope of every operation.

    XLA rewrites products without keeping their names. One whose operand is carried
    around the loop as it is (a matrix of weights) is named a product with weights; any
    other operation without a name belongs to what reads it, or to what came before.
    """
    users: dict[str, str] = {}
    for name, operation in operations.items():
        for operand in operation.operands:
            users.setdefault(operand, name)

    def source(name: str) -> Operation | None:
        operation = operations.get(name)
        while operation is not None and operation.kind == "bitcast":
            operation = operations.get(operation.operands[0])
        return operation

    def carries_weights(operation: Operation) -> bool:
        sources = map(source, operation.operands)
        return any(
            s is not None
            and s.kind in ("get-tuple-element", "parameter")
            and re.match(r"(f32|bf16)\[\d{2,},\d{2,}\]", s.shape)
            for s in sources
        )

    scopes, last = {}, ""
    for name, operation in operations.items():
        scope, reader = operation.scope, users.get(name)
        while scope is None and reader is not None:
            scope, reader = operations[reader].scope, users.get(reader)
        scope = scope or last
        product = operation.kind == "dot" or name.startswith("ynn_fusion")
        if product and operation.scope is None and carries_weights(operation):
            scope = next((s for s in STAGES if s in scope), "") + "/linear"
        scopes[name], last = scope, scope
    return scopes


def traced(call: Any) -> tuple[list[dict[str, Any]], float]:
    """Events of a call's operations on the device, and the call's microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        call()
        jax.profiler.stop_trace()
        (path,) = Path(folder).rglob("*.trace.json.gz")
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    events = [e for e in events if "hlo_op" in e.get("args", {})]
    events = [e for e in events if e["args"]["hlo_module"] == "jit_advance"]
    began = min(e["ts"] for e in events)
    return events, max(e["ts"] + e["dur"] for e in events) - began


def finder(operations: dict[str, Operation]) -> Callable[[dict[str, Any]], str | None]:
    """What gives the operation of an event, None where it is not known.

    In a CUDA graph an event names the graph and its kernel. A kernel is called like
    the operation that it was made of, or one just like it; Pallas's have own names.
    """
    kernels: dict[str, str] = {}
    for name, operation in operations.items():
        kernels[re.sub(r"[.\-]", "_", name)] = name
        if operation.kind == "custom-call":
            kernels.setdefault(name.split(".")[0], name)

    def operation_of(event: dict[str, Any]) -> str | None:
        name = event["args"]["hlo_op"]
        return name if name in operations else kernels.get(event["name"])

    return operation_of


def profile_step(
    target: Model, drafter: Model | None, prompt: Prompt, tree: str | None
) -> list[dict[str, Any]]:
    """Microseconds a step by stage and part, most first; they add up to the step.

    "no operation" is what no operation ran in: dispatch, and waiting for threads.
    """
    decoding, plan = begin(
        target,
        [prompt],
        max_new_tokens=16 * STEPS,
        stop_tokens=(),
        drafter=drafter,
        tree=tree,
    )
    spec, steps = plan.spec, jnp.int32(STEPS)
    text = loop.advance_jit.lower(spec, decoding, steps).compile().as_text()
    operations = operations_of(text or "")
    scopes = scopes_of(operations)
    decoding = jax.block_until_ready(loop.advance_jit(spec, decoding, steps))
    events, total = traced(
        lambda: jax.block_until_ready(loop.advance_jit(spec, decoding, steps))
    )
    spent: dict[tuple[str, str], list[float]] = {}
    operation_of = finder(operations)
    for event in events:
        name = operation_of(event)
        if name is None and event["name"].startswith(COPIES):
            spent.setdefault(("between", "copies"), []).append(event["dur"])
        elif name is None:
            spent.setdefault(("between", "unknown"), []).append(event["dur"])
        elif operations[name].kind not in CONTAINERS:
            place = stage_and_part(scopes.get(name, ""))
            if str(target.config.vocab_size) in operations[name].shape:
                place = (place[0], "head" if place[1] in PARTS else place[1])
            spent.setdefault(place, []).append(event["dur"])
    idle = total - sum(map(sum, spent.values()))
    rows = [(*place, sum(times), len(times)) for place, times in spent.items()]
    rows.append(("between", "no operation", idle, 0))
    return [
        {"stage": s, "part": p, "us": us / STEPS, "operations": count / STEPS}
        for s, p, us, count in sorted(rows, key=lambda row: -row[2])
    ]


def measure_profile(
    target: Model,
    drafter: Model,
    prompts: dict[str, list[Prompt]],
    *,
    arms: Sequence[str],
    run: Run,
) -> dict[str, Any]:
    """Profiles of plain decoding and of trees, on the first prompt, mean of turns.

    Returns:
      "results": rows of arm, stage, part, us (a step) and operations (a step).
    """
    prompt = next(iter(prompts.values()))[0]

    def unit(arm: str) -> list[dict[str, Any]]:
        ways = (None, prompt, None) if arm == PLAIN else (drafter, prompt, arm)
        turns = [profile_step(target, *ways) for _ in range(run.repeats)]
        mean: dict[tuple[str, str], dict[str, Any]] = {}
        for row in (row for turn in turns for row in turn):
            place = (row["stage"], row["part"])
            total = mean.setdefault(place, {**row, "us": 0.0, "arm": arm})
            total["us"] += row["us"] / run.repeats
        return list(mean.values())

    settings = settings_of("profile", {"": (target, drafter)}, prompts) | {
        "steps": STEPS,
        "arms": list(arms),
    }
    report = measure(settings, arms, unit, run)
    rows = [row for rows in report["units"].values() for row in rows]
    return {**report, "results": rows}


def profile_table(report: dict[str, Any]) -> str:
    """Parts of a step by arm, in microseconds and percent."""
    sections = []
    for arm in report["units"]:
        rows = [row for row in report["results"] if row["arm"] == arm]
        total = sum(row["us"] for row in rows)
        lines = [
            [
                row["stage"],
                row["part"],
                f"{row['us']:.0f}",
                f"{100 * row['us'] / total:.0f}",
                f"{row['operations']:.0f}",
            ]
            for row in sorted(rows, key=lambda row: -row["us"])
        ]
        head = ["stage", "part", "us", "%", "operations"]
        sections += [f"{arm}: {total:.0f} us a step", table(head, lines)]
    return "\n\n".join(sections)
