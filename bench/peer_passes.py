"""Times single forward passes over several tokens, and prefill, here and in llama.cpp.

Speculation verifies its draft tokens in one such pass, so what a pass over more tokens
costs decides what speculation can gain.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from bench import tables
from bench.llama_process import Ask
from bench.method import quartiles_of, take_turns
from bench.passes import CONTEXT, Case, Turns, compile_case
from bench.reading import our_reader
from stree_jax.models import Model

OURS, LLAMA = "ours", "llama.cpp"


def time_passes(
    model: Model,
    ask: Ask | None,
    sizes: Sequence[int],
    repeats: int,
    passes: int = 1,
    others: Mapping[str, Callable[[], float]] | None = None,
) -> dict[str, dict[str, list[float]]]:
    """Times passes over `sizes` tokens, of both programs in turns.

    Our tokens are the nodes of a binary tree, those of llama.cpp continue its text.
    Both compute logits for every token, after `CONTEXT` committed ones.

    Args:
      model: the model.
      ask: calls llama.cpp, which has loaded the model. None if it is not measured.
      sizes: numbers of tokens.
      repeats: timed calls of each.
      passes: passes in each call of ours.
      others: functions that also take turns, by "NAME/SIZE". Each returns seconds.

    Returns:
      The seconds of each turn, by program and by number of tokens as a string.
    """
    arms: dict[str, Callable[[], Any]] = dict(others or {})
    for n in sizes:
        turns = Turns(compile_case(model, Case(n, "packed"), passes))
        arms[f"{OURS}/{n}"] = partial(turns)
    if ask is not None:
        random = np.random.default_rng(0)
        ids = random.integers(model.config.num_tokens, size=CONTEXT).tolist()
        for n in sizes:
            arms[f"{LLAMA}/{n}"] = partial(_seconds, ask, ids, n)
    return _by_program(take_turns(arms, repeats, set())[0])


def time_prefill(
    model: Model, ask: Ask | None, lengths: Sequence[int], repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Times the prefill of prompts of random tokens, of both programs in turns.

    Returns:
      The seconds of each turn, by program and by length of the prompt as a string.
    """
    random = np.random.default_rng(0)
    arms: dict[str, Callable[[], Any]] = {}
    for n in lengths:
        ids = random.integers(model.config.num_tokens, size=n).tolist()
        read, _ = our_reader(model, ids)
        arms[f"{OURS}/{n}"] = partial(_first, read)
        if ask is not None:
            arms[f"{LLAMA}/{n}"] = partial(_prompt_seconds, ask, ids)
    return _by_program(take_turns(arms, repeats, set())[0])


def _by_program(
    seconds: Mapping[str, list[float]],
) -> dict[str, dict[str, list[float]]]:
    """Groups times of arms "PROGRAM/SIZE" by program and size."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, own in seconds.items():
        program, size = name.split("/")
        found.setdefault(program, {})[size] = own
    return found


def _first(read: Callable[[], tuple[float, Any]]) -> float:
    return read()[0]


def _prompt_seconds(ask: Ask, ids: list[int]) -> float:
    return ask("time_prompt", ids=ids)["seconds"]


def _seconds(ask: Ask, ids: list[int], count: int) -> float:
    return ask("time_pass", ids=ids, count=count)["seconds"]


def context_of(sizes: Sequence[int], lengths: Sequence[int], repeats: int) -> int:
    """Returns the context length of llama.cpp in which all turns of passes over `sizes`
    tokens fit, and each prompt of `lengths` tokens."""
    return max(CONTEXT + (repeats + 1) * sum(sizes), *lengths, 0)


def pass_rows(units: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a row per subject, dtype, program and number of tokens: "ms" with
    quartiles, and "of_one", its ratio to the smallest pass of that program."""
    rows = []
    for unit, programs in units.items():
        kind, *pair = unit.split("/")
        if kind != "passes":
            continue
        label, dtype = pair
        for program, by_size in programs.items():
            first = median(next(iter(by_size.values())))
            for size, seconds in by_size.items():
                row = {"subject": label, "dtype": dtype, "program": program}
                row |= {"tokens": int(size), "of_one": median(seconds) / first}
                rows.append(row | quartiles_of("ms", [1e3 * s for s in seconds]))
    return rows


def prefill_rows(units: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a row per subject, dtype and length of the prompt: tokens per second of
    each program with quartiles, and "ratio" of ours to llama.cpp's, turn by turn, with
    quartiles; None without llama.cpp."""
    rows = []
    for unit, programs in units.items():
        kind, *pair = unit.split("/")
        if kind != "prefill":
            continue
        label, dtype = pair
        for length, ours in programs[OURS].items():
            theirs = programs.get(LLAMA, {}).get(length, [])
            row = {"subject": label, "dtype": dtype, "length": int(length)}
            row |= quartiles_of(OURS, [int(length) / s for s in ours])
            row |= quartiles_of(LLAMA, [int(length) / s for s in theirs])
            ratios = [b / a for a, b in zip(ours, theirs, strict=False)]
            rows.append(row | quartiles_of("ratio", ratios))
    return rows


def prefill_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of one subject in one dtype."""
    columns = [
        ("tokens of a prompt", "length"),
        tables.quartiles("tokens/s", OURS, ".0f"),
        tables.quartiles("llama.cpp", LLAMA, ".0f", "-"),
        tables.quartiles("over llama.cpp", "ratio", ".2f", "-"),
    ]
    return tables.table(columns, rows)


def pass_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of one subject in one dtype."""
    columns = [
        ("program", "program"),
        ("tokens in a pass", "tokens"),
        tables.quartiles("ms", "ms", ".2f"),
        ("of the smallest", "of_one", ".2f"),
    ]
    return tables.table(columns, rows)
