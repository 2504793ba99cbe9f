"""Drafts of text that a constraint forces.

Where a constraint allows only one continuation, such as the name of the next property
of an object, its tokens are known without a drafter. They are still only drafts, since
other tokens can spell the same text: the target decides.

Letters: B rows, T nodes, M depth of the tree, L forced tokens, C candidates.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.adaptive.pool import (
    FORCED_KIND,
    Pool,
    joined,
    merged,
    no_candidates,
    path_powers,
)
from stree_jax.speculation.draft import DRAFTER, FORCED, Draft


def forced_tokens(dist: Distribution) -> jax.Array | None:
    """Returns the tokens [B, L] int32 that are forced after the roots, padded with -1.
    None if no row has a constraint."""
    constraints = dist.requests.constraints
    if constraints is None or dist.state is None:
        return None
    return constraints.forced_after(dist.state)


def with_forced(draft: Draft, dist: Distribution) -> Draft:
    """Writes the forced tokens over a path of a tree: that of first children.

    The drafts of the other nodes stay. If the drafter gives probabilities, those of the
    path are 1, as of a draw that cannot be another.

    Args:
      draft: the tree of T nodes.
      dist: the distribution of the tokens below the root.
    """
    forced = forced_tokens(dist)
    if forced is None:
        return draft
    (batch, T), row = draft.tokens.shape, jnp.arange(draft.tokens.shape[0])
    tokens, q, node = draft.tokens, draft.q, jnp.zeros((batch,), jnp.int32)
    origin = draft.origin
    if origin is None:
        origin = jnp.full_like(tokens, DRAFTER, jnp.uint8)
    goes_on = jnp.ones((batch,), bool)
    for j in range(min(forced.shape[1], draft.layout.paths.shape[2] - 1)):
        token, child = forced[:, j], draft.layout.children[row, node, 0]
        goes_on &= (token >= 0) & (child < T)
        at = jnp.where(goes_on, child, T)
        tokens = tokens.at[row, at].set(token, mode="drop")
        origin = origin.at[row, at].set(jnp.uint8(FORCED), mode="drop")
        if q is not None:
            one = jax.nn.one_hot(token, q.shape[2], dtype=q.dtype)
            q = q.at[row, jnp.where(goes_on, node, T)].set(one, mode="drop")
        node = jnp.where(goes_on, child, 0)
    return replace(draft, tokens=tokens, origin=origin, q=q)


def with_forced_candidates(
    pool: Pool, dist: Distribution, probability: jax.Array, depth: int
) -> Pool:
    """Returns the pool with the forced tokens as further candidates, before the others.

    Args:
      pool: the candidates.
      dist: the distribution of the tokens below the root.
      probability: [Z] float32. Acceptance probability of nodes by kind.
      depth: M, the depth of the largest tree.
    """
    forced = forced_tokens(dist)
    if forced is None:
        return pool
    tokens = forced[:, :depth]
    batch, count = tokens.shape
    exists = jnp.cumprod(tokens >= 0, axis=1) > 0
    numbers = (tokens + 1).astype(jnp.uint32) * path_powers(count)[None]
    kind = jnp.full((batch, count), FORCED_KIND, jnp.int32)
    value = jnp.cumprod(jnp.broadcast_to(probability[FORCED_KIND], kind.shape), axis=1)
    place = jnp.arange(count, dtype=jnp.int32)[None]
    own = Pool(
        tokens=jnp.maximum(tokens, 0),
        parents=jnp.broadcast_to(place, kind.shape),
        value=jnp.where(exists, value, 0.0),
        kind=kind,
        path=jnp.cumsum(numbers, axis=1, dtype=jnp.uint32),
        guessed=jnp.zeros(kind.shape, bool),
    )
    space = no_candidates(batch, pool.tokens.shape[1])
    return merged(joined(own, space), pool)
