"""Tiny random models of transformers' class of ZAYA, with every option off its
default."""

import torch
from transformers import ZayaConfig, ZayaForCausalLM

from tests.support.hf_random import NO_TOKENS, VOCAB, randomize

WINDOW = 6
FAR, NEAR = "hybrid", "hybrid_sliding"


def zaya(**options):
    """Returns a model with and without windows, with convolutions of 3 and 2 taps."""
    defaults = {
        "hidden_size": 32,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_hidden_layers": 4,
        "layer_types": [FAR, NEAR, FAR, NEAR],
        "sliding_window": WINDOW,
        "moe_intermediate_size": 20,
        "num_experts": 5,
        "router_hidden_size": 12,
        "cca_time0": 3,
        "rms_norm_eps": 1e-3,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "rope_parameters": {
            FAR: _rope(700.0, 0.4),
            NEAR: _rope(50.0, 0.7),
        },
        **NO_TOKENS,
    }
    return prepared(ZayaForCausalLM(ZayaConfig(**(defaults | options))))


def zaya_plain(**options):
    """Returns a model with the options of the published ZAYA1-8B."""
    defaults = {
        "num_attention_heads": 4,
        "cca_time0": 2,
        "layer_types": None,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "rope_parameters": {FAR: _rope(700.0, 0.4)},
    }
    return zaya(**(defaults | options))


def _rope(theta, share):
    return {
        "rope_type": "default",
        "rope_theta": theta,
        "partial_rotary_factor": share,
    }


def prepared(model):
    """Returns the model with random weights, also of the scales that are 1 in a new
    model."""
    randomize(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("_scale"):
                p.copy_(1 + 0.3 * torch.randn(p.shape, generator=generator))
            elif ".gate." in name and p.ndim == 2:
                p.mul_(1.5)
    return balanced(model)


def balanced(model):
    """Returns the model with biases of the routers for which tokens choose several
    classes, also the class without an expert. Its bias is -1, to which transformers
    5.24 sets it on loading."""

    def balance(gate, _, found):
        share = found[0].softmax(-1).mean(0)
        gate.balancing_biases.copy_(share[-1] - share - 1)

    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(balance) for gate in gates]
    with torch.no_grad():
        for _ in gates:  # each router's input depends on those before it
            model(torch.arange(VOCAB)[None])
    for hook in hooks:
        hook.remove()
    return model


ZAYA_CASES = {"zaya": zaya, "zaya-plain": zaya_plain}
