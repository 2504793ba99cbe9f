"""A block drafter whose drafts ignore what is drafted before them, for comparison.

The marginal probability of token b at level k is that of all paths to it,

    q_k(b) = sum over a of q_{k-1}(a) P_k(b | a),

with the drafter's own probabilities P_k of tokens after tokens. A tree from marginals
expects the same children below every node of a level. DFlash drafters and Medusa heads
estimate nothing else.

Letters: B rows, M levels, K candidates, V tokens.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.models import Model
from stree_jax.models.drafters.dflash import DFlash
from stree_jax.models.drafters.dflash_pairs import no_memory, pair_scores
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.drafters.block_candidates import (
    Candidates,
    pair_temperature,
)
from stree_jax.speculation.drafters.dflash import (
    ContextState,
    DFlashDrafter,
    DFlashSource,
)
from stree_jax.speculation.tree import Topology


@struct.dataclass
class MarginalDrafter(DFlashDrafter):
    """A `DFlashDrafter` that scores candidates by their marginals.

    Attributes:
      paired: the drafter with its scores of pairs; `drafter` is without them.
    """

    paired: DFlash

    def candidates(
        self,
        state: ContextState,
        root: jax.Array,
        depth: int,
        dist: Distribution,
        rule: Rule,
    ) -> Candidates:
        own = replace(self, drafter=self.paired)
        found = DFlashDrafter.candidates(own, state, root, depth, dist, rule)
        log_q = marginals(self.paired, found, root, pair_temperature(dist, len(root)))
        rest = jnp.log(jnp.maximum(-jnp.expm1(jax.nn.logsumexp(log_q, axis=-1)), 1e-6))
        return replace(found, scores=log_q, rest=rest)


@struct.dataclass
class Marginals(DFlashSource):
    """A block drafter of the target that drafts by marginals, for searched trees."""

    name = "block drafter by marginals"

    def check_tree(self, tree: Topology) -> None:
        raise ValueError("tree: marginals are for searched trees only")

    def bind(self, target: Model, tree: Topology) -> MarginalDrafter:
        found = DFlashSource.bind(self, target, tree)
        c = self.drafter.config
        alone = replace(self.drafter, config=replace(c, pairs="", confidence=False))
        own = found.output, found.taps, None, found.reads_late
        return MarginalDrafter(alone, *own, self.drafter)


def marginals(
    drafter: DFlash, found: Candidates, root: jax.Array, temperature: jax.Array
) -> jax.Array:
    """Returns log q_k of the candidates [B, M, K] float32.

    Args:
      drafter: the drafter, with scores of pairs.
      found: its candidates.
      root: [B] int32.
      temperature: [B] float32, by which scores of pairs are divided.
    """
    batch, depth, count = found.tokens.shape
    previous, log_q = root[:, None], jnp.zeros((batch, 1), jnp.float32)
    memory, levels = no_memory(drafter, (batch, 1)), []
    for k in range(depth):
        hidden, tokens = found.hidden[:, k], found.tokens[:, k]
        pairs, memory = pair_scores(drafter, hidden, previous, tokens, memory)
        scores = found.scores[:, k, None] + pairs / temperature[:, None, None]
        among = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        total = jnp.logaddexp(among, found.rest[:, k, None, None])
        paths = log_q[..., None] + scores - total  # [B, Q, K]
        log_q = jax.nn.logsumexp(paths, axis=1)
        levels.append(log_q)
        best = paths.argmax(axis=1)  # a token's memory is that of its likeliest path
        memory = jnp.take_along_axis(memory, best[..., None], axis=1)
        previous = tokens
    return jnp.stack(levels, axis=1)
