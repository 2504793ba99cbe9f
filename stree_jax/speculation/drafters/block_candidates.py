"""The candidates of one pass of a block drafter, and their scores of pairs.

Letters: B rows, M levels, K candidates per level, Q nodes of a level, d width, r rank.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from stree_jax.models.drafters.dflash import DFlash
from stree_jax.models.drafters.dflash_pairs import pair_scores
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.drafters.ngram_pairs import after


@struct.dataclass
class Candidates:
    """The candidates of one pass of a block drafter.

    Attributes:
      hidden: [B, M, d] float32. The hidden states that predict the drafts.
      tokens: [B, M, K] int32. Candidates for each level, best first.
      logits: [B, M, K] float32. Their logits U.
      scores: [B, M, K] float32. The logits as `Distribution.best` processes them.
      rest: [B, M] float32. The log-sum-exp of the scores of all other tokens.
      pairs: [B, M, K, K] float32. Scores of the candidates after each candidate of the
        level above, if n-grams give them (`ngram_pairs`); None if the drafter does.
    """

    hidden: jax.Array
    tokens: jax.Array
    logits: jax.Array
    scores: jax.Array
    rest: jax.Array
    pairs: jax.Array | None = None

    def pairs_after(
        self, drafter: DFlash, previous: jax.Array, memory: jax.Array, depth: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the pair scores [B, Q, K] of one level's candidates after Q previous
        tokens, to be added to the candidates' logits, and the memory after them.

        Args:
          drafter: the block drafter.
          previous: [B, Q] int32. The tokens before the candidates.
          memory: [B, Q, r]. Memory of the nodes above, see `dflash_pairs.pair_scores`.
          depth: [] int32. The level.
        """
        if self.pairs is None:
            hidden, tokens = at_depth((self.hidden, self.tokens), depth)
            return pair_scores(drafter, hidden, previous, tokens, memory)
        (above,) = at_depth((self.tokens,), jnp.maximum(depth - 1, 0))
        (table,) = at_depth((self.pairs,), depth)
        return after(table, above, previous), memory


def at_depth(tables: Sequence[jax.Array], depth: jax.Array) -> Iterator[jax.Array]:
    """Yields the entries [B, ...] of the level `depth` [] from each of several arrays
    [B, M, ...]."""
    for table in tables:
        yield lax.dynamic_index_in_dim(table, depth, axis=1, keepdims=False)


def pair_temperature(dist: Distribution, batch: int) -> jax.Array:
    """Returns the number by which pair scores are divided, [B] float32: the row's
    temperature, or 1 for greedy rows."""
    if dist.sampling is None:
        return jnp.ones((batch,), jnp.float32)
    temperature = dist.sampling.temperature
    return jnp.where(temperature == 0, 1.0, temperature)
