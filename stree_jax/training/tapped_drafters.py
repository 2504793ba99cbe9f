"""Trains drafters that read a frozen target's residual streams.

First the target reads windows of a text, and windows of text that it generated itself;
or answers that it wrote before (`training.answers`). Its hidden states, and the
residual streams that the drafter will read, are stored in files. A training example is
a stretch: `TrainConfig.length` consecutive tokens of a window. Some random tokens of
the stretch are roots. Below each root the drafter predicts the next M tokens (the
drafts of the root), given the tokens of the text and not its own predictions.

Letters: B stretches, T tokens of a stretch, A roots in a stretch, M drafts of a root, m
residual streams, d width, V tokens of the vocabulary.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.checkpoints.draft_tokens import draft_vocabulary
from stree_jax.checkpoints.load import load
from stree_jax.convert.hub import hub_name
from stree_jax.models import (
    AttentionConfig,
    Model,
    ModelConfig,
    Rope,
    Taps,
    logits_of,
)
from stree_jax.models import Model as BareModel
from stree_jax.models.drafters.heads import head_of
from stree_jax.models.drafters.trimming import head_name
from stree_jax.models.stack.boundaries import boundary_count, tap_of
from stree_jax.models.stack.network import capped
from stree_jax.models.weights.linear import linear
from stree_jax.models.weights.parameters import as_weight
from stree_jax.models.weights.weight import Weight
from stree_jax.training.answers import answer_files, answer_tokens, read_answers
from stree_jax.training.hidden_state_files import (
    GENERATED,
    PROMPT,
    digest,
    keep_own_text,
    keep_tapped,
    spread_windows,
)
from stree_jax.training.recipe import Job, TrainingData, prepare_for
from stree_jax.training.train import (
    Batch,
    Examples,
    Params,
    Subject,
    TrainConfig,
    learn,
)

HELD_OUT = 64  # held-out windows of each source
DECAY = 4.0  # drafts over which the weight falls to 1/e
HEAD = 64  # channels of an attention head
TAPS = 3  # default number of residual streams


class StretchSubject(Subject, Protocol):
    """A drafter that is trained on stretches of text (see the module's docstring). The
    teacher of its loss is the target's embedding and head."""

    @property
    def config(self) -> Any:
        """The drafter's architecture, which has `boundaries`."""
        ...

    @property
    def drafts(self) -> int:
        """M, the number of tokens that the drafter predicts below a root."""
        ...

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens of the drafter's head, ascending; empty if it has all."""
        ...

    def drafter(self, params: Params, output: BareModel) -> Any:
        """Returns the drafter with trained parameters.

        Args:
          params: the parameters.
          output: the target's embedding and head.
        """
        ...

    def log_probs(
        self, params: Params, batch: Batch, output: BareModel
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the log-probabilities [B A, M, V] of the target and of the drafter;
        with a draft vocabulary, of its tokens only.

        Args:
          params: the drafter's parameters.
          batch: a dictionary with "states" [B, T, 1 + m, d], the target's hidden state
            and m residual streams at each token; "tokens" [B, T] int32; and "places"
            [B, A] int32, the index of each root in its stretch, from 1 to T - M.
          output: the target's embedding and head.
        """
        ...


class StretchSize(Protocol):
    """The size of a drafter that is trained on stretches of text."""

    @property
    def drafts(self) -> int:
        """M, the number of tokens that the drafter predicts below a root."""
        ...

    def subject(self, target: Model, tokens: np.ndarray, name: str) -> StretchSubject:
        """Returns the drafter to train.

        Args:
          target: the target.
          tokens: [n] ints, the text.
          name: the target's hub id, or "".

        Raises:
          ValueError: the size does not fit the target.
        """
        ...


@dataclass(frozen=True)
class Amounts:
    """Amounts of text from which a drafter learns.

    Attributes:
      roots: A, the number of roots in each stretch of `TrainConfig.length` tokens.
      tokens: number of tokens of the text that the target reads, in windows that are
        spread evenly over the text.
      own_tokens: number of tokens that the target generates. If 0, the drafter learns
        from the text only.
      window: number of tokens of a window. The target reads each window from an empty
        state.
    """

    roots: int = 32
    tokens: int = 500_000
    own_tokens: int = 400_000
    window: int = 256


# Sizes


def check_least(size: Any, **least: int) -> None:
    """Raises ValueError if a field of a drafter's size is below its minimum."""
    for name, low in least.items():
        if (value := getattr(size, name)) < low:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: want at least {low}, got {value}")


def check_amounts(length: int, drafts: int, amounts: Amounts) -> None:
    """Raises ValueError for sizes that do not fit together, before the target reads
    text."""
    roots, window = amounts.roots, amounts.window
    check_least(amounts, roots=1, tokens=1, own_tokens=0)
    most = min(window, PROMPT + GENERATED - 1) if amounts.own_tokens else window
    least = PROMPT + drafts + roots
    if not least <= length <= most:
        raise ValueError(
            f"--length: want {least}..{most} tokens for {roots} roots with {drafts} "
            f"drafts, got {length}"
        )


def spread_boundaries(target: ModelConfig, taps: int | None) -> tuple[int, ...]:
    """Returns m boundaries (see `models.stack.boundaries`), evenly spread over the
    target's layers. The last one is after the last layer.

    Args:
      target: the target's architecture.
      taps: m. If None, `TAPS`, or as many as the target has layers.

    Raises:
      ValueError: the target has fewer layers.
    """
    last = boundary_count(target)
    count = min(TAPS, last) if taps is None else taps
    if not 1 <= count <= last:
        raise ValueError(f"--taps: want 1..{last}, got {count}")
    return tuple(last * (i + 1) // count for i in range(count))


def attention_of(target: ModelConfig) -> AttentionConfig:
    """Returns the attention config of a drafter that is as wide as the target. It has
    as many key as query heads, of `HEAD` channels each.

    Raises:
      ValueError: the target's width is not divisible by `HEAD`.
    """
    d = target.d_model
    if d % HEAD:
        raise ValueError(f"target: want a width divisible by {HEAD}, got {d}")
    return AttentionConfig(d // HEAD, d // HEAD, HEAD, rope=Rope(1e4, HEAD))


def published_name(target: str | Path | Model) -> str:
    """Returns the hub id of a target, or "" if it is not from the hub."""
    if not isinstance(target, str) or Path(target).exists():
        return ""
    found = hub_name(target)
    return "" if found is None else found.repo


# Losses


def draft_slots(batch: Batch, drafts: int) -> tuple[jax.Array, jax.Array]:
    """Returns indices that select the token before each draft from an array [B, T].

    Args:
      batch: see `StretchSubject.log_probs`.
      drafts: M.

    Returns:
      The index of the stretch [B, 1, 1] int32, and the index in the stretch [B, A, M]
      int32 of the token before each draft: root + 0, 1, .., M - 1.
    """
    rows = jnp.arange(len(batch["tokens"]), dtype=jnp.int32)[:, None, None]
    later = jnp.arange(drafts, dtype=jnp.int32)[None, None]
    return rows, batch["places"][..., None] + later


def trained_tokens(
    target: BareModel, count: int | None, tokens: np.ndarray
) -> tuple[int, ...]:
    """Returns the tokens that a drafter's head has, ascending: the most frequent of the
    text `tokens` [n]. If `count` is None, the result is empty: the head has all
    tokens."""
    if count is None:
        return ()
    return tuple(draft_vocabulary(target, count, tokens).tolist())


def rows_of_head(output: BareModel, ids: Sequence[int], dtype: Any) -> jax.Array:
    """Returns the rows [D, d] of the target's head for the tokens `ids`, which are not
    trained."""
    head = as_weight(output.params[head_name(output.config)])
    return head.rows(jnp.asarray(ids, jnp.int32)).astype(dtype)


def target_log_probs(
    output: BareModel, batch: Batch, drafts: int, head: jax.Array | None = None
) -> jax.Array:
    """Returns the log-probabilities [B A, M, V] of the target for each draft.

    Args:
      output: the target's embedding and head.
      batch: see `StretchSubject.log_probs`.
      drafts: M.
      head: [D, d], rows of the target's head. If given, the result [B A, M, D] is of
        their tokens, as if there were no others.
    """
    c, hidden = output.config, batch["states"][:, :, 0].astype(jnp.float32)
    V = c.num_tokens if head is None else len(head)
    if head is None:
        logits = logits_of(output, hidden)[..., :V]
    else:
        logits = capped(linear(hidden, head) / c.logits_divisor, c.logits_cap)
    p = jax.nn.log_softmax(jax.lax.stop_gradient(logits))
    return p[draft_slots(batch, drafts)].reshape(-1, drafts, V)


def divergences(p: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns KL(p || q) in nats and the total variation sum |p - q| / 2, for
    log-probabilities [.., V]."""
    kl = (jnp.exp(p) * (p - q)).sum(axis=-1)
    return kl, jnp.abs(jnp.exp(p) - jnp.exp(q)).sum(axis=-1) / 2


def weighted(losses: jax.Array) -> jax.Array:
    """Returns the weighted mean of the losses [N, M] of N roots' drafts. The weight of
    draft k = 0, 1, .. is proportional to exp(-k / `DECAY`)."""
    weights = np.exp(-np.arange(losses.shape[1]) / DECAY)
    each = losses.mean(axis=0)
    return (each * jnp.asarray(weights / weights.sum(), jnp.float32)).sum()


# Examples


class Source(Protocol):
    """Tokens from one source, with the target's states."""

    @property
    def identity(self) -> list[Any]:
        """The shape of the states, and a hash of the tokens and possible roots."""
        ...

    def cut(self, rng: np.random.Generator, length: int, roots: int, M: int) -> Batch:
        """Returns a random stretch of `length` tokens with random roots; M is the
        number of drafts of a root."""
        ...


@dataclass(frozen=True)
class Stretches:
    """Windows of text from one source, with the target's states. `cut` takes stretches
    from them.

    Attributes:
      tokens: [n, L] ints.
      states: [n, L, 1 + m, d]. The target's hidden state and m residual streams at each
        token.
      first: index of the first token of a window that may be a root. It is 0 for text
        from files, and the last token of the prompt for generated text.
    """

    tokens: np.ndarray
    states: np.ndarray
    first: int

    @property
    def identity(self) -> list[Any]:
        return [*self.states.shape, digest(self.tokens, self.first)]

    def cut(self, rng: np.random.Generator, length: int, roots: int, M: int) -> Batch:
        """Returns a random stretch of `length` tokens with random roots.

        From generated text, it is always the end of a window, because the beginning is
        the prompt, where roots are not allowed.
        """
        row, L = rng.integers(0, len(self.tokens)), self.tokens.shape[1]
        start = L - length if self.first else rng.integers(0, L - length + 1)
        least = max(self.first - int(start), 1)
        places = least + rng.permutation(length - M + 1 - least)[:roots]
        part = slice(start, start + length)
        return {
            "states": self.states[row, part],
            "tokens": self.tokens[row, part].astype(np.int32),
            "places": np.sort(places).astype(np.int32),
        }


def stretch_examples(
    train: TrainConfig,
    learnt: Sequence[Source],
    held: Sequence[Source],
    roots: int,
    drafts: int,
) -> Examples:
    """Returns training examples. The stretches of a batch are taken from the sources in
    turn.

    Args:
      train: the training settings; `length` is T.
      learnt, held: the sources, for training and for evaluation.
      roots: A.
      drafts: M.
    """

    def batch(rng: np.random.Generator, sources: Sequence[Source]) -> Batch:
        size = train.length, roots, drafts
        rows = [sources[i % len(sources)].cut(rng, *size) for i in range(train.batch)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def batches(step: int) -> Iterator[Batch]:
        while True:
            yield batch(np.random.default_rng([train.seed, step]), learnt)
            step += 1

    count = max(len(held) * HELD_OUT // train.batch, 1)
    rng = np.random.default_rng([train.seed, 0, 1])
    settings = {"sources": [s.identity for s in learnt], "roots": roots}
    return Examples(batches, [batch(rng, held) for _ in range(count)], settings)


# Training


def _read(
    target: BareModel,
    taps: Taps,
    window: int,
    stream: np.ndarray,
    file: Path,
    count: int,
    own: int,
) -> list[Stretches]:
    """Runs the target on windows of a text, and on text that the target generates from
    beginnings of such windows. Stores its states in files.

    Args:
      target: the target.
      taps: the target's layers whose residual streams the drafter reads.
      window: number of tokens of a window.
      stream: [n]. Token ids of the text.
      file: path without suffix of the files with states and generated text.
      count: number of windows.
      own: number of texts that the target generates.

    Returns:
      The windows of the text with the states, and if `own` is not 0 also the generated
      texts with theirs.
    """
    texts = spread_windows(stream, window, count)
    states = keep_tapped(target, texts, file.with_suffix(".text"), taps)
    found = [Stretches(texts[:, :-1], states, 0)]
    if own:
        prompts = spread_windows(stream, window, own)
        texts = keep_own_text(target, prompts, file.with_suffix(".own"))
        states = keep_tapped(target, texts, file.with_suffix(".own_states"), taps)
        found.append(Stretches(texts[:, :-1], states, PROMPT - 1))
    return found


def train_drafter(
    job: Job,
    target: str | Path | Model,
    size: StretchSize,
    amounts: Amounts,
    dtype: str = "float32",
) -> tuple[Any, int]:
    """Trains a drafter for a target, and prints how often the two agree.

    Half of the examples are from the text. The other half is text that the target
    generates greedily from short prompts of the text; its roots are generated tokens.

    Args:
      job: the text, the folders, and the training settings. `work` must have space for
        the states, 2 (1 + m) d bytes per token, and the saves. The caller writes `out`.
      target: the target model, or its path or name.
      size: the size of the drafter.
      amounts: how much text is used.
      dtype: dtype of the target during training.

    Returns:
      The drafter in bfloat16, and the number of the target's layers.

    Raises:
      ValueError: the arguments or files are invalid.
    """
    job.check()
    check_amounts(job.train.length, size.drafts, amounts)
    files = answer_files(job.text)
    if files and amounts.own_tokens:
        raise ValueError("--own-tokens: leave it out, because --text has answers")
    loaded = target if isinstance(target, Model) else load(target, dtype=dtype)
    if files:
        text = answer_tokens(files, loaded.config.num_tokens)
        read = partial(_read_answers, job, loaded, files)
    else:
        data = prepare_for(job, loaded, str(target))
        text, read = np.asarray(data.train), partial(_read_text, job, loaded, data)
    subject = size.subject(loaded, text, published_name(target))
    taps = tuple(tap_of(loaded.config, b) for b in subject.config.boundaries)
    learnt, held = read(taps, amounts, size.drafts)
    output = _in_float32(head_of(loaded))
    params = _train(job, output, subject, learnt, held, amounts.roots)
    return subject.drafter(params, output), boundary_count(loaded.config)


def _in_float32(model: BareModel) -> BareModel:
    """Returns a model whose quantized matrices are float32, so that the gradient of a
    step does not dequantize them again."""
    params = {
        name: p.matrix() if isinstance(p, Weight) else p
        for name, p in model.params.items()
    }
    return model.replace(params=params)


def _read_text(
    job: Job,
    target: BareModel,
    data: TrainingData,
    taps: Taps,
    amounts: Amounts,
    drafts: int,
) -> tuple[Sequence[Source], Sequence[Source]]:
    """Returns the text and, if wanted, text of the target, with the target's states:
    the sources for training, and for evaluation."""
    read = partial(_read, target, taps, amounts.window)
    own = bool(amounts.own_tokens)
    held = read(data.heldout, job.work / "heldout", HELD_OUT, HELD_OUT * own)
    windows = max(math.ceil(amounts.tokens / amounts.window), 1)
    own_texts = math.ceil(amounts.own_tokens / GENERATED)
    return read(data.train, job.work / "train", windows, own_texts), held


def _read_answers(
    job: Job,
    target: BareModel,
    files: Sequence[Path],
    taps: Taps,
    amounts: Amounts,
    drafts: int,
) -> tuple[Sequence[Source], Sequence[Source]]:
    """Returns answers with the target's states, for training and for evaluation."""
    work = job.work / "answers"
    learnt, held = read_answers(target, taps, files, work, job.train.length, drafts)
    return [learnt], [held]


def _train(
    job: Job,
    output: BareModel,
    subject: StretchSubject,
    learnt: Sequence[Source],
    held: Sequence[Source],
    roots: int,
) -> Params:
    """Trains on examples, prints how often the drafter and the target agree, and
    returns the parameters in bfloat16; see `train_drafter`."""
    drafts = subject.drafts
    examples = stretch_examples(job.train, learnt, held, roots, drafts)
    settings = {"drafter": repr(subject.config), "drafts": drafts}
    if subject.ids:
        settings["draft_vocab"] = digest(subject.ids)
    params, _ = learn(
        subject,
        job.train,
        replace(examples, settings=examples.settings | settings),
        job.work / "saves",
        teacher=output,
        minutes=job.minutes,
        save_minutes=job.save_minutes,
    )
    rounded = subject.cast(params, jnp.bfloat16)
    last = held[-1:]
    final = stretch_examples(job.train, last, last, roots, drafts).heldout
    right, accepted = agreement(subject, rounded, output, final)
    for k in range(drafts):
        shares = f"first guess {right[k]:.1%}, accepted {accepted[k]:.1%}"
        print(f"stree-jax: draft {k + 1}: {shares}", file=sys.stderr)
    return rounded


@partial(jax.jit, static_argnums=0)
def _agreements(
    subject: StretchSubject, params: Params, batch: Batch, output: BareModel
) -> tuple[jax.Array, jax.Array]:
    p, q = subject.log_probs(params, batch, output)
    right = p.argmax(axis=-1) == q.argmax(axis=-1)
    return right, 1 - divergences(p, q)[1]


def agreement(
    subject: StretchSubject,
    params: Params,
    output: BareModel,
    batches: Sequence[Batch],
) -> tuple[np.ndarray, np.ndarray]:
    """Measures how well a drafter agrees with the target, given the tokens of the text.

    Returns for each draft 1, .., M how often both have the same likeliest token, and
    the mean probability that the draft is accepted: [M] each.

    Args:
      subject: the drafter.
      params: its parameters.
      output: the target's embedding and head.
      batches: batches as in `StretchSubject.log_probs`.
    """
    found = [
        _agreements(subject, params, jax.tree.map(jnp.asarray, batch), output)
        for batch in batches
    ]
    right, accepted = (np.concatenate(x) for x in zip(*found, strict=True))
    return right.mean(axis=0), accepted.mean(axis=0)
