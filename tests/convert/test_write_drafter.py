"""Test that written block drafters are read back, bit by bit."""

from dataclasses import replace

import chex
import jax.numpy as jnp
import pytest

from stree_jax.convert import CheckpointError
from stree_jax.convert.drafters import open_drafter
from stree_jax.convert.drafters.write import config_fields, save_drafter
from stree_jax.models import AttentionConfig, Rope
from stree_jax.models.dflash import DFlashLayer, cast_dflash
from stree_jax.models.weights.formats import format_named
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
    save_drafter(drafter, tmp_path / "d", 1)
    opened = open_drafter(tmp_path / "d", pytest.fail)
    assert opened.block_config == drafter.config
    assert opened.target_layers == 1
    found = opened.read(target.config, format_named("bfloat16"), None)
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
