"""Test that mistakes people make with Qwen3-Next and Qwen3.5 change the logits.

Each function plants a mistake in a `qwen.Recomputed` by replacing one of its steps by a
wrong one. Its logits must then differ from the library's.
"""

from dataclasses import replace

import numpy as np
import pytest

import stree_jax
from stree_jax.convert import checkpoint
from stree_jax.convert.families.tensor_map import Groups
from tests.support import qwen
from tests.support.qwen import TOKENS, mtp_score, score

SEEN = 1e-2  # a mistake changes a logit by more than this: 100 times the tolerance


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return qwen.checkpoints(tmp_path_factory.mktemp("qwen"))


def swapped(sequence, *order):
    return lambda *args: tuple(sequence(*args)[i] for i in order)


def plain_scale(part):
    def plant(o):
        right = o.scale
        o.scale = lambda name: o[name] if part in name else right(name)

    return plant


def offset_of_the_output_norm(o):
    o.output_scale = lambda prefix: 1 + o[f"{prefix}norm"]


def halves_of_q_and_gate(o):
    def halves(both):
        shape = (len(both), o.heads[0], o.head_dim)
        return tuple(x.reshape(shape) for x in np.split(both, 2, axis=-1))

    o.query_and_gate = halves


def gate_before_q(o):
    o.query_and_gate = swapped(o.query_and_gate, 1, 0)


def silu_of_the_attention_gate(o):
    o.attention_gate = qwen.silu


def attention_without_a_gate(o):
    o.attention_gate = np.ones_like


def a_before_b(o):
    right = o.projected
    o.projected = lambda u, p: tuple(right(u, p)[i] for i in (0, 1, 2, 3, 5, 4))


def z_before_v(o):
    right = o.projected
    o.projected = lambda u, p: tuple(right(u, p)[i] for i in (0, 1, 3, 2, 4, 5))


def k_before_q(o):
    right = o.projected
    o.projected = lambda u, p: tuple(right(u, p)[i] for i in (1, 0, 2, 3, 4, 5))


def ungrouped_projections(o):
    right = o.projected

    def wrong(u, prefix):
        if f"{prefix}in_proj_qkvz.weight" not in o.tensors:
            return right(u, prefix)
        n, (dk, dv) = len(u), o.sizes
        cuts = np.cumsum([o.keys * dk, o.keys * dk, o.values * dv])
        q, k, v, z = np.split(u @ o[f"{prefix}in_proj_qkvz"].T, cuts, axis=-1)
        q, k = (x.reshape(n, o.keys, dk) for x in (q, k))
        v, z = (x.reshape(n, o.values, dv) for x in (v, z))
        return q, k, v, z, *right(u, prefix)[4:]

    o.projected = wrong


def ungrouped_gates(o):
    def wrong(both, ratio):
        return np.split(both.reshape(len(both), -1), 2, axis=-1)

    o.gates = wrong


def tiled_heads(o):
    o.for_value_heads = lambda x: np.tile(x, (1, o.values // o.keys, 1))


def query_without_scale(o):
    o.query = o.unit


def query_without_norm(o):
    o.query = lambda q: q * o.sizes[0] ** -0.5


def key_without_norm(o):
    o.key = lambda k: k


def mean_square_norm(o):
    o.unit = lambda x: o.normed(x, 1e-6)


def doubled_beta(o):
    o.beta = lambda b: 2 * qwen.sigmoid(b)


def beta_without_sigmoid(o):
    o.beta = lambda b: b


def decay_without_softplus(o):
    o.decay = lambda a, p: np.exp(
        -np.exp(o.tensors[f"{p}A_log"]) * np.abs(a + o.tensors[f"{p}dt_bias"])
    )


def growing_decay(o):
    right = o.decay
    o.decay = lambda a, p: np.minimum(1 / right(a, p), 1.2)


def decay_without_exponential(o):
    def wrong(a, prefix):
        step = qwen.softplus(a + o.tensors[f"{prefix}dt_bias"])
        return np.exp(-np.abs(o.tensors[f"{prefix}A_log"]) * step)

    o.decay = wrong


def decay_without_bias(o):
    o.decay = lambda a, p: np.exp(-np.exp(o.tensors[f"{p}A_log"]) * qwen.softplus(a))


def no_decay(o):
    o.decay = lambda a, p: np.ones_like(a)


def reading_before_the_decay(o):
    right, held = o.read, {}

    def read(state, k):
        before = held.get("state", np.zeros_like(state))
        held["state"] = state
        return right(before, k)

    o.read = read


def plain_linear_attention(o):
    o.read = lambda state, k: 0.0


def reversed_taps(o):
    right = o.conv
    o.conv = lambda x, weight: right(x, weight[:, ::-1])


def conv_without_silu(o):
    o.conv_activation = lambda x: x


def conv_over_v_q_k(o):
    right, size = o.conv, o.keys * o.sizes[0]
    o.conv = lambda x, weight: right(x, np.roll(weight, size, axis=0))


def sigmoid_of_the_output_gate(o):
    o.output_gate = qwen.sigmoid


def output_gate_before_the_norm(o):
    o.output_norm = lambda y, z, scale: o.normed(y * qwen.silu(z), o.eps) * scale


def norm_over_all_heads(o):
    def wrong(y, z, scale):
        flat = o.normed(y.reshape(len(y), -1), o.eps).reshape(y.shape)
        return flat * scale * qwen.silu(z)

    o.output_norm = wrong


def whole_rotary_embedding(o):
    o.share = 1.0


def interleaved_rotary_embedding(o):
    right, dim = o.turned, int(o.head_dim * o.share)
    order = np.arange(o.head_dim)
    order[:dim] = np.concatenate([order[:dim:2], order[1:dim:2]])
    o.turned = lambda x: right(x[..., order])[..., np.argsort(order)]


def last_channels_rotate(o):
    right = o.turned
    o.turned = lambda x: right(x[..., ::-1])[..., ::-1]


def shared_expert_without_gate(o):
    o.shared = lambda u, prefix: o.mlp(u, f"{prefix}.shared_expert")


def no_shared_expert(o):
    o.shared = lambda u, prefix: 0.0


def weights_that_do_not_add_up_to_one(o):
    o.weights = lambda p: p


def up_before_gate(o):
    right = o.expert
    o.expert = lambda prefix, e: tuple(right(prefix, e)[i] for i in (1, 0, 2))


MISTAKES = {  # by model, with steps that all of them have in the first
    "qwen3-5": {
        "input norms store w": plain_scale("input_layernorm"),
        "second norms store w": plain_scale("post_attention_layernorm"),
        "the final norm stores w": plain_scale("model.norm"),
        "q_norm stores w": plain_scale("q_norm"),
        "k_norm stores w": plain_scale("k_norm"),
        **{
            plant.__name__: plant
            for plant in (
                offset_of_the_output_norm,
                halves_of_q_and_gate,
                gate_before_q,
                silu_of_the_attention_gate,
                attention_without_a_gate,
                a_before_b,
                z_before_v,
                k_before_q,
                tiled_heads,
                query_without_scale,
                query_without_norm,
                key_without_norm,
                mean_square_norm,
                doubled_beta,
                beta_without_sigmoid,
                decay_without_softplus,
                growing_decay,
                decay_without_exponential,
                decay_without_bias,
                no_decay,
                reading_before_the_decay,
                plain_linear_attention,
                reversed_taps,
                conv_without_silu,
                conv_over_v_q_k,
                sigmoid_of_the_output_gate,
                output_gate_before_the_norm,
                norm_over_all_heads,
                whole_rotary_embedding,
                interleaved_rotary_embedding,
                last_channels_rotate,
            )
        },
    },
    "qwen3-next": {
        plant.__name__: plant
        for plant in (
            ungrouped_projections,
            ungrouped_gates,
            shared_expert_without_gate,
            no_shared_expert,
            weights_that_do_not_add_up_to_one,
            up_before_gate,
        )
    },
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistakes_are_seen(source, name):
    """Each changes a logit by 100 times the tolerance or more."""
    model, missed = stree_jax.load(source(name)), []
    ours = score(model)
    for mistake, plant in MISTAKES[name].items():
        oracle = qwen.Recomputed(source(name))
        plant(oracle)
        found = oracle.logits(oracle.target_states(TOKENS))
        if not np.abs(found - ours).max() > SEEN:
            missed.append(mistake)
    assert not missed


def hidden_and_embedding_swapped(o):
    right = o.mtp_inputs
    o.mtp_inputs = lambda e, h: np.roll(right(e, h), e.shape[1], axis=-1)


def norms_of_mtp_inputs_swapped(o):
    right = o.mtp_inputs
    o.mtp_inputs = lambda e, h: np.roll(right(h, e), e.shape[1], axis=-1)


def hidden_before_the_final_norm(o):
    o.target_states = o.streams


def first_token_is_read(o):
    """The MTP layers read each token with the state of that token, not of the one
    before it."""
    right = o.target_states
    o.target_states = lambda tokens: np.roll(right(tokens), -1, axis=0)


MTP_MISTAKES = {
    "fc's inputs": hidden_and_embedding_swapped,
    "norms of fc's inputs": norms_of_mtp_inputs_swapped,
    "hidden before the final norm": hidden_before_the_final_norm,
    "state of the token itself": first_token_is_read,
    "embedding's norm stores w": plain_scale("pre_fc_norm_embedding"),
    "hidden's norm stores w": plain_scale("pre_fc_norm_hidden"),
    "last norm stores w": plain_scale("mtp.norm"),
    "norms of the layer store w": plain_scale("mtp.layers.0."),
    "no gate": attention_without_a_gate,
}


def test_planted_mistakes_in_mtp_are_seen(source):
    ours, missed = mtp_score(stree_jax.load(source("qwen3-5"), mtp=True)), []
    for mistake, plant in MTP_MISTAKES.items():
        oracle = qwen.Recomputed(source("qwen3-5"))
        plant(oracle)
        if not np.abs(oracle.mtp_logits(TOKENS) - ours).max() > SEEN:
            missed.append(mistake)
    assert not missed


def ungrouped(row):
    return replace(row, groups=())


def as_stored(row):
    return replace(row, how="copy") if row.how == "offset" else row


def halves(row):
    """Takes the query and the gate of all heads as halves of q_proj."""
    sizes = [group.rows for group in row.groups]
    if row.how != "concat" or len(sizes) != 2:
        return row
    first = Groups(1, (sizes[0] // 2,) * 2, (1, 0))
    return replace(row, groups=(first, row.groups[1]))


ROWS = {"no groups": ungrouped, "norms as stored": as_stored, "halves of q": halves}


@pytest.mark.parametrize("mistake", ROWS)
def test_planted_mistakes_in_rows_are_seen(source, monkeypatch, mistake):
    """The same for how the loader arranges rows of the files."""
    right = score(stree_jax.load(source("qwen3-next")))
    rows_of = checkpoint.rows_of
    monkeypatch.setattr(
        checkpoint, "rows_of", lambda *args: [ROWS[mistake](r) for r in rows_of(*args)]
    )
    assert np.abs(score(stree_jax.load(source("qwen3-next"))) - right).max() > SEEN
