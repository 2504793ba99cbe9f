"""Loads the models and prompts that the options of a benchmark name."""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.prompts import Prompt, read_prompts
from bench.widen import sizes_of, widened
from stree_jax.checkpoints.kinds.finding import is_custom
from stree_jax.checkpoints.load import load
from stree_jax.checkpoints.pair import load_pair
from stree_jax.checkpoints.save import save
from stree_jax.models import Model

RANDOM_PROMPT = 128  # tokens


def load_models(
    args: argparse.Namespace, allow_custom: bool = False
) -> tuple[Model, Any]:
    """Loads the target of `--model`, zero-padded by the factor `--widen`, and the
    drafter of `--drafter`.

    Args:
      args: the command's arguments.
      allow_custom: if True, the drafter may be a draft model or a custom drafter,
        `MODULE:NAME`. Otherwise it must be a draft model.

    Raises:
      ValueError: the drafter is of another kind, such as "lookup" or heads; or it is
        custom and `--widen` is not 1.
    """
    target, drafter = load_pair(args.model, args.drafter, args.dtype)
    custom = allow_custom and is_custom(args.drafter or "")
    if not custom and not isinstance(drafter, Model):
        raise ValueError(
            f"bench {args.benchmark} needs a draft model; name one with --drafter"
        )
    if custom and args.widen != 1:
        raise ValueError("--widen: a custom drafter cannot draft for a wider target")
    return widened(target, args.widen), drafter


def load_prompts(args: argparse.Namespace) -> dict[str, list[Prompt]]:
    return read_prompts(args.prompts or [], args.count)


def settings_of(
    benchmark: str,
    pairs: Mapping[str, tuple[Model, Any]],
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


def in_dtype(model: Model, dtype: str) -> Model:
    """Converts a float32 model to another dtype, by saving it and loading it with
    `load(dtype=...)`."""
    if dtype == "float32":
        return model
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "model")
        return load(Path(folder) / "model", dtype=dtype)
