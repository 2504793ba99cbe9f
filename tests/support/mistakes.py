"""Mistakes that are planted in copies of transformers' models.

A checkpoint holds the right version, which the library reads; the logits of a copy with
a mistake must differ from the library's.
"""

import copy
from functools import cache

import jax
import numpy as np
import pytest
import torch

import stree_jax
from tests.support.hf_random import VOCAB

TOLERANCE = 1e-4  # of logits without a mistake
SEEN = 1e-2  # a mistake changes a logit by more than this
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 40)


def maker(models, root):
    """Returns a function: name of a model -> transformers' model, and the library's
    logits of it.

    Args:
      models: functions that make transformers' models, by name.
      root: directory for the checkpoints.
    """

    @cache
    def make(name):
        model = models[name]()
        model.save_pretrained(root / name)
        ours = stree_jax.score(stree_jax.load(root / name), TOKENS[None])[0]
        return model, np.asarray(ours)

    return make


def difference(model, ours, plant=None):
    """Returns the largest difference of the library's logits from those of a copy of
    the model in which `plant` has planted a mistake."""
    if plant is not None:
        model = copy.deepcopy(model)
        with torch.no_grad():
            plant(model)
    return np.abs(logits(model) - ours).max()


def checks(models, mistakes):
    """Returns what a test module needs: a fixture, a test that the library's logits are
    those of transformers' models, and a test that a mistake changes them.

    Args:
      models: functions that make transformers' models, by name.
      mistakes: functions that plant a mistake, by its name and the model's.
    """

    @pytest.fixture(scope="module")
    def made(tmp_path_factory):
        return maker(models, tmp_path_factory.mktemp("mistakes"))

    @pytest.mark.parametrize("name", models)
    def agree(made, name):
        model, ours = made(name)
        assert difference(model, ours) < TOLERANCE
        assert np.abs(ours).max() > 1

    cases = [(name, mistake) for name, all_of in mistakes.items() for mistake in all_of]

    @pytest.mark.parametrize(("name", "mistake"), cases)
    def seen(made, name, mistake):
        assert difference(*made(name), mistakes[name][mistake]) > SEEN

    return made, agree, seen


def check_recomputed(recomputed, directory, plants, tokens):
    """Checks that the library's logits are those of a recomputation in float64, and
    that each mistake in one of its steps changes them."""
    ours = np.asarray(stree_jax.score(stree_jax.load(directory), tokens[None])[0])
    right = recomputed(directory).logits(tokens)
    np.testing.assert_allclose(ours, right, rtol=0, atol=TOLERANCE)
    missed = []
    for plant in plants:
        oracle = recomputed(directory)
        plant(oracle)
        if not np.abs(oracle.logits(tokens) - ours).max() > SEEN:
            missed.append(plant.__name__)
    assert not missed
    jax.clear_caches()


def logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)[None]).logits[0].numpy()


def of(model, ending):
    """Returns the parameters and buffers with this ending of their name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    found = [p for name, p in named if name.endswith(ending)]
    assert found, ending
    return found


def changed(ending, change):
    def plant(model):
        for p in of(model, ending):
            p.copy_(change(p.clone()))

    return plant


def exchanged(one, other):
    """Exchanges two parameters of equal shape in every layer."""

    def plant(model):
        for a, b in zip(of(model, one), of(model, other), strict=True):
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)

    return plant


def with_config(**fields):
    """Plants other values of fields that modules took from the config."""

    def plant(model):
        for name, value in fields.items():
            for module in model.modules():
                if hasattr(module, name):
                    setattr(module, name, value)

    return plant


def in_config(**fields):
    """Plants other values of fields that the classes read in each pass."""

    def plant(model):
        for name, value in fields.items():
            assert hasattr(model.config, name), name
            setattr(model.config, name, value)

    return plant


def windows(tokens):
    """Returns mistakes with windows of another size: masks are made from the config."""
    return {
        "window too short by one": in_config(sliding_window=tokens - 1),
        "window too long by one": in_config(sliding_window=tokens + 1),
        "no window": in_config(sliding_window=1000),
    }


def turned_as(kind, other):
    """Plants the rotary embedding of another type of layers."""

    def plant(model):
        mine, theirs = (of(model, f"{k}_inv_freq")[0] for k in (kind, other))
        count = min(len(mine), len(theirs))
        mine[:count].copy_(theirs[:count])
        rotary = model.model.rotary_emb
        scaling = getattr(rotary, f"{other}_attention_scaling")
        setattr(rotary, f"{kind}_attention_scaling", scaling)

    return plant


def plainly_turned(ending, parts=1):
    """Plants frequencies of a plain rotary embedding of one of so many parts of the
    channels; those of the other parts stay."""

    def plant(model):
        (frequencies,) = of(model, ending)
        count = len(frequencies) // parts
        frequencies[:count].copy_(700.0 ** -(torch.arange(count) / count))

    return plant


def halves(w, dim=0):
    """Exchanges the halves of a parameter."""
    return torch.cat(w.chunk(2, dim)[::-1], dim)


def ones(w):
    return torch.ones_like(w)


def zeros(w):
    return torch.zeros_like(w)


EXPERTS_UP_FIRST = changed("experts.gate_up_proj", lambda w: halves(w, 1))
