"""Distilling a drafter: Mamba2 layers that learn a target's distributions.

Letters: n windows, L tokens of one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stree_jax import models
from stree_jax.checkpoints.load import Model, load
from stree_jax.models import base_model
from stree_jax.training.kept import PROMPT, SPOKEN, keep_own_text, spread_windows
from stree_jax.training.recipe import (
    Job,
    TrainingData,
    drafter_config,
    finish,
    prepare_for,
)
from stree_jax.training.train import (
    Examples,
    Text,
    TrainConfig,
    distillation_loss,
    learn,
    text_examples,
)

OWN_LENGTH = PROMPT + SPOKEN - 1  # tokens of the longest window of its own text


@dataclass(frozen=True)
class DrafterSize:
    """What is trained.

    Attributes:
      width: d_model; None: half the target's, or all of it where that is borrowed.
      layers: of Mamba2.
      borrows: the embedding and the output matrix are the target's, and stay as they
        are: of a large vocabulary most weights, which little text teaches little.
    """

    width: int | None = None
    layers: int = 2
    borrows: bool = False


def distill_drafter(
    job: Job,
    target: str | Path | Model,
    size: DrafterSize = DrafterSize(),
    own_tokens: int = 0,
) -> None:
    """Train Mamba2 layers on a target's distributions, and write them.

    Args:
      own_tokens: of text that the target writes itself first, greedily, after
        beginnings of the text; half of every batch is of it. 0: text alone.

    Raises:
      ValueError: what cannot be made, before anything is trained.
    """
    job.check()
    check_own_text(job.train, own_tokens)
    loaded = target if isinstance(target, Model) else load(target, dtype="bfloat16")
    config = config_of(loaded.config, size)
    data, teacher = prepare_for(job, loaded, str(target)), base_model(loaded)
    examples = text_examples(config, job.train, data.train, data.heldout)
    if own_tokens:
        examples = with_own_text(examples, job, data, teacher, own_tokens)
    borrowed = ("embedding", "lm_head") if size.borrows else ()
    text = Text(
        config, distillation_loss, tuple(n for n in borrowed if n in teacher.params)
    )
    params, _ = learn(
        text,
        job.train,
        replace(examples, settings=examples.settings | {"borrowed": [*text.borrowed]}),
        job.work,
        teacher=teacher,
        minutes=job.minutes,
        save_minutes=job.save_minutes,
    )
    finish(job, data, config, text.whole(params, teacher))


def config_of(target: models.ModelConfig, size: DrafterSize) -> models.ModelConfig:
    """Raises ValueError for a width that is not the target's, whose embedding it is."""
    if not size.borrows:
        return drafter_config(target, size.width, size.layers)
    if size.width not in (None, target.d_model):
        raise ValueError(
            f"--width: the target's embedding has {target.d_model}, got {size.width}"
        )
    config = drafter_config(target, target.d_model, size.layers)
    return replace(config, tie_embeddings=target.tie_embeddings)


def check_own_text(train: TrainConfig, own_tokens: int) -> None:
    """Refuse what there would be no windows of, before the target writes."""
    if own_tokens < 0:
        raise ValueError(f"--own-tokens: want at least 0, got {own_tokens}")
    if own_tokens and train.length > OWN_LENGTH:
        raise ValueError(
            f"--length: want at most {OWN_LENGTH} tokens with --own-tokens, "
            f"got {train.length}"
        )
    if own_tokens and train.batch < 2:
        raise ValueError("--batch: want at least 2 with --own-tokens")


def with_own_text(
    examples: Examples,
    job: Job,
    data: TrainingData,
    teacher: models.Model,
    own_tokens: int,
) -> Examples:
    """Half of every batch, and of the held-out ones, are of text by the teacher."""
    train, half = job.train, job.train.batch // 2

    def written(stream: np.ndarray, count: int, name: str) -> np.ndarray:
        """[n, L + 1]: ends of texts, where its own words are."""
        beginnings = spread_windows(stream, PROMPT, count)
        texts = keep_own_text(teacher, beginnings, job.work / f"{name}.own")
        return np.asarray(texts[:, -train.length - 1 :])

    def batches(step: int) -> Iterator[np.ndarray]:
        for rows in examples.batches(step):
            rng = np.random.default_rng([train.seed, step, 1])
            yield np.concatenate([rows[half:], own[rng.integers(0, len(own), half)]])
            step += 1

    held = written(data.heldout, len(examples.heldout) * half, "heldout")
    own = written(data.train, math.ceil(own_tokens / SPOKEN), "train")
    places = np.arange(len(examples.heldout) * half) % len(held)
    beside = np.split(held[places], len(examples.heldout))
    mixed = [
        np.concatenate([rows[half:], more])
        for rows, more in zip(examples.heldout, beside, strict=True)
    ]
    return Examples(batches, mixed, examples.settings | {"own_text": len(own)})
