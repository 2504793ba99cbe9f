"""Drafting with the layers that a target has for it (multi-token prediction).

They read pairs: a token of the text and the target's hidden state that chose it, and so
predict the token after. A drafted token is read with their own hidden state that it was
drafted from, so one set of layers serves at every depth of a tree. Text is heard as it
comes, prompts included; of drafts nothing is kept.

Letters: B rows, M depth of the tree, d width of the target's hidden states.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from stree_jax.models import Model, State, extend, grow, init_state, param_dtype
from stree_jax.sampling.distribution import Distribution
from stree_jax.speculation.accept import Rule
from stree_jax.speculation.draft import Draft, only_root
from stree_jax.speculation.drafter import News, Prompts
from stree_jax.speculation.drafters.model import fill_tree
from stree_jax.speculation.tree import Topology, Tree


@struct.dataclass
class Heard:
    """What the layers have made of the text: all of it but its first token.

    Of a text that goes on from a past, the tokens of the last step before its end are
    missing: nobody hears how a row finished.

    Attributes:
      state: the layers' own, with their caches.
      hidden: [B, 1, d] float32, theirs at the root of the next tree; 0 as long as
        nothing was heard.
      passes: [B] int32, of the layers since the prompts were read.
    """

    state: State
    hidden: jax.Array
    passes: jax.Array


@struct.dataclass
class MTPDrafter:
    """Fills static trees.

    Attributes:
      model: of `models.mtp_model`.
    """

    model: Model
    hears_prompts = True  # see `Drafter`

    def init(self, prompts: Prompts, past: Any) -> Heard:
        """Room for the prompts; of a past that did not hear, nothing is known."""
        none = jnp.zeros_like(prompts.lengths)
        if isinstance(past, Heard):
            return replace(past, state=grow(past.state, prompts.capacity), passes=none)
        config, dtype = self.model.config, param_dtype(self.model.params)
        state = init_state(config, none.shape[0], prompts.capacity, dtype)
        hidden = jnp.zeros((none.shape[0], 1, config.d_model), jnp.float32)
        return Heard(state, hidden, none)

    def propose(
        self,
        state: Heard,
        root: jax.Array,
        tree: Topology,
        dist: Distribution,
        rule: Rule,
    ) -> tuple[Draft, Heard]:
        # A pass for every level but the root's, and one that hears what comes of it.
        state = replace(state, passes=state.passes + max(tree.depth, 1))
        if tree.size == 1:
            return only_root(root), state
        assert isinstance(tree, Tree)  # `specs.make_spec` sees to it
        below = (self.model, state.state, root, state.hidden, tree, dist, rule)
        return fill_tree(*below, hands_down=True), state

    def commit(self, state: Heard, news: News) -> Heard:
        hidden, after = extend(
            self.model, state.state, news.tokens, news.length, previous=news.hidden
        )
        last = jnp.maximum(news.length - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(hidden, last, axis=1)
        told = (news.length > 0)[:, None, None]
        return replace(state, state=after, hidden=jnp.where(told, hidden, state.hidden))
