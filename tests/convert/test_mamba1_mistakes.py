"""Test that mistakes people make with Mamba, Falcon Mamba and Jamba change the logits.

Each function plants a mistake in a copy of transformers' model, whose right version the
checkpoint holds. Its logits must then differ from the library's.
"""

import torch
from torch import nn

from tests.support.mistakes import (
    changed,
    checks,
    exchanged,
    halves,
    ones,
    with_config,
    zeros,
)
from tests.support.selective import falcon_mamba, jamba, mamba

MODELS = {"mamba": mamba, "falcon-mamba": falcon_mamba, "jamba": jamba}
RANK, N = 3, 5


def parts(*order):
    """Returns a function that reorders the rows of dt, B and C in x_proj."""

    def reordered(w):
        dt, B, C = w.split([RANK, N, N])
        return torch.cat([(dt, B, C)[i] for i in order])

    return reordered


def without(*names):
    """Returns a function that removes modules of these names."""

    def plant(model):
        for module in list(model.modules()):
            for name in names:
                if hasattr(module, name):
                    setattr(module, name, nn.Identity())

    return plant


def normalized_experts(model):
    """Divides the weights of the chosen experts by their sum."""

    def divided(module, args, result):
        scores, weight, chosen = result
        return scores, weight / weight.sum(-1, keepdim=True), chosen

    for name, module in model.named_modules():
        if name.endswith("router"):
            module.register_forward_hook(divided)


MIXER = {
    "z before x": changed("in_proj.weight", halves),
    "B before dt": changed("x_proj.weight", parts(1, 0, 2)),
    "C before B": changed("x_proj.weight", parts(0, 2, 1)),
    "reversed taps": changed("conv1d.weight", lambda w: w.flip(-1)),
    "no bias of the convolution": changed("conv1d.bias", zeros),
    "no bias of dt": changed("dt_proj.bias", zeros),
    "growth in place of decay": changed("A_log", lambda w: w - 3),
    "transposed A": changed("A_log", lambda w: w.T.reshape(w.shape)),
    "the same decay for all states": changed(
        "A_log", lambda w: w.mean(1, keepdim=True).expand_as(w)
    ),
    "no skip": changed(".D", zeros),
    "no bias of the input": changed("in_proj.bias", zeros),
    "no bias of the output": changed("out_proj.bias", zeros),
}
MISTAKES = {
    "mamba": {**MIXER, "no final norm's scale": changed("norm_f.weight", ones)},
    "falcon-mamba": {
        **MIXER,
        "no norm of dt": without("dt_layernorm"),
        "no norm of B": without("b_layernorm"),
        "no norm of C": without("c_layernorm"),
        "epsilon of the other norms": with_config(eps=1e-1),
    },
    "jamba": {
        **MIXER,
        "no scale of dt's norm": changed("dt_layernorm.weight", ones),
        "no norm of B": without("b_layernorm"),
        "no scale of B's norm": changed("b_layernorm.weight", ones),
        "normalized weights of experts": normalized_experts,
        "norms exchanged": exchanged(
            "input_layernorm.weight", "pre_ff_layernorm.weight"
        ),
        "experts in another order": changed("experts.down_proj", lambda w: w.flip(0)),
        "up before gate": exchanged("gate_proj.weight", "up_proj.weight"),
    },
}
made, test_the_models_agree_without_a_mistake, test_a_mistake_is_seen = checks(
    MODELS, MISTAKES
)
