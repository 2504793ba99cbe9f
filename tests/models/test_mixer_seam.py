"""Test that a custom mixer works everywhere once it is added to `MIXERS` and
`COMPUTATIONS`."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import stree_jax
from stree_jax.models.configs import MIXERS
from stree_jax.models.mixers import COMPUTATIONS
from stree_jax.speculation.adaptive.policy import step_times
from stree_jax.speculation.tree import Auto
from tests.support.toy_mixer import TOY, TOY_COMPUTATION
from tests.support.toy_models import NEW, PROMPTS, model_of, text

CHEAP = step_times([1.0] * len(Auto().sizes), 0.1, 0.1)  # drafting is worth its time


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    """Adds the custom mixer to both tables."""
    monkeypatch.setitem(MIXERS, TOY.kind, TOY)
    monkeypatch.setitem(COMPUTATIONS, TOY.kind, TOY_COMPUTATION)


@pytest.fixture(scope="module")
def pair():
    """Returns a target model, and a draft model that mostly agrees with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MIXERS, TOY.kind, TOY)
        patch.setitem(COMPUTATIONS, TOY.kind, TOY_COMPUTATION)
        yield model_of(0), model_of(0, noise=0.01)


@pytest.fixture(scope="module")
def plain(pair):
    return text(pair[0], drafter=None)


@pytest.mark.parametrize("tree", ["A", "E", "beam:2x3", "auto"])
def test_output_equals_plain_decoding(pair, plain, tree):
    target, drafter = pair
    result = stree_jax.generate(
        target,
        PROMPTS,
        max_new_tokens=NEW,
        stop_tokens=(),
        drafter=drafter,
        tree=tree,
        times=CHEAP if tree == "auto" else None,
    )
    assert result.tokens == plain
    assert sum(result.target_calls) < NEW * len(PROMPTS)  # drafts were accepted


def test_results_do_not_depend_on_the_batch(pair, plain):
    target, drafter = pair
    for prompt, wanted in zip(PROMPTS, plain, strict=True):
        assert text(target, [prompt], drafter=drafter, tree="E") == [wanted]


def test_a_text_can_be_continued(pair, plain):
    target, drafter = pair
    options = {"drafter": drafter, "tree": "E", "stop_tokens": ()}
    first = stree_jax.generate(
        target, PROMPTS, max_new_tokens=7, keep_past=True, **options
    )
    then = text(
        target,
        [[]] * len(PROMPTS),
        past=first.past,
        max_new_tokens=NEW - 7,
        **options,
    )
    both = [a + b for a, b in zip(first.tokens, then, strict=True)]
    assert both == plain


def test_a_long_prompt_is_read_in_chunks(pair):
    """Compares logits of a prompt in two chunks with those token by token."""
    target, _ = pair
    ids = np.random.default_rng(0).integers(0, 47, (1, 80))
    tree = stree_jax.score_tree(target, ids[0, :-1], ids[0, -1:], [-1])
    whole = stree_jax.score(target, ids)[0, -1:]
    np.testing.assert_allclose(tree, whole, atol=1e-4)
    assert text(target, ids.tolist(), drafter="lookup") == text(
        target, ids.tolist(), drafter=None
    )


def test_streams_and_memory(pair, plain):
    target, drafter = pair
    options = {"drafter": drafter, "max_new_tokens": NEW, "stop_tokens": ()}
    *_, last = stree_jax.stream(target, PROMPTS, steps=2, tree="E", **options)
    assert last.tokens == plain
    assert text(target, drafter=drafter, memory="1GB") == plain
    planned = stree_jax.plan(target, "1GB", drafter=drafter, context=256)
    assert planned.best.memory.state >= 4 * (24 + 24 + 8)  # of the toy mixers alone


def test_a_saved_model_is_loaded_again(pair, plain, tmp_path):
    stree_jax.save(pair[0], tmp_path / "model")
    again = stree_jax.load(tmp_path / "model")
    assert again.config == pair[0].config
    assert text(again, drafter=None) == plain
    kinds = json.loads((tmp_path / "model" / "config.json").read_text())
    assert kinds["model"]["mixers"]["small_toy"] == {"kind": "toy", "channels": 8}


PROGRAM = """
import json
import jax
import stree_jax
from stree_jax.models.configs import MIXERS
from stree_jax.models.mixers import COMPUTATIONS
from tests.support.toy_mixer import TOY, TOY_COMPUTATION
from tests.support.toy_models import NEW, PROMPTS, model_of, text

MIXERS[TOY.kind], COMPUTATIONS[TOY.kind] = TOY, TOY_COMPUTATION
target, drafter = model_of(0), model_of(0, noise=0.01)
mesh = stree_jax.make_mesh("data=2,model=4")
cut = stree_jax.shard(target, mesh)
prompts, near = PROMPTS + PROMPTS[:1], stree_jax.shard(drafter, mesh)
options = {"max_new_tokens": NEW, "stop_tokens": ()}
*_, last = stree_jax.stream(cut, prompts, steps=2, drafter=near, tree="E", **options)
print(json.dumps({
    "plain": text(target, prompts, drafter=None),
    "mesh": text(cut, prompts, drafter=near, tree="E"),
    "stream": last.tokens,
    "parts": dict(cut.cut.parts),
}))
"""


def test_eight_devices_share_it():
    environment = dict(os.environ, JAX_NUM_CPU_DEVICES="8")
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["mesh"] == found["plain"]
    assert found["stream"] == found["plain"]  # records go from call to call
    assert found["parts"]["toy"] == found["parts"]["small_toy"] == 4
