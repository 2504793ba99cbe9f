"""Test ZAYA: mistakes that people make with it change the logits, the state after a
long text, and the checks of its config."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

import stree_jax
from stree_jax import CheckpointError
from stree_jax.models import init_state, prefill
from tests.support.hf_random import VOCAB
from tests.support.hf_zaya import FAR, NEAR, WINDOW, ZAYA_CASES, zaya_plain
from tests.support.mistakes import (
    SEEN,
    TOLERANCE,
    changed,
    difference,
    exchanged,
    maker,
    of,
    ones,
    with_config,
    zeros,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return maker(ZAYA_CASES, tmp_path_factory.mktemp("mistakes"))


def in_each(part, change):
    """Plants a change of a part of every layer, named as in the class."""

    def plant(model):
        for layer in model.model.layers:
            change(layer.get_submodule(part))

    return plant


def with_forward(change):
    """Returns a change of what a module computes: change(forward, *arguments)."""

    def plant(module):
        plain = module.forward
        module.forward = lambda *args, **options: change(plain, *args, **options)

    return plant


def router_of_two_before(model):
    """Plants a router that reads the vector of the first router, not the last."""
    first = []

    def forward(plain, x, router_states=None):
        found = plain(x, router_states=first[0] if first else None)
        first.append(found[3])
        return found

    in_each("mlp.gate", with_forward(forward))(model)


def router_without_average(plain, x, router_states=None):
    return plain(x, router_states=None)


def router_vector_after_its_norm(model):
    for layer in model.model.layers:
        gate, norm = layer.mlp.gate, layer.mlp.gate.router_mlp.norm

        def forward(plain, x, router_states=None, norm=norm):
            *found, vector = plain(x, router_states=router_states)
            return *found, norm(vector)

        with_forward(forward)(gate)


def always_an_expert(plain, x, router_states=None):
    """Plants the first expert, with its weight, for tokens that use none."""
    logits, share, chosen, vector = plain(x, router_states=router_states)
    best = logits.softmax(-1).amax(-1, keepdim=True)
    return logits, torch.where(share == 0, best, share), chosen, vector


def weights_of_one(plain, x, router_states=None):
    logits, share, chosen, vector = plain(x, router_states=router_states)
    return logits, (share > 0).to(share.dtype), chosen, vector


def bias_in_the_weights(model):
    """Plants weights that include the bias of the choice."""
    for layer in model.model.layers:
        gate = layer.mlp.gate

        def forward(plain, x, router_states=None, gate=gate):
            logits, share, chosen, vector = plain(x, router_states=router_states)
            added = gate.balancing_biases[chosen]
            return logits, torch.where(share == 0, share, share + added), chosen, vector

        with_forward(forward)(gate)


def values_of_this_token(projection):
    """Plants values that are all of the token itself."""
    plain = projection.forward

    def forward(hidden, *args):
        q, k, _ = plain(hidden, *args)
        both = projection.v_proj_current(hidden), projection.v_proj_delayed(hidden)
        return q, k, torch.cat(both, -1).view_as(k)

    projection.forward = forward


def values_by_head(projection):
    """Plants values of which half of each head, not of all heads, is of the token
    before."""
    plain = projection.forward

    def forward(hidden, *args):
        q, k, v = plain(hidden, *args)
        late, now = (v.flatten(2).chunk(2, -1)[i].unflatten(2, (2, -1)) for i in (1, 0))
        return q, k, torch.cat([now, late], -1)

    projection.forward = forward


def padded_between(projection):
    """Plants zeros between the convolutions, before the first token."""
    kernel = projection.conv_qk_grouped.kernel_size[0]
    plain = projection.conv_qk_depthwise.forward

    def forward(x):
        return functional.pad(plain(x)[..., kernel - 1 :], (kernel - 1, 0))

    projection.conv_qk_depthwise.forward = forward


def no_mean(projection):
    """Plants q and k without the mean of the group."""
    grouped = projection.conv_qk_grouped
    kept = {}

    def keep(plain, hidden, *args):
        return plain(hidden, *args)

    def convolved(plain, x):
        kept["y"] = plain(x).transpose(1, 2)
        return kept["y"].transpose(1, 2)

    with_forward(convolved)(grouped)

    def forward(plain, hidden, *args):
        q, k, v = keep(plain, hidden, *args)
        ends = [q.shape[2] * q.shape[3], k.shape[2] * k.shape[3]]
        q_only, k_only = kept["y"].split(ends, -1)
        return q_only.view_as(q), k_only.view_as(k), v

    with_forward(forward)(projection)


def unnormed(plain, q, k):
    return q, k


def turned(kind, change):
    def plant(model):
        with torch.no_grad():
            for p in of(model, f"{kind}_inv_freq"):
                p.copy_(change(p.clone()))

    return plant


QKV, GATE = "self_attn.qkv_proj", "mlp.gate"
COMMON = {
    "convolutions in the other order of taps": changed(
        "conv_qk_grouped.weight", lambda w: w.flip(-1)
    ),
    "first convolution reads the taps backwards": changed(
        "conv_qk_depthwise.weight", lambda w: w.flip(-1)
    ),
    "no bias of the first convolution": changed("conv_qk_depthwise.bias", zeros),
    "no bias of the second convolution": changed("conv_qk_grouped.bias", zeros),
    "zeros between the convolutions": in_each(QKV, padded_between),
    "no mean of the group": in_each(QKV, no_mean),
    "values of this token only": in_each(QKV, values_of_this_token),
    "values late by head": in_each(QKV, values_by_head),
    "values exchanged": exchanged("v_proj_current.weight", "v_proj_delayed.weight"),
    "no norm of q and k": in_each("self_attn.qk_norm", with_forward(unnormed)),
    "no scale of k": changed("qk_norm.temp", ones),
    "scales of other heads": changed("qk_norm.temp", lambda w: w.flip(0)),
    "frequencies of whole heads": turned(FAR, lambda f: f**0.5),
    "no scale of the residual stream": changed(".residual_scale", ones),
    "no bias of the residual stream": changed(".residual_bias", zeros),
    "no scale of what is added": changed("residual_scale.hidden_states_scale", ones),
    "no bias of what is added": changed("residual_scale.hidden_states_bias", zeros),
    "scales exchanged": exchanged(
        "residual_scale.hidden_states_scale", "residual_scale.residual_scale"
    ),
    "no scale of the embedding": changed("model.input_hidden_states_scale", ones),
    "no bias of the embedding": changed("model.input_hidden_states_bias", zeros),
    "no average of routers": in_each(GATE, with_forward(router_without_average)),
    "average with the first router": router_of_two_before,
    "no scale of the average": changed("router_states_scale", ones),
    "average of normed vectors": router_vector_after_its_norm,
    "no bias of the choice": changed("balancing_biases", zeros),
    "bias in the weights": bias_in_the_weights,
    "an expert for every token": in_each(GATE, with_forward(always_an_expert)),
    "weights of 1": in_each(GATE, with_forward(weights_of_one)),
    "up before gate": changed(
        "experts.gate_up_proj", lambda w: torch.cat(w.chunk(2, 1)[::-1], 1)
    ),
    "tanh of GELU": in_each(
        "mlp.gate.router_mlp",
        lambda m: setattr(m, "act_fn", torch.nn.GELU(approximate="tanh")),
    ),
}
MISTAKES = {
    "zaya": {
        **COMMON,
        "window too short by one": with_config(sliding_window=WINDOW - 1),
        "no window": with_config(sliding_window=1000),
        "near layers turned as others": turned(NEAR, lambda f: f**1.5),
    },
    "zaya-plain": COMMON,
}
CASES = [(name, mistake) for name, all_of in MISTAKES.items() for mistake in all_of]


@pytest.mark.parametrize("name", ZAYA_CASES)
def test_the_models_agree_without_a_mistake(made, name):
    assert difference(*made(name)) < TOLERANCE


@pytest.mark.parametrize(("name", "mistake"), CASES)
def test_a_mistake_is_seen(made, name, mistake):
    with torch.no_grad():
        assert difference(*made(name), MISTAKES[name][mistake]) > SEEN
