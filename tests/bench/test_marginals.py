"""Test the marginals of block drafters."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.marginals import Marginals, marginals
from stree_jax.models.drafters.dflash_pairs import no_memory, pair_scores
from stree_jax.speculation.accept import NAIVE
from stree_jax.speculation.drafter import Prompts
from stree_jax.speculation.tree import chain
from stree_jax.verify.agreement import text_distribution
from tests.support.dflash import KINDS, random_dflash
from tests.support.tiny import tiny


@pytest.fixture(scope="module")
def found():
    target = tiny(1)
    drafter = random_dflash(target, **KINDS["dspark"])
    bound = Marginals(drafter).bind(target, chain(3))
    ids, one = jnp.asarray([[3, 5]], jnp.int32), jnp.ones((1,), jnp.int32)
    state = bound.init(Prompts(ids, one, 8, 1), None)
    dist = text_distribution(None, jnp.zeros((1,), jnp.int32), target.config.num_tokens)
    root = jnp.asarray([5], jnp.int32)
    own = bound.replace(drafter=drafter)
    paired = super(type(own), own).candidates(state, root, 3, dist, NAIVE)
    return drafter, paired, bound.candidates(state, root, 3, dist, NAIVE)


def test_marginals_equal_the_sum_over_all_paths(found):
    drafter, paired, alone = found
    tables, previous = [], jnp.asarray([[5]], jnp.int32)
    for k in range(3):  # P_k of candidates after candidates, with the others' mass
        memory = no_memory(drafter, previous.shape)
        tokens = paired.tokens[:, k]
        pairs, _ = pair_scores(drafter, paired.hidden[:, k], previous, tokens, memory)
        scores = np.asarray(paired.scores[:, k] + pairs[0])
        rest = np.full((len(scores), 1), paired.rest[0, k])
        whole = np.concatenate([scores, rest], axis=1)
        tables.append(np.exp(scores - np.logaddexp.reduce(whole, axis=1)[:, None]))
        previous = tokens
    count = tables[0].shape[1]
    wanted = np.zeros(count)
    for a, b, c in itertools.product(range(count), repeat=3):
        wanted[c] += tables[0][0, a] * tables[1][a, b] * tables[2][b, c]
    np.testing.assert_allclose(np.exp(alone.scores[0, 2]), wanted, rtol=1e-4)
    heat = jnp.ones((1,), jnp.float32)
    again = marginals(drafter, paired, jnp.asarray([5], jnp.int32), heat)
    np.testing.assert_array_equal(again, alone.scores)


def test_candidates_are_those_of_the_drafter(found):
    _, paired, alone = found
    np.testing.assert_array_equal(alone.tokens, paired.tokens)
    mass = jnp.exp(jax.nn.logsumexp(alone.scores, axis=-1)) + jnp.exp(alone.rest)
    np.testing.assert_allclose(mass, 1, rtol=1e-4)
