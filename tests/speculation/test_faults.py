"""Test that a token that no text has cannot change a text, even if its embedding is
NaN."""

import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax import generate
from stree_jax.speculation.adaptive.pool import best_tree, no_candidates
from stree_jax.speculation.tree import Budget
from tests.support.families import FAMILIES, random_model


def test_unfilled_nodes_have_the_root_token():
    roots = jnp.asarray([5, 7], jnp.int32)
    draft, value = best_tree(no_candidates(2, 3), roots, Budget(5, 4))
    np.testing.assert_array_equal(draft.tokens, [[5] * 5, [7] * 5])
    np.testing.assert_array_equal(value[:, 1:], 0)


@pytest.mark.parametrize("name", ["qwen3.5", "kimi-linear", "lfm2"])
def test_prompt_lookup_writes_the_text_of_plain_decoding(name):
    """Token 0 has no numbers. It is never the most probable: its logit is 0."""
    model = random_model(FAMILIES[name], 0)
    head = model.params["lm_head"].at[0].set(0.0)
    model = model.replace(params=model.params | {"lm_head": head})
    prompts = [[5, 6, 7, 5, 6], [9, 8]]
    wanted = generate(model, prompts, max_new_tokens=8, drafter=None)
    embedding = model.params["embedding"].at[0].set(jnp.nan)
    model = model.replace(params=model.params | {"embedding": embedding})
    found = generate(model, prompts, max_new_tokens=8, drafter="lookup", tree="A")
    for ours, theirs in zip(found.tokens, wanted.tokens, strict=True):
        np.testing.assert_array_equal(ours, theirs)
