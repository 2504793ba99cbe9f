"""Test that the numbers of parameters that publishers state follow from the configs of
their drafters, which are as published except for fields of training."""

import math

import pytest

from stree_jax.convert.drafters.dflash import dflash_config
from stree_jax.models.drafters.dflash import dflash_table

LIQUID = {
    "architectures": ["Lfm2DSparkDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 6144,
    "rms_norm_eps": 1e-5,
    "layer_types": ["full_attention"] * 5,
    "block_size": 9,
    "rope_is_neox_style": False,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
}
SMALL = LIQUID | {
    "vocab_size": 65536,
    "rope_theta": 1e6,
    "dflash_config": {"mask_token_id": 64402, "target_layer_ids": [2, 5, 8, 11, 14]},
}
LARGE = LIQUID | {
    "vocab_size": 128000,
    "rope_theta": 1e7,
    "dflash_config": {"mask_token_id": 125017, "target_layer_ids": [2, 9, 17, 21, 27]},
}
DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 5120,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 17408,
    "vocab_size": 248320,
    "rope_theta": 1e7,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "block_size": 16,
    "mask_token_id": 248070,
    "target_layer_ids": [1, 16, 31, 46, 61],
}
DFLASH2 = DFLASH | {
    "architectures": ["DFlash2DraftModel"],
    "layer_types": ["sliding_attention"] * 5,
    "block_size": 8,
    "target_layer_ids": [5, 19, 33, 47, 61],
    "dflash_config": {"conv_group_size": 16, "conv_kernel_size": 2},
}
PUBLISHED = {  # config, millions of parameters, drafts, last boundary
    "LiquidAI/LFM2.5-1.2B-Instruct-DSpark": (SMALL, 295.7, 9, 15),
    "LiquidAI/LFM2.5-2.6B-DSpark": (LARGE, 327.7, 9, 28),
    "z-lab/Qwen3.6-27B-DFlash": (DFLASH, 1730, 15, 62),
    "z-lab/Qwen3.8-27B-DFlash2": (DFLASH2, 1924, 7, 62),
}


def shapes(config):
    """Returns the shapes of a drafter's tensors."""
    c = config
    d, wide, rank = c["hidden_size"], c["intermediate_size"], 256
    heads = [c[f"num_{k}_heads"] * c["head_dim"] for k in ("attention", "key_value")]
    taps = (c | c.get("dflash_config", {}))["target_layer_ids"]
    found = {"fc.weight": (d, len(taps) * d)}
    found |= dict.fromkeys(("hidden_norm.weight", "norm.weight"), (d,))
    for i in range(c["num_hidden_layers"]):
        own = f"layers.{i}.self_attn."
        rows = dict(zip("qkv", (heads[0], heads[1], heads[1]), strict=True))
        found |= {f"{own}{k}_proj.weight": (n, d) for k, n in rows.items()}
        found |= {f"{own}{k}_norm.weight": (c["head_dim"],) for k in "qk"}
        found[f"{own}o_proj.weight"] = (d, heads[0])
        for k in ("gate", "up"):
            found[f"layers.{i}.mlp.{k}_proj.weight"] = (wide, d)
        found[f"layers.{i}.mlp.down_proj.weight"] = (d, wide)
        for k in ("input", "post_attention"):
            found[f"layers.{i}.{k}_layernorm.weight"] = (d,)
        for k in ("attention", "mlp") if c["block_size"] == 8 else ():
            conv = f"layers.{i}.{k}_conv."
            found[f"{conv}base_kernel"] = (2, 2, d)
            found[f"{conv}kernel_projection.weight"] = (4 * d // 16, d)
    tables = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    if "markov_rank" in c:
        found |= dict.fromkeys(tables, (c["vocab_size"], rank))
        found["confidence_head.proj.weight"] = (1, d + rank)
        found["confidence_head.proj.bias"] = (1,)
    elif c["block_size"] == 8:
        names = ("predecessor_codebook", "successor_codebook")
        for name in names:
            found[f"candidate_selector.{name}.weight"] = (c["vocab_size"], rank)
        found["candidate_selector.hidden_projection.weight"] = (rank, d)
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_drafters(name):
    config, millions, drafts, last = PUBLISHED[name]
    found = dflash_config(config, shapes(config), warn=pytest.fail)
    count = sum(math.prod(param.shape) for param in dflash_table(found).values())
    assert count / 1e6 == pytest.approx(millions, rel=1e-3)
    assert (found.drafts, found.boundaries[-1]) == (drafts, last)
    assert not any(layer.causal for layer in found.layers)
