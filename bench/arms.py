"""Measures decoding setups ("arms") on the same prompts, and compares them.

An arm is a drafter, a tree and an acceptance rule; one arm is plain decoding. `method`
explains turns, units and records.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.inputs import settings_of
from bench.method import (
    Run,
    measure,
    quartiles_of,
    sign_test,
    spread,
    take_turns,
)
from bench.prompts import Prompt, rounds
from stree_jax.common.words import LOOKUP
from stree_jax.generation.generate import begin, encode_prompts
from stree_jax.generation.result import Generation, HostArguments, summarise
from stree_jax.generation.scoring import first_difference
from stree_jax.models import Model
from stree_jax.models.drafters.heads import Heads, first_heads
from stree_jax.sampling.settings import Sampling
from stree_jax.sizing import step_times
from stree_jax.speculation import loop
from stree_jax.speculation.accept import resolve_rule
from stree_jax.speculation.adaptive.policy import AdaptivePolicy
from stree_jax.speculation.decoding import Decoding
from stree_jax.speculation.drafters.ngrams import NGrams
from stree_jax.speculation.drafters.staged import Staged
from stree_jax.speculation.drafters.table import AnyDrafter
from stree_jax.speculation.step import Verify, packed
from stree_jax.speculation.tree import chain, resolve_tree

# Two tokens whose logits differ by less may swap ranks, because other trees add numbers
# in another order. By weight format, or else by dtype of the KV caches and records.
# Kept weights round their input rows: another last bit can become a whole step.
TIE = {"float32": 1e-4, "bfloat16": 0.2, "kept": 0.03, "kept-int8": 1.5}
PLAIN = "plain"
# Cache rows in addition to the text: prefill writes whole chunks, and a replay writes a
# whole path of a tree.
MARGIN = 256


@dataclass(frozen=True)
class Arm:
    """A decoding setup that is measured.

    Attributes:
      name: the name in tables.
      tree: the tree as `generate` takes it, a name or a list of parents. If None, the
        arm is plain decoding.
      rule: the name of the acceptance rule. If None, the default.
      drafting: the drafter: the draft model, "lookup", n-grams or heads alone,
        n-grams that guess for the draft model ("staged"), or a key of
        `Workload.others`.
      ahead, width: with "staged", the number of levels that the n-grams guess, and the
        guesses per node.
      heads: number of Medusa heads to use, the first ones. If 0, all.
      verify: the function that runs the target on a tree, see
        `stree_jax.speculation.step.Verify`.
    """

    name: str
    tree: str | tuple[int, ...] | None
    rule: str | None = None
    drafting: str = "model"
    ahead: int = 0
    width: int = 1
    heads: int = 0
    verify: Verify = packed

    @property
    def samples_plain_tokens(self) -> bool:
        """True if sampling with this arm gives the same tokens as plain decoding, as it
        does with the default rule."""
        return (
            self.rule is None or resolve_rule(self.rule, chain(0)).promise == "tokens"
        )


def tree_of(arm: str) -> str:
    """Returns the tree in an arm's name."""
    return arm.rpartition("@")[2]


def parse_arm(name: str) -> Arm:
    """Parses the name of an arm: "plain", "lookup", "A" (a tree) or "mss@A" (a rule and
    a tree).

    Raises:
      ValueError: an unknown tree or rule, or a rule that does not fit the tree.
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
    """The prompts and models that the arms decode.

    Attributes:
      target, drafter: the target model and the draft model.
      arms: the setups to measure, plain decoding first.
      max_new_tokens: number of new tokens per row. Stop tokens are ignored, so that all
        arms generate as many.
      batch: number of prompts decoded together.
      capacity: rows of the KV caches, the same for all prompts, which therefore share a
        compiled program.
      ngrams, heads: drafters of the arms that use them.
      top_k: top-k filter of sampling. If 0, there is no filter.
      others: further drafters by name.
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
    others: Mapping[str, AnyDrafter] = field(default_factory=dict)

    def drafter_of(self, arm: Arm) -> AnyDrafter:
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
                return self.others.get(arm.drafting, self.drafter)


def workload(
    target: Model,
    drafter: Model,
    arms: Sequence[Arm],
    prompts: dict[str, list[Prompt]],
    max_new_tokens: int,
    batch: int = 1,
) -> Workload:
    """Returns a workload whose KV caches have space for the longest prompt and its
    output.

    Raises:
      ValueError: a set has fewer prompts than a batch needs.
    """
    for name, texts in prompts.items():
        if len(texts) < batch:
            raise ValueError(
                f"--count: {len(texts)} of {name} make no batch of {batch}"
            )
    texts = [text for group in prompts.values() for text in group]
    longest = max(map(len, encode_prompts(target, texts)))
    capacity = longest + max_new_tokens + MARGIN
    return Workload(target, drafter, tuple(arms), max_new_tokens, batch, capacity)


def begin_arm(
    work: Workload, arm: Arm, texts: Sequence[Prompt], temperature: float
) -> tuple[Decoding, HostArguments]:
    """Prefills a batch of prompts for an arm. Row i is sampled with seed i in every
    arm."""
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
    """Decodes a batch of prompts once. `decode_s` of the result does not include
    prefill."""
    decoding, plan = begin_arm(work, arm, texts, temperature)
    jax.block_until_ready(decoding)
    began = time.perf_counter()
    spec = plan.spec
    if isinstance(spec.policy, AdaptivePolicy):
        spec = step_times.timed(spec, decoding)
        # `summarise` reads from the spec whether n-grams guess for the draft model.
        plan = replace(plan, spec=spec)
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
    others: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, Any]:
    """Decodes a batch of prompts with every arm, the arms taking turns, and returns the
    record.

    Args:
      work: the models and arms.
      texts: the prompts.
      temperature: 0 for greedy decoding.
      repeats: number of timed calls of each arm.
      warm: names of arms that are already compiled; updated.
      others: decoding functions of other programs, by name. A call returns the seconds
        that it took.

    Raises:
      RuntimeError: greedy tokens differ from plain decoding's beyond a tie.
    """

    def call(arm: Arm) -> Callable[[], Generation]:
        return lambda: decode_once(work, arm, texts, temperature)

    others = others or {}
    # Greedy and sampled programs differ, and are warmed up apart.
    which = "greedy " if temperature == 0 else "sampled "
    names = {which + arm.name: arm for arm in work.arms}
    calls: dict[str, Callable[[], Any]] = {n: call(arm) for n, arm in names.items()}
    results, first = take_turns(calls | dict(others), repeats, warm)
    last = {arm.name: results[name][-1] for name, arm in names.items()}
    if temperature == 0:
        check_ties(work.target, texts, last)
    record: dict[str, Any] = {}
    for name, arm in names.items():
        same = last[PLAIN] if temperature == 0 or arm.samples_plain_tokens else None
        record[arm.name] = record_of(results[name], same, first.get(name))
    for name in others:
        seconds = {"seconds": results[name], "first_call_s": first.get(name)}
        record[name] = record[PLAIN] | seconds | {"gained": None, "equal": None}
    return record


def record_of(
    turns: Sequence[Generation], same: Generation | None, first_call_s: float | None
) -> dict[str, Any]:
    """Returns the record of one arm: its times, tokens, target passes and traffic.

    Args:
      turns: the results of its timed calls.
      same: the generation with which the tokens are compared, or None.
      first_call_s: seconds of the first call, which compiles. None if the arm had
        already been called.
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
    """Raises RuntimeError if tokens differ from plain decoding's beyond a tie.

    A tie is a place where the target's two logits are closer than `TIE`.
    """
    kept = target.weight_format
    tie = TIE.get(kept.name, TIE[kept.dtype.name])
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
    benchmark: str,
    works: dict[str, Workload],
    prompts: dict[str, list[Prompt]],
    temperatures: Sequence[float],
    run: Run,
    others: Callable[[Prompt], dict[str, Callable[[], float]]] | None = None,
) -> dict[str, Any]:
    """Measures every workload on every prompt set at every temperature.

    The units are ordered such that a run that is cut short has measured some of every
    combination. Acceptance rules make no difference to greedy decoding, so for it arms
    that differ only in their rule are measured once.

    Args:
      benchmark: name of the benchmark.
      works: workloads by name of their pair of models; "" if there is only one.
      prompts: prompts by name of their set.
      temperatures: 0 is greedy decoding.
      run: how often, how long, and where the report goes.
      others: returns, for a prompt, greedy decoding functions of other programs.

    Returns:
      the report; "results" are rows of `summarise_arms`.
    """
    any_work = next(iter(works.values()))
    warm = {label: set[str]() for label in works}

    def unit(label: str, texts: Sequence[Prompt], temperature: float) -> Any:
        work, strangers = works[label], None
        if temperature == 0:
            work = replace(work, arms=_greedy_arms(work.arms))
            strangers = None if others is None else others(texts[0])
        options = temperature, run.repeats, warm[label], strangers
        return decode_unit(work, texts, *options)

    units = {
        f"{label}/{title}/T={temperature:g}/{i}": partial(
            unit, label, texts, temperature
        )
        for i, groups in enumerate(rounds(prompts, any_work.batch))
        for temperature in temperatures
        for title, texts in groups.items()
        for label in works
    }
    pairs = {label: (work.target, work.drafter) for label, work in works.items()}
    settings = settings_of(benchmark, pairs, prompts) | {
        "pairs": list(works),
        "arms": [arm.name for arm in any_work.arms],
        "temperatures": list(temperatures),
        "batch": any_work.batch,
        "max_new_tokens": any_work.max_new_tokens,
    }
    report = measure(settings, units, run)
    return {**report, "results": summarise_arms(report["units"])}


def _greedy_arms(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """Returns the arms without those that differ from an earlier one only in their
    rule."""
    kept: dict[Any, Arm] = {}
    for arm in arms:
        way = arm.tree, arm.drafting, arm.ahead, arm.width, arm.verify
        kept.setdefault(way, arm)
    return tuple(kept.values())


def summarise_arms(units: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row per pair, set, temperature and arm, from the units' records."""
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


def records_of(report: dict[str, Any], row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the records that a row of `summarise_arms` summarises."""
    begin = f"{row['pair']}/{row['set']}/T={row['temperature']:g}/"
    return [r for name, r in report["units"].items() if name.startswith(begin)]


def summarise_cells(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns statistics of one arm.

    tau is the tokens of all units divided by their target passes. The speed of a unit
    is that of its median turn; the median and the quartiles are taken over units.

    Args:
      cells: the arm's record of each unit.
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
    """Returns the tokens per second of each unit's median turn."""
    return [c["tokens"] / median(c["seconds"]) for c in cells]


def bytes_a_token(cells: Sequence[dict[str, Any]], caches: bool = True) -> float:
    """Returns the bytes that an arm reads from memory per generated token.

    Args:
      cells: the arm's record of each unit.
      caches: if False, KV caches are not counted.
    """
    parts = ("weights", "state", "caches") if caches else ("weights", "state")
    total = sum(t[part] for c in cells for t in c["traffic"] for part in parts)
    return total / sum(c["tokens"] for c in cells)


def speedups(cells: Sequence[Any], others: Sequence[Any]) -> list[float]:
    """Returns, for each unit, the speed of an arm relative to another arm."""
    return [a / b for a, b in zip(rates(cells), rates(others), strict=True)]


def summarise_arm(
    records: Sequence[dict[str, Any]], arm: str, chain: str | None
) -> dict[str, Any]:
    """Returns statistics of an arm over the units of a set. Speedups are computed for
    each unit before they are summarised.

    Args:
      records: the records of the units, by arm.
      arm: name of the arm.
      chain: name of the arm whose tree is a chain, for comparison, or None.
    """
    cells = [record[arm] for record in records]

    def over(other: str) -> list[float]:
        return speedups(cells, [record[other] for record in records])

    over_plain = over(PLAIN)
    compared = cells[0]["equal"] is not None
    row = summarise_cells(cells) | {
        "speedup": spread(over_plain),
        "worst_tenth": float(np.quantile(over_plain, 0.1)),
        "faster_than_plain": sum(s > 1 for s in over_plain),
        "p_plain": sign_test(over_plain),
        "equal_to_plain": sum(c["equal"] for c in cells) if compared else None,
        "over_chain": None,
        "p_chain": None,
    }
    if chain is not None and arm != chain:
        row["over_chain"], row["p_chain"] = median(over(chain)), sign_test(over(chain))
    return row
