"""Test that mistakes people make with MiniMax-01 change the logits, and that published
files are read.

Each function plants a mistake in a `minimax.Recomputed` by replacing one of its steps
by a wrong one. Its logits must then differ from the library's.
"""

import json
import re
import shutil

import numpy as np
import pytest

import stree_jax
from stree_jax.convert import CheckpointError
from stree_jax.convert.export import export_hf
from stree_jax.convert.families.hf_config import hf_config
from stree_jax.models.stack.memory import size_of
from stree_jax.models.weights.parameters import as_weight
from tests.support import minimax, quantized
from tests.support.checkpoints import (
    assert_same,
    edit_json,
    small_tokenizer,
    sources,
)
from tests.support.hf_minimax import minimax as minimax_model
from tests.support.hf_random import VOCAB, randomize
from tests.support.mistakes import TOLERANCE, check_recomputed
from tests.support.quantized_int4 import SPELLINGS
from tests.support.qwen import silu

TOKENS = np.random.default_rng(5).integers(0, VOCAB, 23)
NUMBERS = {"linear_attention": 0, "full_attention": 1}


def publish(values):
    """Rewrites a config with the names of the published files."""
    values["model_type"] = "minimax_text_01"
    values["attn_type_list"] = [NUMBERS[kind] for kind in values.pop("layer_types")]
    for old, new in minimax.PREFIXES.values():
        for letter in ("alpha", "beta"):
            values[f"{old}_{letter}"] = values.pop(f"{new}_{letter}_factor")
    values |= {"postnorm": True, "rotary_dim": 4, "shared_intermediate_size": 0}
    values["rope_theta"] = values.pop("rope_parameters")["rope_theta"]
    values["shared_moe_mode"] = "sigmoid"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    make = sources(root)
    shutil.copytree(make("minimax"), root / "published")
    edit_json(root / "published" / "config.json", publish)
    return lambda name: root / name if name == "published" else make(name)


# The residual sum


def residual_before_the_norm(o):
    o.norms_stream = False


def no_alpha(o):
    right = o.factors
    o.factors = lambda kind: [1.0, right(kind)[1]]


def no_beta(o):
    right = o.factors
    o.factors = lambda kind: [right(kind)[0], 1.0]


def alpha_for_beta(o):
    right = o.factors
    o.factors = lambda kind: right(kind)[::-1]


def factors_of_attention_everywhere(o):
    right = o.factors
    o.factors = lambda kind: right("full" if kind == "linear" else kind)


def factors_of_mixers_for_experts(o):
    right = o.factors
    o.factors = lambda kind: right("linear" if kind == "mlp" else kind)


# Lightning attention


def no_silu(o):
    o.activation = lambda qkv: qkv


def silu_of_q_and_k_only(o):
    right = o.cut

    def wrong(qkv):
        q, k, v = right(qkv)
        return silu(q), silu(k), v

    o.activation, o.cut = (lambda qkv: qkv), wrong


def q_k_v_of_all_heads_in_turn(o):
    def wrong(qkv):
        parts = np.split(qkv, 3, axis=-1)
        return [x.reshape(len(qkv), o.heads, -1) for x in parts]

    o.cut = wrong


def heads_within_channels(o):
    def wrong(qkv):
        by_channel = qkv.reshape(len(qkv), -1, o.heads).swapaxes(1, 2)
        return np.split(by_channel, 3, axis=-1)

    o.cut = wrong


def keys_before_queries(o):
    right = o.cut

    def wrong(qkv):
        q, k, v = right(qkv)
        return k, q, v

    o.cut = wrong


def rotated_keys(o):
    right = o.cut

    def wrong(qkv):
        q, k, v = right(qkv)
        return o.turned(q), o.turned(k), v

    o.cut = wrong


def no_decay(o):
    o.slopes = lambda i: np.zeros(o.heads)


def slopes_of_the_first_layer(o):
    o.layer_factor = lambda i: 1.0


def slopes_by_number_of_lightning_layers(o):
    """Counts only the layers with lightning attention."""
    count = o.kinds.count("linear")
    places = [o.kinds[:i].count("linear") for i in range(len(o.kinds))]
    o.layer_factor = lambda i: 1 - places[i] / (count - 1 + 1e-5) + 1e-5


def slopes_in_reverse(o):
    right = o.slopes
    o.slopes = lambda i: right(i)[::-1]


def slopes_from_1(o):
    o.slopes = lambda i: 2.0 ** (-8 * np.arange(o.heads) / o.heads) * o.layer_factor(i)


def state_before_the_token(o):
    right = o.read
    o.read = lambda state, before, q: right(before, state, q)


def transposed_state(o):
    o.read = lambda state, before, q: np.einsum("hvk,hv->hk", state, q)


def norm_of_each_head(o):
    def wrong(y, scale):
        by_head = y.reshape(len(y), o.heads, -1)
        return o.normed(by_head, 1e-6).reshape(y.shape) * scale

    o.output_norm = wrong


def norm_with_the_epsilon_of_the_config(o):
    eps = o.config["rms_norm_eps"]
    o.output_norm = lambda y, scale: o.normed(y, eps) * scale


def no_scale_of_the_norm(o):
    o.output_norm = lambda y, scale: o.normed(y, 1e-6)


def silu_of_the_gate(o):
    o.gated = lambda y, gate: y * silu(gate)


def no_gate(o):
    o.gated = lambda y, gate: y


def gate_before_the_norm(o):
    norm, gated = o.output_norm, o.gated
    scales = []

    def keep(y, scale):
        scales.append(scale)
        return y

    o.output_norm = keep
    o.gated = lambda y, gate: norm(gated(y, gate), scales.pop())


# Attention


def no_rotation(o):
    o.turned = lambda x: x


def usual_base(o):
    o.theta = 1e6


def grouped_heads_in_turn(o):
    def wrong(u, p):
        k, v = f"{p}k_proj.weight", f"{p}v_proj.weight"
        both = {name: o.tensors[name] for name in (k, v)}
        for name, w in both.items():
            heads = w.reshape(o.kv_heads, o.size, -1)
            repeats = o.heads // o.kv_heads
            o.tensors[name] = np.tile(heads, (repeats, 1, 1)).reshape(-1, w.shape[1])
        few, o.kv_heads = o.kv_heads, o.heads
        y = right(u, p)
        o.tensors |= both
        o.kv_heads = few
        return y

    right, o.attention = o.attention, wrong


# Experts


def weights_of_all_experts(o):
    o.normalized = lambda weight: weight


def sigmoid_router(o):
    o.router = lambda logits: 1 / (1 + np.exp(-logits))


def up_before_gate(o):
    o.tensors = {
        name.replace(".w1.", ".x.").replace(".w3.", ".w1.").replace(".x.", ".w3."): w
        for name, w in o.tensors.items()
    }


# Of one case


def no_window(o):
    o.window = None


def window_without_the_token_itself(o):
    o.window += 1


def whole_heads_rotate(o):
    o.rotated = o.size


def last_channels_rotate(o):
    right = o.turned
    o.turned = lambda x: right(x[..., ::-1])[..., ::-1]


def frequencies_of_whole_heads(o):
    o.theta = o.theta ** (o.rotated / o.size)


EVERY = (
    *(residual_before_the_norm, no_alpha, no_beta, alpha_for_beta),
    *(factors_of_attention_everywhere, factors_of_mixers_for_experts),
    *(no_silu, silu_of_q_and_k_only, q_k_v_of_all_heads_in_turn),
    *(heads_within_channels, keys_before_queries, rotated_keys),
    *(no_decay, slopes_of_the_first_layer, slopes_by_number_of_lightning_layers),
    *(slopes_in_reverse, slopes_from_1, state_before_the_token, transposed_state),
    *(norm_of_each_head, norm_with_the_epsilon_of_the_config, no_scale_of_the_norm),
    *(silu_of_the_gate, no_gate, gate_before_the_norm, no_rotation, usual_base),
    *(weights_of_all_experts, sigmoid_router, up_before_gate),
)
MISTAKES = {
    "minimax": (*EVERY, grouped_heads_in_turn),
    "minimax-window": (*EVERY, no_window, window_without_the_token_itself),
    "published": (whole_heads_rotate, last_channels_rotate, frequencies_of_whole_heads),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistakes_are_seen(source, name):
    check_recomputed(minimax.Recomputed, source(name), MISTAKES[name], TOKENS)


# Published files


@pytest.fixture
def edited(source, tmp_path):
    """Returns a function that edits a published config and loads the model."""

    def load(**values):
        target = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(source("published"), target)
        edit_json(target / "config.json", lambda config: config.update(values))
        return stree_jax.load(target)

    return load


def test_published_names_mean_the_same(source, edited):
    right = stree_jax.load(source("minimax"))
    assert_same(edited(rotary_dim=10), right)
    assert_same(edited(rotary_dim=10, model_type="minimax_m1"), right)
    assert_same(edited(rotary_dim=10, model_type="minimax"), right)


def test_a_residual_before_the_norm(source, tmp_path):
    """`postnorm` is false in the authors' code unless a config sets it."""
    shutil.copytree(source("published"), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    edit_json(file, lambda values: values.pop("postnorm"))
    ours = stree_jax.score(stree_jax.load(file.parent), TOKENS[None])[0]
    right = minimax.Recomputed(file.parent).logits(TOKENS)
    np.testing.assert_allclose(ours, right, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shared_intermediate_size": [0, 8, 0, 0]}, "shared MLP"),
        ({"attn_type_list": [0, 2, 1, 0]}, "0 or 1 for every layer"),
        ({"attn_type_list": [0, 1]}, "want a list of 4"),
        ({"num_attention_heads": 3}, "power of 2"),
        ({"rotary_dim": 11}, "rotary_dim: want 1..10"),
        ({"model_type": "minimax", "postnorm": False}, "postnorm"),
    ],
)
def test_unsupported_options_are_refused(edited, values, message):
    with pytest.raises(CheckpointError, match=message):
        edited(**values)


def test_transformers_cannot_rotate_a_part_of_a_head(source):
    """So such models are not exported."""
    config = stree_jax.load(source("published")).config
    with pytest.raises(CheckpointError, match="partial rotary"):
        hf_config(config, "float32")


def export(model, directory):
    export_hf(model.config, model.params, small_tokenizer(), directory)


def test_slopes_are_not_exported(source, tmp_path):
    """Their class computes them. A model with others is refused."""
    model = stree_jax.load(source("minimax"))
    export(model, tmp_path / "hf")
    names = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "slope" not in str(names)
    mixer = model.params["layers_0"]["lightning"]
    mixer["slope"] = 2 * mixer["slope"]
    with pytest.raises(CheckpointError, match="layers_0/lightning/slope: its numbers"):
        export(model, tmp_path / "other")


def test_quantized_rows_are_kept_in_our_order(tmp_path, monkeypatch):
    """q, k and v of one head after the other become q of all heads, k and v."""
    sizes = dict(hidden_size=64, head_dim=16, intermediate_size=64)
    model = randomize(minimax_model(VOCAB, **sizes)).half()
    model.save_pretrained(tmp_path / "plain")
    monkeypatch.setattr(quantized, "LINEAR", re.compile(r".*\.(qkv_proj|output_gate)"))
    quantized.write(tmp_path / "plain", tmp_path / "int4", "gptq", SPELLINGS)
    kept, plain = (
        stree_jax.load(tmp_path / "int4", dtype=dtype).params["layers_0"]["lightning"]
        for dtype in ("kept", "float32")
    )
    rows = as_weight(kept["in_proj"]).rows(np.arange(4 * 64))
    np.testing.assert_array_equal(rows, plain["in_proj"])
    assert size_of(kept["in_proj"]) < plain["in_proj"].nbytes / 4
