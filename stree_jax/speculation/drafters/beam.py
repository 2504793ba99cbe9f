"""Drafts by beam search and keeps all of its tokens as a tree (STree, Table 1).

Letters: B rows, T nodes, W width of the beam, V tokens of the vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import lax

from stree_jax.models import (
    Model,
    State,
    forward_hidden,
    init_records,
    logits_of,
    param_dtype,
)
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.draft import Draft
from stree_jax.speculation.layout import below_root, tree_layout
from stree_jax.speculation.tree import Beam


def search(
    model: Model,
    state: State,
    root: jax.Array,
    at_root: jax.Array,
    beam: Beam,
    dist: Distribution,
    rule: Rule,
) -> Draft:
    """Returns the tree of a beam search; see `Fill` for the arguments.

    Each layer contains the W continuations of the layer above whose whole paths are
    most probable, best first.
    """
    batch, T, W = root.shape[0], beam.size, beam.width

    def grow(
        tokens: jax.Array,
        parents: jax.Array,
        hidden: jax.Array,
        above: jax.Array,
        total: jax.Array,
        depth: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns tokens, parents and log-probabilities with the layer at `depth`
        added.

        Args:
          tokens, parents: [B, T] int32. The tree so far.
          hidden: [B, Q, d] float32. Hidden states after the nodes above.
          above: [Q] int32. The nodes of the layer above.
          total: [B, Q] float32. Log-probabilities of their paths.
          depth: [] int32.
        """
        paths = tree_layout(beam, parents).paths[:, above]
        path = jax.vmap(lambda tokens, rows: tokens[rows])(tokens, paths)
        depths = jnp.broadcast_to(depth - 1, (1, *above.shape))
        z = dist.scores(logits_of(model, hidden), depths, path)
        best, guess = lax.top_k(jax.nn.log_softmax(z), W)  # [B, Q, W]
        total, chosen = lax.top_k((total[..., None] + best).reshape(batch, -1), W)
        rows = 1 + (depth - 1) * W + jnp.arange(W, dtype=jnp.int32)
        token = jnp.take_along_axis(guess.reshape(batch, -1), chosen, axis=1)
        tokens = tokens.at[:, rows].set(token.astype(jnp.int32))
        return tokens, parents.at[:, rows].set(above[chosen // W]), total

    def level(carry: tuple, depth: jax.Array) -> tuple[tuple, None]:
        tokens, parents, total, records = carry
        above = 1 + (depth - 2) * W + jnp.arange(W, dtype=jnp.int32)
        hidden, records, _ = forward_hidden(
            model,
            state,
            tokens[:, above],
            below_root(parents, model.config.conv_taps),
            records=records,
            rows=above,
        )
        return (*grow(tokens, parents, hidden, above, total, depth), records), None

    tokens = jnp.broadcast_to(root[:, None], (batch, T))
    parents = jnp.full((batch, T), -1, jnp.int32)
    top, zero = jnp.zeros((1,), jnp.int32), jnp.zeros((batch, 1), jnp.float32)
    first = grow(tokens, parents, at_root, top, zero, jnp.int32(1))
    records = init_records(model.config, batch, T, param_dtype(model.params))
    depths = jnp.arange(2, beam.depth + 1, dtype=jnp.int32)
    tokens, parents = first[:2]
    if depths.size:  # without jit, `lax.scan` does not accept an empty array
        (tokens, parents, _, _), _ = lax.scan(level, (*first, records), depths)
    return Draft(tree_layout(beam, parents), tokens)
