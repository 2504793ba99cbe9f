"""Sizes, step times and ways of decoding that tests of tree "auto" share."""

import jax
import jax.numpy as jnp

import stree_jax
from stree_jax import Sampling
from stree_jax.generation.generate import begin
from stree_jax.models import logits_of
from stree_jax.speculation.adaptive.best_first import (
    best_first,
    by_model,
    catch_up,
    nothing_grown,
)
from stree_jax.speculation.adaptive.calibration import PRIOR
from stree_jax.speculation.adaptive.policy import StepTimes
from stree_jax.speculation.drafters.lookup import begin_history
from tests.speculation.steps import prompts_of
from tests.support.tiny import REAL

NEW, TREE = 24, "auto:1,4,8"
# A pass over a tree takes about as long as one over a single token
FLAT = [1.0, 1.01, 1.02]
SETTINGS = {
    "greedy": dict(),
    "coupled": dict(sampling=[Sampling(temperature=t, seed=4) for t in (0, 0.7, 1)]),
    "top_k": dict(
        rule="naive", sampling=Sampling(temperature=0.8, repetition_penalty=1.3)
    ),
}


def times(verify=FLAT, draft=0.01, level=0.01):
    numbers = (verify, draft, level)
    return StepTimes(*(jnp.asarray(x, jnp.float32) for x in numbers))


def plain_of(target, prompts, name):
    """Returns the options of the setting, and the tokens of plain decoding with
    them."""
    options = dict(max_new_tokens=[NEW, NEW, 9], **SETTINGS[name])
    without = {k: v for k, v in options.items() if k != "rule"}
    return options, stree_jax.generate(target, prompts, **without, drafter=None).tokens


def before_a_search(target, prompts):
    """Returns a draft model, its state, the texts, and the arguments of a search."""
    begun, plan = begin(target, prompts, max_new_tokens=8, drafter=None)
    history = begin_history(prompts_of(prompts, update_width=9, capacity=80))
    root = jnp.asarray([ids[-1] for ids in prompts], jnp.int32)
    asked = root, begun.distribution(REAL), plan.spec.rule, jnp.asarray(PRIOR)
    return plan.spec.target, begun.state, history, asked


def searching(drafter, history, asked, shape):
    """Returns a compiled search of all levels.

    It takes a model state, and the value below which a node gets no children.
    """

    @jax.jit
    def run(state, least):
        hidden, state, _ = catch_up(drafter, state, history, 4)
        return best_first(
            logits_of(drafter, hidden),
            by_model(drafter, state),
            *asked,
            nothing_grown(drafter, hidden.shape[0], *shape),
            lambda grown: jnp.bool_(True),
            least,
        )

    return run
