"""Records the trees that a drafter proposes while a text is decoded."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from stree_jax.generation.generate import begin
from stree_jax.speculation import loop
from stree_jax.speculation.drafter import DrafterBase


@struct.dataclass
class Watched(DrafterBase):
    """A drafter that records the tokens of its last tree, of `size` nodes."""

    inner: Any
    size: int = struct.field(pytree_node=False)
    observes_prompts = True

    @property
    def taps(self):
        return self.inner.taps

    def init(self, prompts, past):
        blank = jnp.zeros((prompts.lengths.shape[0], self.size), jnp.int32)
        return self.inner.init(prompts, past), blank

    def propose(self, state, root, tree, dist, rule):
        draft, inner = self.inner.propose(state[0], root, tree, dist, rule)
        return draft, (inner, draft.tokens)

    def commit(self, state, update):
        return self.inner.commit(state[0], update), state[1]


def drafted_trees(target, drafter, tree, prompts, new, change=lambda drafter: drafter):
    """Decodes greedily.

    Args:
      drafter: as in `generate`.
      tree: a static tree.
      new: number of tokens per prompt.
      change: changes the drafter, for mistakes that tests plant.

    Returns:
      For each step and running row the text so far and the tree drafted below it; and
      the numbers of steps by row and length of the accepted path.
    """
    _, plan = begin(target, [[3]], max_new_tokens=1, drafter=drafter, tree=tree)
    watched = Watched(change(plan.spec.drafter), tree.size)
    spec = replace(plan.spec, drafter=watched)
    begun, _ = begin(target, prompts, max_new_tokens=new, stop_tokens=(), drafter=None)
    padded = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    d = loop.init_decoding(
        spec,
        jnp.asarray(padded),
        jnp.asarray([len(ids) for ids in prompts], jnp.int32),
        begun.requests,
        max_new_tokens=new,
    )
    # Traced again, with any planted mistake
    advance, found = jax.jit(lambda *args: loop.advance(*args)), []
    while (running := np.flatnonzero(np.asarray(d.finish) == 0)).size:
        before = [
            ids + np.asarray(d.tokens[b, : d.length[b]]).tolist()
            for b, ids in enumerate(prompts)
        ]
        d = advance(spec, d, jnp.int32(1))
        trees = np.asarray(d.drafting[1])
        found += [(before[b], trees[b].tolist()) for b in running]
    return found, np.asarray(d.gained)


def count_wrong(found, recomputed, tree):
    """Counts the drafted trees that differ from `recomputed.tree(text, parents)`."""
    seen = [(text, drafts) for text, drafts in found if len(text) > 1]
    return sum(drafts != recomputed.tree(text, tree.parents) for text, drafts in seen)
