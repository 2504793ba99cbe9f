"""Test that written drafters are read back, bit by bit."""

from dataclasses import replace

import chex
import jax.numpy as jnp
import pytest

from stree_jax.checkpoints.drafters import load_drafter, save_drafter
from stree_jax.checkpoints.kinds.block import BLOCK
from stree_jax.checkpoints.kinds.files import DrafterFiles
from stree_jax.convert import CheckpointError
from stree_jax.convert.drafters.eagle import read_eagle
from stree_jax.convert.drafters.write_dflash import config_fields
from stree_jax.convert.drafters.write_eagle import eagle_fields
from stree_jax.models import AttentionConfig, Rope
from stree_jax.models.drafters.dflash import DFlashLayer, cast_dflash
from stree_jax.models.weights.formats import format_named
from tests.support import eagle
from tests.support.dflash import KINDS, dflash_config, random_dflash
from tests.support.tiny import tiny

PLAIN = dict(
    layers=(DFlashLayer(6), DFlashLayer()),
    attention=AttentionConfig(4, 2, 8, rope=Rope(1e4, 8), qk_norm_eps=1e-6),
)


@pytest.fixture(scope="module")
def target():
    return tiny(1, layers=("attention", "mlp"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 20])
def test_what_is_written_is_read(target, tmp_path, kind, rows):
    options = KINDS[kind] | dict(head_rows=rows)
    if kind == "dflash-causal":
        options["layers"] = (DFlashLayer(6, True), DFlashLayer(6, True))
    drafter = random_dflash(target, dtype=jnp.bfloat16, **PLAIN | options)
    config = replace(drafter.config, target="maker/model")
    params = cast_dflash(config, drafter.params, "bfloat16")
    drafter = drafter.replace(params=params, config=config)
    save_drafter(drafter, tmp_path / "d", target_layers=1)
    opened = BLOCK.open(DrafterFiles(str(tmp_path / "d")), pytest.fail)
    assert opened.own_config == drafter.config
    assert opened.target_layers == 1
    found = opened.read(target, format_named("bfloat16"))
    chex.assert_trees_all_equal(found.params, drafter.params)
    if rows:
        chex.assert_trees_all_equal(found.ids, drafter.ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layers=(DFlashLayer(0, True), DFlashLayer())), "the same causal"),
        (dict(layers=(DFlashLayer(4), DFlashLayer(6))), "the same window"),
        (dict(norm_eps=1e-5), "one epsilon"),
        (dict(attention=AttentionConfig(4, 2, 8)), "rotary"),
    ],
)
def test_what_the_layout_cannot_express_is_refused(target, options, message):
    with pytest.raises(CheckpointError, match=message):
        config_fields(dflash_config(target, **PLAIN | options))


HEADS = [f"layers.0.self_attn.{x}_norm" for x in "qk"]
EAGLE = {  # arguments of `eagle.tensors`, and fields of the config
    "plain": ({}, {}),
    "windows": (
        dict(layers=2),
        dict(layer_types=["full_attention", "sliding_attention"], sliding_window=4),
    ),
    "normed": (
        dict(extra=["fc_norm", "fc.bias"], layers=2),
        dict(fc_norm=True, norm_output=True, norm_before_residual=True),
    ),
    "narrow": (dict(width=24, extra=["embed_tokens"]), dict(hidden_size=24)),
    "hidden states": (dict(taps=0), dict(use_aux_hidden_state=False)),
    "the target's head": (
        dict(extra=["input_norm", *HEADS]),
        dict(norm_before_fc=True, draft_vocab_size=None, target_model="maker/model"),
    ),
}


def random_eagle(target, arguments, fields):
    """Returns a drafter with half as many key as query heads."""
    tensors = eagle.tensors(target, **arguments)
    if "draft_vocab_size" in fields:
        for name in ("lm_head.weight", "d2t", "t2d"):
            tensors.pop(name, None)
    for name, x in tensors.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[name] = x[: len(x) // 2]
    config = eagle.config(num_key_value_heads=eagle.KV_HEADS // 2, **fields)
    return read_eagle(config, tensors, target.config, dtype="bfloat16")


@pytest.mark.parametrize("case", EAGLE)
def test_an_eagle_drafter_that_is_written_is_read(tmp_path, case):
    target = eagle.target()
    drafter = random_eagle(target, *EAGLE[case])
    save_drafter(drafter, tmp_path / "d")
    found = load_drafter(tmp_path / "d", target=target)
    assert found.config == drafter.config
    chex.assert_trees_all_equal(found.params, drafter.params)
    first = "midlayer." if len(drafter.config.layers) == 2 else "layers.0."
    names = DrafterFiles(str(tmp_path / "d")).source.tensors
    assert f"{first}self_attn.q_proj.weight" in names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(fused=True), "EAGLE-2 is not written"),
        (dict(mask_token=3), "P-EAGLE is not written"),
        (dict(hands_down_normed=True), "a norm of each stream"),
    ],
)
def test_an_eagle_drafter_that_the_layout_cannot_express_is_refused(changes, message):
    drafter = random_eagle(eagle.target(), {}, {})
    with pytest.raises(CheckpointError, match=message):
        eagle_fields(replace(drafter.config, **changes))


@pytest.mark.parametrize("layers", ["x", -4, 1.5, 0])
def test_a_wrong_number_of_layers_is_refused(target, tmp_path, layers):
    with pytest.raises(CheckpointError, match="^target_layers: want a number from 1"):
        save_drafter(target, tmp_path / "d", target_layers=layers)
    assert not (tmp_path / "d").exists()
