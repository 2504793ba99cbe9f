"""Compares drafters: draft models, heads, block drafters, MTP layers, prompt lookup.

Two kinds of figures. On the target's own answers, greedy and sampled, every drafter
drafts at every place, as a chain and as the best tree of a number of nodes; block
drafters with scores of pairs also by their marginals, which ignore what is drafted
before a token, and DFlash drafters with n-grams. These figures do not depend on the
machine, and are without prompt lookup. Then decoding is measured.
"""

import argparse
from dataclasses import replace
from typing import Any

import jax

from bench import tables
from bench.arms import PLAIN, Arm, Workload, measure_arms, workload
from bench.inputs import load_prompts
from bench.marginals import Marginals
from bench.method import Run
from bench.options import add_batch, add_prompts, add_temperatures
from bench.prompts import Prompt
from bench.widen import widened, widened_drafter
from stree_jax.checkpoints.kinds.ngrams import load_ngrams
from stree_jax.checkpoints.pair import load_pair
from stree_jax.cli.options import add
from stree_jax.common.words import LOOKUP
from stree_jax.generation.generate import encode_prompts, generate
from stree_jax.models import Model
from stree_jax.models.drafters.dflash import DFlash
from stree_jax.models.stack.memory import weights_read
from stree_jax.sampling.settings import Sampling
from stree_jax.speculation.drafters.ngram_pairs import WithNGrams
from stree_jax.speculation.drafters.ngrams import NGrams
from stree_jax.speculation.drafters.table import AnyDrafter, source_of
from stree_jax.speculation.source import Source
from stree_jax.speculation.tree import Budget
from stree_jax.verify.agreement import Agreement, agreement, joined

NAME, REPEATS = "drafters", 2
SIDES = 3  # levels for which children of siblings are shown


def add_options(b: argparse.ArgumentParser) -> None:
    add_prompts(b, 10)
    add_temperatures(b, (0, 1))
    names = "drafters, as --drafter of generate"
    add(b, "--drafters", str, ("demo", "demo-heads", "demo-dspark"), names, "+")
    text = "n-grams that score pairs for DFlash drafters (from stree-jax ngrams)"
    add(b, "--ngrams", str, None, text, metavar="FILE")
    add(b, "--nodes", int, 16, "of the best trees")
    add(b, "--levels", int, 7, "most levels of chains and trees")
    add_batch(b)


def measure(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    """Measures agreement on the target's answers, then decoding."""
    prompts, (target, found) = load_prompts(args), load_drafters(args)
    ngrams = None if args.ngrams is None else load_ngrams(args.ngrams)
    arms = [Arm(PLAIN, None), Arm("lookup", "auto", drafting=LOOKUP)]
    for name, drafter in found.items():
        depth = _depth(source_of(drafter, target.config), args.levels)
        arms += [Arm(f"{name}, {t}", t, None, name) for t in (f"chain:{depth}", "auto")]
    none: Any = None  # every arm names its drafter
    work = workload(target, none, arms, prompts, args.max_new_tokens, args.batch)
    work = replace(work, others=found)
    agreed = [
        {"set": title, "temperature": t, "drafter": name} | row
        for title, texts in prompts.items()
        for t in args.temperatures
        for name, drafter in found.items()
        for row in agreements(work, texts, drafter, t, ngrams, args.nodes, args.levels)
    ]
    jax.clear_caches()  # programs of all drafters together exhaust memory maps
    report = measure_arms(NAME, {"": work}, prompts, args.temperatures, run)
    return report | {
        "agreement": agreed,
        "bytes": {n: round_bytes(target, d, args.levels) for n, d in found.items()}
        | {"target": weights_read(target)},
    }


def load_drafters(args: argparse.Namespace) -> tuple[Model, dict[str, AnyDrafter]]:
    """Loads the target, with its MTP layers if a drafter needs them, and the drafters
    by name; zero-padded by the factor `--widen`."""
    loaded = {name: load_pair(args.model, name, args.dtype) for name in args.drafters}
    targets = [target for target, _ in loaded.values()]
    small = next((target for target in targets if target.config.mtp), targets[0])
    found = {n: widened_drafter(d, small, args.widen) for n, (_, d) in loaded.items()}
    return widened(small, args.widen), found


def _depth(source: Source, levels: int) -> int:
    return min(levels, source.search_size[1])


def agreements(
    work: Workload,
    texts: list[Prompt],
    drafter: AnyDrafter,
    temperature: float,
    ngrams: NGrams | None,
    nodes: int,
    levels: int,
) -> list[dict[str, Any]]:
    """Returns a row for each way to draft, on the target's answers."""
    target = work.target
    settings = [Sampling(temperature, seed=i) for i in range(len(texts))]
    answers = generate(
        target,
        list(texts),
        max_new_tokens=work.max_new_tokens,
        stop_tokens=(),
        drafter=LOOKUP,
        sampling=settings,
    )
    prompts = encode_prompts(target, list(texts))
    depth = _depth(source_of(drafter, target.config), levels)
    rows = []
    for way, other, tree in ways(drafter, ngrams, nodes, depth):
        parts = []
        for ids, own, sampling in zip(prompts, answers.tokens, settings, strict=True):
            text, start = [*ids, *own], len(ids)
            found = agreement(
                target, other, text, tree, sampling=sampling, prompt=start
            )
            parts.append(found.after(start - 1))
        rows.append({"way": way} | figures_of(joined(parts)))
    return rows


def ways(
    drafter: AnyDrafter, ngrams: NGrams | None, nodes: int, depth: int
) -> list[tuple[str, AnyDrafter | Source, Any]]:
    """Returns the ways to draft: name, drafter and tree."""
    best = Budget(nodes, depth)
    found: list[tuple[str, AnyDrafter | Source, Any]] = [
        ("chain", drafter, f"chain:{depth}"),
        (f"tree of {nodes}", drafter, best),
    ]
    if isinstance(drafter, DFlash) and drafter.config.pairs:
        found.insert(1, (f"tree of marginals, {nodes}", Marginals(drafter), best))
    elif isinstance(drafter, DFlash) and ngrams is not None:
        more = WithNGrams(drafter, ngrams)
        found.append(("chain with n-grams", more, f"chain:{depth}"))
        found.append((f"tree of {nodes} with n-grams", more, best))
    return found


def figures_of(found: Agreement) -> dict[str, Any]:
    """Returns tau, how often the drafts of each level are right, and how often a child
    of a right sibling is."""
    return {
        "tau": found.tau(),
        "by_position": [share for share, _ in found.by_position()],
        "after_siblings": found.after_siblings(),
        "places": len(found.tokens),
    }


def round_bytes(target: Model, drafter: AnyDrafter, levels: int) -> int:
    """Returns the bytes that the drafting of one round reads."""
    source = source_of(drafter, target.config)
    work = source.work(target)
    passes = _depth(source, levels)
    return work.read_once + sum(weights_read(m) * passes for m in work.models)


def table(report: dict[str, Any]) -> str:
    """Returns agreement and decoding."""

    def share(row: dict[str, Any], level: int) -> str:
        found = row["by_position"]
        return f"{found[level]:.0%}" if level < len(found) else ""

    def side(row: dict[str, Any], level: int) -> str:
        found = row["after_siblings"]
        known = level < len(found) and found[level][1]
        return f"{found[level][0]:.0%} of {found[level][1]}" if known else ""

    agreed: list[Any] = [("set", "set"), ("T", "temperature", "g")]
    agreed += [("drafter", "drafter"), ("drafts", "way"), ("tau", "tau", ".2f")]
    for k in (0, 1, 3):
        agreed.append((f"draft {k + 1} right", lambda row, k=k: share(row, k)))
    for k in range(SIDES):
        title = f"below a sibling at level {k + 1}"
        agreed.append((title, lambda row, k=k: side(row, k)))
    arms = [
        ("set", "set"),
        ("T", "temperature", "g"),
        ("arm", "arm"),
        ("tau", "tau", ".2f"),
        ("tokens/s", "tokens_per_s", ".0f"),
        ("over plain (quartiles)", "speedup", ".2f"),
        tables.equal(),
    ]
    read = ", ".join(f"{k} {v / 1e6:.2f} MB" for k, v in report["bytes"].items())
    return "\n\n".join(
        [
            "Drafts at every place of the target's answers.",
            tables.table(agreed, report["agreement"]),
            tables.table(arms, report["results"]),
            f"Read in a round: {read}.",
        ]
    )
