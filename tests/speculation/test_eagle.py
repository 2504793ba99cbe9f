"""Test drafting with EAGLE drafters: drafts match the equations, text stays exact."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from stree_jax.convert.drafters.eagle import read_eagle
from stree_jax.generation import begin
from stree_jax.speculation import loop
from stree_jax.speculation.drafter import DrafterBase
from stree_jax.speculation.drafters.eagle import EagleDrafter
from stree_jax.speculation.tree import resolve_tree
from tests.support import eagle

NEW, LENGTHS = 20, [3, 1, 70]  # prompt lengths; the longest takes two chunks
TREE = resolve_tree([-1, 0, 0, 1, 1, 2, 3])
NORMED = dict(fc_norm=True, norm_output=True)
KINDS = {  # arguments of `eagle.tensors`, and fields of the config
    "eagle3": ({}, {}),
    "normed": (dict(layers=2, extra=("fc_norm",)), NORMED),
    "parallel": (
        dict(extra=("mask_hidden", "embed_tokens")),
        dict(mask_token_id=eagle.MASK, norm_before_residual=True),
    ),
    "eagle2": (
        dict(fused=True, extra=("embed_tokens", "fc.bias")),
        dict(draft_vocab_size=None),
    ),
}


@pytest.fixture(scope="module")
def target():
    return eagle.target()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(2)
    return [rng.integers(0, eagle.REAL, n).tolist() for n in LENGTHS]


def made(target, kind):
    """Returns a drafter, and its recomputation."""
    arguments, fields = KINDS[kind]
    tensors, config = eagle.tensors(target, **arguments), eagle.config(**fields)
    drafter = read_eagle(config, tensors, target.config)
    return drafter, eagle.Recomputed(tensors, config, target)


@struct.dataclass
class Watched(DrafterBase):
    """A drafter that records the tokens of its last tree."""

    inner: EagleDrafter
    observes_prompts = True

    @property
    def taps(self):
        return self.inner.taps

    def init(self, prompts, past):
        blank = jnp.zeros((prompts.lengths.shape[0], TREE.size), jnp.int32)
        return self.inner.init(prompts, past), blank

    def propose(self, state, root, tree, dist, rule):
        draft, inner = self.inner.propose(state[0], root, tree, dist, rule)
        return draft, (inner, draft.tokens)

    def commit(self, state, update):
        return self.inner.commit(state[0], update), state[1]


def drafted(target, drafter, prompts, change=lambda drafter: drafter):
    """Returns for each step and running row the text so far and the tree drafted below
    it; and the lengths of accepted paths."""
    begun, plan = begin(target, prompts, max_new_tokens=NEW, drafter=drafter, tree=TREE)
    spec = replace(plan.spec, drafter=Watched(change(plan.spec.drafter)))
    padded = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    lengths = jnp.asarray([len(ids) for ids in prompts], jnp.int32)
    d = loop.init_decoding(
        spec, jnp.asarray(padded), lengths, begun.requests, max_new_tokens=NEW
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


def count_wrong(found, recomputed):
    """Counts the drafted trees that differ from the equations."""
    seen = [(text, tree) for text, tree in found if len(text) > 1]
    return sum(tree != recomputed.tree(text, TREE.parents) for text, tree in seen)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_match_the_equations(target, prompts, kind):
    """Over whole texts, in which paths of several lengths were accepted."""
    drafter, recomputed = made(target, kind)
    found, gained = drafted(target, drafter, prompts)
    assert count_wrong(found, recomputed) == 0
    assert (gained[:, 1:3].sum(axis=0) > 0).all()
