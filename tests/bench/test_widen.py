"""Test widening a target with zeros: the same function, with a larger size."""

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest

import stree_jax
from bench import attention, inputs
from bench.everything import arguments
from bench.registry import parse_bench
from bench.widen import (
    sizes_of,
    widened,
    widened_dflash,
    widened_drafter,
)
from stree_jax.models import AttentionConfig, MambaConfig, MLPConfig, Rope, init_params
from stree_jax.speculation.tree import Budget
from stree_jax.verify.agreement import agreement
from tests.support.dflash import KINDS, random_dflash
from tests.support.tiny import REAL, perturbed, tiny

BIASES = dict(proj_in_bias=True, proj_out_bias=True)


def model_of(**options):
    """Like `tiny`, with one group per mixer, every bias, and norms with a large
    epsilon."""
    biased = AttentionConfig(4, 2, 8, Rope(1e4, 8), qkv_bias=True, out_bias=True)
    config = tiny(0).config.with_mixers(
        mamba=MambaConfig(4, 8, 16, norm_eps=0.1, **BIASES),
        attention=biased,
        mlp=MLPConfig(48, bias=True),
    )
    config = config.with_mixers(**options.pop("mixers", {}))
    config = replace(config, **{"norm_eps": 0.2, **options})
    params = init_params(config, jax.random.key(0), np.float32)
    return stree_jax.Model(params=perturbed(params, 0.2, 0), config=config)


NOT_GATED = {"mlp": MLPConfig(48, gated=False, bias=True)}


@pytest.mark.parametrize(
    "options",
    [{}, dict(tie_embeddings=False, mixers=NOT_GATED)],
    ids=["gated", "not gated"],
)
def test_a_widened_model_is_the_same_function(options):
    model = model_of(**options)
    wide = widened(model, 4)
    assert wide.config.d_model == 128
    assert wide.params["embedding"].shape == (50, 128)
    chex.assert_trees_all_equal_dtypes(wide.params, model.params)
    rng = np.random.default_rng(0)
    tokens = rng.integers(REAL, size=(2, 30)).astype(np.int32)
    want = stree_jax.score(model, tokens)
    assert float(want.std()) > 0.1
    chex.assert_trees_all_close(stree_jax.score(wide, tokens), want, atol=1e-5)


def test_a_widened_target_gets_the_same_blocks():
    model = model_of(embedding_multiplier=3.0)
    drafter = random_dflash(model, **KINDS["dspark"])
    wide = widened(model, 4), widened_dflash(drafter, model, 4)
    found = [
        agreement(*pair, list(range(3, 40)), Budget(8, 3))
        for pair in ((model, drafter), wide)
    ]
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
    np.testing.assert_array_equal(found[0].parents, found[1].parents)
    assert len(np.unique(found[0].tokens[:, 1:])) > 10
    assert widened_drafter("lookup", model, 4) == "lookup"
    with pytest.raises(ValueError, match="--widen: not for"):
        widened_drafter(object(), model, 4)


def test_a_widened_target_accepts_the_same_drafts():
    model = model_of()
    drafter = model.replace(params=perturbed(model.params, 0.05, 3))
    prompts = [np.random.default_rng(i).integers(REAL, size=5) for i in range(2)]
    prompts = [row.tolist() for row in prompts]
    options = dict(max_new_tokens=12, drafter=drafter, tree="A")
    small, wide = (
        stree_jax.generate(target, prompts, **options)
        for target in (model, widened(model, 4))
    )
    assert small.tokens == wide.tokens and small.min_margin.min() > 1e-4
    assert small.target_calls.tolist() == wide.target_calls.tolist()
    assert small.acceptance_length.max() > 1.5


def test_the_option_widens_targets(monkeypatch):
    model = model_of()
    monkeypatch.setattr(inputs, "load_pair", lambda *args: (model, model))
    monkeypatch.setattr(attention, "load", lambda path, dtype: model)
    words = ["--prompts", "p.jsonl", "--widen", "4"]
    args = parse_bench(["cost", *words])
    target, drafter = inputs.load_models(args)
    assert target.config.d_model == 128 and drafter is model
    named = attention.named_pairs(["a=t:d"], "float32", args.widen)
    assert named["a"][0].config.d_model == 128 and named["a"][1] is model
    args = parse_bench(["all", "--out", "R", *words])
    assert arguments(args, "unrolled").widen == 4
    small, wide = sizes_of(model, widened(model, 4))
    assert 10 < wide / small < 16


def test_models_that_cannot_be_widened_are_refused():
    for factor in (0, 2, 3, 8, -4):
        with pytest.raises(ValueError, match=f"power of four, got {factor}"):
            widened(model_of(), factor)
    groups = MambaConfig(4, 8, 16, n_groups=2)
    inside = AttentionConfig(4, 2, 8, d_mlp=16)
    models = [tiny(1), tiny(1, ("mamba+attention",)), model_of(norm="layer")]
    for model in (*models, model_of(mixers={"attention": inside})):
        with pytest.raises(ValueError, match="--widen: want a target of Mamba2"):
            widened(model, 4)
    with pytest.raises(ValueError, match="one group"):
        config = model_of().config.with_mixers(mamba=groups)
        widened(stree_jax.Model(params=model_of().params, config=config), 4)
