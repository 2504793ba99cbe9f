"""Test that mistakes people make with Kimi-Linear and Ling-3 change the logits.

Each function plants a mistake in a `kimi.Recomputed` by replacing one of its steps by a
wrong one. Its logits must then differ from the library's.
"""

import shutil

import numpy as np
import pytest
import torch

import stree_jax
from stree_jax.convert import CheckpointError
from tests.support import kimi
from tests.support.checkpoints import assert_same, edit_tensors, sources
from tests.support.hf_checkpoints import VOCAB
from tests.support.mistakes import check_recomputed
from tests.support.qwen import sigmoid, silu, softplus

TOKENS = np.random.default_rng(5).integers(0, VOCAB, 23)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return sources(tmp_path_factory.mktemp("sources"))


# Kimi Delta Attention


def decay_of_whole_heads(o):
    right = o.log_decay
    o.log_decay = lambda f, rate: right(f.mean(-1, keepdims=True), rate)


def decay_without_bias(o):
    o.dt_bias = lambda p: 0.0


def decay_without_exponential_of_a(o):
    o.rate = lambda p: np.abs(o.tensors[f"{p}A_log"].reshape(-1, 1))


def decay_without_softplus(o):
    o.log_decay = lambda f, rate: -rate * np.abs(f)


def no_decay(o):
    o.log_decay = lambda f, rate: np.zeros_like(f)


def decay_of_values(o):
    """The decay scales the rows of the state instead of its columns."""

    def wrong(q, k, v, decay, beta):
        state, y = np.zeros((o.kda_heads, o.size, o.size)), []
        for t in range(len(q)):
            state = state * decay[t][..., None]
            added = beta[t][:, None] * (v[t] - o.read(state, state, k[t]))
            state = state + added[..., None] * k[t][:, None]
            y.append(np.einsum("hvk,hk->hv", state, q[t]))
        return np.stack(y)

    o.recurrence = wrong


def reading_before_the_decay(o):
    right = o.read
    o.read = lambda kept, before, k: right(before, kept, k)


def plain_linear_attention(o):
    o.read = lambda kept, before, k: 0.0


def doubled_beta(o):
    o.beta = lambda b: 2 * sigmoid(b)


def query_without_scale(o):
    o.query = o.unit


def query_without_norm(o):
    o.query = lambda q: q * o.size**-0.5


def key_without_norm(o):
    o.key = lambda k: k


def reversed_taps(o):
    right = o.taps
    o.taps = lambda p, letter: right(p, letter)[:, ::-1]


def taps_of_k_for_q(o):
    right = o.taps
    o.taps = lambda p, letter: right(p, {"q": "k", "k": "q"}.get(letter, letter))


def conv_without_silu(o):
    o.conv_activation = lambda x: x


def silu_of_the_output_gate(o):
    o.output_gate = silu


def output_gate_before_the_norm(o):
    o.output_norm = lambda y, z, scale: o.normed(y * sigmoid(z), o.eps) * scale


def norm_over_all_heads(o):
    def wrong(y, z, scale):
        flat = o.normed(y.reshape(len(y), -1), o.eps).reshape(y.shape)
        return flat * scale * sigmoid(z)

    o.output_norm = wrong


def offset_of_the_output_norm(o):
    o.output_scale = lambda p: 1 + o[f"{p}o_norm"]


# Latent attention


def latent_without_norm(o):
    o.latent_norm = lambda c, scale: c * scale


def shared_key_before_the_latent(o):
    o.latent = lambda kv: (kv[:, o.rope :], kv[:, : o.rope])


def rotated_part_of_the_query_first(o):
    o.cut = lambda q: (q[..., o.rope :], q[..., : o.rope])


def keys_of_all_heads_before_values(o):
    def wrong(kv):
        k, v = np.split(kv, [o.heads * o.nope], axis=1)
        return (x.reshape(len(kv), o.heads, -1) for x in (k, v))

    o.expanded = wrong


def values_before_keys(o):
    def wrong(kv):
        kv = kv.reshape(len(kv), o.heads, -1)
        return kv[..., o.value :], kv[..., : o.value]

    o.expanded = wrong


def scale_of_unrotated_channels(o):
    o.softmax_scale = lambda: o.nope**-0.5


def shared_key_left_out(o):
    o.turned = np.zeros_like


# Experts


def bias_in_the_weights(o):
    right = o.weighed
    bias = "gate.e_score_correction_bias"
    o.weighed = lambda score, p: right(score, p) + o.tensors[f"{p}.{bias}"]


def softmax_router(o):
    o.router = lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def no_groups(o):
    o.config |= {"num_expert_group": 1, "topk_group": 1}


def groups_by_their_best_expert(o):
    o.group_score = lambda groups: groups.max(-1)


def experts_without_scale(o):
    o.config["routed_scaling_factor"] = 1.0


def other_renormalization(o):
    o.config["moe_renormalize"] = not o.config["moe_renormalize"]


def no_shared_experts(o):
    o.shared = lambda u, p: 0.0


def up_before_gate(o):
    swapped = {}
    for name, tensor in o.tensors.items():
        other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        parts = [other.get(part, part) for part in name.split(".")]
        swapped[".".join(parts) if ".experts." in name else name] = tensor
    o.tensors = swapped


# Of one family


def rotated_keys(o):
    o.turned = o.rotated


def gate_through_the_decays_projection(o):
    o.gate = lambda u, p: u @ o[f"{p}f_a_proj"].T @ o[f"{p}g_b_proj"].T


def unbounded_decay(o):
    o.log_decay = lambda f, rate: -rate * softplus(f)


def usual_bound(o):
    o.config["kda_lower_bound"] = -5.0


def bound_without_a(o):
    right = o.log_decay
    o.log_decay = lambda f, rate: right(f, 1.0)


def bounded_softplus(o):
    o.log_decay = lambda f, rate: np.maximum(-rate * softplus(f), -3.0)


def keys_that_are_not_rotated(o):
    o.turned = lambda x: x


def rotated_halves(o):
    right, half = o.rotated, o.rope // 2
    order = np.arange(o.rope).reshape(2, half).T.reshape(-1)
    o.turned = lambda x: right(x[..., order])[..., np.argsort(order)]


def usual_base(o):
    o.theta = 1e4


def heads_without_gates(o):
    o.head_gate = np.ones_like


def silu_of_the_gate_of_heads(o):
    o.head_gate = silu


EVERY = (
    *(decay_of_whole_heads, decay_without_bias, no_decay, decay_of_values),
    *(reading_before_the_decay, plain_linear_attention, doubled_beta),
    *(query_without_scale, query_without_norm, key_without_norm),
    *(reversed_taps, taps_of_k_for_q, conv_without_silu, silu_of_the_output_gate),
    *(output_gate_before_the_norm, norm_over_all_heads, offset_of_the_output_norm),
    *(latent_without_norm, shared_key_before_the_latent),
    *(rotated_part_of_the_query_first, keys_of_all_heads_before_values),
    *(values_before_keys, scale_of_unrotated_channels, shared_key_left_out),
    *(bias_in_the_weights, softmax_router, no_groups, experts_without_scale),
    *(other_renormalization, no_shared_experts, up_before_gate),
)
MISTAKES = {
    "kimi-linear": (
        *EVERY,
        *(decay_without_exponential_of_a, decay_without_softplus),
        *(rotated_keys, gate_through_the_decays_projection),
    ),
    "bailing-hybrid": (
        *EVERY,
        *(unbounded_decay, usual_bound, bound_without_a, bounded_softplus),
        *(keys_that_are_not_rotated, rotated_halves, usual_base),
        *(heads_without_gates, silu_of_the_gate_of_heads, groups_by_their_best_expert),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistakes_are_seen(source, name):
    check_recomputed(kimi.Recomputed, source(name), MISTAKES[name], TOKENS)


def test_the_mtp_layer_of_ling_is_not_read(source, tmp_path):
    """Its tensors are numbered after the last layer. A layer after that is refused."""
    shutil.copytree(source("bailing-hybrid"), tmp_path / "model")
    right = stree_jax.load(source("bailing-hybrid"))

    def add(number):
        def change(tensors):
            tensors[f"model.layers.{number}.eh_proj.weight"] = torch.zeros(2, 2)

        return change

    edit_tensors(tmp_path / "model", add(4))
    assert_same(stree_jax.load(tmp_path / "model"), right)
    edit_tensors(tmp_path / "model", add(5))
    with pytest.raises(CheckpointError, match="unexpected tensor model.layers.5.eh"):
        stree_jax.load(tmp_path / "model")
