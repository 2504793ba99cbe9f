"""Trains an EAGLE-3 drafter on a frozen target (arXiv 2503.01840).

Training examples are the stretches of `training.tapped_drafters`. The drafter reads
pairs of a token and a vector, see `models.drafters.eagle`. It reads the pairs of a
stretch in one pass, which predicts the first draft below each root. For each further
draft, a pass over all roots reads the text's next token together with the vector that
the previous pass handed down ("training-time test"). As in decoding, a draft sees the
pairs of the text up to its root and the drafts above it.

With the target's distribution p and the drafter's q at draft k = 1, 2, ..:

    sum_k w_k (KL(p || q) + TV(p, q))

with w_k ~ exp(-(k - 1) / 4), and the total variation TV = sum |p - q| / 2.

Letters: those of `training.tapped_drafters`; P = T - 1 pairs of a stretch.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stree_jax.models import (
    MLPConfig,
    ModelConfig,
    Nodes,
    Records,
    forward_hidden,
    init_state,
    logits_of,
    param_dtype,
)
from stree_jax.models import Model as BareModel
from stree_jax.models.drafters.eagle import (
    Eagle,
    EagleConfig,
    EagleModel,
    cast_eagle,
    eagle_mixers,
    eagle_model,
    init_eagle,
    project,
    trimmed_eagle_config,
)
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


@dataclass(frozen=True)
class EagleSize:
    """The size of an EAGLE-3 drafter.

    Attributes:
      layers: its layers, of the target's width.
      taps: residual streams of the target that it reads, evenly spread. If None, 3, or
        as many as the target has layers.
      drafts: M, number of drafts in a row that it is trained for.
      mlp: width of the MLPs. If None, the target's width.
      window: tokens of the text that a layer sees; 0 for all. A window makes texts that
        are longer than the training examples safe.
      draft_vocab: D, the number of tokens that can be drafted: the most frequent ones
        of the text that the drafter learns from. If None, all.
    """

    layers: int = 1
    taps: int | None = None
    drafts: int = 5
    mlp: int | None = None
    window: int = 128
    draft_vocab: int | None = None

    def subject(self, target: BareModel, tokens: np.ndarray, name: str) -> "Levels":
        """Returns the drafter to train, see `StretchSize`."""
        config = replace(eagle_config(target.config, self), target=name)
        ids = trained_tokens(target, self.draft_vocab, tokens)
        return Levels(config, self.drafts, ids)


def eagle_config(target: ModelConfig, size: EagleSize) -> EagleConfig:
    """Returns the architecture of a drafter with the target's embedding and head.

    Args:
      target: the target's architecture.
      size: the drafter's size.

    Raises:
      ValueError: the size does not fit the target.
    """
    d = target.d_model
    check_least(size, layers=1, drafts=1, window=0)
    attention, mlp = attention_of(target), MLPConfig(size.mlp or d)
    layers, mixers = eagle_mixers(attention, mlp, d, [size.window] * size.layers)
    return EagleConfig(
        vocab_size=target.vocab_size,
        num_tokens=target.num_tokens,
        d_model=d,
        layers=layers,
        mixers=mixers,
        norm_eps=1e-6,
        target_width=d,
        boundaries=spread_boundaries(target, size.taps),
        own_head=False,
    )


def level_nodes(places: jax.Array, pairs: int, levels: int) -> Nodes:
    """Returns which nodes attend to which: the pairs of the stretches, and a chain of
    drafts below each root.

    The nodes are the P pairs, then the first draft of all A roots, then the second
    draft of all roots, and so on. The first levels alone are valid `Nodes`, too
    (`first_levels`).

    Args:
      places: [B, A] int32, the index of each root in its stretch. The pair of token i
        has the index i - 1, because the first token has no pair.
      pairs: P.
      levels: number of levels of drafts below the roots.
    """
    batch, A = places.shape
    count = pairs + levels * A
    row = jnp.arange(count, dtype=jnp.int32)
    drafted = row >= pairs
    chain = jnp.where(drafted, (row - pairs) % A, -1)  # the root that a draft is below
    last = jnp.where(drafted[None], places[:, chain] - 1, row[None])  # last pair seen
    below = jnp.where(drafted, (row - pairs) // A + 1, 0)
    of_text = ~drafted[None, None] & (row[None, None] <= last[..., None])
    above = (chain[None] == chain[:, None]) & (row[None] <= row[:, None])
    mask = of_text | (above & drafted[None])[None]
    window = jnp.broadcast_to(row[None, :, None], (batch, count, 1))
    return Nodes(mask, last + below[None], window)


def first_levels(nodes: Nodes, count: int) -> Nodes:
    """Returns the first `count` nodes, without the others."""
    return Nodes(
        nodes.mask[:, :count, :count], nodes.depth[:, :count], nodes.window[:, :count]
    )


def handed_down(model: EagleModel, batch: Batch, drafts: int) -> jax.Array:
    """Computes the vectors that predict the drafts below many roots of a text.

    Args:
      model: the drafter with its target's embedding and head.
      batch: see `StretchSubject.log_probs`.
      drafts: M.

    Returns:
      [B, A, M, d] float32.
    """
    states, tokens, places = batch["states"], batch["tokens"], batch["places"]
    B, T, _, _ = states.shape
    A, pairs = places.shape[1], T - 1
    streams = jnp.moveaxis(states[:, :-1, 1:].astype(jnp.float32), 2, 0)
    state = init_state(model.config, B, 1, param_dtype(model.params))
    nodes = level_nodes(places, pairs, drafts - 1)
    hidden, records, _ = forward_hidden(
        model,
        state,
        tokens[:, 1:],
        first_levels(nodes, pairs),
        previous=project(model, tuple(streams)),
    )
    rows, slots = draft_slots(batch, drafts)
    found = [hidden[rows[..., 0], places - 1]]
    text = tokens[rows, slots]
    for k in range(1, drafts):
        count = pairs + k * A
        hidden, records, _ = forward_hidden(
            model,
            state,
            text[:, :, k],
            first_levels(nodes, count),
            records=_longer(records, A),
            rows=jnp.arange(count - A, count, dtype=jnp.int32),
            previous=found[-1],
        )
        found.append(hidden)
    return jnp.stack(found, axis=2)


def _longer(records: Records, more: int) -> Records:
    """Returns records with space for `more` further nodes."""

    def longer(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, more)) + ((0, 0),) * (x.ndim - 2))

    return jax.tree.map(longer, records)


@dataclass(frozen=True)
class Levels:
    """An EAGLE-3 drafter in training; it implements `StretchSubject`.

    Attributes:
      config: its architecture, without a head.
      drafts: M.
      ids: the tokens of its head, ascending; see `dspark.Blocks`.
    """

    config: EagleConfig
    drafts: int
    ids: tuple[int, ...] = ()

    def init(self, key: jax.Array) -> Params:
        return init_eagle(self.config, key, jnp.float32)

    def cast(self, params: Params, dtype: Any) -> Params:
        return cast_eagle(self.config, params, dtype)

    def drafter(self, params: Params, output: BareModel) -> Eagle:
        if not self.ids:
            return Eagle(params, self.config)
        head = {
            "lm_head": rows_of_head(output, self.ids, params["fc"].dtype),
            "head_ids": jnp.asarray(self.ids, jnp.int32),
        }
        config = trimmed_eagle_config(self.config, len(self.ids))
        return Eagle(params | head, config)

    def log_probs(
        self, params: Params, batch: Batch, output: BareModel
    ) -> tuple[jax.Array, jax.Array]:
        model = eagle_model(self.drafter(params, output), output)
        hidden = handed_down(model, batch, self.drafts)
        logits = logits_of(model, hidden.reshape(-1, *hidden.shape[2:]))
        ids = model.params["head_ids"] if self.ids else slice(output.config.num_tokens)
        head = model.params["lm_head"] if self.ids else None
        q = jax.nn.log_softmax(logits[..., ids])
        return target_log_probs(output, batch, self.drafts, head), q

    def loss(self, params: Params, batch: Batch, teacher: BareModel) -> jax.Array:
        """Returns the mean loss of the drafts, in nats; see `StretchSubject`."""
        kl, apart = divergences(*self.log_probs(params, batch, teacher))
        return weighted(kl + apart)
