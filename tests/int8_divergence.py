"""Measures how far bfloat16 and int8 weights are from float32, on prompts.

    python -m tests.int8_divergence PROMPTS.jsonl ... [--model demo] [--count 10]

The float32 model continues each prompt greedily. Every other model scores that text
(teacher forcing), and then writes its own. Printed for each set of prompts:

- KL: mean of KL(float32 || model) over the next-token distributions of prompt and
  continuation, in nats per token;
- top-1: share of tokens whose most probable next token is that of float32, in percent;
- parts: tokens before the model's greedy text first differs from that of float32, the
  median over prompts (the length of the text, if at least half never differ).

Caches and all weights that are not int8 are bfloat16. The row for bfloat16 shows the
effect of that alone.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import stree_jax
from bench.prompts import read_prompts
from stree_jax.generation.generate import encode_prompts
from stree_jax.models import cast_params
from stree_jax.models.weights.int8_format import Int8Format

GROUPS = {"by channel": None, "groups of 128": 128, "of 64": 64, "of 32": 32}


def models_of(target: stree_jax.Model) -> dict[str, stree_jax.Model]:
    """Returns the float32 model in smaller dtypes, by name."""
    low: dict[str, Any] = {"bfloat16": "bfloat16"}
    for name, group in GROUPS.items():
        low[f"int8 {name}"] = Int8Format(group=group)
    config, params = target.config, target.params
    return {
        name: replace(target, params=cast_params(config, params, format))
        for name, format in low.items()
    }


def compared(logits: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns KL in nats, and whether the best tokens agree, from logits [n, V]."""
    both = (logits, others)
    p, q = (z - np.logaddexp.reduce(z, axis=-1, keepdims=True) for z in both)
    kl = (np.exp(p) * (p - q)).sum(axis=-1)
    return kl, logits.argmax(axis=-1) == others.argmax(axis=-1)


def first_apart(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Returns the number of tokens before the first difference."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(ours))


def rows_of(
    target: stree_jax.Model, prompts: dict[str, list], tokens: int
) -> list[tuple[str, ...]]:
    """Returns lines of the table."""
    rows, models = [], models_of(target)
    for title, texts in prompts.items():
        ids = encode_prompts(target, texts)
        own = [_greedy(target, one, tokens) for one in ids]
        whole = [[*one, *more] for one, more in zip(ids, own, strict=True)]
        told = [_logits(target, text) for text in whole]
        for name, model in models.items():
            found = [
                compared(logits, _logits(model, text))
                for logits, text in zip(told, whole, strict=True)
            ]
            kl, same = (np.concatenate(parts) for parts in zip(*found, strict=True))
            parts = median(
                first_apart(_greedy(model, one, tokens), more)
                for one, more in zip(ids, own, strict=True)
            )
            facts = f"{kl.mean():.5f}", f"{100 * same.mean():.2f}", f"{parts:g}"
            rows.append((title, name, *facts, f"{len(kl)}"))
            print("| " + " | ".join(rows[-1]) + " |", flush=True)
    return rows


def _greedy(model: stree_jax.Model, ids: Sequence[int], tokens: int) -> list[int]:
    result = stree_jax.generate(
        model, [ids], max_new_tokens=tokens, stop_tokens=(), drafter=None
    )
    return list(result.tokens[0])


def _logits(model: stree_jax.Model, text: Sequence[int]) -> np.ndarray:
    return np.asarray(stree_jax.score(model, [text])[0], np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--count", type=int, default=10, help="prompts of each file")
    parser.add_argument("--tokens", type=int, default=128, help="that follow a prompt")
    args = parser.parse_args()
    target = stree_jax.load(args.model, dtype="float32")
    print("| prompts | weights | KL | top-1 % | parts at | tokens |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    rows_of(target, read_prompts(args.prompts, args.count), args.tokens)


if __name__ == "__main__":
    main()
