"""The benchmarks: from options to a report, and from a report to a table."""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

from stree_jax.bench import (
    budget_runs,
    budget_tables,
    capacity,
    cost,
    devices,
    forward,
    heads,
    kernels,
    others,
    peers,
    profile,
    reading,
    speculation,
    staged,
    unrolled,
)
from stree_jax.bench.method import Run, check_report, machine_line
from stree_jax.bench.prompts import Prompt, read_prompts, read_turns
from stree_jax.bench.shapes import config_of, random_model, random_pair, random_prompts
from stree_jax.bench.speculation import PLAIN, measure_arms, parse_arm, workload
from stree_jax.bench.widen import widened, widened_heads
from stree_jax.checkpoints.checkpoint import Model, load
from stree_jax.checkpoints.heads import load_heads
from stree_jax.checkpoints.ngrams import load_ngrams
from stree_jax.pair import load_pair
from stree_jax.sizing.units import bytes_named
from stree_jax.speculation.drafters.lookup import LOOKUP

RANDOM_PROMPT = 128  # tokens


def measure_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """The report of what the options ask for.

    Raises:
      ValueError: options that do not go together; nothing has been measured.
    """
    match args.benchmark:
        case "decode" | "temperature" | "trees" | "attention":
            return _measure_arms(args)
        case "staged":
            target, drafter = pair(args)
            return staged.measure_staged(
                target,
                widened(drafter, args.widen_drafter),
                load_ngrams(args.ngrams),
                read_prompts(args.prompts, args.count),
                staged.Options(
                    tree=args.tree,
                    aheads=tuple(args.ahead),
                    widths=tuple(args.width),
                    auto=args.auto,
                    temperatures=tuple(args.temperatures),
                    top_k=args.top_k,
                    max_new_tokens=args.max_new_tokens,
                    batch=args.batch,
                ),
                run_of(args),
            )
        case "heads":
            target, drafter = pair(args)
            return heads.measure_heads(
                target,
                drafter,
                widened_heads(load_heads(args.heads, args.dtype), args.widen),
                None if args.ngrams is None else load_ngrams(args.ngrams),
                read_prompts(args.prompts, args.count),
                heads.Options(
                    trees=tuple(args.trees),
                    model_trees=tuple(args.model_trees),
                    typical=args.typical,
                    temperatures=tuple(args.temperatures),
                    max_new_tokens=args.max_new_tokens,
                    batch=args.batch,
                ),
                run_of(args),
            )
        case "memory":
            return _measure_memory(args)
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
                arms=args.arms,
                max_new_tokens=args.max_new_tokens,
                run=run_of(args),
            )
        case "profile":
            prompts = read_prompts(args.prompts, 1)
            return profile.measure_profile(
                *pair(args), prompts, arms=args.arms, run=run_of(args)
            )
        case "kernels":
            return kernels.measure_kernels(
                batches=args.batch,
                sizes=args.sizes,
                dtype=args.dtype,
                run=run_of(args),
            )
        case "peers":
            return _measure_peers(args)
        case "prompts":
            return reading.measure_reading(
                reading.Options(
                    shapes=tuple(dict.fromkeys(args.shapes)),
                    lengths=tuple(dict.fromkeys(args.lengths)),
                    dtypes=tuple(dict.fromkeys(args.dtypes)),
                    once=args.once,
                ),
                run_of(args),
            )
        case "devices":
            return devices.measure_devices(
                devices.Options(
                    shapes=tuple(dict.fromkeys(args.shapes)),
                    meshes=tuple(dict.fromkeys(args.meshes)),
                    sizes=tuple(dict.fromkeys(args.sizes)),
                    dtype=args.dtype,
                    batch=args.batch,
                    context=args.context,
                ),
                run_of(args),
            )
        case "capacity":
            return capacity.measure_capacity(
                capacity.Options(
                    models=tuple(dict.fromkeys(args.models)),
                    sizes=tuple(dict.fromkeys(args.sizes)),
                    capacities=tuple(dict.fromkeys(args.capacities)),
                    lengths=tuple(dict.fromkeys(args.lengths)),
                    text=args.text,
                    dtypes=tuple(dict.fromkeys(args.dtypes)),
                ),
                run_of(args),
            )
    raise ValueError(f"bench: unknown benchmark {args.benchmark!r}")


def _measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    target, drafter = pair(args)
    heads = widened_heads(load_heads(args.heads, args.dtype), args.widen)
    paths = args.prompts or []
    return budget_runs.measure_memory(
        budget_runs.Models(target, drafter, heads),
        read_prompts(paths, args.count),
        read_turns(paths, args.count),
        budget_runs.Options(
            parts=tuple(args.parts),
            shapes=tuple(args.shapes),
            limit=bytes_named(args.memory),
            small=bytes_named(args.small),
            sizes=tuple(args.sizes),
            head_counts=tuple(args.head_counts),
            caches=tuple(args.caches),
            pruned=tuple(args.pruned),
            batches=tuple(args.batches),
            tree=args.tree,
            shares=tuple(args.shares),
            tune=args.tune,
            max_new_tokens=args.max_new_tokens,
        ),
        run_of(args),
    )


def _measure_peers(args: argparse.Namespace) -> dict[str, Any]:
    subjects = {}
    plain, arms = parse_arm(PLAIN), [parse_arm(name) for name in args.arms]
    for shape in args.shapes:
        model = random_model(config_of(shape), "float32")
        ids = random_prompts(model.config, args.count, RANDOM_PROMPT)
        subjects[shape] = peers.Subject(model, model, (plain,), {"random": ids})
    if args.prompts:
        target, drafter = load_pair(args.model, args.drafter, args.dtype)
        if not isinstance(drafter, Model):  # no tree has a drafter then
            drafter = target
            arms = [arm for arm in arms if arm.drafting == LOOKUP]
        ours = (plain, *(arm for arm in arms if arm != plain))
        prompts = read_prompts(args.prompts, args.count)
        wide = widened(target, args.widen)
        subjects[peers.label_of(args.model)] = peers.Subject(
            wide, wide if drafter is target else drafter, ours, prompts
        )
    if not subjects:
        raise ValueError("bench peers: want --prompts or --shapes")
    return peers.measure_peers(
        subjects,
        peers.Options(
            dtypes=tuple(dict.fromkeys(args.dtypes)),
            max_new_tokens=args.max_new_tokens,
            llama_python=args.llama_python,
            threads=peers.threads_of_xla(),
        ),
        run_of(args),
    )


def run_of(args: argparse.Namespace) -> Run:
    """How to measure, from the options."""
    for name in ("repeats", "batch", "max_new_tokens"):
        values = getattr(args, name, 1)
        for value in (values,) if isinstance(values, int) else values:
            if value < 1:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option}: want at least 1, got {value}")
    if args.minutes is not None and not args.minutes >= 0:
        raise ValueError(f"--minutes: want at least 0, got {args.minutes}")
    if args.json is not None:
        check_report(args.json)
    for name in ("json", "figure"):
        path = getattr(args, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"--{name}: {path.parent}: no such directory")
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            raise ValueError(f"--{name}: {path.parent}: cannot be written to")
    return Run(args.repeats, args.json, args.minutes)


def table_of(report: dict[str, Any]) -> str:
    """The report as Markdown, what it was measured on below."""
    tables: dict[str, Callable[[dict[str, Any]], str]] = {
        "temperature": speculation.temperature_table,
        "heads": heads.heads_table,
        "memory": budget_tables.memory_table,
        "staged": staged.staged_table,
        "unrolled": unrolled.unrolled_table,
        "forward": forward.forward_table,
        "cost": cost.cost_table,
        "profile": profile.profile_table,
        "kernels": kernels.kernels_table,
        "peers": peers.peers_table,
        "prompts": reading.reading_table,
        "capacity": capacity.capacity_table,
        "devices": devices.devices_table,
    }
    text = tables.get(report["kind"], speculation.arms_table)(report)
    return f"{text}\n\n{machine_line(report)}"


def pair(args: argparse.Namespace) -> tuple[Model, Model]:
    target, drafter = load_pair(args.model, args.drafter, args.dtype)
    if not isinstance(drafter, Model):
        raise ValueError(
            f"bench {args.benchmark} needs a drafter, a model; give --drafter"
        )
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


def _measure_arms(args: argparse.Namespace) -> dict[str, Any]:
    arms = [parse_arm(name) for name in dict.fromkeys([PLAIN, *args.arms])]
    if args.benchmark == "attention":
        pairs = named_pairs(args.pairs, args.dtype, args.widen)
    else:
        pairs = {"": pair(args)}
    prompts = read_prompts(args.prompts, args.count)
    batch = args.batch if args.benchmark in ("decode", "temperature") else 1
    works = {
        label: workload(*models, arms, prompts, args.max_new_tokens, batch)
        for label, models in pairs.items()
    }
    strangers = None
    if args.benchmark == "decode" and args.transformers:
        if batch != 1:
            raise ValueError("--transformers: it is timed with --batch 1 only")
        target, _ = pairs[""]
        strangers = others.with_transformers(target, args.max_new_tokens)
    return measure_arms(
        args.benchmark, works, prompts, args.temperatures, run_of(args), strangers
    )
