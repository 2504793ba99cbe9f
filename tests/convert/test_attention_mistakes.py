"""Test that mistakes people make with Qwen3's experts, SmolLM3, Olmo 3, Ministral 3 and
Granite with windows change the logits: layers without a rotary embedding, norms of
whole widths, YaRN on some layers, queries that grow, sinks, routers."""

import math
from functools import partial

import torch

from tests.support.hf_attention import (
    SMOLLM3_WINDOWS,
    granite_swa,
    granitemoe_swa,
    ministral3,
    olmo3,
    qwen3_moe,
    smollm3,
)
from tests.support.hf_windows import FAR, NEAR, WINDOW
from tests.support.mistakes import (
    EXPERTS_UP_FIRST,
    changed,
    checks,
    exchanged,
    halves,
    in_config,
    ones,
    plainly_turned,
    turned_as,
    windows,
    with_config,
    zeros,
)

MODELS = {
    "qwen3-moe": qwen3_moe,
    "smollm3": partial(smollm3, **SMOLLM3_WINDOWS),
    "olmo3": olmo3,
    "ministral3": ministral3,
    "granite-swa": granite_swa,
    "granite-swa-moe": granitemoe_swa,
}


def in_rope(**fields):
    def plant(model):
        model.config.rope_parameters |= fields

    return plant


def attention_of(model):
    return [layer.self_attn for layer in model.model.layers]


def other_layers_rotate(model):
    for attention in attention_of(model):
        attention.use_rope = 1 - attention.use_rope


def every_fourth_from_the_first(model):
    for i, attention in enumerate(attention_of(model)):
        attention.use_rope = int(i % 4 != 0)


def norms_by_head(model):
    """Plants norms of q and k over each head, with the scales that the heads have."""

    def by_head(norm, x):
        heads = x.unflatten(-1, (-1, 6))
        scale = torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-3)
        return (heads * scale).flatten(-2) * norm.weight

    for attention in attention_of(model):
        for norm in (attention.q_norm, attention.k_norm):
            norm.forward = partial(by_head, norm)


def norms_before(model):
    """Plants norms before attention in place of those after it."""
    for layer in model.model.layers:
        norm, attend = layer.post_attention_layernorm, layer.self_attn.forward
        layer.self_attn.forward = partial(normed, norm.forward, attend)
        norm.forward = lambda x: x


def normed(norm, attend, hidden_states, **options):
    return attend(hidden_states=norm(hidden_states), **options)


GRANITE = {
    **windows(WINDOW),
    "windows on other layers": in_config(layer_types=[NEAR, FAR, FAR, NEAR]),
    "no sinks": changed("sinks", lambda s: s - 1000),
    "sinks of other heads": changed("sinks", lambda s: s.roll(1)),
    "sinks of the opposite sign": changed("sinks", lambda s: -s),
    "one base for all layers": in_config(layer_rope_theta=[0, 700.0, 700.0, 700.0]),
    "bases of other layers": in_config(layer_rope_theta=[0, 50.0, 700.0, 50.0]),
    "all layers rotate": in_config(layer_rope_theta=[700.0, 700.0, 50.0, 50.0]),
    "no layer rotates": in_config(layer_rope_theta=[0, 0, 0, 0]),
    "no residual multiplier": with_config(residual_multiplier=1.0),
    "no embedding multiplier": with_config(embedding_multiplier=1.0),
    "scale of the head's size": with_config(scaling=6**-0.5),
}
MISTAKES = {
    "qwen3-moe": {
        "weights of all experts": with_config(norm_topk_prob=False),
        "one expert": with_config(top_k=1),
        "up before gate": EXPERTS_UP_FIRST,
        "experts in another order": changed("experts.down_proj", lambda w: w.flip(0)),
        "router of other experts": changed("gate.weight", lambda w: w.roll(1, 0)),
        "up before gate in the MLP": exchanged(
            "mlp.gate_proj.weight", "mlp.up_proj.weight"
        ),
        "no scale of the q norm": changed("q_norm.weight", ones),
        "k norm of q": exchanged("q_norm.weight", "k_norm.weight"),
        "norms exchanged": exchanged(
            "input_layernorm.weight", "post_attention_layernorm.weight"
        ),
    },
    "smollm3": {
        **windows(WINDOW),
        "all layers rotate": with_config(use_rope=1),
        "no layer rotates": with_config(use_rope=0),
        "other layers rotate": other_layers_rotate,
        "all but every fourth from the first": every_fourth_from_the_first,
        "windows on other layers": in_config(layer_types=[FAR, NEAR, FAR, NEAR]),
        "windows where nothing rotates": in_config(layer_types=[NEAR, FAR, FAR, NEAR]),
    },
    "olmo3": {
        **windows(WINDOW),
        "windows on other layers": in_config(layer_types=[FAR, NEAR, FAR]),
        "near layers turned as far ones": turned_as(NEAR, FAR),
        "far layers turned as near ones": turned_as(FAR, NEAR),
        "no YaRN": plainly_turned(f"{FAR}_inv_freq"),
        "no factor of the cosines": with_config(full_attention_attention_scaling=1.0),
        "norms of q and k by head": norms_by_head,
        "k norm of one head": changed("k_norm.weight", lambda w: w[:6].repeat(2)),
        "no scale of the q norm": changed("q_norm.weight", ones),
        "norms before attention": norms_before,
        "norms after exchanged": exchanged(
            "post_attention_layernorm.weight", "post_feedforward_layernorm.weight"
        ),
        "no scale after the MLP": changed("post_feedforward_layernorm.weight", zeros),
    },
    "ministral3": {
        "queries that do not grow": in_rope(llama_4_scaling_beta=0.0),
        "growth twice as fast": in_rope(llama_4_scaling_beta=1.2),
        "growth one token late": in_rope(original_max_position_embeddings=17),
        "growth after the whole context": in_rope(original_max_position_embeddings=64),
        "no factor of the cosines": with_config(attention_scaling=1.0),
        "factor without mscale_all_dim": with_config(
            attention_scaling=0.1 * math.log(4) + 1
        ),
        "no YaRN": plainly_turned("rotary_emb.inv_freq"),
        "up before gate": exchanged("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    },
    "granite-swa": GRANITE,
    "granite-swa-moe": {
        **GRANITE,
        "up before gate": EXPERTS_UP_FIRST,
        "experts in another order": changed("experts.down_proj", lambda w: w.flip(0)),
        "one expert": with_config(top_k=1),
        "no shared MLP": changed("shared_mlp.output_linear.weight", zeros),
        "up before gate in the shared MLP": changed(
            "shared_mlp.input_linear.weight", halves
        ),
    },
}
made, test_the_models_agree_without_a_mistake, test_a_mistake_is_seen = checks(
    MODELS, MISTAKES
)
