"""Decoding arms side by side on prompts: plain, chains, trees, rules, baselines."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from stree_jax.bench.method import Run, measure, sign_test, spread, take_turns
from stree_jax.bench.prompts import Prompt
from stree_jax.bench.unroll import Unrolled
from stree_jax.bench.widen import sizes_of
from stree_jax.checkpoint import Model, without_tokenizer
from stree_jax.generation import FOREVER, begin, encode_prompts
from stree_jax.models import param_dtype
from stree_jax.result import Generation, Plan, summarise
from stree_jax.sampling.settings import Sampling
from stree_jax.scoring import first_difference
from stree_jax.speculation import loop
from stree_jax.speculation.accept import resolve_rule
from stree_jax.speculation.loop import Decoding
from stree_jax.speculation.tree import resolve_tree

TIE = {"float32": 1e-4, "bfloat16": 0.2}  # so close logits may change places
PLAIN = "plain"


@dataclass(frozen=True)
class Arm:
    """A way to decode.

    Attributes:
      name: as in tables.
      tree: a name or parents, as `generate` takes them; None: plain decoding.
      rule: a name; None: the default.
      unrolled: how to verify if not packed.
    """

    name: str
    tree: str | tuple[int, ...] | None
    rule: str | None = None
    unrolled: Unrolled | None = None


def parse_arm(name: str) -> Arm:
    """An arm from "plain", "A" (a tree) or "mss@A" (a rule and a tree).

    Raises:
      ValueError: an unknown tree or rule, or one that does not fit the other.
    """
    if name == PLAIN:
        return Arm(name, None)
    rule, _, tree = name.rpartition("@")
    shape = resolve_tree(tree)
    if rule:
        resolve_rule(rule, shape)
    return Arm(name, tree, rule or None)


@dataclass(frozen=True)
class Workload:
    """What the arms have to do.

    Attributes:
      target, drafter: models.
      arms: plain decoding first.
      max_new_tokens: of every row; no text ends before, so that all arms do the same.
      batch: prompts decoded together.
      capacity: of the caches, so that all prompts share a program.
    """

    target: Model
    drafter: Model
    arms: tuple[Arm, ...]
    max_new_tokens: int
    batch: int
    capacity: int


def workload(
    target: Model,
    drafter: Model,
    arms: Sequence[Arm],
    prompts: dict[str, list[Prompt]],
    max_new_tokens: int,
    batch: int = 1,
) -> Workload:
    """A workload with room for the longest prompt.

    Raises:
      ValueError: a set with fewer prompts than a batch.
    """
    for name, texts in prompts.items():
        if len(texts) < batch:
            raise ValueError(
                f"--count: {len(texts)} of {name} make no batch of {batch}"
            )
    texts = [text for group in prompts.values() for text in group]
    longest = max(map(len, encode_prompts(target, texts)))
    room = longest + max_new_tokens + 256  # whole chunks of text, a path of a tree
    return Workload(target, drafter, tuple(arms), max_new_tokens, batch, room)


def begin_arm(
    work: Workload, arm: Arm, texts: Sequence[Prompt], temperature: float
) -> tuple[Decoding, Plan]:
    """Texts read and ready to be decoded; seeds are the rows' own, whatever the arm."""
    sampling = [Sampling(temperature, seed=i) for i in range(len(texts))]
    return begin(
        work.target,
        list(texts),
        max_new_tokens=work.max_new_tokens,
        stop_tokens=(),
        drafter=None if arm.tree is None else work.drafter,
        tree=arm.tree,
        rule=arm.rule,
        sampling=None if temperature == 0 else sampling,
        capacity=work.capacity,
    )


def decode_once(
    work: Workload, arm: Arm, texts: Sequence[Prompt], temperature: float
) -> Generation:
    """One generation, the decoding timed."""
    decoding, plan = begin_arm(work, arm, texts, temperature)
    jax.block_until_ready(decoding.count)
    began = time.perf_counter()
    bare = (
        without_tokenizer(work.target),
        None if plan.drafter is None else without_tokenizer(plan.drafter),
    )
    decoding = loop.advance_jit(
        *bare, plan.tree, decoding, jnp.int32(FOREVER), plan.rule, arm.unrolled
    )
    jax.block_until_ready(decoding.count)
    seconds = time.perf_counter() - began
    return summarise(plan, decoding, [0] * len(plan.text), (0.0, seconds), False)


def decode_unit(
    work: Workload,
    texts: Sequence[Prompt],
    temperature: float,
    repeats: int,
    warm: set[str],
    others: dict[str, Callable[[], Any]],
) -> dict[str, Any]:
    """The record of one batch of prompts at one temperature: every arm, all turns.

    Args:
      others: decoders that are not ours, by name; called, they return seconds.

    Raises:
      RuntimeError: greedy tokens differ from plain decoding's beyond a tie.
    """

    def call(arm: Arm) -> Callable[[], Generation]:
        return lambda: decode_once(work, arm, texts, temperature)

    # Greedy and sampled programs differ, and are warmed up apart.
    kind = "greedy " if temperature == 0 else "sampled "
    names = {kind + arm.name: arm for arm in work.arms}
    calls: dict[str, Callable[[], Any]] = {n: call(arm) for n, arm in names.items()}
    results, first = take_turns(calls | others, repeats, warm)
    last = {arm.name: results[name][-1] for name, arm in names.items()}
    if temperature == 0:
        check_ties(work.target, texts, last)
    record: dict[str, Any] = {}
    for name, arm in names.items():
        result = last[arm.name]
        # The other rules keep the distribution, not the very tokens.
        promised = temperature == 0 or (arm.rule or "naive").startswith("naive")
        record[arm.name] = {
            "seconds": [turn.decode_s for turn in results[name]],
            "tokens": int(result.lengths.sum()),
            "calls": int(result.target_calls.sum()),
            "gained": result.gained.sum(axis=0).tolist(),
            "equal": result.tokens == last[PLAIN].tokens if promised else None,
            "first_call_s": first.get(name),
        }
    tokens = record[PLAIN]["tokens"]
    for name in others:
        record[name] = {
            "seconds": results[name],
            "tokens": tokens,
            "calls": tokens,
            "gained": None,
            "equal": None,
            "first_call_s": first.get(name),
        }
    return record


def check_ties(
    target: Model, texts: Sequence[Prompt], results: dict[str, Generation]
) -> None:
    """Every difference from plain decoding is at a tie of the target's logits.

    Raises:
      RuntimeError: it is not.
    """
    tie = TIE[str(param_dtype(target.params))]
    for row, ids in enumerate(encode_prompts(target, list(texts))):
        plain = results[PLAIN].tokens[row]
        for name, result in results.items():
            parted = first_difference(target, ids, plain, result.tokens[row])
            if parted is not None and parted[1] > tie:
                raise RuntimeError(
                    f"{name}: token {parted[0]} differs from plain decoding, and the "
                    f"two logits are {parted[1]:.3g} apart; prompt {texts[row]!r}"
                )


def measure_arms(
    kind: str,
    works: dict[str, Workload],
    prompts: dict[str, list[Prompt]],
    temperatures: Sequence[float],
    run: Run,
    others: Callable[[Prompt], dict[str, Callable[[], float]]] | None = None,
) -> dict[str, Any]:
    """Every workload (a pair of models) on every prompt set at every temperature.

    Units are ordered so that a run that is cut short has some of everything. Greedy
    arms are those whose trees differ: rules make no difference then.

    Args:
      works: by label, "" where there is one pair only.
      others: makes decoders that are not ours for a text, greedy.
    """
    any_work = next(iter(works.values()))
    units = {}
    groups = max(len(texts) // any_work.batch for texts in prompts.values())
    for i in range(groups):
        for temperature in temperatures:
            for title, texts in prompts.items():
                group = texts[i * any_work.batch : (i + 1) * any_work.batch]
                for label in works:
                    if len(group) == any_work.batch:
                        name = f"{label}/{title}/T={temperature:g}/{i}"
                        units[name] = (label, group, temperature)
    warm = {label: set[str]() for label in works}

    def work_unit(name: str) -> dict[str, Any]:
        label, group, temperature = units[name]
        work = works[label]
        strangers = {}
        if temperature == 0:
            work = replace(work, arms=_greedy_arms(work.arms))
            strangers = {} if others is None else others(group[0])
        return decode_unit(
            work, group, temperature, run.repeats, warm[label], strangers
        )

    settings = {
        "kind": kind,
        "dtype": str(param_dtype(any_work.target.params)),
        "pairs": list(works),
        "parameters": {k: sizes_of(w.target, w.drafter) for k, w in works.items()},
        "arms": [arm.name for arm in any_work.arms],
        "sets": {title: len(texts) for title, texts in prompts.items()},
        "temperatures": list(temperatures),
        "batch": any_work.batch,
        "max_new_tokens": any_work.max_new_tokens,
    }
    report = measure(settings, units, work_unit, run)
    return {**report, "results": summarise_arms(report["units"])}


def _greedy_arms(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """One arm a tree and way to verify."""
    kept: dict[Any, Arm] = {}
    for arm in arms:
        kept.setdefault((arm.tree, arm.unrolled), arm)
    return tuple(kept.values())


def summarise_arms(units: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per pair, set, temperature and arm, from the records of the units."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for name, record in units.items():
        label, title, temperature, _ = name.split("/")
        groups.setdefault((label, title, temperature), []).append(record)
    rows = []
    for (label, title, temperature), records in groups.items():
        chain = next((n for n in records[0] if is_chain(n)), None)
        for arm in records[0]:
            row = {"pair": label, "set": title, "temperature": float(temperature[2:])}
            rows.append(row | {"arm": arm} | summarise_arm(records, arm, chain))
    return rows


def is_chain(name: str) -> bool:
    return name.rpartition("@")[2].startswith("chain")


def summarise_arm(
    records: list[dict[str, Any]], arm: str, chain: str | None
) -> dict[str, Any]:
    """Statistics of an arm over the units of one set.

    tau counts tokens and calls of all units. Speeds are ratios of medians over the
    turns, unit by unit; their median and quartiles are over units.
    """

    def rates(name: str) -> list[float]:
        """Tokens per second, by unit."""
        return [
            r[name]["tokens"] / spread(r[name]["seconds"])["median"] for r in records
        ]

    cells = [record[arm] for record in records]
    own, plain = rates(arm), rates(PLAIN)
    speedups = [a / b for a, b in zip(own, plain, strict=True)]
    calls = sum(c["calls"] for c in cells)
    seconds = [spread(c["seconds"])["median"] for c in cells]
    row = {
        "units": len(cells),
        "tau": sum(c["tokens"] for c in cells) / calls,
        "tokens_per_s": spread(own)["median"],
        "ms_per_call": 1e3
        * spread([s / c["calls"] for s, c in zip(seconds, cells, strict=True)])[
            "median"
        ],
        "speedup": spread(speedups),
        "faster_than_plain": sum(s > 1 for s in speedups),
        "p_plain": sign_test(speedups),
        "equal_to_plain": None
        if cells[0]["equal"] is None
        else sum(c["equal"] for c in cells),
        "first_call_s": max((c["first_call_s"] or 0 for c in cells), default=0),
        "over_chain": None,
        "p_chain": None,
    }
    if chain is not None and arm != chain:
        ratios = [a / b for a, b in zip(own, rates(chain), strict=True)]
        row |= {"over_chain": spread(ratios)["median"], "p_chain": sign_test(ratios)}
    return row


def arms_table(report: dict[str, Any]) -> str:
    """A row per pair, set, temperature and arm."""
    many = len(report["pairs"]) > 1
    head = ["pair"] if many else []
    head += ["set", "T", "arm", "tau", "tokens/s", "ms/call", "over plain (quartiles)"]
    head += ["faster, p", "over chain, p", "equal", "first call, s"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for row in report["results"]:
        s, n = row["speedup"], row["units"]
        chain = "-" if row["over_chain"] is None else f"{row['over_chain']:.2f}"
        if row["p_chain"] is not None:
            chain += f", {row['p_chain']:.2g}"
        equal = row["equal_to_plain"]
        cells = [row["pair"]] if many else []
        greedy = row["temperature"] == 0  # which knows no rules
        named = row["arm"].rpartition("@")[2] if greedy else row["arm"]
        cells += [row["set"], f"{row['temperature']:g}", named]
        cells += [f"{row['tau']:.2f}", f"{row['tokens_per_s']:.0f}"]
        cells += [f"{row['ms_per_call']:.2f}"]
        cells += [f"{s['median']:.2f} ({s['low']:.2f}..{s['high']:.2f})"]
        plain = row["arm"] == PLAIN
        faster = f"{row['faster_than_plain']}/{n}, {row['p_plain']:.2g}"
        cells += ["-" if plain else faster, chain]
        cells += ["-" if equal is None else f"{equal}/{n}"]
        cells += [f"{row['first_call_s']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def temperature_table(report: dict[str, Any]) -> str:
    """tau and speed-up over plain decoding, by arm and temperature, set by set."""
    lines = []
    for title in report["sets"]:
        rows = [row for row in report["results"] if row["set"] == title]
        temperatures = sorted({row["temperature"] for row in rows})
        cells = {(row["arm"], row["temperature"]): row for row in rows}
        lines += [
            f"{title}, {report['sets'][title]} prompts, batch {report['batch']}: "
            "tau (over plain)\n",
            f"| rule and tree | {' | '.join(f'T = {t:g}' for t in temperatures)} |",
            f"| --- |{' --- |' * len(temperatures)}",
        ]
        for arm in dict.fromkeys(row["arm"] for row in rows):
            shown = []
            for t in temperatures:
                row = cells.get((arm, t)) or _same_tree(rows, arm, t)
                speed = row["speedup"]["median"] if row else 0
                shown += [f"{row['tau']:.2f} ({speed:.2f}x)" if row else "-"]
            lines.append(f"| {arm} | {' | '.join(shown)} |")
        rates = [cells[PLAIN, t]["tokens_per_s"] for t in temperatures]
        rates_shown = " | ".join(f"{rate:.0f}" for rate in rates)
        lines += [f"| plain, tokens/s | {rates_shown} |", ""]
    return "\n".join(lines)


def _same_tree(
    rows: list[dict[str, Any]], arm: str, temperature: float
) -> dict[str, Any] | None:
    """At T = 0 one arm a tree was run: the row that stands for this one."""
    tree = arm.rpartition("@")[2]
    same = (
        row
        for row in rows
        if row["temperature"] == temperature and row["arm"].rpartition("@")[2] == tree
    )
    return next(same, None)
