"""Compares Medusa heads with other drafters, and measures what typical acceptance
changes.

The accuracy of a head is the share of its guesses that are the next tokens of the
target's greedy text. Decoding is measured with chains and trees of heads, with the
draft model and with prompt lookup. In sampling, the rule "typical" is measured too. It
does not keep the target's distribution, so the difference of its output is measured
separately.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from bench import tables
from bench.arms import (
    PLAIN,
    Arm,
    Workload,
    bytes_a_token,
    measure_arms,
    records_of,
    workload,
)
from bench.charts import POINTS, lines, panels
from bench.inputs import load_models, load_prompts
from bench.method import Run
from bench.options import add_batch, add_prompts, add_temperatures
from bench.prompts import Prompt
from bench.widen import widened_heads
from stree_jax.checkpoints.kinds.heads import load_heads
from stree_jax.checkpoints.kinds.ngrams import load_ngrams
from stree_jax.cli.figures import GUIDE
from stree_jax.cli.options import add
from stree_jax.generation.generate import encode_prompts, generate
from stree_jax.generation.result import Generation
from stree_jax.generation.scoring import score
from stree_jax.models import Model
from stree_jax.models.stack.memory import weights_read
from stree_jax.sampling.settings import Sampling
from stree_jax.speculation.drafters.medusa import heads_read
from stree_jax.training.heads import accuracy_table, ranks_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, REPEATS = "heads", 2
TREES = [
    *(f"chain:{k}" for k in (1, 2, 3, 4)),
    "cartesian:4x2x2",
    "sparse:8",
    "sparse:16",
    "sparse:32",
    "auto",
]
TYPICAL = "typical"
RANKS = 10  # first guesses of a head that are counted
RANKS_SHOWN = (1, 2, 3, 5, 10)
GRAM = 4  # tokens of a run that may be repeated


def add_options(b: argparse.ArgumentParser) -> None:
    add_prompts(b, 10)
    add_temperatures(b, (0, 1))
    heads = "directory or hub id of Medusa heads for the target"
    add(b, "--heads-path", str, "demo-heads", heads, metavar="PATH", dest="heads")
    table = "n-grams of the drafter, for a staged arm (default: no such arm)"
    b.add_argument("--ngrams", metavar="FILE", help=table)
    add(b, "--trees", str, TREES, "trees that the heads fill", "+")
    model_trees = "trees that the draft model fills"
    add(b, "--model-trees", str, ("chain:4", "E", "auto"), model_trees, "+")
    add(b, "--typical", str, "sparse:16", "tree of the heads, with rule typical")
    add_batch(b)


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Measures decoding with heads; with `--ngrams`, also a staged drafter."""
    (target, drafter), prompts = load_models(args), load_prompts(args)
    heads = widened_heads(load_heads(args.heads, args.dtype), args.widen)
    ngrams = None if args.ngrams is None else load_ngrams(args.ngrams)
    arms = arms_of(args, ngrams is not None)
    work = workload(target, drafter, arms, prompts, args.max_new_tokens, args.batch)
    work = replace(work, heads=heads, ngrams=ngrams)
    accuracy = accuracies(work, prompts)
    texts = [
        text_of(work, prompts, args.typical, t) for t in args.temperatures if t > 0
    ]
    jax.clear_caches()  # programs of all arms together exhaust memory maps
    report = measure_arms(NAME, {"": work}, prompts, args.temperatures, run)
    report["accuracy"], report["texts"] = accuracy, texts
    report["bytes"] = {
        "target": weights_read(target),
        "heads": heads_read(heads, heads.config.heads),
        "model": weights_read(drafter),
        "lookup": 0,
    }
    report["results"] = with_traffic(report)
    return report


def arms_of(args: argparse.Namespace, staged: bool) -> list[Arm]:
    """Returns plain decoding, heads, the draft model, lookup and the rule typical."""
    arms = [Arm(PLAIN, None)]
    arms += [Arm(f"heads, {t}", t, drafting="heads") for t in args.trees]
    arms += [Arm(f"model, {t}", t) for t in args.model_trees]
    if staged:
        arms.append(Arm("staged, E", "E", drafting="staged", ahead=2))
    arms.append(Arm("lookup", "auto", drafting="lookup"))
    name = f"{TYPICAL}, {args.typical}"
    return [*arms, Arm(name, args.typical, TYPICAL, "heads")]


def decoded(
    work: Workload, texts: Sequence[Prompt], **options: Any
) -> tuple[Generation, list[list[int]]]:
    """Generates answers; returns them, and each prompt with its answer."""
    result = generate(
        work.target,
        list(texts),
        max_new_tokens=work.max_new_tokens,
        stop_tokens=(),
        **options,
    )
    prompts = encode_prompts(work.target, list(texts))
    pairs = zip(prompts, result.tokens, strict=True)
    return result, [prompt + own for prompt, own in pairs]


def accuracies(
    work: Workload, prompts: dict[str, list[Prompt]]
) -> dict[str, list[list[float]]]:
    """Returns for each prompt set how often the guess of rank r of head k is right,
    [k][r]."""
    assert work.heads is not None
    found = {}
    for title, texts in prompts.items():
        _, whole = decoded(work, texts, drafter=None)
        padded = np.zeros((len(whole), max(map(len, whole))), np.int32)
        for row, ids in zip(padded, whole, strict=True):
            row[: len(ids)] = ids
        ranks = ranks_in(work.heads, work.target, padded, 0)
        ranks = ranks.reshape(len(whole), -1, ranks.shape[-1])
        K = ranks.shape[-1]
        kept = [
            ranks[i, len(ids) - work.max_new_tokens - 1 : len(ids) - K - 1]
            for i, ids in enumerate(whole)
        ]
        every = np.concatenate(kept)
        found[title] = [
            (np.bincount(r[r < RANKS], minlength=RANKS) / len(every)).tolist()
            for r in every.T
        ]
        given = accuracy_table(every)
        found[f"{title}, given the heads before"] = given.tolist()
    return found


def text_of(
    work: Workload,
    prompts: dict[str, list[Prompt]],
    tree: str,
    temperature: float,
) -> dict[str, Any]:
    """Compares texts of typical acceptance with sampled and greedy ones.

    A rule that draws nothing is a distribution of one text, so its divergence
    KL(rule || target) in nats a token is the mean of -log p of its tokens. That of
    sampling is 0, and its mean of -log p is the target's entropy.
    """
    texts = [text for group in prompts.values() for text in group]
    settings = [Sampling(temperature, seed=i) for i in range(len(texts))]
    typical = {"rule": TYPICAL, "drafter": work.heads, "tree": tree}
    ways: dict[str, dict[str, Any]] = {
        "sampling": {"sampling": settings, "drafter": None},
        TYPICAL: {"sampling": settings, **typical},
        "greedy": {"drafter": None},
    }
    row: dict[str, Any] = {"temperature": temperature}
    for name, options in ways.items():
        result, whole = decoded(work, texts, **options)
        scored = log_probs_of(work.target, whole, result.tokens, temperature)
        row[name] = {
            "log_prob": float(np.mean(scored)),
            "divergence": 0.0 if name == "sampling" else -float(np.mean(scored)),
            "distinct": distinct(result.tokens),
            "tau": float(result.lengths.sum() / result.target_calls.sum()),
        }
    return row


def log_probs_of(
    target: Model,
    whole: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    temperature: float,
) -> np.ndarray:
    """Returns log-probabilities [n] of the answers under the target."""
    found = []
    for ids, own in zip(whole, answers, strict=True):
        padded = np.pad(np.asarray(ids, np.int32), (0, -len(ids) % 64))
        logits = np.asarray(score(target, padded[None])[0], np.float64) / temperature
        logits = logits[: len(ids) - 1, : target.config.num_tokens]
        logits -= logits.max(axis=-1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        found.append(log_p[np.arange(len(ids) - 1), ids[1:]][-len(own) :])
    return np.concatenate(found)


def distinct(texts: Sequence[Sequence[int]]) -> float:
    """Returns the number of distinct sequences of `GRAM` tokens in a text, divided by
    the number of all such sequences; the mean over texts."""
    shares = []
    for text in texts:
        runs = [tuple(text[i : i + GRAM]) for i in range(len(text) - GRAM + 1)]
        shares.append(len(set(runs)) / max(len(runs), 1))
    return float(np.mean(shares))


def with_traffic(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Adds "traffic" to the report's results: the bytes read per token, relative to
    plain decoding."""
    rows = []
    for row in report["results"]:
        units = records_of(report, row)
        own, plain = ([unit[arm] for unit in units] for arm in (row["arm"], PLAIN))
        rows.append(row | {"traffic": bytes_a_token(own) / bytes_a_token(plain)})
    return rows


def table(report: dict[str, Any]) -> str:
    """Returns accuracies, arms, and the texts of typical acceptance."""
    accuracies = [
        {"set": title, "head": k, "ranks": ranks}
        for title, heads in report["accuracy"].items()
        for k, ranks in enumerate(heads, start=1)
    ]
    ranks: list[Any] = [("set", "set"), ("head", "head")]
    ranks += [
        (f"in {r}", lambda row, r=r: sum(row["ranks"][:r]), ".1%") for r in RANKS_SHOWN
    ]
    arms = [
        ("set", "set"),
        ("T", "temperature", "g"),
        ("arm", "arm"),
        ("tau", "tau", ".2f"),
        ("bytes a token", "traffic", ".2f"),
        ("tokens/s", "tokens_per_s", ".0f"),
        ("over plain (quartiles)", "speedup", ".2f"),
        ("worst tenth", "worst_tenth", ".2f"),
        tables.equal(),
    ]
    texts = [
        {"T": row["temperature"], "text": name, **row[name]}
        for row in report["texts"]
        for name in ("sampling", TYPICAL, "greedy")
    ]
    about_texts = [
        ("T", "T", "g"),
        ("text", "text"),
        ("tau", "tau", ".2f"),
        ("log p a token", "log_prob", ".2f"),
        ("KL to the target", "divergence", ".2f"),
        ("distinct runs", "distinct", ".0%"),
    ]
    weights = ", ".join(f"{k} {v / 1e6:.2f} MB" for k, v in report["bytes"].items())
    sections = [
        "How often the token is among a head's first guesses, in greedy text.",
        tables.table(ranks, accuracies),
        tables.table(arms, report["results"]),
        f"Weights: {weights}.",
    ]
    return "\n\n".join(sections + [tables.table(about_texts, texts)] * bool(texts))


def figures(report: dict[str, Any]) -> "dict[str, Figure]":
    """Draws accuracies by head and rank, tau and speed by tree, a point per set."""
    temperatures = report["temperatures"]
    figure, axes = panels(1 + 2 * len(temperatures), report, "Medusa heads")
    for k in range(max(map(len, report["accuracy"].values()))):
        reached = [
            {"set": "_" * bool(k) + title, "rank": r, "found": sum(heads[k][:r])}
            for title, heads in report["accuracy"].items()
            if "," not in title
            for r in range(1, len(heads[k]) + 1)
        ]
        words = "among so many guesses", "share of tokens found"
        style = {"alpha": 1 - 0.2 * k, "markersize": 3}
        title = "greedy text; paler: later heads"
        lines(axes[0], reached, "rank", "found", "set", *words, title, style)
    axes[0].set_ylim(0, 1)
    values: dict[str, tables.Value] = {
        "tokens a call": "tau",
        "times plain": lambda row: row["speedup"]["median"],
    }
    places = list(product(temperatures, values.items()))
    for ax, (temperature, (what, value)) in zip(axes[1:], places, strict=True):
        mode = "greedy" if temperature == 0 else f"T = {temperature:g}"
        rows = [
            row
            for row in report["results"]
            if row["temperature"] == temperature and row["arm"] != PLAIN
        ]
        title = f"{what}, {mode}"
        lines(ax, rows, value, "arm", "set", title=title, style=POINTS, legend=None)
        ax.invert_yaxis()
        ax.axvline(1, **GUIDE)
        ax.grid(axis="x", linewidth=0.5, alpha=0.4)
        ax.tick_params(axis="y", labelsize=7)
    return {"": figure}
