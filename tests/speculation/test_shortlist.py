"""Test the candidates of block drafters with Markov heads against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from stree_jax.models.drafters.dflash_pairs import no_memory, pair_scores
from stree_jax.speculation.drafters import shortlist
from tests.support.dflash import KINDS, random_dflash
from tests.support.tiny import REAL, tiny

M, K = 3, 6


def by_loops(drafter, hidden, scores, root, temperature, considered):
    """Returns the candidates [M][K] of one row."""
    every = jnp.arange(REAL, dtype=jnp.int32)[None]
    above = [(root, 0.0, no_memory(drafter, (1, 1)))]
    found = []
    for k in range(M):
        after, memories = [], []
        near = np.isin(np.arange(REAL), np.argsort(-scores[k])[:considered])
        for token, weight, memory in above:
            one = hidden[None, k], jnp.full((1, 1), token, jnp.int32), every, memory
            pairs, memory = pair_scores(drafter, *one)
            bias = np.where(near, np.asarray(pairs)[0, 0] / temperature, 0)
            z = scores[k] + bias
            best = np.argsort(-np.where(near, z, -np.inf), kind="stable")[:K]
            among = np.isin(np.arange(REAL), best)
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


@pytest.mark.parametrize("considered", [12, 256])
@pytest.mark.parametrize("kind", ["dspark", "dspark-gated", "dspark-rnn"])
def test_candidates_are_those_of_plain_loops(kind, considered, monkeypatch):
    monkeypatch.setattr(shortlist, "CONSIDERED", considered)
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
    found = jax.jit(lambda *args: shortlist.reached(*args, K))(drafter, *args)
    for b in range(2):
        row = drafter, hidden[b], scores[b], int(root[b]), float(heat[b])
        want = by_loops(*row, considered)
        assert found[b].tolist() == want
    alone = np.argsort(-scores, axis=-1)[..., :K]
    assert (np.sort(found, axis=-1) != np.sort(alone, axis=-1)).any()
    assert known[np.asarray(found)].all()
