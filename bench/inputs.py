"""The models and prompts that the options of a benchmark name."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from stree_jax.bench.prompts import Prompt, read_prompts
from stree_jax.bench.widen import sizes_of, widened
from stree_jax.checkpoints.load import Model
from stree_jax.pair import load_pair

RANDOM_PROMPT = 128  # tokens


def load_models(args: argparse.Namespace) -> tuple[Model, Model]:
    """Returns the target, as wide as `--widen` says, and the drafter.

    Raises:
      ValueError: the drafter is no model.
    """
    target, drafter = load_pair(args.model, args.drafter, args.dtype)
    if not isinstance(drafter, Model):
        raise ValueError(
            f"bench {args.benchmark} needs a drafter, a model; give --drafter"
        )
    return widened(target, args.widen), drafter


def load_prompts(args: argparse.Namespace) -> dict[str, list[Prompt]]:
    return read_prompts(args.prompts or [], args.count)


def settings_of(
    benchmark: str,
    pairs: Mapping[str, tuple[Model, Model]],
    prompts: Mapping[str, Sequence[Prompt]],
) -> dict[str, Any]:
    """Returns the settings that all measurements of pairs on prompts have."""
    target, _ = next(iter(pairs.values()))
    return {
        "kind": benchmark,
        "dtype": str(target.weight_format),
        "parameters": {label: sizes_of(*pair) for label, pair in pairs.items()},
        "sets": {title: len(texts) for title, texts in prompts.items()},
    }
