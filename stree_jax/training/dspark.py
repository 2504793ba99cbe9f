"""Trains a DSpark drafter on a frozen target (arXiv 2607.05147), or a DFlash drafter,
which is one without Markov and confidence heads (arXiv 2602.06036).

Training examples are the stretches of `training.tapped_drafters`. Below each root, the
drafter predicts a block of M drafts; its slots are explained in
`models.drafters.dflash`. All blocks of a stretch run in one pass. A block sees the
context rows of the tokens before its root.

With the target's distribution p and the drafter's q at draft k = 1, 2, ..:

    sum_k w_k (KL(p || q) + TV(p, q) + KL(p || u) / 4 + BCE(c, 1 - TV))

with w_k ~ exp(-(k - 1) / 4). TV is the total variation sum |p - q| / 2, so that 1 - TV
is the probability that the draft is accepted, which the confidence c estimates. u is
the drafter's distribution without the Markov head, from which some programs take the
candidates; without a loss for u, the right token is often not among them. For a
DFlash drafter, q is u, and the loss is KL(p || q) + TV(p, q).

Letters: those of `training.tapped_drafters`; r rank.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models import Model as BareModel
from stree_jax.models import ModelConfig
from stree_jax.models.drafters.dflash import (
    DFlash,
    DFlashConfig,
    DFlashLayer,
    add_context,
    cast_dflash,
    draft_logits,
    empty_context,
    init_dflash,
    run_block,
    trimmed_dflash_config,
)
from stree_jax.models.drafters.dflash_pairs import confidence, no_memory, pair_bias
from stree_jax.training.tapped_drafters import (
    attention_of,
    check_least,
    divergences,
    draft_slots,
    rows_of_head,
    spread_boundaries,
    target_log_probs,
    trained_tokens,
    weighted,
)
from stree_jax.training.train import Batch, Params

ALONE = 0.25  # weight of the loss without the Markov head


@dataclass(frozen=True)
class DSparkSize:
    """The size of a DSpark drafter.

    Attributes:
      layers: its layers, of the target's width.
      taps: residual streams of the target that it reads, evenly spread. If None, 3, or
        as many as the target has layers.
      drafts: drafts of a block.
      mlp: width of the MLPs. If None, half of the target's width.
      rank: r, of the Markov head. If 0, the drafter is a DFlash drafter.
      window: tokens of the text that a layer sees; 0 for all. A window makes texts that
        are longer than the training examples safe.
      causal: True if a slot does not attend to later slots of the block. Then a block
        may be cut to the levels that a tree needs.
      draft_vocab: D, the number of tokens that can be drafted: the most frequent ones
        of the text that the drafter learns from. If None, all.
    """

    layers: int = 2
    taps: int | None = None
    drafts: int = 5
    mlp: int | None = None
    rank: int = 128
    window: int = 128
    causal: bool = True
    draft_vocab: int | None = None

    def subject(self, target: BareModel, tokens: np.ndarray, name: str) -> "Blocks":
        """Returns the drafter to train, see `StretchSize`."""
        mask = rarest_token(tokens, target.config)
        config = replace(dspark_config(target.config, self, mask), target=name)
        if not (ids := trained_tokens(target, self.draft_vocab, tokens)):
            return Blocks(config)
        config = trimmed_dflash_config(config, len(ids), target.config.logits_divisor)
        return Blocks(config, ids)


def dspark_config(target: ModelConfig, size: DSparkSize, mask: int) -> DFlashConfig:
    """Returns the architecture of a drafter.

    Args:
      target: the target's architecture.
      size: the drafter's size.
      mask: the token whose embedding the slots after the root's slot have.

    Raises:
      ValueError: the size does not fit the target.
    """
    d = target.d_model
    check_least(size, layers=1, drafts=1, rank=0, window=0)
    pairs = size.rank > 0
    return DFlashConfig(
        d_model=d,
        vocab_size=target.vocab_size,
        target_width=d,
        boundaries=spread_boundaries(target, size.taps),
        layers=(DFlashLayer(size.window, size.causal),) * size.layers,
        # As many key heads as query heads, because all that a slot reads of the text
        # goes through the values of these heads.
        attention=replace(attention_of(target), qk_norm_eps=1e-6),
        d_mlp=size.mlp or d // 2,
        slots=size.drafts,
        mask_token=mask,
        from_root=True,
        pairs="vanilla" if pairs else "",
        rank=size.rank,
        confidence=pairs,
        confidence_pairs=pairs,
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
      places: [B, A] int32, the index of each root in its stretch. A block sees the
        tokens before its root.

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
    """Computes the logits of the drafts of N blocks, given the token before each draft
    (teacher forcing: a token of the text, not the drafter's own prediction).

    Args:
      drafter, output: as in `block_states`.
      hidden: [N, M, d], hidden states of N blocks.
      previous: [N, M] int32, the token before each draft.

    Returns:
      The logits [N, M, V] float32 without the pair scores, the logits with them, and
      the confidences [N, M], or None if the drafter has no confidence head.
    """
    logits = draft_logits(drafter, output, hidden)
    if not drafter.config.pairs:
        return logits, logits, None
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
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Computes the log-probabilities and confidences that the loss compares.

    Args:
      drafter: the drafter.
      output: the target's embedding and head.
      batch: see `StretchSubject.log_probs`.

    Returns:
      Log-probabilities [B A, M, V] of the target, of the drafter, and of the drafter
      without the Markov head, V being the rows of the drafter's head if it has one; and
      the confidences [B A, M], None for a DFlash drafter.
    """
    states, tokens, places = batch["states"], batch["tokens"], batch["places"]
    M, head = drafter.config.drafts, drafter.params.get("head")
    V = output.config.num_tokens if head is None else len(head)
    rows, slots = draft_slots(batch, M)
    previous = tokens[rows, slots]
    hidden = block_states(drafter, output, states[:, :, 1:], previous[..., 0], places)
    hidden = hidden.reshape(-1, *hidden.shape[2:])
    alone, logits, sure = forced(drafter, output, hidden, previous.reshape(-1, M))
    one, other = (jax.nn.log_softmax(x[..., :V]) for x in (logits, alone))
    return target_log_probs(output, batch, M, head), one, other, sure


@dataclass(frozen=True)
class Blocks:
    """A block drafter in training; it implements `StretchSubject`.

    Attributes:
      config: its architecture.
      ids: the tokens of its head, ascending. The head's rows are those of the target's
        head and are not trained. If empty, it uses the whole head of the target.
    """

    config: DFlashConfig
    ids: tuple[int, ...] = ()

    @property
    def drafts(self) -> int:
        return self.config.drafts

    def init(self, key: jax.Array) -> Params:
        params = init_dflash(self.config, key, jnp.float32)
        return {name: p for name, p in params.items() if name != "head"}

    def cast(self, params: Params, dtype: Any) -> Params:
        return cast_dflash(self.config, params, dtype)

    def drafter(self, params: Params, output: BareModel) -> DFlash:
        if not self.ids:
            return DFlash(params, self.config)
        head = rows_of_head(output, self.ids, params["fc"].dtype)
        ids = jnp.asarray(self.ids, jnp.int32)
        return DFlash(params | {"head": head}, self.config, ids)

    def log_probs(
        self, params: Params, batch: Batch, output: BareModel
    ) -> tuple[jax.Array, jax.Array]:
        return block_scores(self._in_training(params, output), output, batch)[:2]

    def _in_training(self, params: Params, output: BareModel) -> DFlash:
        """Returns the drafter, whose logits are those of its head's rows."""
        return replace(self.drafter(params, output), ids=None)

    def loss(self, params: Params, batch: Batch, teacher: BareModel) -> jax.Array:
        """Returns the mean loss of the drafts, in nats; see `StretchSubject`."""
        drafter = self._in_training(params, teacher)
        p, q, alone, sure = block_scores(drafter, teacher, batch)
        kl, apart = divergences(p, q)
        if sure is None:
            return weighted(kl + apart)
        kl += ALONE * divergences(p, alone)[0]
        accepted = jax.lax.stop_gradient(1 - apart)
        sure = jnp.clip(sure, 1e-6, 1 - 1e-6)
        bce = -accepted * jnp.log(sure) - (1 - accepted) * jnp.log1p(-sure)
        return weighted(kl + apart + bce)


def rarest_token(tokens: np.ndarray, target: ModelConfig) -> int:
    """Chooses the mask token, which the slots after the root's slot have. The
    vocabulary gets no new token for it. It is the token that occurs least in the text,
    and of several such tokens the one with the largest id."""
    counts = np.bincount(tokens, minlength=target.num_tokens)[: target.num_tokens]
    return int(target.num_tokens - 1 - counts[::-1].argmin())
