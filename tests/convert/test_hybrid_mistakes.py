"""Test that mistakes people make with LFM2 and Olmo-Hybrid change the logits.

Each function plants a mistake in a copy of transformers' model, whose right version the
checkpoint holds. Its logits must then differ from the library's.
"""

import torch

from tests.support.hf_checkpoints import lfm2, lfm2_moe, olmo_hybrid
from tests.support.mistakes import (
    EXPERTS_UP_FIRST,
    changed,
    checks,
    exchanged,
    ones,
    with_config,
    zeros,
)

MODELS = {
    "lfm2": lambda: lfm2(conv_bias=True),
    "lfm2-moe": lfm2_moe,
    "lfm2-moe-unbiased": lambda: lfm2_moe(use_expert_bias=False),
    "olmo": lambda: olmo_hybrid(attention_bias=False),
}


def thirds(*order):
    return lambda w: torch.cat([w.chunk(3)[i] for i in order])


def biased_choice(model):
    """Plants a bias for the choice of experts, of another sign for each neighbour."""
    for layer in model.model.layers:
        block = layer.feed_forward
        if hasattr(block, "gate"):
            block.use_expert_bias = block.gate.use_expert_bias = True
            block.expert_bias = (-1.0) ** torch.arange(block.gate.num_experts)


CONV = {
    "output gate before input gate": changed("in_proj.weight", thirds(1, 0, 2)),
    "input before gates": changed("in_proj.weight", thirds(2, 0, 1)),
    "reversed taps": changed("conv.conv.weight", lambda w: w.flip(-1)),
    "no q norm": changed("q_layernorm.weight", ones),
    "k norm of q": exchanged("q_layernorm.weight", "k_layernorm.weight"),
    "norms exchanged": exchanged("operator_norm.weight", "ffn_norm.weight"),
    "no final norm's scale": changed("embedding_norm.weight", ones),
}
MISTAKES = {
    "lfm2": {
        **CONV,
        "no bias of the projection": changed("in_proj.bias", zeros),
        "no bias of the convolution": changed("conv.conv.bias", zeros),
        "no bias of the output": changed("conv.out_proj.bias", zeros),
        "up before gate": exchanged("w1.weight", "w3.weight"),
    },
    "lfm2-moe": {
        **CONV,
        "no bias for the choice": changed("expert_bias", zeros),
        "bias of the opposite sign": changed("expert_bias", lambda b: -b),
        "up before gate": EXPERTS_UP_FIRST,
        "experts in another order": changed("experts.down_proj", lambda w: w.flip(0)),
        "router in another order": changed("gate.weight", lambda w: w.flip(0)),
        "no scale before the experts": changed("ffn_norm.weight", ones),
        "no scale of the experts": with_config(routed_scaling_factor=1.0),
        "weights that are not normalized": with_config(norm_topk_prob=False),
    },
    "lfm2-moe-unbiased": {
        "bias for the choice": biased_choice,
        "no scale of the experts": with_config(routed_scaling_factor=1.0),
        "weights that are not normalized": with_config(norm_topk_prob=False),
    },
    "olmo": {
        "beta up to 1": with_config(allow_neg_eigval=False),
        "a before b": exchanged("a_proj.weight", "b_proj.weight"),
        "k before q": exchanged(
            "linear_attn.q_proj.weight", "linear_attn.k_proj.weight"
        ),
        "reversed taps": changed("conv1d.weight", lambda w: w.flip(-1)),
        "channels of the convolution moved": changed(
            "conv1d.weight", lambda w: w.roll(5, 0)
        ),
        "no scale of the output's norm": changed("o_norm.weight", ones),
        "no scale of the q norm": changed("self_attn.q_norm.weight", ones),
        "k norm of one head": changed(
            "self_attn.k_norm.weight", lambda w: w[:6].repeat(2)
        ),
        "norms after exchanged": changed("post_feedforward_layernorm.weight", ones),
        "growth in place of decay": changed("A_log", lambda w: w - 3),
        "no dt_bias": changed("dt_bias", zeros),
        "norm before attention's output": changed(
            "layers.1.post_attention_layernorm.weight", ones
        ),
        "gate of v": exchanged(
            "linear_attn.v_proj.weight", "linear_attn.g_proj.weight"
        ),
        "up before gate": exchanged("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "heads of another order": changed(
            "linear_attn.v_proj.weight", lambda w: w.roll(12, 0)
        ),
    },
}
made, test_the_models_agree_without_a_mistake, test_a_mistake_is_seen = checks(
    MODELS, MISTAKES
)
