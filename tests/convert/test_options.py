"""Test that every option of the hybrid families changes the logits.

The tests of equality with transformers detect an option that is read wrongly only if
it changes their checkpoints' results, which is tested here for each option.
"""

from dataclasses import replace

import numpy as np
import pytest

import stree_jax
from stree_jax.models import Rope
from tests.support.checkpoints import HF_CASES, VOCAB

SEEN = 1e-3  # ten times what the equality tests allow


def whole(**options):
    return lambda model: model.replace(config=replace(model.config, **options))


def part(name, **options):
    def change(model):
        config = model.config
        if name == "shared":
            return whole(shared=replace(config.shared, **options))(model)
        changed = replace(config.mixers[name], **options)
        return model.replace(config=config.with_mixers(**{name: changed}))

    return change


def multiplier(i):
    def change(model):
        scales = list(model.config.mixers.get("mamba").part_multipliers)
        scales[i] = 1.0
        return part("mamba", part_multipliers=tuple(scales))(model)

    return change


def without_router_bias(model):
    layers = dict(model.params)
    for name, layer in model.params.items():
        if isinstance(layer, dict) and "moe" in layer:
            moe = layer["moe"] | {"router_bias": 0 * layer["moe"]["router_bias"]}
            layers[name] = layer | {"moe": moe}
    return model.replace(params=layers)


MAMBA = {
    "norm groups": part("mamba", norm_groups=1),
    "norm eps": part("mamba", norm_eps=1e-2),
}
LIMITED = {**MAMBA, "dt limit": part("mamba", dt_limit=(0.0, float("inf")))}
CHANGES = {
    "falcon-h1": {
        **LIMITED,
        "norm order": part("mamba", norm="gate_first"),
        "embedding": whole(embedding_multiplier=1.0),
        "lm_head": whole(logits_divisor=1.0),
        "ssm_in": part("mamba", in_multiplier=1.0),
        "ssm_out": part("mamba", out_multiplier=1.0),
        **{f"ssm {n}": multiplier(i) for i, n in enumerate(("z", "x", "B", "C", "dt"))},
        "attention_in": part("attention", in_multiplier=1.0),
        "attention_out": part("attention", out_multiplier=1.0),
        "key": part("attention", key_multiplier=1.0),
        "mlp gate": part("mlp", gate_multiplier=1.0),
        "mlp down": part("mlp", down_multiplier=1.0),
    },
    "bamba": {
        **LIMITED,
        "whole head rotates": part("attention", rope=Rope(1e4, 8)),
        "theta": part("attention", rope=Rope(500.0, 4)),
        "no rotary": part("attention", rope=None),
    },
    "nemotron-h": {
        **MAMBA,
        "activation": part("mlp", activation="gelu"),
        "rotary": part("attention", rope=Rope(1e4, 6)),
    },
    "nemotron-h-moe": {
        "groups": part("moe", groups=1, top_groups=1),
        "top groups": part("moe", top_groups=3),
        "normalize": part("moe", normalize=False),
        "scale": part("moe", scale=1.0),
        "top k": part("moe", top_k=2),
        "router": part("moe", router="softmax"),
        "activation": part("moe", activation="silu"),
        "correction bias": without_router_bias,
    },
    "zamba2": {
        **MAMBA,
        "no rotary": part("attention", rope=None),
        "attention scale": part("attention", scale=None),
        "one block for all": part("shared", blocks=1),
        "adapters": part("shared", attention_adapter=False),
        "activation": part("mlp", activation="silu"),
        "norm eps of the blocks": whole(norm_eps=1e-2),
    },
    "qwen3": {"norms of q and k": part("attention", qk_norm_eps=0.1)},
    "granite-moe": {
        **LIMITED,
        "top k": part("moe", top_k=3),
        "embedding": whole(embedding_multiplier=1.0),
        "residual": whole(residual_multiplier=1.0),
        "logits": whole(logits_divisor=1.0),
        "attention scale": part("attention", scale=None),
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_counts(name, tmp_path):
    HF_CASES[name]().save_pretrained(tmp_path / "source")
    model = stree_jax.load(tmp_path / "source")
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, 40))
    right = np.asarray(stree_jax.score(model, tokens))
    for option, change in CHANGES[name].items():
        moved = np.abs(np.asarray(stree_jax.score(change(model), tokens)) - right).max()
        assert moved > SEEN, option
