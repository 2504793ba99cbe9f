"""Trains Medusa heads on a frozen target (Cai et al. 2024, Medusa-1).

The target first reads a text, and generates text that it reads, too. Its hidden states
are stored in files. Then only the heads are trained, which is quick on a CPU. The
hidden state h_t chooses token t + 1. Head k learns to predict from h_t the target's
distribution k tokens later:

    sum over k of KL(target(. | h_{t+k}) || head_k(. | h_t)) / K

Letters: B rows, K heads, R ranks, L tokens of a window, S tokens of a text, P = L - K
positions, d width of hidden states, V tokens of the vocabulary.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.checkpoints.load import load
from stree_jax.models import Model, logits_of
from stree_jax.models import Model as BareModel
from stree_jax.models.drafters.heads import (
    Heads,
    HeadsConfig,
    cast_heads,
    head_logits,
    head_of,
    init_heads,
)
from stree_jax.sampling.ranks import rank_of
from stree_jax.training.hidden_state_files import (
    GENERATED,
    PROMPT,
    READ_AT_ONCE,
    hidden_states,
    keep_hidden,
    keep_own_text,
    spread_windows,
)
from stree_jax.training.recipe import Job, prepare_for
from stree_jax.training.train import Batch, Examples, Params, TrainConfig, learn

RANKS = 10  # R, the maximum number of children in the trees of the public Medusa code
HELD_OUT = 128  # held-out windows, and texts in which ranks are counted


@dataclass(frozen=True)
class HeadsSubject:
    """Draft heads that are trained on hidden states. The teacher is the target's output
    head."""

    config: HeadsConfig

    def init(self, key: jax.Array) -> Params:
        return init_heads(self.config, key, jnp.float32)

    def cast(self, params: Params, dtype: Any) -> Params:
        return cast_heads(self.config, params, dtype)

    def loss(self, params: Params, batch: Batch, teacher: BareModel) -> jax.Array:
        """Returns the mean KL divergence in nats over heads and positions.

        Args:
          params: parameters of the heads.
          batch: [B, L, d]. Hidden states of the target.
          teacher: the target's output head.
        """
        hidden = batch.astype(jnp.float32)
        K, places = self.config.heads, hidden.shape[1] - self.config.heads
        own = head_logits(Heads(params, self.config), teacher, hidden[:, :places], K)
        logits = jax.lax.stop_gradient(logits_of(teacher, hidden))
        p = jax.nn.log_softmax(logits)
        total = jnp.float32(0)
        for k in range(K):
            q = jax.nn.log_softmax(own[:, :, k])
            later = p[:, k + 1 : k + 1 + places]
            total += (jnp.exp(later) * (later - q)).sum(axis=-1).mean()
        return total / K


def examples_of(
    train: TrainConfig, learnt: Sequence[np.ndarray], held: Sequence[np.ndarray]
) -> Examples:
    """Returns training examples: `train.length` consecutive hidden states of a window.
    The examples of a batch are taken from the sources in turn.

    Args:
      train: the training settings.
      learnt, held: for training and for evaluation, the hidden states [n, L, d] of the
        windows of each source.

    Raises:
      ValueError: the windows of a source are shorter than `train.length`.
    """
    T = train.length
    if (shortest := min(source.shape[1] for source in learnt)) < T:
        raise ValueError(f"--length: want at most {shortest} tokens, got {T}")

    def batches(step: int) -> Iterator[np.ndarray]:
        while True:
            rng, rows = np.random.default_rng([train.seed, step]), []
            for i in range(train.batch):
                source = learnt[i % len(learnt)]
                row = rng.integers(0, source.shape[0])
                start = rng.integers(0, source.shape[1] - T + 1)
                rows.append(source[row, start : start + T])
            yield np.stack(rows)
            step += 1

    stretches = np.concatenate([np.asarray(source[:, -T:]) for source in held])
    count = max(len(stretches) // train.batch, 1)
    settings = {"sources": [list(source.shape) for source in learnt]}
    return Examples(batches, np.array_split(stretches, count), settings)


@jax.jit
def head_ranks(
    heads: Heads, target: BareModel, hidden: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Returns the ranks of the text's tokens among the guesses of each head.

    Args:
      heads: the heads.
      target: the target's output head.
      hidden: [B, L, d]. Hidden states after each of the first L tokens.
      tokens: [B, L + 1] int32. The text.

    Returns:
      [B, P, K] int32, from 0. Entry [:, t, k] is the rank of the token at t + k + 2,
      which head k + 1 guesses from the state at t.
    """
    K, places = heads.config.heads, hidden.shape[1] - heads.config.heads
    V = target.config.num_tokens
    guesses = head_logits(heads, target, hidden[:, :places], K)[..., :V]
    wanted = [tokens[:, k + 2 : k + 2 + places] for k in range(K)]
    rank = jax.vmap(rank_of)
    return jnp.stack([rank(guesses[:, :, k], wanted[k]) for k in range(K)], axis=-1)


def accuracy_table(ranks: np.ndarray, width: int = RANKS) -> np.ndarray:
    """Returns the accuracies of heads by rank, for trees with R = `width` children.

    Entry [k, r] is the share of positions at which the token has rank r for head k,
    among positions where its ranks for the heads before were below R. This is
    `gain.Acceptance` of the full tree, but counted at all positions and not only where
    a target pass begins.

    Args:
      ranks: [n, K] ints.
      width: R.

    Returns:
      [K, R] float64.
    """
    table, reached = np.zeros((ranks.shape[1], width)), np.ones(len(ranks), bool)
    for k, rank in enumerate(ranks.T):
        count = np.bincount(rank[reached & (rank < width)], minlength=width)
        table[k] = count / max(reached.sum(), 1)
        reached &= rank < width
    return table


def ranks_in(heads: Heads, target: BareModel, texts: np.ndarray, start: int) -> Any:
    """Returns the ranks [n, K] of the texts' tokens among the heads' guesses, for all
    positions from `start` on of texts [B, S]; see `head_ranks`."""
    bare, found = head_of(target), []
    for i in range(0, len(texts), READ_AT_ONCE):
        part = texts[i : i + READ_AT_ONCE].astype(np.int32)
        full = np.pad(part, ((0, READ_AT_ONCE - len(part)), (0, 0)))
        hidden = hidden_states(target, jnp.asarray(full[:, :-1]))
        ranks = np.asarray(head_ranks(heads, bare, hidden, jnp.asarray(full)))
        found.append(ranks[: len(part), start:].reshape(-1, ranks.shape[2]))
    return np.concatenate(found)


def calibrated(heads: Heads, target: BareModel, texts: np.ndarray) -> Heads:
    """Returns the heads with accuracies counted in text generated by the target.

    Args:
      heads: the heads.
      target: the target model.
      texts: result of `keep_own_text` for held-out text.
    """
    table = accuracy_table(ranks_in(heads, target, texts, PROMPT - 1))
    rows = tuple(tuple(float(p) for p in row) for row in table)
    return replace(heads, config=replace(heads.config, accuracy=rows))


def check_sizes(
    length: int, heads: int, tokens: int, own_tokens: int, window: int
) -> None:
    """Raises ValueError for sizes that do not fit together, before the target reads
    text."""
    if tokens < 1:
        raise ValueError(f"--tokens: want at least 1, got {tokens}")
    if own_tokens < 0:
        raise ValueError(f"--own-tokens: want at least 0, got {own_tokens}")
    if window < PROMPT:
        raise ValueError(f"window: want at least {PROMPT} tokens, got {window}")
    most = min(window, PROMPT + GENERATED - 1) if own_tokens else window
    if not heads < length <= most:
        raise ValueError(
            f"--length: want {heads + 1}..{most} tokens for {heads} heads, got {length}"
        )


def train_heads(
    job: Job,
    target: str | Path | Model,
    heads: int = 4,
    blocks: int = 3,
    own_output: bool = False,
    *,
    tokens: int = 2_000_000,
    own_tokens: int = 400_000,
    window: int = 512,
    dtype: str = "float32",
) -> Heads:
    """Trains draft heads on the hidden states of a target, and counts their accuracies.

    Half of the training examples are from the text, and half are generated greedily by
    the target. In generated text the next token is always the target's likeliest one,
    so a head can predict what comes after it.

    Args:
      job: the text, the folders, and the training settings. `work` must have space for
        the hidden states, 2 d bytes per token, and the saves. The caller writes `out`.
      target: the target model, or its path or name.
      heads, blocks, own_output: see `HeadsConfig`.
      tokens: number of tokens of text to read, spread evenly over the text.
      own_tokens: number of tokens that the target generates. If 0, the heads learn from
        the text only.
      window: number of tokens that the target reads from an empty state.
      dtype: dtype of the target during training. float32 is fastest on a CPU.

    Returns:
      The heads in bfloat16, with accuracies.

    Raises:
      ValueError: the arguments or files are invalid.
    """
    job.check()
    check_sizes(job.train.length, heads, tokens, own_tokens, window)
    loaded = target if isinstance(target, Model) else load(target, dtype=dtype)
    data = prepare_for(job, loaded, str(target))
    c = loaded.config
    config = HeadsConfig(c.d_model, c.vocab_size, heads, blocks, own_output)

    def sources(name: str, stream: np.ndarray, read: int, own: int) -> list[Any]:
        """Returns the hidden states in windows of the text, then those in generated
        text if `own` is not 0, and at the end the generated text or None."""
        texts = spread_windows(stream, window, read)
        kept = [keep_hidden(loaded, texts, job.work / f"{name}.text")]
        if own == 0:
            return [*kept, None]
        prompts = spread_windows(stream, window, own)
        generated = keep_own_text(loaded, prompts, job.work / f"{name}.own")
        states = keep_hidden(loaded, generated, job.work / f"{name}.own_states")
        return [*kept, states, generated]

    count = max(math.ceil(tokens / window), 1), math.ceil(own_tokens / GENERATED)
    # The shorter stream first: if there is too little text, the error comes early.
    *held, generated = sources("heldout", data.heldout, HELD_OUT, HELD_OUT)
    *learnt, _ = sources("train", data.train, *count)
    examples = examples_of(job.train, learnt, held[: len(learnt)])
    settings = examples.settings | {"heads": repr(config)}
    params, _ = learn(
        HeadsSubject(config),
        job.train,
        replace(examples, settings=settings),
        job.work / "saves",
        teacher=head_of(loaded),
        minutes=job.minutes,
        save_minutes=job.save_minutes,
    )
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    trained = Heads(rounded, config)
    trained = calibrated(trained, loaded, np.asarray(generated))
    for k, row in enumerate(trained.config.accuracy):
        shares = f"first guess {row[0]:.1%}, one of {len(row)} {sum(row):.1%}"
        print(f"stree-jax: head {k + 1}: {shares}", file=sys.stderr)
    return trained
