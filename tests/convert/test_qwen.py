"""Test Qwen3-Next and Qwen3.5: logits, spellings of files, and planted mistakes."""

import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import stree_jax
from stree_jax import convert, models
from stree_jax.checkpoints.info import info
from stree_jax.cli import main as cli
from stree_jax.convert import CheckpointError, convert_checkpoint
from stree_jax.convert.export import export_hf
from stree_jax.convert.rows import Groups
from stree_jax.models import extend, init_state, logits_of, without_mtp
from tests.support import hf_checkpoints as hf
from tests.support import qwen
from tests.support.checkpoints import assert_same, edit_json, edit_tensors
from tests.support.reference import path_to, random_tree

LIMIT = 1e-4
SEEN = 1e-2  # a mistake changes a logit by more than this: 100 times the tolerance
TOKENS = qwen.tokens_of(1, 40)
LEFT_OUT = r"model.visual.\* \(the vision encoder\) is left out"
MAKERS = {
    "qwen3-next": hf.qwen3_next,  # dense layers among experts, grouped projections
    "qwen3-5": lambda: hf.qwen3_5(tie_word_embeddings=True),
    "qwen3-5-moe": hf.qwen3_5_moe,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Returns a function: name of a maker -> its checkpoint, with MTP layers."""
    root = tmp_path_factory.mktemp("qwen")

    def make(name):
        if not (root / name).exists():
            MAKERS[name]().save_pretrained(root / name)
            qwen.with_mtp(root / name)
        return root / name

    return make


def score(model, tokens=TOKENS):
    return np.asarray(stree_jax.score(model, tokens[None])[0])


def mtp_score(model, tokens=TOKENS):
    """Returns the logits of a model's MTP layers for a text."""
    size = jnp.asarray([len(tokens) - 1], jnp.int32)
    state = init_state(model.config, 1, len(tokens), jnp.float32)
    ids = jnp.asarray(tokens[None], jnp.int32)
    hidden, _ = extend(model, state, ids[:, :-1], size)
    layers = models.mtp_model(model)
    state = init_state(layers.config, 1, len(tokens), jnp.float32)
    hidden, _ = extend(layers, state, ids[:, 1:], size, hidden)
    return np.asarray(logits_of(layers, hidden)[0])


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=LIMIT)


def theirs(directory, tokens=TOKENS):
    """Returns the logits of transformers."""
    other = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        return other.eval()(torch.tensor(tokens[None])).logits[0].numpy()


@pytest.mark.parametrize("name", MAKERS)
def test_float64_recomputation(source, name):
    """transformers, the library and the recomputation agree; so do the last two for the
    MTP layers, which transformers lacks."""
    oracle = qwen.Recomputed(source(name))
    wanted = oracle.logits(oracle.target_states(TOKENS))
    assert wanted.std() > 0.5
    close(theirs(source(name)), wanted)
    model = stree_jax.load(source(name), mtp=True)
    close(score(model), wanted)
    mtp = oracle.mtp_logits(TOKENS)
    assert mtp.std() > 0.5
    close(mtp_score(model), mtp)


@pytest.mark.parametrize("name", MAKERS)
def test_trees_of_64_nodes(source, name):
    """Along every path of a random tree, logits are those of the path alone."""
    oracle, rng = qwen.Recomputed(source(name)), np.random.default_rng(5)
    parents, tokens = random_tree(rng, 64), qwen.tokens_of(6, 64)
    found = stree_jax.score_tree(stree_jax.load(source(name)), TOKENS, tokens, parents)
    for leaf in set(range(64)) - set(parents.tolist()):
        path = path_to(parents, leaf)
        states = oracle.target_states(np.concatenate([TOKENS, tokens[path]]))
        close(found[np.array(path)], oracle.logits(states[-len(path) :]))


# Spellings of files


@pytest.mark.parametrize("where", ["model.", "mtp.", ""])
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3-5-moe"])
def test_fused_experts(source, tmp_path, name, where):
    """Of the model, of the MTP layers, or of both, as in different releases."""
    shutil.copytree(source(name), tmp_path / "fused")
    qwen.fuse_experts(tmp_path / "fused", where)
    plain = stree_jax.load(source(name), mtp=True)
    assert_same(stree_jax.load(tmp_path / "fused", mtp=True), plain)


def in_text_config(values):
    text = dict(values)
    values.clear()
    kind = text["model_type"]
    text.pop("architectures")
    values |= {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": kind.removesuffix("_text"),
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5"},
        "tie_word_embeddings": text.pop("tie_word_embeddings"),
        "eos_token_id": 3,
    }


def nest_tensors(tensors):
    for name in [name for name in tensors if name.startswith("model.")]:
        tensors[f"model.language_{name}"] = tensors.pop(name)
    tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(2, 3, 1, 4, 4)
    tensors["model.visual.blocks.0.attn.qkv.bias"] = torch.zeros(6)


@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-5-moe"])
def test_text_model_within_a_multimodal_one(source, tmp_path, name):
    path = shutil.copytree(source(name), tmp_path / "both")
    edit_json(path / "config.json", in_text_config)
    edit_tensors(path, nest_tensors)
    with pytest.warns(UserWarning, match=LEFT_OUT) as told:
        model = stree_jax.load(path, mtp=True)
    assert len(told) == 1
    plain = stree_jax.load(source(name), mtp=True)
    assert model.config.stop_tokens == (3,)
    changed = replace(model.config, stop_tokens=plain.config.stop_tokens)
    assert_same(model.replace(config=changed), plain)
    facts, text = info(path), info(source(name))
    assert facts.pop("left_out") == ["model.visual.*"]
    for key in ("parameters", "weight_bytes", "mtp_layers", "mtp_weight_bytes"):
        assert facts[key] == text[key]


@pytest.mark.parametrize("field", ["text_config", "tie_word_embeddings"])
def test_odd_fields_of_multimodal_models(source, tmp_path, field):
    """An error of one line that names the field."""
    path = shutil.copytree(source("qwen3-5"), tmp_path / "both")
    edit_json(path / "config.json", in_text_config)
    for odd in (7, "x", [-1], [], True if field == "text_config" else 1.5):
        edit_json(path / "config.json", lambda v, odd=odd: v.update({field: odd}))
        with pytest.raises(CheckpointError, match=field) as caught:
            stree_jax.load(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3-5"])
def test_verify_in_bfloat16(source, tmp_path, name, capsys):
    """Scales of norms keep their bits, and so does the comparison's other side."""
    path = shutil.copytree(source(name), tmp_path / "many-bits")

    def change(tensors):
        for tensor in tensors.values():
            if tensor.ndim == 1:
                tensor *= 0.9173

    edit_tensors(path, change)
    words = ["convert", path, tmp_path / "ours", "--verify", "--dtype", "bfloat16"]
    assert cli.main([str(word) for word in words]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings(f"ignore:.*{LEFT_OUT}:UserWarning")
def test_multimodal_models_of_transformers(tmp_path, experts, tied):
    """What transformers saves has the logits of its language model."""
    other = hf.qwen3_5_multimodal(experts, tied)
    other.set_experts_implementation("eager")
    other.save_pretrained(tmp_path / "both")
    with torch.no_grad():
        wanted = other(torch.tensor(TOKENS[None])).logits[0].numpy()
    model = stree_jax.load(tmp_path / "both")
    assert model.config.tie_embeddings == tied
    close(score(model), wanted)
    close(theirs(tmp_path / "both"), wanted)
    export_hf(model.config, model.params, None, tmp_path / "text")
    close(theirs(tmp_path / "text"), wanted)


def test_float32_decays_in_a_bfloat16_file(source, tmp_path):
    """A_log keeps its bits; the default dtype is that of the matrices. Scales of norms
    are float32, because 1 + w needs more bits than w."""
    path = shutil.copytree(source("qwen3-5"), tmp_path / "mixed")

    def change(tensors):
        for name, tensor in tensors.items():
            if not name.endswith(("A_log", "linear_attn.norm.weight")):
                tensors[name] = tensor.bfloat16()

    edit_tensors(path, change)
    model, tensors = stree_jax.load(path), load_file(path / "model.safetensors")
    delta = model.params["layers_0"]["delta"]
    assert delta["in_proj"].dtype == jnp.bfloat16
    name = "model.layers.0.linear_attn.A_log"
    np.testing.assert_array_equal(delta["A_log"], tensors[name].numpy())
    scale = tensors["model.norm.weight"].float().numpy() + 1
    np.testing.assert_array_equal(model.params["norm"]["scale"], scale)
    assert model.params["norm"]["scale"].dtype == jnp.float32


# MTP layers


def test_mtp_layers_are_left_out_by_default(source):
    both = stree_jax.load(source("qwen3-5-moe"), mtp=True)
    assert both.config.mtp == models.blocks(("attention", "moe"))
    plain = stree_jax.load(source("qwen3-5-moe"))
    assert plain.config.mtp == ()
    assert_same(without_mtp(both), plain)


@pytest.mark.parametrize("name", MAKERS)
def test_round_trips_with_mtp(source, tmp_path, name):
    """Converted, saved and exported: equal tensors and equal names."""
    model = stree_jax.load(source(name), mtp=True)
    convert_checkpoint(source(name), tmp_path / "ours", progress=False)
    stree_jax.save(model, tmp_path / "saved")
    export_hf(model.config, model.params, None, tmp_path / "hf")
    for path in ("ours", "saved", "hf"):
        assert_same(stree_jax.load(tmp_path / path, mtp=True), model)
        assert_same(stree_jax.load(tmp_path / path), without_mtp(model))
    before = load_file(source(name) / "model.safetensors")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    close(theirs(tmp_path / "hf"), score(model))


def drop_mtp(tensors):
    for name in [name for name in tensors if name.startswith("mtp.")]:
        tensors.pop(name)


def test_the_tensors_decide_if_the_config_says_nothing(source, tmp_path):
    """Qwen3-Next has no field for the number of MTP layers."""
    path = shutil.copytree(source("qwen3-next"), tmp_path / "silent")
    edit_json(path / "config.json", lambda v: v.pop("mtp_num_hidden_layers"))
    expected = stree_jax.load(source("qwen3-next"), mtp=True)
    assert_same(stree_jax.load(path, mtp=True), expected)
    edit_tensors(path, drop_mtp)
    assert_same(stree_jax.load(path), without_mtp(expected))
    assert info(path)["mtp_layers"] == []
    with pytest.raises(CheckpointError, match="it has no MTP layers"):
        stree_jax.load(path, mtp=True)


DISAGREE = {
    "no tensors": (lambda v: None, drop_mtp, "layers: 1, but .* has no mtp"),
    "denied": (
        lambda v: v.update(mtp_num_hidden_layers=0),
        lambda t: None,
        "mtp_num_hidden_layers: 0, but .* has mtp",
    ),
    "several": (
        lambda v: v.update(mtp_num_hidden_layers=2),
        lambda t: None,
        "mtp_num_hidden_layers: 2 is not supported",
    ),
    "own embedding": (
        lambda v: v.update(mtp_use_dedicated_embeddings=True),
        lambda t: None,
        "mtp_use_dedicated_embeddings",
    ),
}


@pytest.mark.parametrize("case", DISAGREE)
def test_mtp_that_is_not_supported(source, tmp_path, case):
    """An error with mtp=True; everything else continues without the layers."""
    config, tensors, message = DISAGREE[case]
    path = shutil.copytree(source("qwen3-5"), tmp_path / "odd")
    edit_json(path / "config.json", config)
    edit_tensors(path, tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        stree_jax.load(path, mtp=True)
    assert "\n" not in str(caught.value)
    plain, told = stree_jax.load(source("qwen3-5")), []
    assert_same(stree_jax.load(path), plain)
    assert info(path)["mtp_layers"] == []
    convert_checkpoint(path, tmp_path / "ours", progress=False, warn=told.append)
    assert_same(stree_jax.load(tmp_path / "ours"), plain)
    assert len(told) == 1 and told[0].endswith("its MTP layers are left out")


def test_missing_mtp_tensors_are_named(source, tmp_path):
    path = shutil.copytree(source("qwen3-5"), tmp_path / "short")
    edit_tensors(path, lambda t: t.pop("mtp.pre_fc_norm_hidden.weight"))
    with pytest.raises(CheckpointError, match="pre_fc_norm_hidden.* is missing"):
        stree_jax.load(path, mtp=True)
    stree_jax.load(path)


# Planted mistakes


def swapped(sequence, *order):
    return lambda *args: tuple(sequence(*args)[i] for i in order)


class Mistakes:
    """Functions of a `qwen.Recomputed` that replace one of its steps by a wrong one."""

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
        o.decay = lambda a, p: np.exp(
            o.tensors[f"{p}A_log"] * qwen.softplus(a + o.tensors[f"{p}dt_bias"]) - 3
        )

    def decay_without_bias(o):
        o.decay = lambda a, p: np.exp(
            -np.exp(o.tensors[f"{p}A_log"]) * qwen.softplus(a)
        )

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


M = Mistakes
MISTAKES = {  # by model, with steps that all of them have in the first
    "qwen3-5": {
        "input norms store w": M.plain_scale("input_layernorm"),
        "second norms store w": M.plain_scale("post_attention_layernorm"),
        "the final norm stores w": M.plain_scale("model.norm"),
        "q_norm stores w": M.plain_scale("q_norm"),
        "k_norm stores w": M.plain_scale("k_norm"),
        **{
            plant.__name__: plant
            for plant in (
                M.offset_of_the_output_norm,
                M.halves_of_q_and_gate,
                M.gate_before_q,
                M.silu_of_the_attention_gate,
                M.attention_without_a_gate,
                M.a_before_b,
                M.z_before_v,
                M.k_before_q,
                M.tiled_heads,
                M.query_without_scale,
                M.query_without_norm,
                M.key_without_norm,
                M.mean_square_norm,
                M.doubled_beta,
                M.beta_without_sigmoid,
                M.decay_without_softplus,
                M.growing_decay,
                M.decay_without_exponential,
                M.decay_without_bias,
                M.no_decay,
                M.reading_before_the_decay,
                M.plain_linear_attention,
                M.reversed_taps,
                M.conv_without_silu,
                M.conv_over_v_q_k,
                M.sigmoid_of_the_output_gate,
                M.output_gate_before_the_norm,
                M.norm_over_all_heads,
                M.whole_rotary_embedding,
                M.interleaved_rotary_embedding,
                M.last_channels_rotate,
            )
        },
    },
    "qwen3-next": {
        plant.__name__: plant
        for plant in (
            M.ungrouped_projections,
            M.ungrouped_gates,
            M.shared_expert_without_gate,
            M.no_shared_expert,
            M.weights_that_do_not_add_up_to_one,
            M.up_before_gate,
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
    "embedding's norm stores w": M.plain_scale("pre_fc_norm_embedding"),
    "hidden's norm stores w": M.plain_scale("pre_fc_norm_hidden"),
    "last norm stores w": M.plain_scale("mtp.norm"),
    "norms of the layer store w": M.plain_scale("mtp.layers.0."),
    "no gate": M.attention_without_a_gate,
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
    rows_of = convert.rows_of
    monkeypatch.setattr(
        convert, "rows_of", lambda *args: [ROWS[mistake](r) for r in rows_of(*args)]
    )
    assert np.abs(score(stree_jax.load(source("qwen3-next"))) - right).max() > SEEN
