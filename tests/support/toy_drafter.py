"""A toy drafter that taps two layers of its target, and records its updates."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax.speculation.adaptive.search import recurrent_search
from stree_jax.speculation.draft import only_root
from stree_jax.speculation.drafters.model import draw_level, empty_draft
from stree_jax.speculation.layout import tree_levels

TAPS = (1, 4)
FADE = 0.5  # factor of the streams' share of the logits, per level


@struct.dataclass
class Seen:
    """The state of a `TwoTaps`.

    Attributes:
      last: [B, 2, d] float32. The tapped streams that chose the root.
      tokens: [B, S] int32. All tokens of updates.
      streams: [B, S, 2, d] float32. The tapped streams that chose each of them.
      count: [B] int32. Number of recorded tokens.
    """

    last: jax.Array
    tokens: jax.Array
    streams: jax.Array
    count: jax.Array


@struct.dataclass
class TwoTaps:
    """A drafter that uses the last token and random projections of two residual
    streams.

    Attributes:
      after: [V, V] float32. Scores of the next token, by token.
      project: [2, d, V] float32. Projections of the streams to logits.
    """

    after: jax.Array
    project: jax.Array
    taps: tuple = struct.field(pytree_node=False, default=TAPS)

    def init(self, prompts, past):
        batch, d = prompts.lengths.shape[0], self.project.shape[1]
        if past is not None:
            return past
        return Seen(
            last=jnp.zeros((batch, 2, d), jnp.float32),
            tokens=jnp.zeros((batch, prompts.capacity), jnp.int32),
            streams=jnp.zeros((batch, prompts.capacity, 2, d), jnp.float32),
            count=jnp.zeros((batch,), jnp.int32),
        )

    def commit(self, state, update):
        streams = jnp.stack(update.taps, axis=2)
        index = jnp.arange(streams.shape[1], dtype=jnp.int32)[None]
        valid = index < update.length[:, None]
        place = jnp.where(valid, state.count[:, None] + index, state.tokens.shape[1])
        write = jax.vmap(lambda table, at, new: table.at[at].set(new, mode="drop"))
        return Seen(
            last=update.last_of(streams, state.last),
            tokens=write(state.tokens, place, update.tokens),
            streams=write(state.streams, place, streams),
            count=state.count + update.length,
        )

    def logits(self, tokens, streams):
        """Returns logits [B, W, V] after tokens [B, W], with streams [B, W, 2, d]."""
        return self.after[tokens] + jnp.einsum("bwsd,sdv->bwv", streams, self.project)

    def propose(self, state, root, tree, dist, rule):
        if tree.size == 1:
            return only_root(root), state
        draft, levels = empty_draft(root, tree, dist, rule), tree_levels(tree)
        for depth in range(tree.depth):
            nodes = jnp.minimum(levels.inner[depth], tree.size - 1)
            shape = len(root), len(nodes), *state.last.shape[1:]
            streams = FADE**depth * jnp.broadcast_to(state.last[:, None], shape)
            logits = self.logits(draft.tokens[:, nodes], streams)
            at = jnp.int32(depth)
            draft = draw_level(draft, logits, at, tree, levels, dist, rule)
        return draft, state

    def search(self, state, query):
        """Searches for tree "auto"."""
        text = query.text
        root = jnp.take_along_axis(text.tokens, text.length[:, None] - 1, axis=1)

        def after(tokens, streams, depth):
            streams = FADE * streams
            return self.logits(tokens, streams), streams

        at_root = self.logits(root, state.last[:, None])
        return state, recurrent_search(query, at_root, state.last, after)


def two_taps(target, texts, seed=0):
    """Returns a `TwoTaps` that has counted which tokens follow each other in texts."""
    c = target.config
    after = np.zeros((c.vocab_size, c.vocab_size), np.float32)
    for text in texts:
        np.add.at(after, (text[:-1], text[1:]), 1.0)
    after[:, c.num_tokens :] = -1e9
    rng = np.random.default_rng(seed)
    project = rng.normal(size=(len(TAPS), c.d_model, c.vocab_size)) * 0.01
    return TwoTaps(jnp.asarray(after), jnp.asarray(project, jnp.float32))
