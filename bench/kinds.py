"""The kinds of `stree-jax bench`, from options to a report, and from it to a table."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from stree_jax.bench import (
    cost,
    forward,
    kernels,
    others,
    profile,
    speculation,
    unrolled,
)
from stree_jax.bench.command import run_of
from stree_jax.bench.method import machine_line
from stree_jax.bench.prompts import Prompt, read_prompts
from stree_jax.bench.shapes import random_pair, random_prompts
from stree_jax.bench.speculation import PLAIN, measure_arms, parse_arm, workload
from stree_jax.bench.widen import widened
from stree_jax.checkpoint import Model, load
from stree_jax.pair import load_pair

RANDOM_PROMPT = 128  # tokens
# Multi-step sampling on tree A and Leviathan's rule on a chain of four are the paper's;
# at T = 0 only the trees make a difference.
ARMS = {
    "decode": ["leviathan@chain:4", "mss@A", "naive/coupled@A", "naive/coupled@E"],
    "temperature": [
        "leviathan@chain:4",
        "mss@A",
        "recursive@A",
        "naive@A",
        "naive/coupled@A",
    ],
    "trees": ["leviathan@chain:4", *(f"mss@{tree}" for tree in "ABCDE")],
    "attention": ["leviathan@chain:4", "mss@A"],
}


def measure_kind(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the options ask for."""
    match args.kind:
        case "decode" | "temperature" | "trees" | "attention":
            return _speculation(args)
        case "unrolled":
            return unrolled.measure_unrolled(
                *_pair_and_prompts(args),
                widths=args.widths,
                depths=args.depths,
                scans=args.scans,
                max_new_tokens=args.max_new_tokens,
                run=run_of(args),
            )
        case "forward":
            return forward.measure_forward(
                args.shape, args.sizes, args.levels, args.dtype, run_of(args)
            )
        case "cost":
            return cost.measure_cost(
                *pair(args),
                read_prompts(args.prompts, args.count),
                arms=args.arms or cost.ARMS,
                max_new_tokens=args.max_new_tokens,
                run=run_of(args),
            )
        case "profile":
            return profile.measure_profile(
                *pair(args),
                read_prompts(args.prompts, 1),
                arms=args.arms or ["plain", "chain:4", "E"],
                run=run_of(args),
            )
        case "kernels":
            return kernels.measure_kernels(
                batches=args.batch,
                sizes=args.sizes,
                dtype=args.dtype,
                run=run_of(args),
            )
    raise ValueError(f"bench: unknown kind {args.kind!r}")


def table_of(report: dict[str, Any]) -> str:
    """The report as Markdown, what it was measured on below."""
    tables: dict[str, Callable[[dict[str, Any]], str]] = {
        "temperature": speculation.temperature_table,
        "unrolled": unrolled.unrolled_table,
        "forward": forward.forward_table,
        "cost": cost.cost_table,
        "profile": profile.profile_table,
        "kernels": kernels.kernels_table,
    }
    table = tables.get(report["kind"], speculation.arms_table)(report)
    return f"{table.rstrip()}\n\n{machine_line(report)}"


def pair(args: argparse.Namespace) -> tuple[Model, Model]:
    target, drafter = load_pair(args.model, args.drafter, args.dtype)
    if drafter is None:
        raise ValueError(f"bench {args.kind} needs a drafter; give --drafter")
    return widened(target, args.widen), drafter


def _pair_and_prompts(
    args: argparse.Namespace,
) -> tuple[Model, Model, dict[str, list[Prompt]]]:
    """Models and texts, or random weights of `--shape` and token ids."""
    if (args.shape is None) == (args.prompts is None):
        raise ValueError("bench unrolled: want either --prompts or --shape")
    if args.shape is None:
        return *pair(args), read_prompts(args.prompts, args.count)
    if args.widen != 1:
        raise ValueError("bench unrolled: --widen is for models, not for --shape")
    target, drafter = random_pair(args.shape, args.drafter_shape, args.dtype)
    ids = random_prompts(target.config, args.count, RANDOM_PROMPT)
    return target, drafter, {f"{args.shape}, {args.drafter_shape}": ids}


def named_pairs(
    specs: Sequence[str], dtype: str, widen: int = 1
) -> dict[str, tuple[Model, Model]]:
    """Models by label, from "NAME=TARGET:DRAFTER"."""
    pairs = {}
    for spec in specs:
        name, _, paths = spec.partition("=")
        target, _, drafter = paths.partition(":")
        if not (name and target and drafter) or "/" in name:
            raise ValueError(f"--pairs: want NAME=TARGET:DRAFTER, got {spec!r}")
        wide = widened(load(target, dtype=dtype), widen)
        pairs[name] = wide, load(drafter, dtype=dtype)
    return pairs


def _speculation(args: argparse.Namespace) -> dict[str, Any]:
    names = [PLAIN, *(args.arms or ARMS[args.kind])]
    arms = [parse_arm(name) for name in dict.fromkeys(names)]
    if args.kind == "attention":
        pairs = named_pairs(args.pairs, args.dtype, args.widen)
    else:
        pairs = {"": pair(args)}
    prompts = read_prompts(args.prompts, args.count)
    batch = getattr(args, "batch", 1)
    works = {
        label: workload(*models, arms, prompts, args.max_new_tokens, batch)
        for label, models in pairs.items()
    }
    strangers = None
    if getattr(args, "transformers", False):
        target, _ = pairs[""]
        strangers = others.with_transformers(target, args.max_new_tokens)
    run = run_of(args)
    return measure_arms(args.kind, works, prompts, args.temperatures, run, strangers)
