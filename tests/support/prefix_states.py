"""Made-up states of texts, for tests of the server's cache of prefixes."""

import jax
import numpy as np

from stree_jax.models import State
from stree_jax.models.mixers.kv_cache import AttentionState
from stree_jax.models.mixers.mamba2 import MambaState
from stree_jax.server.host_states import Form
from stree_jax.server.prefixes import Prefixes


def rows_of(text, capacity):
    """Returns rows [1, 1, capacity, 2] that depend on all tokens before them."""
    value = np.cumsum(np.asarray(text) * (1 + np.arange(len(text)))) % 9973
    rows = np.full((1, 1, capacity, 2), -1, np.float32)
    rows[0, 0, : len(text), :] = value[:, None]
    return rows


def past_of(text, recurrent, lag=0, capacity=64):
    """Returns states of a target, and of a draft model that has read `lag` tokens
    less."""

    def state(text):
        rows = rows_of(text, capacity)
        layers = [{"attention": AttentionState(rows, rows + 0.5)}]
        if recurrent:
            total = np.full((1, 2, 3, 4), sum(text), np.float32)
            layers.append({"mamba": MambaState(total, np.zeros((1, 2, 3), np.float32))})
        return State(tuple(layers), np.asarray([len(text)], np.int32))

    return state(text), state(text[: len(text) - lag])


def cache_of(limit, recurrent):
    prefixes = Prefixes(limit)
    prefixes.form = Form.of(past_of([1], recurrent))
    return prefixes


def check_restored(found, text, recurrent, lags):
    """Asserts that a past is that of the first tokens of a text."""
    read = text[: found.length]
    target, drafting = found.restored()
    wanted = past_of(read, recurrent, min(lags[found.length], len(read)))
    for state, one in zip((target, drafting), wanted, strict=True):
        n = int(state.length[0])
        assert n <= len(read) and (n == len(read) or state is drafting)
        if not recurrent:
            one = past_of(read, recurrent, len(read) - n)[1]
        one = jax.tree.map(lambda x: np.where(x == -1, 0, x), one)  # unused rows
        one = jax.tree.map(lambda x: np.where(x == -0.5, 0, x), one)
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(one), strict=True):
            assert np.array_equal(x, y)
