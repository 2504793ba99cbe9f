"""Trains a DSpark drafter on a frozen target (arXiv 2607.05147).

The target first reads a text and text of its own, and its hidden states and the
residual streams that the drafter reads are stored in files. A training example is a
stretch of text in which blocks begin at random tokens, the roots. All blocks of a
stretch run in one pass over the stretch's context rows; a block sees the rows before
its root. The tokens before each draft are the text's.

With the target's distribution p and the drafter's q at draft k = 1, 2, ..:

    sum_k w_k (KL(p || q) + TV(p, q) + KL(p || u) / 4 + BCE(c, 1 - TV))

with w_k ~ exp(-(k - 1) / 4). TV is the total variation sum |p - q| / 2, so that 1 - TV
is the probability that the draft is accepted, which the confidence c estimates. u is
the drafter's distribution without the Markov head, from which some programs take the
candidates; without a loss of its own, the right token is often missing there.

Letters: B stretches, T tokens of a stretch, A roots in a stretch, M drafts of a block,
m residual streams, d width, V tokens of the vocabulary, r rank.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.checkpoints.load import Model, load
from stree_jax.convert.hub import hub_name
from stree_jax.models import AttentionConfig, ModelConfig, Rope, base_model, logits_of
from stree_jax.models import Model as BareModel
from stree_jax.models.boundaries import boundary_count, tap_of
from stree_jax.models.dflash import (
    DFlash,
    DFlashConfig,
    DFlashLayer,
    add_context,
    cast_dflash,
    draft_logits,
    empty_context,
    init_dflash,
    run_block,
)
from stree_jax.models.dflash_pairs import confidence, no_memory, pair_bias
from stree_jax.models.heads import head_of
from stree_jax.training.kept import (
    GENERATED,
    PROMPT,
    keep_own_text,
    keep_tapped,
    spread_windows,
)
from stree_jax.training.recipe import Job, prepare_for
from stree_jax.training.train import Batch, Examples, Params, TrainConfig, learn

HELD_OUT = 64  # held-out windows of each source
DECAY = 4.0  # drafts over which the weight falls to 1/e
ALONE = 0.25  # weight of the loss without the Markov head
HEAD = 64  # channels of an attention head


@dataclass(frozen=True)
class DSparkSize:
    """The size of a DSpark drafter.

    Attributes:
      layers: its layers, of the target's width.
      taps: residual streams of the target that it reads, evenly spread. If None, 3, or
        as many as the target has layers.
      drafts: drafts of a block.
      mlp: width of the MLPs. If None, half of the target's width.
      rank: r, of the Markov head.
      window: tokens of the text that a layer sees; 0 for all. A window makes texts that
        are longer than the training examples safe.
      causal: True if slots see no later slots, so that short blocks cost less.
    """

    layers: int = 2
    taps: int | None = None
    drafts: int = 5
    mlp: int | None = None
    rank: int = 128
    window: int = 128
    causal: bool = True


def dspark_config(target: ModelConfig, size: DSparkSize, mask: int) -> DFlashConfig:
    """Returns the architecture of a drafter.

    Args:
      target: the target's architecture.
      size: the drafter's size.
      mask: the token of the slots after the root's.

    Raises:
      ValueError: the size does not fit the target.
    """
    d, last = target.d_model, boundary_count(target)
    taps = min(3, last) if size.taps is None else size.taps
    if not 1 <= taps <= last:
        raise ValueError(f"--taps: want 1..{last}, got {taps}")
    if d % HEAD:
        raise ValueError(f"target: want a width divisible by {HEAD}, got {d}")
    for name in ("layers", "drafts", "rank", "window"):
        value, least = getattr(size, name), int(name != "window")
        if value < least:
            raise ValueError(f"--{name}: want at least {least}, got {value}")
    heads = d // HEAD
    # As many key as query heads: slots read the text only through the values.
    attention = AttentionConfig(
        *(heads, heads, HEAD), rope=Rope(1e4, HEAD), qk_norm_eps=1e-6
    )
    return DFlashConfig(
        d_model=d,
        vocab_size=target.vocab_size,
        target_width=d,
        boundaries=tuple(last * (i + 1) // taps for i in range(taps)),
        layers=(DFlashLayer(size.window, size.causal),) * size.layers,
        attention=attention,
        d_mlp=size.mlp or d // 2,
        slots=size.drafts,
        mask_token=mask,
        from_root=True,
        pairs="vanilla",
        rank=size.rank,
        confidence=True,
        confidence_pairs=True,
    )


def block_states(
    drafter: DFlash,
    output: BareModel,
    taps: jax.Array,
    roots: jax.Array,
    places: jax.Array,
) -> jax.Array:
    """Runs blocks below many roots of a text.

    Args:
      drafter: the drafter.
      output: the target's embedding and head.
      taps: [B, T, m, d], the residual streams in the text.
      roots: [B, A] int32, the tokens of the roots.
      places: [B, A] int32, their places in the text. A block sees the text before.

    Returns:
      [B, A, M, d] float32, the hidden states that predict the drafts.
    """
    batch, T, m = taps.shape[:3]
    tapped = tuple(taps[:, :, i].astype(jnp.float32) for i in range(m))
    context = empty_context(drafter, batch, T, jnp.float32)
    context = add_context(drafter, context, tapped, jnp.full((batch,), T, jnp.int32))

    def below(root: jax.Array, place: jax.Array) -> jax.Array:
        before = replace(context, length=place)
        return run_block(drafter, output, before, root, drafter.config.slots)

    return jax.vmap(below, in_axes=1, out_axes=1)(roots, places)


def forced(
    drafter: DFlash, output: BareModel, hidden: jax.Array, previous: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Scores the drafts of blocks, each after a given token.

    Args:
      drafter, output: as in `block_states`.
      hidden: [N, M, d], hidden states of N blocks.
      previous: [N, M] int32, the tokens before the drafts.

    Returns:
      Logits [N, M, V] float32 without and with the pair scores, and the confidences
      [N, M]; None without that head.
    """
    logits = draft_logits(drafter, output, hidden)
    memory, bias = no_memory(drafter, (len(hidden), 1)), []
    sure: list[jax.Array] = []
    for k in range(hidden.shape[1]):
        one = hidden[:, k], previous[:, k : k + 1]
        more, memory = pair_bias(drafter, *one, memory)
        bias.append(more)
        if (chance := confidence(drafter, *one)) is not None:
            sure.append(chance)
    paired = logits + jnp.concatenate(bias, axis=1)
    return logits, paired, jnp.concatenate(sure, axis=1) if sure else None


def block_scores(
    drafter: DFlash, output: BareModel, batch: Batch
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes what the loss compares.

    Args:
      drafter: the drafter.
      output: the target's embedding and head.
      batch: see `Blocks.loss`.

    Returns:
      Log-probabilities [B A, M, V] of the target, of the drafter, and of the drafter
      without the Markov head; and the confidences [B A, M].
    """
    states, tokens, places = batch["states"], batch["tokens"], batch["places"]
    M, V = drafter.config.drafts, output.config.num_tokens
    slots = places[..., None] + jnp.arange(M, dtype=jnp.int32)[None, None]
    rows = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
    hidden = block_states(
        drafter, output, states[:, :, 1:], tokens[rows, places], places
    )
    previous = tokens[rows[..., None], slots].reshape(-1, M)
    hidden = hidden.reshape(-1, *hidden.shape[2:])
    alone, logits, sure = forced(drafter, output, hidden, previous)
    assert sure is not None  # `dspark_config` has a confidence head
    wanted = logits_of(output, states[:, :, 0].astype(jnp.float32))[..., :V]
    wanted = jax.nn.log_softmax(jax.lax.stop_gradient(wanted))
    wanted = wanted[rows[..., None], slots].reshape(-1, M, V)
    one, other = (jax.nn.log_softmax(x[..., :V]) for x in (logits, alone))
    return wanted, one, other, sure


@dataclass(frozen=True)
class Blocks:
    """A block drafter that is trained. The teacher is the target's embedding and
    head."""

    config: DFlashConfig

    def init(self, key: jax.Array) -> Params:
        return init_dflash(self.config, key, jnp.float32)

    def cast(self, params: Params, dtype: Any) -> Params:
        return cast_dflash(self.config, params, dtype)

    def loss(self, params: Params, batch: Batch, teacher: BareModel) -> jax.Array:
        """Returns the mean loss of the drafts, in nats.

        Args:
          params: the drafter's parameters.
          batch: "states" [B, T, 1 + m, d], the target's hidden states and residual
            streams; "tokens" [B, T] int32; "places" [B, A] int32 of the roots, at most
            T - M.
          teacher: the target's embedding and head.
        """
        drafter = DFlash(params, self.config)
        p, q, alone, sure = block_scores(drafter, teacher, batch)
        weights = np.exp(-np.arange(self.config.drafts) / DECAY)
        kl = (jnp.exp(p) * (p - q + ALONE * (p - alone))).sum(axis=-1)
        apart = jnp.abs(jnp.exp(p) - jnp.exp(q)).sum(axis=-1) / 2
        accepted = jax.lax.stop_gradient(1 - apart)
        sure = jnp.clip(sure, 1e-6, 1 - 1e-6)
        bce = -accepted * jnp.log(sure) - (1 - accepted) * jnp.log1p(-sure)
        each = (kl + apart + bce).mean(axis=0)
        return (each * jnp.asarray(weights / weights.sum(), jnp.float32)).sum()


@dataclass(frozen=True)
class Stretches:
    """Texts of one source with a target's states.

    Attributes:
      tokens: [n, L] ints.
      states: [n, L, 1 + m, d], see `Blocks.loss`.
      first: the first token that is a root.
    """

    tokens: np.ndarray
    states: np.ndarray
    first: int

    def cut(self, rng: np.random.Generator, length: int, roots: int, M: int) -> Batch:
        """Returns a random stretch of a random text, with random roots. Text that the
        target wrote keeps its end, so that roots are not in the prompt."""
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


def block_examples(
    train: TrainConfig,
    learnt: Sequence[Stretches],
    held: Sequence[Stretches],
    roots: int,
    drafts: int,
) -> Examples:
    """Returns examples whose rows are from the sources in turn.

    Args:
      train: the training settings; `length` is T.
      learnt, held: the sources, for training and evaluation.
      roots: A.
      drafts: M.
    """

    def batch(rng: np.random.Generator, sources: Sequence[Stretches]) -> Batch:
        size = train.length, roots, drafts
        rows = [sources[i % len(sources)].cut(rng, *size) for i in range(train.batch)]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def batches(step: int) -> Iterator[Batch]:
        while True:
            yield batch(np.random.default_rng([train.seed, step]), learnt)
            step += 1

    count = max(len(held) * HELD_OUT // train.batch, 1)
    rng = np.random.default_rng([train.seed, 0, 1])
    settings = {"sources": [list(s.states.shape) for s in learnt], "roots": roots}
    return Examples(batches, [batch(rng, held) for _ in range(count)], settings)


@partial(jax.jit, static_argnums=0)
def _agreements(
    config: DFlashConfig, params: Params, batch: Batch, output: BareModel
) -> tuple[jax.Array, jax.Array]:
    p, q, *_ = block_scores(DFlash(params, config), output, batch)
    right = p.argmax(axis=-1) == q.argmax(axis=-1)
    return right, jnp.minimum(jnp.exp(p), jnp.exp(q)).sum(axis=-1)


def agreement(
    drafter: DFlash, output: BareModel, batches: Sequence[Batch]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns by draft how often drafter and target agree on the likeliest token after
    the text's tokens, and the mean probability of acceptance, [M] each."""
    found = [
        _agreements(
            drafter.config, drafter.params, jax.tree.map(jnp.asarray, b), output
        )
        for b in batches
    ]
    right, accepted = (np.concatenate(x) for x in zip(*found, strict=True))
    return right.mean(axis=0), accepted.mean(axis=0)


def rarest_token(tokens: np.ndarray, target: ModelConfig) -> int:
    """Returns the token for the slots after the root's: the last one of those that
    occur least in the text, as no token of its own is added."""
    counts = np.bincount(tokens, minlength=target.num_tokens)[: target.num_tokens]
    return int(target.num_tokens - 1 - counts[::-1].argmin())


def published_name(target: str | Path | Model) -> str:
    """Returns the hub id of a target, or "" if it is not from the hub."""
    if not isinstance(target, str) or Path(target).exists():
        return ""
    found = hub_name(target)
    return "" if found is None else found.repo


def check_sizes(
    length: int, drafts: int, roots: int, tokens: int, own_tokens: int, window: int
) -> None:
    """Raises ValueError for sizes that do not fit together, before the target reads
    text."""
    least_of = {
        "roots": (roots, 1),
        "tokens": (tokens, 1),
        "own-tokens": (own_tokens, 0),
    }
    for name, (value, least) in least_of.items():
        if value < least:
            raise ValueError(f"--{name}: want at least {least}, got {value}")
    most = min(window, PROMPT + GENERATED - 1) if own_tokens else window
    least = PROMPT + drafts + roots
    if not least <= length <= most:
        raise ValueError(
            f"--length: want {least}..{most} tokens for {roots} blocks of {drafts} "
            f"drafts, got {length}"
        )


def train_dspark(
    job: Job,
    target: str | Path | Model,
    size: DSparkSize = DSparkSize(),
    *,
    roots: int = 32,
    tokens: int = 500_000,
    own_tokens: int = 400_000,
    window: int = 256,
    dtype: str = "float32",
) -> tuple[DFlash, int]:
    """Trains a DSpark drafter for a target.

    Half of the examples are from the text. The others are written greedily by the
    target from beginnings of the text, and their roots are in what it wrote.

    Args:
      job: the text, the folders, and the training settings. `work` must have space for
        the states, 2 (1 + taps) d bytes per token, and the saves. The caller writes
        `out`.
      target: the target model, or its path or name.
      size: the size of the drafter.
      roots: A, blocks in each stretch of `length` tokens.
      tokens: number of tokens of text to read, spread evenly over the text.
      own_tokens: number of tokens that the target generates. If 0, the drafter learns
        from the text only.
      window: number of tokens that the target reads from an empty state.
      dtype: dtype of the target during training.

    Returns:
      The drafter in bfloat16, and the number of the target's layers.

    Raises:
      ValueError: the arguments or files are invalid.
    """
    job.check()
    check_sizes(job.train.length, size.drafts, roots, tokens, own_tokens, window)
    loaded = target if isinstance(target, Model) else load(target, dtype=dtype)
    data, bare = prepare_for(job, loaded, str(target)), base_model(loaded)
    mask = rarest_token(np.asarray(data.train), loaded.config)
    config = dspark_config(loaded.config, size, mask)
    config = replace(config, target=published_name(target))
    taps = tuple(tap_of(loaded.config, b) for b in config.boundaries)

    def sources(name: str, stream: np.ndarray, read: int, own: int) -> list[Stretches]:
        """Returns the text with its states, and what the target wrote (if any)."""
        texts = spread_windows(stream, window, read)
        states = keep_tapped(bare, texts, job.work / f"{name}.text", taps)
        found = [Stretches(texts[:, :-1], states, 0)]
        if own:
            prompts = spread_windows(stream, window, own)
            texts = keep_own_text(bare, prompts, job.work / f"{name}.own")
            states = keep_tapped(bare, texts, job.work / f"{name}.own_states", taps)
            found.append(Stretches(texts[:, :-1], states, PROMPT - 1))
        return found

    count = max(math.ceil(tokens / window), 1), math.ceil(own_tokens / GENERATED)
    held = sources("heldout", data.heldout, HELD_OUT, HELD_OUT * bool(own_tokens))
    learnt = sources("train", data.train, *count)
    examples = block_examples(job.train, learnt, held, roots, size.drafts)
    settings = examples.settings | {"drafter": repr(config)}
    params, _ = learn(
        Blocks(config),
        job.train,
        replace(examples, settings=settings),
        job.work / "saves",
        teacher=head_of(bare),
        minutes=job.minutes,
        save_minutes=job.save_minutes,
    )
    trained = DFlash(cast_dflash(config, params, jnp.bfloat16), config)
    final = block_examples(job.train, held[-1:], held[-1:], roots, size.drafts)
    right, accepted = agreement(trained, head_of(bare), final.heldout)
    for k in range(size.drafts):
        shares = f"first guess {right[k]:.1%}, accepted {accepted[k]:.1%}"
        print(f"stree-jax: draft {k + 1}: {shares}", file=sys.stderr)
    return trained, boundary_count(loaded.config)
