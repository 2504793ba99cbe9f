"""Test the traces of agents that measure the server's cache of prefixes."""

import argparse
from dataclasses import replace

import numpy as np

from bench.agent_traces import TURNS, Trace, replayed
from stree_jax.server.batch import Batch
from stree_jax.server.rows import Sizes
from stree_jax.speculation.default_tree import spec_for
from tests.support.tiny import tiny

ARGS = argparse.Namespace(tokens=2048, requests=12, answer=4)


def test_traces_are_seeded_and_of_all_kinds():
    model = tiny(1, layers=("attention", "mlp"))
    found = []
    for seed in (1, 1, 2):
        trace, kinds, prompts = Trace.of(model, seed, 40), set(), []
        for kind, agent in trace.prompts(1900, 80):
            kinds.add(kind)
            prompts.append(agent.asked)
            agent.messages.append([5, 6, trace.stop])
        assert kinds == set(TURNS) and max(map(len, prompts)) <= 1900
        assert all(p[: trace.system] == prompts[0][: trace.system] for p in prompts)
        found.append(prompts)
    assert found[0] == found[1] != found[2]
    tokens = np.concatenate(found[0])
    assert tokens.min() >= 0 and tokens.max() < model.config.num_tokens


def test_attention_reuses_every_token_and_nothing_without_a_cache():
    model = tiny(1, layers=("attention", "mlp"))
    model = replace(model, config=replace(model.config, stop_tokens=()))
    spec, shares = spec_for(model, None, None, None, None), []
    for memory in (2**26, 1):
        sizes = Sizes(rows=1, context=2048, top_logprobs=1, prefix_memory=memory)
        found = replayed(Batch(model, spec, sizes), Trace.of(model, 1, 40), ARGS)
        assert found["reusable"] > 0.8 * found["prompt"]
        shares.append(found["share"])
    assert shares == [1.0, 0.0]
