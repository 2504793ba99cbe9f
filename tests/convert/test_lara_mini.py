"""Test Lara 4 Mini: both spellings of its files, and that mistakes people make with it
change the logits."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open

import stree_jax
from stree_jax.convert.export import export_hf
from stree_jax.models.weights.kept import Panels
from tests.support import quantized
from tests.support.checkpoints import assert_same, edit_json, edit_tensors
from tests.support.hf_windows import DELTA, FAR, NEAR, WINDOW, lara_mini
from tests.support.long_texts import TOKENS as TOKENS_OF_TEXT
from tests.support.long_texts import WAYS, text
from tests.support.mistakes import (
    EXPERTS_UP_FIRST,
    TOKENS,
    TOLERANCE,
    changed,
    checks,
    exchanged,
    in_config,
    ones,
    windows,
    with_config,
    zeros,
)
from tests.support.reference import assert_near

# Rows of q, k, v and z, of b and of a.
SIZES = (2 * 16 + 48, 48, 4, 4)
PARTS = ("qkv", "z", "b", "a")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("lara") / "source"
    lara_mini().save_pretrained(path)
    return path


def names(directory):
    with safe_open(directory / "model.safetensors", "np") as opened:
        return set(opened.keys())


# Files


def separate(tensors):
    """Rewrites tensors with the names of transformers' modules."""
    for name in [name for name in tensors if ".linear_attn." in name]:
        if name.endswith(".in_proj.weight"):
            parts = tensors.pop(name).split(SIZES)
            for part, w in zip(PARTS, parts, strict=True):
                new = name.replace("in_proj", f"in_proj_{part}")
                tensors[new] = w.clone()
        elif ".out_norm." in name:
            tensors[name.replace("out_norm", "norm")] = tensors.pop(name)


def test_both_spellings_are_read(source, tmp_path):
    """Published files have one projection; this is the spelling of exports."""
    assert "model.layers.0.linear_attn.in_proj.weight" in names(source)
    assert "model.layers.0.linear_attn.out_norm.weight" in names(source)
    shutil.copytree(source, tmp_path / "separate")
    edit_tensors(tmp_path / "separate", separate)
    assert "model.layers.0.linear_attn.in_proj_b.weight" in names(tmp_path / "separate")
    model, again = (stree_jax.load(d) for d in (source, tmp_path / "separate"))
    assert_same(again, model)
    export_hf(again.config, again.params, None, tmp_path / "hf")
    assert names(tmp_path / "hf") == names(source)
    assert_same(stree_jax.load(tmp_path / "hf"), model)


def test_layers_without_layer_types(tmp_path):
    """They repeat the pattern of the release."""
    lara_mini(num_hidden_layers=7, layer_types=None).save_pretrained(tmp_path)
    kinds = stree_jax.load(tmp_path).config.kinds[::2]
    edit_json(tmp_path / "config.json", lambda values: values.pop("layer_types"))
    assert stree_jax.load(tmp_path).config.kinds[::2] == kinds
    five = ("delta", "attention_near", "delta", "attention", "attention_near")
    assert kinds == (*five, *five[:2])


def test_only_layers_with_a_window_rotate(source):
    mixers = stree_jax.load(source).config.mixers
    assert mixers["attention"].rope is None and mixers["attention"].window == 0
    near = mixers["attention_near"]
    assert (near.rope.theta, near.rope.dim, near.window) == (700.0, 10, WINDOW)


def test_the_exported_config(source, tmp_path):
    model = stree_jax.load(source)
    export_hf(model.config, model.params, None, tmp_path / "hf")
    ours, theirs = (
        json.loads((path / "config.json").read_text())
        for path in (tmp_path / "hf", source)
    )
    left_out = {"torch_dtype", "bos_token_id", "pad_token_id", "eos_token_id"}
    assert {k: ours[k] for k in ours.keys() - left_out} == {
        k: theirs[k] for k in ours.keys() - left_out
    }
    assert ours["layer_types"] == [DELTA, NEAR, FAR, DELTA]


def test_a_quantized_projection_is_kept(tmp_path):
    """Its rows of b and a become floats, and the others stay in four bits."""
    sizes = {"hidden_size": 64, "head_dim": 16, "linear_value_head_dim": 16}
    wide = lara_mini(**sizes, shared_expert_intermediate_size=64)
    wide.bfloat16().save_pretrained(tmp_path / "bf16")
    quantized.write(tmp_path / "bf16", tmp_path / "nvfp4", "compressed nvfp4")
    exact = stree_jax.load(tmp_path / "nvfp4", "float32")
    with pytest.warns(UserWarning, match="2 matrices of nvfp4 cannot be kept"):
        kept = stree_jax.load(tmp_path / "nvfp4", "kept")
    delta = kept.params["layers_0"]["delta"]
    assert isinstance(delta["in_proj"], Panels)
    assert delta["in_proj"].shape == exact.params["layers_0"]["delta"]["in_proj"].shape
    np.testing.assert_array_equal(
        delta["gates"], exact.params["layers_0"]["delta"]["gates"]
    )
    theirs, ours = (np.asarray(stree_jax.score(m, TOKENS[None])) for m in (exact, kept))
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()


# States


@pytest.fixture(scope="module")
def theirs():
    """Returns the last hidden state of a long text, and the states after it."""
    with torch.no_grad():
        out = lara_mini().model(torch.tensor(text()).long()[None], use_cache=True)
    found = [out.cache.get_recurrent_state(i)[0].mT.numpy() for i in (0, 3)]
    return out.last_hidden_state[0, -1].numpy(), found


@pytest.mark.parametrize("way", ["trees", "trees and steps", "steps", "prefill"])
def test_states_after_a_long_text(source, theirs, way):
    model, (hidden, states) = stree_jax.load(source), theirs
    last, state = WAYS[way](model, text(), capacity=TOKENS_OF_TEXT + 256)
    assert int(state.length[0]) == TOKENS_OF_TEXT
    for layer, wanted in zip((0, 6), states, strict=True):
        assert_near(state.layers[layer]["delta"].ssm[0], wanted, TOLERANCE)
    if last is not None:
        assert_near(last, hidden, TOLERANCE)


# Mistakes


def positions(kind, given):
    """Plants a rotary embedding for a type of layers, or takes it from them."""

    def plant(model):
        kinds = zip(model.model.layers, model.config.layer_types, strict=True)
        for layer in (layer for layer, found in kinds if found == kind):
            forward = layer.forward

            def other(x, *args, position_ids, forward=forward, **options):
                both = model.model.rotary_emb(x, position_ids) if given else None
                options |= {"position_embeddings": both, "position_ids": position_ids}
                return forward(x, *args, **options)

            layer.forward = other

    return plant


def by_key_heads(w):
    """Orders rows of q, k and v as in Qwen3-Next: all of one key head together."""
    q, k, v = w.split((16, 16, 48))
    return torch.cat([q[:8], k[:8], v[:24], q[8:], k[8:], v[24:]])


def tiled(w):
    """Orders value heads as if head h read key head h modulo the number of these."""
    q, k, v = w.split((16, 16, 48))
    heads = v.unflatten(0, (4, 12))
    return torch.cat([q, k, heads[[0, 2, 1, 3]].flatten(0, 1)])


def keys_first(w):
    """Exchanges q and k."""
    return torch.cat([w[16:32], w[:16], w[32:]])


MISTAKES = {
    **windows(WINDOW),
    "windows on other layers": in_config(layer_types=[DELTA, FAR, NEAR, DELTA]),
    "layers without a window rotate": positions(FAR, True),
    "layers with a window do not rotate": positions(NEAR, False),
    "a quarter of the channels rotates": changed(
        "rotary_emb.inv_freq", lambda f: torch.where(torch.arange(len(f)) < 2, f, 0)
    ),
    "norms with 1 added": changed("input_layernorm.weight", lambda w: w + 1),
    "norms exchanged": exchanged(
        "input_layernorm.weight", "post_attention_layernorm.weight"
    ),
    "q norm with 1 added": changed("q_norm.weight", lambda w: w + 1),
    "k norm of q": exchanged("q_norm.weight", "k_norm.weight"),
    "no scale of the output's norm": changed("linear_attn.norm.weight", ones),
    "a before b": exchanged("in_proj_a.weight", "in_proj_b.weight"),
    "k before q": changed("in_proj_qkv.weight", keys_first),
    "projections by key heads": changed("in_proj_qkv.weight", by_key_heads),
    "value heads in another order": changed("in_proj_qkv.weight", tiled),
    "reversed taps": changed("conv1d.weight", lambda w: w.flip(-1)),
    "no dt_bias": changed("dt_bias", zeros),
    "faster decay": changed("A_log", lambda w: w + 3),
    "shared expert with a gate": changed(
        "shared_expert.down_proj.weight", lambda w: w / 2
    ),
    "no shared expert": changed("shared_expert.down_proj.weight", zeros),
    "weights that are not normalized": with_config(norm_topk_prob=False),
    "up before gate": EXPERTS_UP_FIRST,
    "experts in another order": changed("experts.down_proj", lambda w: w.flip(0)),
    "no bias of q": changed("q_proj.bias", zeros),
    "no bias of attention's output": changed("o_proj.bias", zeros),
}
made, test_the_models_agree_without_a_mistake, test_a_mistake_is_seen = checks(
    {"lara": lara_mini}, {"lara": MISTAKES}
)
