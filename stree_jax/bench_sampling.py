"""Acceptance and speed of the rules against temperature (STree's Fig. 4)."""

import statistics
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from stree_jax.accept import resolve_rule
from stree_jax.bench import machine
from stree_jax.checkpoint import Model
from stree_jax.generate import encode_prompts, generate
from stree_jax.result import Generation
from stree_jax.sampling import Sampling
from stree_jax.tree import resolve_tree

ARMS = (
    "leviathan@chain:4",
    "mss@A",
    "recursive@A",
    "naive@A",
    "naive/coupled@A",
)


def bench_temperature(
    target: Model,
    drafter: Model,
    prompts: Sequence[str],
    *,
    arms: Sequence[str],
    temperatures: Sequence[float],
    batch: int,
    max_new_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Plain decoding and every arm ("rule@tree") at every temperature.

    Prompts are decoded `batch` at a time, all to the full length. The arms take turns;
    the first turn compiles and is not counted.

    Raises:
      ValueError: an unknown arm, or fewer prompts than a batch.
    """
    for arm in arms:
        rule, _, tree = arm.partition("@")
        resolve_rule(rule, resolve_tree(tree))
    if len(prompts) < batch:
        raise ValueError(f"--count: {len(prompts)} prompts make no batch of {batch}")
    starts = range(0, len(prompts) - batch + 1, batch)
    groups = [prompts[i : i + batch] for i in starts]
    longest = max(len(ids) for ids in encode_prompts(target, list(prompts)))

    def run(arm: str, group: Sequence[str], temperature: float) -> Generation:
        rule, _, tree = arm.partition("@")
        plain = arm == "plain"
        return generate(
            target,
            list(group),
            max_new_tokens=max_new_tokens,
            stop_tokens=(),
            drafter=None if plain else drafter,
            tree=None if plain else tree,
            rule=None if plain else rule,
            sampling=None if temperature == 0 else Sampling(temperature),
            capacity=longest + max_new_tokens + 256,  # one program for all prompts
        )

    names = ["plain", *arms]
    cells: dict[str, dict[str, Any]] = {name: {} for name in names}
    total = len(temperatures) * len(groups) * (repeats + 1) * len(names)
    with tqdm(total=total, unit="run", mininterval=1) as bar:
        for temperature in temperatures:
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for group in groups:
                times: dict[str, list[float]] = {name: [] for name in names}
                for turn in range(repeats + 1):
                    for name in names:
                        result = run(name, group, temperature)
                        times[name].append(result.decode_s)
                        if turn == repeats:
                            rows[name].append(_row(result, times[name][1:]))
                        bar.update()
            for name in names:
                cells[name][f"{temperature:g}"] = _cell(rows[name], rows["plain"])
    return {
        "machine": machine(),
        "dtype": str(target.params["embedding"].dtype),
        "batch": batch,
        "prompts": len(groups) * batch,
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "arms": cells,
    }


def _row(result: Generation, times: list[float]) -> dict[str, float]:
    return {
        "tokens": int(result.lengths.sum()),
        "calls": int(result.target_calls.sum()),
        "seconds": statistics.median(times),
    }


def _cell(
    rows: list[dict[str, float]], plain: list[dict[str, float]]
) -> dict[str, float]:
    speedups = [p["seconds"] / r["seconds"] for r, p in zip(rows, plain, strict=True)]
    return {
        "tau": sum(r["tokens"] for r in rows) / sum(r["calls"] for r in rows),
        "tokens_per_s": statistics.median(r["tokens"] / r["seconds"] for r in rows),
        "speedup": statistics.median(speedups),
        "speedup_min": min(speedups),
        "speedup_max": max(speedups),
    }


def temperature_table(report: dict[str, Any]) -> str:
    """tau and speed-up over plain decoding, by arm and temperature."""
    temperatures = list(report["arms"]["plain"])
    lines = [
        f"batch {report['batch']}, {report['prompts']} prompts, tau (speed-up)",
        f"| rule and tree | {' | '.join(f'T = {t}' for t in temperatures)} |",
        f"| --- |{' --- |' * len(temperatures)}",
    ]
    for name, by_temperature in report["arms"].items():
        cells = (
            f"{c['tau']:.2f} ({c['speedup']:.2f}x)" for c in by_temperature.values()
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    rates = (f"{c['tokens_per_s']:.0f}" for c in report["arms"]["plain"].values())
    lines.append(f"| plain, tokens/s | {' | '.join(rates)} |")
    return "\n".join(lines)
