"""Mistakes that are planted in copies of transformers' models.

A checkpoint holds the right version, which the library reads; the logits of a copy with
a mistake must differ from the library's.
"""

import copy
from functools import cache

import numpy as np
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
        plant(model)
    return np.abs(logits(model) - ours).max()


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
        with torch.no_grad():
            for p in of(model, ending):
                p.copy_(change(p.clone()))

    return plant


def exchanged(one, other):
    """Exchanges two parameters of equal shape in every layer."""

    def plant(model):
        with torch.no_grad():
            for a, b in zip(of(model, one), of(model, other), strict=True):
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)

    return plant


def with_config(**fields):
    def plant(model):
        for name, value in fields.items():
            for module in model.modules():
                if hasattr(module, name):
                    setattr(module, name, value)

    return plant


def ones(w):
    return torch.ones_like(w)


def zeros(w):
    return torch.zeros_like(w)
