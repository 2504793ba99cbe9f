"""Processed log-probabilities of a row have the same bits in a batch of any shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stree_jax import Sampling, cpu_kernels
from stree_jax.sampling import sampling_rows
from stree_jax.sampling.best import log_softmax
from stree_jax.sampling.distribution import Distribution
from stree_jax.sampling.logprobs import of_tokens
from stree_jax.sampling.requests import Requests

N = 6  # nodes, or rows, with the same settings
FILTERS = [{}, dict(top_k=9), dict(top_p=0.6), dict(min_p=0.02)]
PENALTIES = dict(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1)
CASES = [
    *(Sampling(t, **options) for t in (0, 0.7, 0.9, 1.3) for options in FILTERS),
    *(Sampling(t, **PENALTIES) for t in (0.7, 1.0)),
]


@jax.jit
def processed(logits, sampling, counts, tokens):
    """Returns all log-probabilities [B, Q, V], and those [B, Q] of tokens, as
    `token_logprobs` computes them."""
    batch = logits.shape[0]
    zeros = jnp.zeros((batch,), jnp.int32)
    requests = Requests(zeros, None, zeros[:, None] - 1, None, sampling)
    if sampling.penalties is None:
        counts = None
    dist = Distribution(requests, zeros, counts, logits.shape[2])
    z = log_softmax(dist.scores(logits, jnp.zeros((1, 1), jnp.int32)))
    return z, of_tokens(z, tokens)


@pytest.mark.skipif(cpu_kernels.level() is None, reason="bits of the CPU kernels")
@pytest.mark.parametrize("vocabulary", [64, 1000, 49152])
def test_a_row_has_the_same_bits_in_any_batch(vocabulary, optimised):
    for seed, settings in enumerate(CASES if vocabulary < 49152 else CASES[::3]):
        rng = np.random.default_rng(seed)
        logits = 3 * rng.normal(size=(N, vocabulary)).astype(np.float32)
        logits[:, 5] = -np.inf  # for example a constraint's
        counts = rng.integers(0, 6, vocabulary).astype(np.int32)
        tokens = rng.integers(6, vocabulary, N).astype(np.int32)

        def found(batch, rows, logits=logits, counts=counts, tokens=tokens, s=settings):
            shape = batch, len(logits[rows]) // batch
            each = jnp.broadcast_to(counts, (batch, vocabulary))
            of = logits[rows].reshape(*shape, -1), sampling_rows([s] * batch), each
            z, chosen = processed(*of, tokens[rows].reshape(shape))
            return np.asarray(z).reshape(-1, vocabulary), np.ravel(chosen)

        whole, picked = found(N, slice(None))
        assert np.isneginf(whole[:, 5]).all() and not np.isnan(whole).any()
        for batch in (1, 2):
            z, own = found(batch, slice(None))
            assert (z == whole).all() and (own == picked).all(), settings
        for row in range(N):
            z, own = found(1, slice(row, row + 1))
            assert (z == whole[row]).all() and (own == picked[row]).all(), settings
        assert (picked == np.take_along_axis(whole, tokens[:, None], 1)[:, 0]).all()
