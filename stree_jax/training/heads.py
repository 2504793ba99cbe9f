"""Training Medusa heads on a target that stays as it is (Cai et al. 2024, Medusa-1).

The target reads a text and writes some of its own, and its hidden states are kept in
files. Then only the heads are trained, which is quick on a CPU. Head k learns, from the
state h_t that the token t + 1 is chosen by, what the target says k tokens later:

    sum over k of KL(target(. | h_{t+k}) || head_k(. | h_t)) / K

Letters: K heads, R ranks, L tokens of a window, S of a text, d width, V tokens.
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

from stree_jax.checkpoints.load import Model, load
from stree_jax.models import Model as BareModel
from stree_jax.models import base_model, logits_of
from stree_jax.models.heads import (
    Heads,
    HeadsConfig,
    cast_heads,
    head_logits,
    head_of,
    init_heads,
)
from stree_jax.sampling.ranks import rank_of
from stree_jax.training.kept import (
    PROMPT,
    READ_AT_ONCE,
    SPOKEN,
    hidden_states,
    keep_hidden,
    keep_own_text,
    spread_windows,
)
from stree_jax.training.recipe import Job, prepare_for
from stree_jax.training.train import Batch, Examples, Params, TrainConfig, learn

RANKS = 10  # R: the public code's trees have no more children
HELD_OUT = 128  # windows, and texts that ranks are counted in


@dataclass(frozen=True)
class HeadsSubject:
    """Heads that learn from hidden states; the teacher is the target's head."""

    config: HeadsConfig

    def init(self, key: jax.Array) -> Params:
        return init_heads(self.config, key, jnp.float32)

    def cast(self, params: Params, dtype: Any) -> Params:
        return cast_heads(self.config, params, dtype)

    def loss(self, params: Params, batch: Batch, teacher: BareModel) -> jax.Array:
        """Mean KL in nats, over heads and places, of states [B, P, d]."""
        hidden = batch.astype(jnp.float32)
        K, places = self.config.heads, hidden.shape[1] - self.config.heads
        own = head_logits(Heads(params, self.config), teacher, hidden[:, :places], K)
        said = jax.lax.stop_gradient(logits_of(teacher, hidden))
        p = jax.nn.log_softmax(said)
        total = jnp.float32(0)
        for k in range(K):
            q = jax.nn.log_softmax(own[:, :, k])
            then = p[:, k + 1 : k + 1 + places]
            total += (jnp.exp(then) * (then - q)).sum(axis=-1).mean()
        return total / K


def examples_of(
    train: TrainConfig, learnt: Sequence[np.ndarray], held: Sequence[np.ndarray]
) -> Examples:
    """Stretches of `train.length` states, from the sources in turn.

    Args:
      learnt, held: of sources, [n, L, d] each.

    Raises:
      ValueError: windows that are shorter than that.
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
    """Ranks [B, P, K] int32, from 0, of tokens among the guesses of each head.

    Args:
      hidden: [B, L, d] after each of the first L tokens.
      tokens: [B, L + 1] int32. Entry [:, t, k] is of the token at t + k + 2, which
        head k + 1 guesses from the state at t; P = L - K.
    """
    K, places = heads.config.heads, hidden.shape[1] - heads.config.heads
    V = target.config.num_tokens
    guesses = head_logits(heads, target, hidden[:, :places], K)[..., :V]
    wanted = [tokens[:, k + 2 : k + 2 + places] for k in range(K)]
    rank = jax.vmap(rank_of)
    return jnp.stack([rank(guesses[:, :, k], wanted[k]) for k in range(K)], axis=-1)


def accuracy_table(ranks: np.ndarray, width: int = RANKS) -> np.ndarray:
    """[K, R] shares of ranks [n, K], each given that the heads before were in reach.

    In reach is a rank below R. This is `cost.Acceptance` of the full tree, but that it
    looks at all places, not only at those where a call begins.
    """
    table, reached = np.zeros((ranks.shape[1], width)), np.ones(len(ranks), bool)
    for k, rank in enumerate(ranks.T):
        count = np.bincount(rank[reached & (rank < width)], minlength=width)
        table[k] = count / max(reached.sum(), 1)
        reached &= rank < width
    return table


def ranks_in(heads: Heads, target: BareModel, texts: np.ndarray, start: int) -> Any:
    """Ranks [n, K] in texts [B, S], of states from place `start` on."""
    bare, found = head_of(target), []
    for i in range(0, len(texts), READ_AT_ONCE):
        part = texts[i : i + READ_AT_ONCE].astype(np.int32)
        full = np.pad(part, ((0, READ_AT_ONCE - len(part)), (0, 0)))
        hidden = hidden_states(target, jnp.asarray(full[:, :-1]))
        ranks = np.asarray(head_ranks(heads, bare, hidden, jnp.asarray(full)))
        found.append(ranks[: len(part), start:].reshape(-1, ranks.shape[2]))
    return np.concatenate(found)


def calibrated(heads: Heads, target: BareModel, texts: np.ndarray) -> Heads:
    """The heads with accuracies counted in what the target says after prompts.

    Args:
      texts: as of `keep_own_text`, of text that was held out.
    """
    table = accuracy_table(ranks_in(heads, target, texts, PROMPT - 1))
    rows = tuple(tuple(float(p) for p in row) for row in table)
    return replace(heads, config=replace(heads.config, accuracy=rows))


def check_sizes(
    length: int, heads: int, tokens: int, own_tokens: int, window: int
) -> None:
    """Refuse what could not be learnt from, before the target reads anything."""
    if tokens < 1:
        raise ValueError(f"--tokens: want at least 1, got {tokens}")
    if own_tokens < 0:
        raise ValueError(f"--own-tokens: want at least 0, got {own_tokens}")
    if window < PROMPT:
        raise ValueError(f"window: want at least {PROMPT} tokens, got {window}")
    most = min(window, PROMPT + SPOKEN - 1) if own_tokens else window
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
    """Train heads on what a target makes of a text, and count their accuracies.

    Half of what they learn from is the text. The other half the target has written
    itself, greedily: there the next token is the one that it thinks likeliest, so that
    a head can tell what comes after that one.

    Args:
      job: `work` takes the hidden states, 2 d bytes a token, and the saves; `out` is
        the caller's to write.
      heads, blocks, own_output: see `HeadsConfig`.
      tokens: of text that are read, spread evenly over all of it.
      own_tokens: that the target writes; 0: it learns from text alone.
      window: tokens that the target reads from an empty state.
      dtype: of the target meanwhile; a CPU is faster in float32. Heads are bfloat16.
    """
    job.check()
    check_sizes(job.train.length, heads, tokens, own_tokens, window)
    loaded = target if isinstance(target, Model) else load(target, dtype=dtype)
    data = prepare_for(job, loaded, str(target))
    bare, c = base_model(loaded), loaded.config
    config = HeadsConfig(c.d_model, c.vocab_size, heads, blocks, own_output)

    def sources(name: str, stream: np.ndarray, read: int, own: int) -> list[Any]:
        """Returns the training text, and the text that the target wrote itself."""
        texts = spread_windows(stream, window, read)
        kept = [keep_hidden(bare, texts, job.work / f"{name}.text")]
        if own == 0:
            return [*kept, None]
        spoken = spread_windows(stream, window, own)
        said = keep_own_text(bare, spoken, job.work / f"{name}.own")
        return [*kept, keep_hidden(bare, said, job.work / f"{name}.own_states"), said]

    count = max(math.ceil(tokens / window), 1), math.ceil(own_tokens / SPOKEN)
    # The shorter stream first, so that too little text is told of before the long work.
    *held, said = sources("heldout", data.heldout, HELD_OUT, HELD_OUT)
    *learnt, _ = sources("train", data.train, *count)
    examples = examples_of(job.train, learnt, held[: len(learnt)])
    settings = examples.settings | {"heads": repr(config)}
    params, _ = learn(
        HeadsSubject(config),
        job.train,
        replace(examples, settings=settings),
        job.work / "saves",
        teacher=head_of(bare),
        minutes=job.minutes,
        save_minutes=job.save_minutes,
    )
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    trained = Heads(rounded, config)
    trained = calibrated(trained, bare, np.asarray(said))
    for k, row in enumerate(trained.config.accuracy):
        shares = f"first guess {row[0]:.1%}, one of {len(row)} {sum(row):.1%}"
        print(f"stree-jax: head {k + 1}: {shares}", file=sys.stderr)
    return trained
