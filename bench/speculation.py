"""Decoding arms side by side on prompts: plain, chains, trees, rules, baselines."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.bench.method import (
    Run,
    measure,
    quartiles_of,
    sign_test,
    spread,
    take_turns,
)
from stree_jax.bench.prompts import Prompt, rounds
from stree_jax.bench.tables import shown, table
from stree_jax.bench.widen import sizes_of
from stree_jax.checkpoints.load import Model
from stree_jax.generation import begin, encode_prompts
from stree_jax.models.heads import Heads, first_heads
from stree_jax.result import Generation, Plan, summarise
from stree_jax.sampling.settings import Sampling
from stree_jax.scoring import first_difference
from stree_jax.sizing import step_times
from stree_jax.speculation import loop
from stree_jax.speculation.accept import resolve_rule
from stree_jax.speculation.adaptive.policy import AdaptivePolicy
from stree_jax.speculation.decoding import Decoding
from stree_jax.speculation.drafters.ngrams import NGrams
from stree_jax.speculation.drafters.staged import Staged
from stree_jax.speculation.specs import LOOKUP
from stree_jax.speculation.step import Verify, packed
from stree_jax.speculation.tree import chain, resolve_tree

# Logits as close as this may change places, by dtype of all arrays but weights.
TIE = {"float32": 1e-4, "bfloat16": 0.2}
PLAIN = "plain"


@dataclass(frozen=True)
class Arm:
    """A way to decode.

    Attributes:
      name: as in tables.
      tree: a name or parents, as `generate` takes them; None: plain decoding.
      rule: a name; None: the default.
      drafting: who drafts: the model, "lookup", n-grams or heads alone, or n-grams for
        the model ("staged").
      ahead, width: levels that they guess for it, and tokens of a node.
      heads: how many of them, the first; 0: all.
      verify: how trees are verified, see `stree_jax.speculation.step`.
    """

    name: str
    tree: str | tuple[int, ...] | None
    rule: str | None = None
    drafting: Literal["model", "lookup", "ngrams", "staged", "heads"] = "model"
    ahead: int = 0
    width: int = 1
    heads: int = 0
    verify: Verify = packed

    @property
    def promises_tokens(self) -> bool:
        """Whether its sampled text is plain decoding's, as the default rule's is."""
        return (
            self.rule is None or resolve_rule(self.rule, chain(0)).promise == "tokens"
        )


def tree_of(arm: str) -> str:
    """The tree in an arm's name."""
    return arm.rpartition("@")[2]


def parse_arm(name: str) -> Arm:
    """An arm from "plain", "lookup", "A" (a tree) or "mss@A" (a rule and a tree).

    Raises:
      ValueError: an unknown tree or rule, or one that does not fit the other.
    """
    if name == PLAIN:
        return Arm(name, None)
    if name == LOOKUP:
        return Arm(name, "auto", drafting="lookup")
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
      ngrams: of the drafter, where an arm has them.
      heads: of the target, likewise.
      top_k: of sampling; 0: off.
    """

    target: Model
    drafter: Model
    arms: tuple[Arm, ...]
    max_new_tokens: int
    batch: int
    capacity: int
    ngrams: NGrams | None = None
    heads: Heads | None = None
    top_k: int = 0

    def drafter_of(self, arm: Arm) -> Model | Heads | Staged | NGrams | str | None:
        """Who drafts in an arm."""
        if arm.tree is None:
            return None
        match arm.drafting:
            case "lookup":
                return LOOKUP
            case "ngrams":
                return self.ngrams
            case "heads":
                if self.heads is None or not arm.heads:
                    return self.heads
                return first_heads(self.heads, arm.heads)
            case "staged":
                return Staged(self.drafter, self.ngrams, arm.ahead, arm.width)
            case _:
                return self.drafter


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
    sampling = [
        Sampling(temperature, top_k=work.top_k, seed=i) for i in range(len(texts))
    ]
    return begin(
        work.target,
        list(texts),
        max_new_tokens=work.max_new_tokens,
        stop_tokens=(),
        drafter=work.drafter_of(arm),
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
    jax.block_until_ready(decoding)
    began = time.perf_counter()
    spec = plan.spec
    if isinstance(spec.policy, AdaptivePolicy):
        spec = step_times.timed(spec, decoding)
        plan = replace(plan, spec=spec)  # whose n-grams guess, or not
    decoding = loop.advance_jit(
        spec, decoding, jnp.int32(loop.FOREVER), verify=arm.verify
    )
    jax.block_until_ready(decoding)
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
    which = "greedy " if temperature == 0 else "sampled "
    names = {which + arm.name: arm for arm in work.arms}
    calls: dict[str, Callable[[], Any]] = {n: call(arm) for n, arm in names.items()}
    results, first = take_turns(calls | others, repeats, warm)
    last = {arm.name: results[name][-1] for name, arm in names.items()}
    if temperature == 0:
        check_ties(work.target, texts, last)
    record: dict[str, Any] = {}
    for name, arm in names.items():
        same = last[PLAIN] if temperature == 0 or arm.promises_tokens else None
        record[arm.name] = record_of(results[name], same, first.get(name))
    for name in others:
        seconds = {"seconds": results[name], "first_call_s": first.get(name)}
        record[name] = record[PLAIN] | seconds | {"gained": None, "equal": None}
    return record


def record_of(
    turns: Sequence[Generation], same: Generation | None, first_call_s: float | None
) -> dict[str, Any]:
    """The record of an arm's turns.

    Args:
      same: whose tokens the arm's should be, if there is such a one.
      first_call_s: None where the arm was warm.
    """
    last = turns[-1]
    return {
        "seconds": [turn.decode_s for turn in turns],
        "tokens": int(last.lengths.sum()),
        "calls": int(last.target_calls.sum()),
        "gained": last.gained.sum(axis=0).tolist(),
        "traffic": [asdict(stage) for stage in last.traffic],
        "equal": None if same is None else last.tokens == same.tokens,
        "first_call_s": first_call_s,
    }


def check_ties(
    target: Model, texts: Sequence[Prompt], results: dict[str, Generation]
) -> None:
    """Every difference from plain decoding is at a tie of the target's logits.

    Raises:
      RuntimeError: it is not.
    """
    tie = TIE[target.weight_format.dtype.name]
    for row, ids in enumerate(encode_prompts(target, list(texts))):
        plain = results[PLAIN].tokens[row]
        for name, result in results.items():
            parted = first_difference(target, ids, plain, result.tokens[row])
            if parted is not None and parted[1] > tie:
                raise RuntimeError(
                    f"{name}: token {parted[0]} differs from plain decoding, and the "
                    f"two logits are {parted[1]:.3g} apart; prompt {texts[row]!r}"
                )


def settings_of(
    benchmark: str,
    pairs: Mapping[str, tuple[Model, Model]],
    prompts: Mapping[str, Sequence[Prompt]],
) -> dict[str, Any]:
    """The settings of any measurement of pairs on prompts."""
    target, _ = next(iter(pairs.values()))
    return {
        "kind": benchmark,
        "dtype": str(target.weight_format),
        "parameters": {label: sizes_of(*pair) for label, pair in pairs.items()},
        "sets": {title: len(texts) for title, texts in prompts.items()},
    }


def measure_arms(
    benchmark: str,
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
    units = {
        f"{label}/{title}/T={temperature:g}/{i}": (label, texts, temperature)
        for i, groups in enumerate(rounds(prompts, any_work.batch))
        for temperature in temperatures
        for title, texts in groups.items()
        for label in works
    }
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

    pairs = {label: (work.target, work.drafter) for label, work in works.items()}
    settings = settings_of(benchmark, pairs, prompts) | {
        "pairs": list(works),
        "arms": [arm.name for arm in any_work.arms],
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
        way = arm.tree, arm.drafting, arm.ahead, arm.width, arm.verify
        kept.setdefault(way, arm)
    return tuple(kept.values())


def summarise_arms(units: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per pair, set, temperature and arm, from the records of the units."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for name, record in units.items():
        label, title, temperature, _ = name.split("/")
        groups.setdefault((label, title, temperature), []).append(record)
    rows = []
    for (label, title, temperature), records in groups.items():
        chain = next((n for n in records[0] if tree_of(n).startswith("chain")), None)
        for arm in records[0]:
            row = {"pair": label, "set": title, "temperature": float(temperature[2:])}
            rows.append(row | {"arm": arm} | summarise_arm(records, arm, chain))
    return rows


def summarise_cells(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What an arm's records, one a unit, say of it alone.

    tau counts tokens and calls of all units. Speeds are of the median turn; their
    median and quartiles are over units.
    """
    seconds = [median(c["seconds"]) for c in cells]
    per_call = [s / c["calls"] for s, c in zip(seconds, cells, strict=True)]
    return {
        "units": len(cells),
        "tau": sum(c["tokens"] for c in cells) / sum(c["calls"] for c in cells),
        **quartiles_of("tokens_per_s", rates(cells)),
        "ms_per_call": 1e3 * median(per_call),
        "first_call_s": max(c["first_call_s"] or 0 for c in cells),
    }


def rates(cells: Sequence[dict[str, Any]]) -> list[float]:
    """Tokens per second of the median turn, by unit."""
    return [c["tokens"] / median(c["seconds"]) for c in cells]


def summarise_arm(
    records: Sequence[dict[str, Any]], arm: str, chain: str | None
) -> dict[str, Any]:
    """Statistics of an arm over the units of one set; ratios are made unit by unit."""
    cells = [record[arm] for record in records]

    def over(other: str) -> list[float]:
        others = rates([record[other] for record in records])
        return [a / b for a, b in zip(rates(cells), others, strict=True)]

    speedups = over(PLAIN)
    promised = cells[0]["equal"] is not None
    row = summarise_cells(cells) | {
        "speedup": spread(speedups),
        "worst_tenth": float(np.quantile(speedups, 0.1)),
        "faster_than_plain": sum(s > 1 for s in speedups),
        "p_plain": sign_test(speedups),
        "equal_to_plain": sum(c["equal"] for c in cells) if promised else None,
        "over_chain": None,
        "p_chain": None,
    }
    if chain is not None and arm != chain:
        row["over_chain"], row["p_chain"] = median(over(chain)), sign_test(over(chain))
    return row


def arms_table(report: dict[str, Any]) -> str:
    """A row per pair, set, temperature and arm."""
    many = len(report["pairs"]) > 1
    head = ["pair"] if many else []
    head += ["set", "T", "arm", "tau", "tokens/s", "ms/call", "over plain (quartiles)"]
    head += ["worst tenth", "faster, p", "over chain, p", "equal", "first call, s"]
    rows = []
    for row in report["results"]:
        s, n = row["speedup"], row["units"]
        chain = shown(row["over_chain"], ".2f")
        if row["p_chain"] is not None:
            chain += f", {row['p_chain']:.2g}"
        equal = row["equal_to_plain"]
        cells = [row["pair"]] if many else []
        greedy = row["temperature"] == 0  # which knows no rules
        named = tree_of(row["arm"]) if greedy else row["arm"]
        cells += [row["set"], f"{row['temperature']:g}", named]
        cells += [f"{row['tau']:.2f}", f"{row['tokens_per_s']:.0f}"]
        cells += [f"{row['ms_per_call']:.2f}"]
        cells += [f"{s['median']:.2f} ({s['low']:.2f}..{s['high']:.2f})"]
        cells += [f"{row['worst_tenth']:.2f}"]
        plain = row["arm"] == PLAIN
        faster = f"{row['faster_than_plain']}/{n}, {row['p_plain']:.2g}"
        cells += ["-" if plain else faster, chain]
        cells += ["-" if equal is None else f"{equal}/{n}"]
        cells += [f"{row['first_call_s']:.1f}"]
        rows.append(cells)
    return table(head, rows)


def temperature_table(report: dict[str, Any]) -> str:
    """tau and speed-up over plain decoding, by arm and temperature, set by set."""
    sections = []
    for title in report["sets"]:
        rows = [row for row in report["results"] if row["set"] == title]
        plain = {
            row["temperature"]: f"{row['tokens_per_s']:.0f}"
            for row in sorted(rows, key=lambda row: row["temperature"])
            if row["arm"] == PLAIN
        }
        lines = [
            [arm, *(_tau_and_speed(row_of(rows, arm, t)) for t in plain)]
            for arm in dict.fromkeys(row["arm"] for row in rows)
        ]
        lines.append(["plain, tokens/s", *plain.values()])
        sections += [
            f"{title}, {report['sets'][title]} prompts, batch {report['batch']}: "
            "tau (over plain)",
            table(["rule and tree", *(f"T = {t:g}" for t in plain)], lines),
        ]
    return "\n\n".join(sections)


def _tau_and_speed(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{row['tau']:.2f} ({row['speedup']['median']:.2f}x)"


def row_of(
    rows: Sequence[dict[str, Any]], arm: str, temperature: float
) -> dict[str, Any] | None:
    """The row of an arm; at T = 0 one arm a tree was run, and stands for all of it."""

    def same(name: str) -> bool:
        return name == arm or (temperature == 0 and tree_of(name) == tree_of(arm))

    at = (row for row in rows if row["temperature"] == temperature)
    return next((row for row in at if same(row["arm"])), None)
