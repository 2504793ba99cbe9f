"""The recipe of the bundled pair: a small hybrid target and its distilled drafter."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.checkpoint import Model, load
from stree_jax.convert.export import export_hf
from stree_jax.models import (
    AttentionConfig,
    LayerKind,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    Rope,
    cast_params,
)
from stree_jax.training import corpus as text
from stree_jax.training.train import (
    TrainConfig,
    distillation_loss,
    fit,
    next_token_loss,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class TrainingData:
    """Token streams (uint16) and the tokenizer that made them."""

    tokenizer: "Tokenizer"
    train: np.ndarray
    heldout: np.ndarray


@dataclass(frozen=True)
class TargetSize:
    """Width and mixers of a target; `attention` of the mixers, spread evenly, attend.

    The default is the bundled target's: 9.8 M parameters at 2048 entries.
    """

    width: int = 384
    mixers: int = 6
    attention: int = 2

    def __post_init__(self) -> None:
        if self.width < 128 or self.width % 128:
            raise ValueError(f"--width: want a multiple of 128, got {self.width}")
        if not 0 <= self.attention <= self.mixers or self.mixers < 1:
            raise ValueError(
                f"--attention: want 0..{self.mixers} of {self.mixers} mixers, "
                f"got {self.attention}"
            )


def target_config(vocab_size: int, size: TargetSize) -> ModelConfig:
    """Mixers and gated MLPs in turns; heads of 64 everywhere."""
    layers: tuple[LayerKind, ...] = ()
    for i in range(size.mixers):
        before, after = (n * size.attention // size.mixers for n in (i, i + 1))
        layers += ("attention" if after > before else "mamba", "mlp")
    heads = size.width // 64
    return ModelConfig(
        vocab_size=vocab_size,
        num_tokens=vocab_size,
        d_model=size.width,
        layers=layers,
        mamba=MambaConfig(num_heads=2 * heads, head_dim=64, d_state=64),
        attention=AttentionConfig(heads, 2, 64, rope=Rope(theta=10000.0, dim=64)),
        mlp=MLPConfig(-(-size.width * 5 // 192) * 64),  # about 5/3, in whole 64s
        tie_embeddings=True,
        stop_tokens=(0,),
    )


def drafter_config(target: ModelConfig) -> ModelConfig:
    """Two Mamba2 layers, half the target's width: about an eleventh of its weights."""
    width = target.d_model // 2
    return ModelConfig(
        vocab_size=target.vocab_size,
        num_tokens=target.num_tokens,
        d_model=width,
        layers=("mamba", "mamba"),
        mamba=MambaConfig(num_heads=2 * width // 64, head_dim=64, d_state=64),
        tie_embeddings=True,
        stop_tokens=target.stop_tokens,
    )


def prepare(
    paths: Sequence[Path],
    tokenizer: "Tokenizer | None" = None,
    vocab_size: int = 2048,
) -> TrainingData:
    """Token streams from text, or from one folder of prepared ones.

    Args:
      paths: text as `text.iter_documents` reads it, or one folder that holds
        train.npy, heldout.npy and tokenizer.json.
      tokenizer: to encode text with; None: train one of `vocab_size` entries.
    """
    from tokenizers import Tokenizer

    folder = paths[0]
    if len(paths) == 1 and (folder / "train.npy").is_file():
        return TrainingData(
            Tokenizer.from_file(str(folder / "tokenizer.json")),
            np.load(folder / "train.npy", mmap_mode="r", allow_pickle=False),
            np.load(folder / "heldout.npy", allow_pickle=False),
        )
    if tokenizer is None:
        tokenizer = text.train_tokenizer(text.iter_documents(paths), vocab_size)
    end = tokenizer.token_to_id(text.END_OF_TEXT)
    if end is None:
        raise ValueError(f"tokenizer: no entry {text.END_OF_TEXT!r}")
    tokens = text.encode_corpus(text.iter_documents(paths), tokenizer, end)
    train, heldout = text.split_holdout(tokens)
    return TrainingData(tokenizer, train, heldout)


def train_target(
    paths: Sequence[Path],
    out: Path,
    work: Path,
    train: TrainConfig,
    *,
    size: TargetSize,
    tokenizer: Path | None = None,
    vocab_size: int = 2048,
) -> None:
    """Train a small hybrid on text and write it as a Hugging Face directory."""
    from tokenizers import Tokenizer

    given = None if tokenizer is None else Tokenizer.from_file(str(tokenizer))
    data = prepare(paths, given, vocab_size)
    config = target_config(data.tokenizer.get_vocab_size(), size)
    loss = partial(next_token_loss, config)
    params, _ = fit(config, train, loss, data.train, data.heldout, work)
    write(params, config, data.tokenizer, out)


def distill_drafter(
    target: str | Path | Model,
    paths: Sequence[Path],
    out: Path,
    work: Path,
    train: TrainConfig,
) -> None:
    """Train a two-layer Mamba2 to predict the target's distributions on text."""
    teacher = target if isinstance(target, Model) else load(target, dtype="bfloat16")
    if teacher.tokenizer is None:
        raise ValueError(f"{target}: distillation needs its tokenizer.json")
    data = prepare(paths, teacher.tokenizer)
    if data.tokenizer.get_vocab() != teacher.tokenizer.get_vocab():
        raise ValueError(f"{target}: its tokenizer is not the one of the prepared text")
    config = drafter_config(teacher.config)
    loss = partial(distillation_loss, config, teacher.config, teacher.params)
    params, _ = fit(config, train, loss, data.train, data.heldout, work)
    write(params, config, data.tokenizer, out)


def write(params, config: ModelConfig, tokenizer: "Tokenizer", out: Path) -> None:
    """A bfloat16 Hugging Face directory of the model."""
    rounded = jax.tree.map(jnp.asarray, cast_params(params, jnp.bfloat16))
    export_hf(config, rounded, tokenizer, out)
