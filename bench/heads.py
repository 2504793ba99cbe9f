"""Medusa heads beside other drafters, and what typical acceptance does to a text.

Accuracies are those of each head's guesses for the target's own greedy text. Arms
decode with chains and trees of heads, the drafting model, and lookup; sampled, the rule
typical as well, whose text is not the target's: how far it is from it is measured
apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from stree_jax.bench.method import Run
from stree_jax.bench.prompts import Prompt
from stree_jax.bench.speculation import (
    PLAIN,
    Arm,
    Workload,
    measure_arms,
    workload,
)
from stree_jax.bench.staged import bytes_a_token, records_of
from stree_jax.bench.tables import shown, table
from stree_jax.checkpoints.checkpoint import Model
from stree_jax.generation import encode_prompts, generate
from stree_jax.models import base_model
from stree_jax.models.heads import Heads
from stree_jax.models.memory import weights_read
from stree_jax.sampling.settings import Sampling
from stree_jax.scoring import score
from stree_jax.speculation.drafters.medusa import heads_read
from stree_jax.speculation.drafters.ngrams import NGrams
from stree_jax.training.heads import accuracy_table, ranks_in

TYPICAL = "typical"
RANKS_SHOWN = (1, 2, 3, 5, 10)
GRAM = 4  # tokens of a run that is counted as the same


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
      trees: of the heads, an arm each; names as `generate` takes them.
      model_trees: of the drafting model.
      typical: the tree of the heads that typical acceptance is tried with.
      temperatures: of sampling; 0 is greedy.
      max_new_tokens, batch: see `Workload`.
    """

    trees: tuple[str, ...]
    model_trees: tuple[str, ...]
    typical: str
    temperatures: tuple[float, ...]
    max_new_tokens: int
    batch: int


def arms_of(options: Options, staged: bool) -> list[Arm]:
    """Plain decoding, the heads, those beside them, and the rule typical."""
    arms = [Arm(PLAIN, None)]
    arms += [Arm(f"heads, {t}", t, drafting="heads") for t in options.trees]
    arms += [Arm(f"model, {t}", t) for t in options.model_trees]
    if staged:
        arms.append(Arm("staged, E", "E", drafting="staged", ahead=2))
    arms.append(Arm("lookup", "auto", drafting="lookup"))
    name = f"{TYPICAL}, {options.typical}"
    return [*arms, Arm(name, options.typical, TYPICAL, "heads")]


def measure_heads(
    target: Model,
    drafter: Model,
    heads: Heads,
    ngrams: NGrams | None,
    prompts: dict[str, list[Prompt]],
    options: Options,
    run: Run,
) -> dict[str, Any]:
    """The report; `ngrams` of the drafter add a staged arm."""
    arms = arms_of(options, ngrams is not None)
    sizes = options.max_new_tokens, options.batch
    work = workload(target, drafter, arms, prompts, *sizes)
    work = replace(work, heads=heads, ngrams=ngrams)
    accuracy = accuracies(work, prompts)
    texts = [
        text_of(work, prompts, options, temperature)
        for temperature in options.temperatures
        if temperature > 0
    ]
    jax.clear_caches()  # of many programs, a process runs out of memory maps
    report = measure_arms("heads", {"": work}, prompts, options.temperatures, run)
    report["accuracy"], report["texts"] = accuracy, texts
    report["bytes"] = bytes_beside(work)
    report["results"] = with_traffic(report)
    return report


def accuracies(
    work: Workload, prompts: dict[str, list[Prompt]]
) -> dict[str, list[list[float]]]:
    """[K][R] by prompt set: how often a head's guess of rank r is the greedy text's."""
    assert work.heads is not None
    target, found = base_model(work.target), {}
    for title, texts in prompts.items():
        said = generate(
            work.target,
            texts,
            max_new_tokens=work.max_new_tokens,
            stop_tokens=(),
            drafter=None,
        )
        whole = [
            ids + row
            for ids, row in zip(
                encode_prompts(work.target, texts), said.tokens, strict=True
            )
        ]
        widest = max(map(len, whole))
        padded = np.zeros((len(whole), widest), np.int32)
        for row, ids in zip(padded, whole, strict=True):
            row[: len(ids)] = ids
        ranks = ranks_in(work.heads, target, padded, 0)
        ranks = ranks.reshape(len(whole), -1, ranks.shape[-1])
        K = ranks.shape[-1]
        kept = [
            ranks[i, len(ids) - work.max_new_tokens - 1 : len(ids) - K - 1]
            for i, ids in enumerate(whole)
        ]
        every = np.concatenate(kept)
        counts = [np.bincount(r[r < 10], minlength=10) / len(every) for r in every.T]
        found[title] = [row.tolist() for row in counts]
        given = accuracy_table(every)
        found[f"{title}, given the heads before"] = given.tolist()
    return found


def text_of(
    work: Workload,
    prompts: dict[str, list[Prompt]],
    options: Options,
    temperature: float,
) -> dict[str, Any]:
    """What typical acceptance makes of a text, beside sampling and greedy decoding.

    A rule that draws nothing is a distribution of one text, so that the divergence
    KL(rule || target) in nats a token is the mean of -log p of its tokens. Sampling's
    is 0, and its mean of -log p the target's entropy.
    """
    texts = [text for group in prompts.values() for text in group]
    settings = [Sampling(temperature, seed=i) for i in range(len(texts))]
    more: dict[str, dict[str, Any]] = {
        "sampling": {"sampling": settings, "drafter": None},
        TYPICAL: {
            "sampling": settings,
            "rule": TYPICAL,
            "drafter": work.heads,
            "tree": options.typical,
        },
        "greedy": {"drafter": None},
    }
    row: dict[str, Any] = {"temperature": temperature}
    for name, given in more.items():
        said = generate(
            work.target,
            texts,
            max_new_tokens=work.max_new_tokens,
            stop_tokens=(),
            **given,
        )
        tokens = [
            prompt + own
            for prompt, own in zip(
                encode_prompts(work.target, texts), said.tokens, strict=True
            )
        ]
        scored = log_probs_of(work.target, tokens, said.tokens, temperature)
        row[name] = {
            "log_prob": float(np.mean(scored)),
            "divergence": 0.0 if name == "sampling" else -float(np.mean(scored)),
            "distinct": distinct(said.tokens),
            "tau": float(said.lengths.sum() / said.target_calls.sum()),
        }
    return row


def log_probs_of(
    target: Model,
    whole: Sequence[Sequence[int]],
    said: Sequence[Sequence[int]],
    temperature: float,
) -> np.ndarray:
    """Log-probabilities [n] of what was said, under the target at a temperature."""
    found = []
    for ids, own in zip(whole, said, strict=True):
        padded = np.pad(np.asarray(ids, np.int32), (0, -len(ids) % 64))
        logits = np.asarray(score(target, padded[None])[0], np.float64) / temperature
        logits = logits[: len(ids) - 1, : target.config.num_tokens]
        logits -= logits.max(axis=-1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        found.append(log_p[np.arange(len(ids) - 1), ids[1:]][-len(own) :])
    return np.concatenate(found)


def distinct(texts: Sequence[Sequence[int]]) -> float:
    """Share of the runs of `GRAM` tokens that are not there twice, text by text."""
    shares = []
    for text in texts:
        runs = [tuple(text[i : i + GRAM]) for i in range(len(text) - GRAM + 1)]
        shares.append(len(set(runs)) / max(len(runs), 1))
    return float(np.mean(shares))


def bytes_beside(work: Workload) -> dict[str, int]:
    """Bytes of weights beside the target's, by who drafts."""
    assert work.heads is not None
    K = work.heads.config.heads
    return {
        "target": weights_read(work.target),
        "heads": heads_read(work.heads, K),
        "model": weights_read(work.drafter),
        "lookup": 0,
    }


def with_traffic(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of `summarise_arms`, with bytes a token beside plain decoding's."""
    rows = []
    for row in report["results"]:
        units = records_of(report, row)
        own, plain = ([unit[arm] for unit in units] for arm in (row["arm"], PLAIN))
        traffic = bytes_a_token(own, True) / bytes_a_token(plain, True)
        rows.append(row | {"traffic": traffic})
    return rows


def heads_table(report: dict[str, Any]) -> str:
    """Accuracies, arms, and typical acceptance's text."""
    head = ["set", "head", *(f"in {r}" for r in RANKS_SHOWN)]
    rows = [
        [title, str(k + 1), *(f"{sum(row[:r]):.1%}" for r in RANKS_SHOWN)]
        for title, table_ in report["accuracy"].items()
        for k, row in enumerate(table_)
    ]
    text = "How often the token is among a head's first guesses, in greedy text.\n\n"
    text += table(head, rows)
    head = ["set", "T", "arm", "tau", "bytes a token", "tokens/s"]
    head += ["over plain (quartiles)", "worst tenth", "equal"]
    rows = []
    for row in report["results"]:
        s, equal = row["speedup"], row["equal_to_plain"]
        cells = [row["set"], f"{row['temperature']:g}", row["arm"], f"{row['tau']:.2f}"]
        cells += [f"{row['traffic']:.2f}", f"{row['tokens_per_s']:.0f}"]
        cells += [f"{s['median']:.2f} ({s['low']:.2f}..{s['high']:.2f})"]
        cells += [shown(row["worst_tenth"], ".2f")]
        cells += ["-" if equal is None else f"{equal}/{row['units']}"]
        rows.append(cells)
    weights = ", ".join(f"{k} {v / 1e6:.2f} MB" for k, v in report["bytes"].items())
    text += f"\n\n{table(head, rows)}\n\nWeights: {weights}."
    head = ["T", "text", "tau", "log p a token", "KL to the target", "distinct runs"]
    rows = [
        [
            f"{row['temperature']:g}",
            name,
            f"{row[name]['tau']:.2f}",
            f"{row[name]['log_prob']:.2f}",
            f"{row[name]['divergence']:.2f}",
            f"{row[name]['distinct']:.0%}",
        ]
        for row in report["texts"]
        for name in ("sampling", TYPICAL, "greedy")
    ]
    return f"{text}\n\n{table(head, rows)}" if rows else text
