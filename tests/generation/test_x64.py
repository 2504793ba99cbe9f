"""With JAX_ENABLE_X64 everything works, and gives the same tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PALLAS = "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
CODE = """
import json, sys
import jax, numpy as np
jax.config.update("jax_numpy_dtype_promotion", "strict")
import stree_jax
from stree_jax import Sampling
from stree_jax.drafters import Staged
from stree_jax.speculation.adaptive.policy import assumed_times
from stree_jax.speculation.tree import resolve_tree
from stree_jax.training.ngrams import count_grams, katz
from tests.support.tiny import REAL, perturbed, tiny

target = tiny(1)
drafter = target.replace(params=perturbed(target.params, 0.05, 3))
rng = np.random.default_rng(0)
prompts = [rng.integers(8, REAL, n).tolist() for n in (3, 9)]
settings = [Sampling(0.8, top_k=9, top_p=0.9, repetition_penalty=1.2, seed=3)] * 2
text = rng.integers(0, REAL, (4, 64), np.int32)
ngrams = katz(count_grams(text, 3, REAL), REAL, slots=256, keep=4)
staged = Staged(drafter, ngrams, 2)
auto = resolve_tree("auto:1,4,8")
times = assumed_times(auto, with_model=True)
arms = {
    "auto": dict(drafter=drafter, tree=auto, times=times),
    "greedy": dict(drafter=drafter, tree="A", min_new_tokens=2),
    "coupled": dict(drafter=drafter, tree="A", sampling=settings, logprobs=1),
    "mss": dict(drafter=drafter, tree="A", sampling=settings, rule="mss"),
    "beam": dict(drafter=drafter, tree="beam:2x2"),
    "staged": dict(drafter=staged, tree="chain:3", sampling=settings),
}
out = {}
for name, options in arms.items():
    result = stree_jax.generate(target, prompts, max_new_tokens=10, **options)
    out[name] = [result.tokens, result.target_calls.tolist()]
demo = stree_jax.load("demo")
out["demo"] = [str(x.dtype) for x in jax.tree.leaves(demo.params)]
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def both():
    """What the code prints with 64 bits, and without."""

    def run(x64):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-W", PALLAS, "-c", CODE],
            cwd=ROOT,
            env={**os.environ, "JAX_ENABLE_X64": x64},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    return run("1"), run("0")


@pytest.mark.parametrize(
    "name", ["auto", "greedy", "coupled", "mss", "beam", "staged", "demo"]
)
def test_the_same_with_64_bits(both, name):
    wide, usual = both
    assert wide[name] == usual[name]
