"""Compares plain decoding, chains and trees on prompts (STree, Table 2)."""

import argparse
from typing import TYPE_CHECKING, Any

from bench import tables
from bench.arms import (
    PLAIN,
    measure_arms,
    parse_arm,
    tree_of,
    workload,
)
from bench.charts import LEGEND, bars, panels
from bench.inputs import load_models, load_prompts
from bench.method import Run
from bench.options import (
    add_arms,
    add_batch,
    add_prompts,
    add_temperatures,
)
from bench.others import TRANSFORMERS, with_transformers
from stree_jax.models import Model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, REPEATS = "decode", 3
# Multi-step sampling on tree A and Leviathan's rule on a chain of four are the paper's;
# at T = 0 only the trees make a difference.
ARMS = [
    "leviathan@chain:4",
    "mss@A",
    "naive/coupled@A",
    "naive/coupled@E",
    "lookup",
    "auto",
]


def add_options(b: argparse.ArgumentParser) -> None:
    add_prompts(b, 20)
    add_arms(b, ARMS)
    add_temperatures(b, (0, 1))
    add_batch(b)
    stranger = "also decode greedily with transformers (default: no)"
    b.add_argument("--transformers", action="store_true", help=stranger)


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    pairs = {"": load_models(args, allow_custom=True)}
    others = None
    if getattr(args, "transformers", False):  # an option of this benchmark only
        if args.batch != 1:
            raise ValueError("--transformers: it is timed with --batch 1 only")
        others = with_transformers(pairs[""][0], args.max_new_tokens)
    return measure_pairs(pairs, args, run, others)


def measure_pairs(
    pairs: dict[str, tuple[Model, Any]],
    args: argparse.Namespace,
    run: Run,
    others: Any = None,
) -> dict[str, Any]:
    """Measures the arms of the options with every pair of target and drafter."""
    arms = [parse_arm(name) for name in dict.fromkeys([PLAIN, *args.arms])]
    prompts = load_prompts(args)
    sizes = args.max_new_tokens, getattr(args, "batch", 1)
    works = {
        label: workload(*models, arms, prompts, *sizes)
        for label, models in pairs.items()
    }
    return measure_arms(args.benchmark, works, prompts, args.temperatures, run, others)


def table(report: dict[str, Any]) -> str:
    """Returns a row per pair, set, temperature and arm."""

    def over_chain(row: dict[str, Any]) -> str | None:
        ratio, p = row["over_chain"], row["p_chain"]
        return None if ratio is None else f"{ratio:.2f}, {p:.2g}"

    def faster(row: dict[str, Any]) -> str | None:
        if row["arm"] == PLAIN:
            return None
        return f"{row['faster_than_plain']}/{row['units']}, {row['p_plain']:.2g}"

    def named(row: dict[str, Any]) -> str:
        # Greedy decoding has no acceptance rules.
        return tree_of(row["arm"]) if row["temperature"] == 0 else row["arm"]

    columns = [
        *[("pair", "pair")] * (len(report["pairs"]) > 1),
        ("set", "set"),
        ("T", "temperature", "g"),
        ("arm", named),
        ("tau", "tau", ".2f"),
        ("tokens/s", "tokens_per_s", ".0f"),
        ("ms/call", "ms_per_call", ".2f"),
        ("over plain (quartiles)", "speedup", ".2f"),
        ("worst tenth", "worst_tenth", ".2f"),
        ("faster, p", faster),
        ("over chain, p", over_chain),
        tables.equal(),
        ("first call, s", "first_call_s", ".1f"),
    ]
    return tables.table(columns, report["results"])


def figures(report: dict[str, Any]) -> "dict[str, Figure]":
    """Draws the speedup of every arm, a panel for each temperature.

    Groups are prompt sets, or pairs and sets where there are several pairs.
    """
    temperatures = sorted({row["temperature"] for row in report["results"]})
    many = len(report["pairs"]) > 1
    title = "Speed of decoding, plain decoding = 1"
    figure, axes = panels(len(temperatures), report, title)
    for ax, temperature in zip(axes, temperatures, strict=True):
        rows = [
            row | {"label": _label(row["arm"], temperature)}
            for row in report["results"]
            if row["temperature"] == temperature
            and row["arm"] not in (PLAIN, TRANSFORMERS)
        ]
        colours = {
            row["label"]: _colour_of(row["arm"], temperature, report["arms"])
            for row in rows
        }
        bars(
            ax,
            rows,
            "speedup",
            "label",
            (lambda row: f"{row['pair']}, {row['set']}") if many else "set",
            "times plain decoding",
            "greedy" if temperature == 0 else f"sampled, T = {temperature:g}",
            note=lambda row: f"τ {row['tau']:.1f}",
            colour=colours,
        )
        if many:  # the labels need more space than is side by side
            ax.tick_params(axis="x", labelrotation=60, labelsize=8)
            ax.set_ylim(top=1.15 * ax.get_ylim()[1])
            ax.legend(loc="upper right", ncols=2, **LEGEND)
        else:
            below = (0.5, -0.08)
            ax.legend(loc="upper center", bbox_to_anchor=below, ncols=2, **LEGEND)
    return {"": figure}


def _colour_of(arm: str, temperature: float, arms: list[str]) -> int:
    """Returns an arm's place among the colours, the same in all panels.

    A greedy arm, which has no rule, gets that of the last arm with its tree.
    """
    drafting = [name for name in arms if name != PLAIN]
    if temperature > 0:
        return drafting.index(arm)
    alike = (i for i, name in enumerate(drafting) if tree_of(name) == tree_of(arm))
    return max(alike)


def _label(arm: str, temperature: float) -> str:
    """Returns the name of an arm for the legend. For greedy decoding it is the tree
    without the acceptance rule."""
    rule, _, tree = arm.rpartition("@")
    kind, _, size = tree.partition(":")
    name = {
        "chain": f"chain of {size}",
        "parents": f"tree of {size.count(',') + 2} nodes",
        "auto": "auto",
        "lookup": "lookup",
    }.get(kind, f"tree {tree}")
    return name if temperature == 0 or not rule else f"{name}, {rule}"
