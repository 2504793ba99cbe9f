"""Times single forward passes over several tokens, here and in llama.cpp.

Speculation verifies its draft tokens in one such pass, so what a pass over more tokens
costs decides what speculation can gain.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from stree_jax.bench import tables
from stree_jax.bench.llama_process import Ask
from stree_jax.bench.method import quartiles_of, take_turns
from stree_jax.bench.passes import CONTEXT, Case, Turns, compile_case
from stree_jax.models import Model, base_model

OURS, LLAMA = "ours", "llama.cpp"


def time_passes(
    model: Model, ask: Ask | None, sizes: Sequence[int], repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Times passes over `sizes` tokens, of both programs in turns.

    Our tokens are the nodes of a binary tree, those of llama.cpp continue its text.
    Both compute logits for every token, after `CONTEXT` committed ones.

    Returns:
      The seconds of each turn, by program and by number of tokens as a string.
    """
    arms: dict[str, Callable[[], Any]] = {}
    for n in sizes:
        turns = Turns(compile_case(base_model(model), Case(n, "packed"), 1))
        arms[f"{OURS}/{n}"] = partial(turns)
    if ask is not None:
        random = np.random.default_rng(0)
        ids = random.integers(model.config.num_tokens, size=CONTEXT).tolist()
        for n in sizes:
            arms[f"{LLAMA}/{n}"] = partial(_seconds, ask, ids, n)
    seconds, _ = take_turns(arms, repeats, set())
    found: dict[str, dict[str, list[float]]] = {}
    for name, own in seconds.items():
        program, size = name.split("/")
        found.setdefault(program, {})[size] = own
    return found


def _seconds(ask: Ask, ids: list[int], count: int) -> float:
    return ask("time_pass", ids=ids, count=count)["seconds"]


def context_of(sizes: Sequence[int], repeats: int) -> int:
    """Returns the context length of llama.cpp in which all turns fit."""
    return CONTEXT + (repeats + 1) * sum(sizes)


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


def pass_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of one subject in one dtype."""
    columns = [
        ("program", "program"),
        ("tokens in a pass", "tokens"),
        tables.quartiles("ms", "ms", ".2f"),
        ("of the smallest", "of_one", ".2f"),
    ]
    return tables.table(columns, rows)
