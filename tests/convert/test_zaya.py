"""Test ZAYA: states after a long text, and that mistakes people make with it change
the logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

import stree_jax
from stree_jax.models import (
    chain_nodes,
    commit,
    extend,
    forward_tree,
    init_state,
    tree_nodes,
)
from stree_jax.models.layers.nodes import Nodes
from stree_jax.models.mixers import kv_cache
from tests.support.hf_zaya import FAR, NEAR, WINDOW, ZAYA_CASES, zaya
from tests.support.long_texts import WAYS, text
from tests.support.mistakes import (
    SEEN,
    TOKENS,
    TOLERANCE,
    changed,
    difference,
    exchanged,
    maker,
    of,
    ones,
    zeros,
)
from tests.support.reference import assert_near

COUNT = 600  # tokens; in longer texts, rounding decides between two experts somewhere


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return maker(ZAYA_CASES, tmp_path_factory.mktemp("mistakes"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("zaya") / "source"
    zaya().save_pretrained(path)
    return path


# States


@pytest.fixture(scope="module")
def theirs():
    """Returns transformers' cache after a long text."""
    with torch.no_grad():
        tokens = torch.tensor(text(n=COUNT)).long()[None]
        return zaya().model(tokens, use_cache=True).cache


@pytest.mark.parametrize("way", ["trees and steps", "prefill"])
def test_states_after_a_long_text(source, theirs, way):
    model = stree_jax.load(source)
    _, state = WAYS[way](model, text(n=COUNT), capacity=COUNT + 256)
    assert int(state.length[0]) == COUNT
    for i, kind in enumerate(("cca", "cca_near", "cca", "cca_near")):
        ours, layer = state.layers[2 * i][kind], theirs.layers[i]
        count = layer.keys.shape[2]  # a layer with a window has fewer
        for cache, wanted in ((ours.k, layer.keys), (ours.v, layer.values)):
            rows = cache[0, :, COUNT - count : COUNT]
            assert_near(rows, wanted[0].numpy(), TOLERANCE)
        inputs = theirs.get_conv_state(i)[0].T.numpy()  # of q and k
        assert_near(ours.conv[0, :, : inputs.shape[1]], inputs, TOLERANCE)
        late = theirs.get_recurrent_state(i)[0].numpy()  # of the last half of v
        assert_near(ours.conv[0, -1, -len(late) :], late, TOLERANCE)


# Mistakes in trees


def packed(nodes, conv_taps):
    """Plants convolutions that read the rows before a node, not its ancestors."""
    batch, count = nodes.depth.shape
    rows = np.add.outer(np.arange(count), np.arange(conv_taps)).astype(np.int32)
    return jnp.broadcast_to(rows[None], (batch, *rows.shape))


def last_nodes(window, inputs, path, length):
    """Plants a window of the last rows of the tree, not of the accepted path."""
    return jnp.concatenate([window, inputs], axis=1)[:, -window.shape[1] :]


def logits_of_a_tree(model):
    """Returns the logits of a tree below a text, and of a token after a path in it."""
    tokens = jnp.asarray(TOKENS[None], jnp.int32)
    state = init_state(model.config, 1, 32, jnp.float32)
    _, state = extend(model, state, tokens[:, :5], jnp.full((1,), 5, jnp.int32))
    taps, parents = model.config.conv_taps, jnp.asarray([[-1, 0, 0, 1, 2, 1]])
    nodes = tree_nodes(parents.astype(jnp.int32), taps)
    logits, records = forward_tree(model, state, tokens[:, 5:11], nodes)
    path = jnp.asarray([[0, 2, 4]], jnp.int32)
    state = commit(state, records, path, jnp.full((1,), 3, jnp.int32))
    after, _ = forward_tree(model, state, tokens[:, 11:12], chain_nodes(1, 1, taps))
    return np.asarray(logits[0]), np.asarray(after[0])


@pytest.mark.parametrize(
    ("owner", "name", "mistake", "part"),
    [(Nodes, "taps", packed, 0), (kv_cache, "commit_window", last_nodes, 1)],
    ids=["rows before a node", "last rows of the tree"],
)
def test_a_mistake_in_trees_is_seen(source, monkeypatch, owner, name, mistake, part):
    model = stree_jax.load(source)
    right = logits_of_a_tree(model)[part]
    monkeypatch.setattr(owner, name, mistake)
    jax.clear_caches()
    wrong = logits_of_a_tree(model)[part]
    jax.clear_caches()
    assert np.abs(wrong - right).max() > SEEN


# Mistakes in a layer


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
    """Plants values that take half of each head from the token before, instead of the
    second half of all heads."""
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

    def convolved(plain, x):
        kept["y"] = plain(x).transpose(1, 2)
        return kept["y"].transpose(1, 2)

    with_forward(convolved)(grouped)

    def forward(plain, hidden, *args):
        q, k, v = plain(hidden, *args)
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


def with_window(window):
    """Plants another window, which the class reads in every forward pass."""
    return lambda model: setattr(model.config, "sliding_window", window)


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
    "SiLU in the router": in_each(
        "mlp.gate.router_mlp", lambda m: setattr(m, "act_fn", torch.nn.SiLU())
    ),
}
MISTAKES = {
    "zaya": {
        **COMMON,
        "window too short by one": with_window(WINDOW - 1),
        "no window": with_window(1000),
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
