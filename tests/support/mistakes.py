"""Functions that plant a mistake in a model of transformers."""

import numpy as np
import torch

from tests.support.randomized import VOCAB

SEEN = 1e-2  # a mistake changes a logit by more than this: 100 times the tolerance
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 40)


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
