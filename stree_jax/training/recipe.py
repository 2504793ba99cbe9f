"""Training recipes: prepares text, trains small hybrid target models, and chooses the
sizes of their draft models."""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from stree_jax.convert.export import export_hf
from stree_jax.convert.tokenizers.tokenizer import check_text_ids, read_tokenizer_file
from stree_jax.models import (
    AttentionConfig,
    DeltaConfig,
    MambaConfig,
    MLPConfig,
    Model,
    ModelConfig,
    Rope,
    cast_params,
)
from stree_jax.models.stack.config import blocks, named
from stree_jax.training import corpus
from stree_jax.training.losses import next_token_loss, with_mtp_loss
from stree_jax.training.records import Spell
from stree_jax.training.saves import Params
from stree_jax.training.texts import PREPARED, Spelled, Tally
from stree_jax.training.train import (
    TrainConfig,
    check_optax,
    check_times,
    fit,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Job:
    """A training job: the text, the folders, and the training settings.

    Attributes:
      text: files and folders for `corpus.iter_documents`, or one folder with prepared
        tokens (train.npy, heldout.npy and tokenizer.json).
      out: Hugging Face directory to create. It must not exist.
      work: folder of this run's saves. If it has saves, training resumes from the
        newest one.
      train: the training settings.
      minutes, save_minutes: see `fit`.
      spell: formats conversations in the text, such as the target's chat template. If
        None, their messages are joined by newlines.
    """

    text: Sequence[Path]
    out: Path
    work: Path
    train: TrainConfig
    minutes: float | None = None
    save_minutes: float = 5.0
    spell: Spell | None = None

    def check(self) -> None:
        """Raises ValueError if a package is missing, times are invalid or results
        cannot be written, before training starts."""
        check_optax()
        check_times(self.minutes, self.save_minutes)
        if self.out.exists() or self.out.is_symlink():
            raise ValueError(f"{self.out}: exists already; choose another place")
        if not self.out.absolute().parent.is_dir():
            raise ValueError(f"{self.out.parent}: no such directory")
        work = next(p for p in (self.work, *self.work.absolute().parents) if p.exists())
        if not work.is_dir():
            raise ValueError(f"{work}: not a directory, cannot store the run's saves")


@dataclass(frozen=True)
class TrainingData:
    """Token streams (uint16 or uint32), and the tokenizer that encoded them.

    Attributes:
      tokenizer: the tokenizer.
      train: [n] tokens to train on.
      heldout: [n] tokens for evaluation.
    """

    tokenizer: "Tokenizer"
    train: np.ndarray
    heldout: np.ndarray


@dataclass(frozen=True)
class TargetSize:
    """The size of a target model. The default is that of the bundled target: 9.8 M
    parameters with a vocabulary of 2048 tokens.

    Attributes:
      width: d_model, a multiple of 128.
      mixers: number of recurrent and attention layers together.
      attention: number of attention layers, evenly spaced among them.
      recurrent: kind of the recurrent layers: Mamba2, or Gated DeltaNet. With the
        latter, attention and norms are those of Qwen3.5 as well.
      mtp: if True, the model also has an MTP layer. Only with Gated DeltaNet, because
        no Hugging Face class has MTP layers and dense Mamba2 layers.
    """

    width: int = 384
    mixers: int = 6
    attention: int = 2
    recurrent: Literal["mamba", "delta"] = "mamba"
    mtp: bool = False

    def __post_init__(self) -> None:
        if self.width < 128 or self.width % 128:
            raise ValueError(f"--width: want a multiple of 128, got {self.width}")
        if not 0 <= self.attention <= self.mixers or self.mixers < 1:
            raise ValueError(
                f"--attention: want 0..{self.mixers} of {self.mixers} mixers, "
                f"got {self.attention}"
            )
        if self.mtp and self.recurrent != "delta":
            raise ValueError("--mtp: want --recurrent delta too")


def target_config(vocab_size: int, size: TargetSize) -> ModelConfig:
    """Returns the architecture of a target: recurrent or attention layers alternating
    with gated MLPs. All heads have a width of 64."""
    layers: tuple[str, ...] = ()
    for i in range(size.mixers):
        before, after = (n * size.attention // size.mixers for n in (i, i + 1))
        layers += ("attention" if after > before else size.recurrent, "mlp")
    kind = _mamba_hybrid if size.recurrent == "mamba" else _delta_hybrid
    return ModelConfig(
        vocab_size=vocab_size,
        num_tokens=vocab_size,
        d_model=size.width,
        layers=blocks(layers),
        tie_embeddings=True,
        stop_tokens=(0,),
        mtp=blocks(("attention", "mlp") if size.mtp else ()),
        **kind(size.width // 64, MLPConfig(-(-size.width * 5 // 192) * 64)),
    )


def _mamba_hybrid(heads: int, mlp: MLPConfig) -> dict[str, Any]:
    """Returns the mixers of a model like Granite 4."""
    attention = AttentionConfig(heads, 2, 64, rope=Rope(theta=10000.0, dim=64))
    mamba = MambaConfig(num_heads=2 * heads, head_dim=64, d_state=64)
    return {"mixers": named(mamba=mamba, attention=attention, mlp=mlp)}


def _delta_hybrid(heads: int, mlp: MLPConfig) -> dict[str, Any]:
    """Returns the mixers and norms of a model like Qwen3.5."""
    attention = AttentionConfig(
        *(heads, 2, 64),
        rope=Rope(theta=10000.0, dim=16),
        qk_norm_eps=1e-6,
        qk_norm_float32=True,
        gated=True,
    )
    delta = DeltaConfig(heads, 2 * heads, key_dim=64, value_dim=64)
    mixers = named(delta=delta, attention=attention, mlp=mlp)
    return {"mixers": mixers, "norm": "rms_float32", "norm_eps": 1e-6}


def drafter_config(
    target: ModelConfig, width: int | None = None, layers: int = 2
) -> ModelConfig:
    """Returns the architecture of a draft model of Mamba2 layers.

    With two layers it has about an eleventh of the bundled target's weights.

    Args:
      target: the target's architecture.
      width: d_model, a multiple of 64. If None, half the target's width, rounded down
        to a multiple of 64.
      layers: number of layers.
    """
    if width is None:
        width = max(target.d_model // 128, 1) * 64
    if width < 64 or width % 64:
        raise ValueError(f"--width: want a multiple of 64, got {width}")
    if layers < 1:
        raise ValueError(f"--layers: want at least 1, got {layers}")
    mamba: str = "mamba"
    return ModelConfig(
        vocab_size=target.vocab_size,
        num_tokens=target.num_tokens,
        d_model=width,
        layers=blocks((mamba,) * layers),
        tie_embeddings=True,
        stop_tokens=target.stop_tokens,
        mixers=named(
            mamba=MambaConfig(num_heads=2 * width // 64, head_dim=64, d_state=64)
        ),
    )


def prepare(
    paths: Sequence[Path],
    tokenizer: "Tokenizer | None" = None,
    vocab_size: int = 2048,
    end: int | None = None,
    spell: Spell | None = None,
) -> TrainingData:
    """Encodes text as token streams, or reads a folder of prepared tokens.

    Prints on stderr what was read and what was skipped.

    Args:
      paths: see `Job.text`.
      tokenizer: encodes the text. If None, a tokenizer of `vocab_size` entries is
        trained.
      vocab_size: size of the vocabulary of a new tokenizer.
      end: the token after each document, if the tokenizer lacks `END_OF_TEXT`.
      spell: see `Job.spell`.

    Raises:
      ValueError: there is too little text, or see `read_texts`.
    """
    folder = paths[0]
    if len(paths) == 1 and (folder / PREPARED).is_file():
        return TrainingData(
            read_tokenizer_file(folder / "tokenizer.json"),
            np.load(folder / PREPARED, mmap_mode="r", allow_pickle=False),
            np.load(folder / "heldout.npy", allow_pickle=False),
        )
    if tokenizer is None:
        texts = corpus.iter_documents(paths, spell=spell)
        documents = tqdm(texts, "for the tokenizer", unit="doc")
        tokenizer = corpus.train_tokenizer(documents, vocab_size)
    own = tokenizer.token_to_id(corpus.END_OF_TEXT)
    end = end if own is None else own
    if end is None:
        raise ValueError(f"tokenizer: no entry {corpus.END_OF_TEXT!r}")
    tally = Tally()
    documents = corpus.iter_documents(paths, tally, spell)
    spelled = special_tokens_in(documents, tokenizer, tally)
    tokens = corpus.encode_corpus(spelled, tokenizer, end)
    for line in tally.lines():
        print(f"stree-jax: {line}", file=sys.stderr)
    if not len(tokens):
        raise ValueError(f"no text in {', '.join(map(str, paths))}")
    train, heldout = corpus.split_holdout(tokens)
    return TrainingData(tokenizer, train, heldout)


def special_tokens_in(
    documents: Iterable[str], tokenizer: "Tokenizer", tally: Tally
) -> Iterator[str]:
    """Yields the documents. Counts in `tally` the plain texts that contain the names of
    special tokens, which are encoded as ordinary text."""
    added = tokenizer.get_added_tokens_decoder().values()
    names = [re.escape(token.content) for token in added if token.special]
    pattern = re.compile("|".join(names) or r"(?!)")
    for text in documents:
        found = None if isinstance(text, Spelled) else pattern.search(text)
        if found is not None:
            tally.special[found[0]] += 1
        yield text


def train_target(
    job: Job,
    size: TargetSize,
    tokenizer: Path | None = None,
    vocab_size: int = 2048,
) -> None:
    """Trains a small hybrid target on text and writes it as a Hugging Face directory.

    Args:
      job: the text, the folders, and the training settings.
      size: the size of the target.
      tokenizer: a tokenizer.json. If None, a tokenizer is trained.
      vocab_size: size of the vocabulary of a new tokenizer.

    Raises:
      ValueError: the arguments or files are invalid.
    """
    job.check()
    own = None if tokenizer is None else read_tokenizer_file(tokenizer)
    data = prepare(job.text, own, vocab_size, spell=job.spell)
    config = target_config(data.tokenizer.get_vocab_size(), size)
    params, _ = fit(
        config,
        job.train,
        with_mtp_loss if size.mtp else next_token_loss,
        data.train,
        data.heldout,
        job.work,
        minutes=job.minutes,
        save_minutes=job.save_minutes,
    )
    finish(job, data, config, params)


def prepare_for(job: Job, target: Model, name: str) -> TrainingData:
    """Encodes the text of a job with the tokenizer of a target.

    Args:
      job: the training job, whose text is encoded.
      target: the target.
      name: the target's name, for messages.

    Raises:
      ValueError: the target has no tokenizer, the text was prepared with another one,
        or the text contains tokens that the target lacks.
    """
    if target.tokenizer is None:
        raise ValueError(f"{name}: training from text needs its tokenizer.json")
    end = next(iter(target.config.stop_tokens), None)
    data = prepare(job.text, target.tokenizer, end=end, spell=job.spell)
    if data.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        raise ValueError(f"{name}: its tokenizer is not the one of the prepared text")
    num_tokens = target.config.num_tokens
    largest = [int(np.max(x, initial=0)) for x in (data.train, data.heldout)]
    check_text_ids("--text", target.tokenizer, largest, num_tokens)
    return data


def finish(job: Job, data: TrainingData, config: ModelConfig, params: Params) -> None:
    """Writes a model in bfloat16 as a Hugging Face directory."""
    print(f"stree-jax: writing {job.out}", file=sys.stderr)
    rounded = jax.tree.map(jnp.asarray, cast_params(config, params, jnp.bfloat16))
    export_hf(config, rounded, data.tokenizer, job.out)
