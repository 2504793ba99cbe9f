"""Test the candidates of block drafters with Markov heads against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from stree_jax.models.dflash_pairs import no_memory, pair_scores
from stree_jax.speculation.drafters import shortlist
from tests.support.dflash import KINDS, random_dflash
from tests.support.tiny import REAL, tiny

M, K = 3, 6


def by_loops(drafter, hidden, scores, root, temperature):
    """Returns the candidates [M][K] of one row."""
    every = jnp.arange(REAL, dtype=jnp.int32)[None]
    above = [(root, 0.0, no_memory(drafter, (1, 1)))]
    found = []
    for k in range(M):
        after, memories = [], []
        for token, weight, memory in above:
            one = hidden[None, k], jnp.full((1, 1), token, jnp.int32), every, memory
            pairs, memory = pair_scores(drafter, *one)
            z = scores[k] + np.asarray(pairs)[0, 0] / temperature
            among = np.isin(np.arange(REAL), np.argsort(-z, kind="stable")[:K])
            after.append(np.where(among, weight + z - logsumexp(z), -np.inf))
            memories.append(memory)
        reach = logsumexp(after, axis=0)
        order = np.argsort(-reach, kind="stable").tolist()
        greedy = int(after[0].argmax())
        found.append([greedy, *(b for b in order if b != greedy)][:K])
        best = found[-1][: shortlist.PARENTS]
        weights = reach[best] - logsumexp(reach[best])
        from_ = [int(np.argmax([x[b] for x in after])) for b in best]
        above = [
            (b, w, memories[i]) for b, w, i in zip(best, weights, from_, strict=True)
        ]
    return found


@pytest.mark.parametrize("kind", ["dspark", "dspark-gated", "dspark-rnn"])
def test_candidates_are_those_of_plain_loops(kind):
    model = tiny(1, layers=("attention", "mlp"))
    options = dict(slots=M + 1) | KINDS[kind] | dict(head_rows=30)
    drafter, rng = random_dflash(model, **options), np.random.default_rng(0)
    params = dict(drafter.params)
    params["pairs"] = jax.tree.map(lambda x: 4 * x, params["pairs"])
    drafter = drafter.replace(params=params)
    hidden = jnp.asarray(rng.standard_normal((2, M, 32)), jnp.float32)
    known = np.isin(np.arange(REAL), np.asarray(drafter.ids))
    scores = np.where(known, rng.standard_normal((2, M, REAL)), -np.inf)
    root, heat = jnp.asarray([3, 9], jnp.int32), jnp.asarray([1.0, 0.5], jnp.float32)
    args = hidden, jnp.asarray(scores, jnp.float32), root, heat
    found = jax.jit(shortlist.reached, static_argnums=5)(drafter, *args, K)
    for b in range(2):
        want = by_loops(drafter, hidden[b], scores[b], int(root[b]), float(heat[b]))
        assert found[b].tolist() == want
    alone = np.argsort(-scores, axis=-1)[..., :K]
    assert (np.sort(found, axis=-1) != np.sort(alone, axis=-1)).any()
    assert known[np.asarray(found)].all()
