"""Test that NaN in the weights shows in the result, with and without compiled kernels.

A NaN in one row of the output matrix makes that token's logit NaN at every step. The
argmax of logits with NaN is the first NaN (NumPy's rule). Greedy text is therefore that
token, or the first token once all logits are NaN.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling
from tests.support.native import INSTRUCTIONS, use
from tests.support.tiny import tiny

KERNELS = ["off"] if INSTRUCTIONS is None else ["off", INSTRUCTIONS[0]]


def broken(row):
    """Returns a model with NaN in its embedding, which is also its output matrix."""
    model = tiny(1, layers=("mamba", "mlp"))
    table = model.params["embedding"].at[row].set(jnp.nan)
    return dataclasses.replace(model, params=dict(model.params, embedding=table))


WAYS = {
    "greedy": {},
    "drafted": dict(drafter="lookup", tree="chain:2"),
    "sampled": dict(sampling=Sampling(temperature=1.0)),
    "filtered": dict(sampling=Sampling(temperature=0.7, top_k=5, top_p=0.9)),
    "tested": dict(sampling=Sampling(), rule="mss", tree="chain:2", drafter=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_nan_in_the_weights_shows_in_the_result(way, monkeypatch):
    model, options = broken(20), dict(WAYS[way])
    if options.pop("drafter", None) is True:
        options["drafter"] = tiny(2, layers=("mamba", "mlp"))
    elif "tree" in options:
        options["drafter"] = "lookup"
    seen = []
    for level in KERNELS:
        use(monkeypatch, level)
        result = stree_jax.generate(model, [[8, 9]], max_new_tokens=4, **options)
        assert np.isnan(result.min_margin).all()
        seen.append(result.tokens)
    first = 20 if way in ("greedy", "drafted") else 0  # sampling makes all logits NaN
    assert seen == [[[first, 0, 0, 0]]] * len(KERNELS)
    jax.clear_caches()
