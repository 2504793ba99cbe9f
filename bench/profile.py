"""Measures in which parts of the model a decoding step spends its time, from the
device's own trace."""

import argparse
import gzip
import json
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench import method, tables
from bench.arms import PLAIN
from bench.inputs import load_models, load_prompts, settings_of
from bench.method import Run
from bench.options import add_arms, add_prompts
from bench.prompts import Prompt
from stree_jax.generation.generate import begin
from stree_jax.models import Model
from stree_jax.speculation import loop

NAME, REPEATS = "profile", 5
ARMS = ["plain", "chain:4", "E"]
STEPS = 16
# Parts in a table, and their scopes in `models` and `step`. The first scope in the name
# of an operation counts.
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
COPIES = ("memcpy", "MemcpyD2D")  # events of a GPU that name no operation
# The trace event of such an operation includes those of the operations inside it.
CONTAINERS = ("while", "call", "conditional")


def stage_and_part(scope: str) -> tuple[str, str]:
    """Returns the stage and part of an operation, from the scopes in its name."""
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
    """Returns the operations in a compiled program's text, by name, in order."""
    found = {}
    for line in compiled.splitlines():
        if match := LINE.match(line):
            name, shape, kind, rest = match.groups()
            scope = re.search(r'op_name="([^"]*)"', rest)
            operands = re.findall(r"%([\w.\-]+)", rest.partition(")")[0])
            found[name] = Operation(kind, shape, operands, scope and scope.group(1))
    return found


def scopes_of(operations: dict[str, Operation]) -> dict[str, str]:
    """Returns the scope of every operation.

    XLA rewrites products without keeping their names. A product of a matrix that the
    loop only carries along is a product with weights. Any other operation without a
    name gets the scope of its reader, or of the operation before.
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
    """Returns a call's events on the device, and the microseconds that it took."""
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
    """Returns a function from an event to its operation, or None if it is unknown.

    In a CUDA graph an event names the graph and its kernel. A kernel has the name of
    its operation, or of an identical one; a Pallas kernel has a custom name.
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
    """Traces decoding steps and divides their time among stages and parts of the model.

    Args:
      target: the target model.
      drafter: the draft model, or None for plain decoding.
      prompt: the text to continue.
      tree: name of the draft tree, or None for plain decoding.

    Returns:
      Rows sorted by time, longest first. Each has a "stage" and a "part", their time
      "us" in microseconds per step, and "operations", the number of operations per
      step. The times add up to the time of a step. The row "no operation" is the time
      in which no operation runs: dispatch, and waiting for threads.
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


def add_options(b: argparse.ArgumentParser) -> None:
    add_prompts(b, 1)
    add_arms(b, ARMS, "plain or TREE")


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Profiles plain decoding and trees on the first prompt, mean of turns.

    Returns:
      the report; "results" are rows of arm, stage, part, us and operations of a step.
    """
    args.count = 1
    (target, drafter), prompts = load_models(args), load_prompts(args)
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

    settings = settings_of(NAME, {"": (target, drafter)}, prompts)
    settings |= {"steps": STEPS, "arms": args.arms}
    units = {arm: partial(unit, arm) for arm in args.arms}
    report = method.measure(settings, units, run)
    rows = [row for rows in report["units"].values() for row in rows]
    return {**report, "results": rows}


def table(report: dict[str, Any]) -> str:
    """Returns parts of a step by arm, in microseconds and percent."""
    sections = []
    for arm, rows in tables.by(report["results"], "arm").items():
        total = sum(row["us"] for row in rows)
        columns = [
            ("stage", "stage"),
            ("part", "part"),
            ("us", "us", ".0f"),
            ("%", lambda row, total=total: 100 * row["us"] / total, ".0f"),
            ("operations", "operations", ".0f"),
        ]
        ordered = sorted(rows, key=lambda row: -row["us"])
        sections += [f"{arm}: {total:.0f} us a step", tables.table(columns, ordered)]
    return "\n\n".join(sections)
