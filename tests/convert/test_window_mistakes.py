"""Test that mistakes people make with Gemma 3, LFM3 and gpt-oss change the logits:
windows, norms on both sides, rotary embeddings by type of layer, gates, sinks."""

import torch

from tests.support.hf_windows import FAR, NEAR, WINDOW, gemma3, gpt_oss, lfm3
from tests.support.mistakes import (
    changed,
    checks,
    exchanged,
    in_config,
    of,
    ones,
    plainly_turned,
    turned_as,
    windows,
    with_config,
    zeros,
)

MODELS = {"gemma3": gemma3, "lfm3": lfm3, "gpt-oss": gpt_oss}


def without_scale_of_embedding(model):
    of(model, "embed_scale")[0].fill_(1)


def with_activation(function):
    def plant(model):
        for layer in model.model.layers:
            layer.mlp.act_fn.forward = function

    return plant


WINDOWS = {
    **windows(WINDOW),
    "near layers turned as far ones": turned_as(NEAR, FAR),
    "far layers turned as near ones": turned_as(FAR, NEAR),
    "k norm of q": exchanged("q_norm.weight", "k_norm.weight"),
    "heads of v in another order": changed("v_proj.weight", lambda w: w.roll(12, 0)),
}
MISTAKES = {
    "gemma3": {
        **WINDOWS,
        "norms before without 1": changed("input_layernorm.weight", lambda w: w - 1),
        "norms after without 1": changed(
            "post_attention_layernorm.weight", lambda w: w - 1
        ),
        "q norm without 1": changed("q_norm.weight", lambda w: w - 1),
        "final norm twice with 1": changed("model.norm.weight", lambda w: w + 1),
        "norms of attention exchanged": exchanged(
            "input_layernorm.weight", "post_attention_layernorm.weight"
        ),
        "norm after attention before the MLP": exchanged(
            "post_attention_layernorm.weight", "pre_feedforward_layernorm.weight"
        ),
        "no scale after the MLP": changed("post_feedforward_layernorm.weight", zeros),
        "no scale of the embedding": without_scale_of_embedding,
        "scale of the head's size": with_config(scaling=10**-0.5),
        "no factor of far positions": changed(f"{FAR}_inv_freq", lambda f: 4 * f),
        "factor of near positions": changed(f"{NEAR}_inv_freq", lambda f: f / 4),
        "windows on other layers": in_config(layer_types=[FAR, NEAR, FAR]),
        "SiLU": with_activation(torch.nn.functional.silu),
        "up before gate": exchanged("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    },
    "lfm3": {
        **WINDOWS,
        "no gate of heads": changed("g_proj.weight", zeros),
        "gates of other heads": changed("g_proj.weight", lambda w: w.roll(1, 0)),
        "all pairs rotate": plainly_turned(f"{FAR}_inv_freq"),
        "half of the channels rotate": plainly_turned(f"{FAR}_inv_freq", 2),
        "norms exchanged": exchanged("operator_norm.weight", "ffn_norm.weight"),
        "norms after exchanged": exchanged(
            "post_operator_norm.weight", "post_ffn_norm.weight"
        ),
        "no scale after mixers": changed("post_operator_norm.weight", ones),
        "no scale after MLPs": changed("post_ffn_norm.weight", ones),
        "windows on other layers": in_config(layer_types=[NEAR, "conv", FAR]),
        "reversed taps": changed("conv.conv.weight", lambda w: w.flip(-1)),
        "no bias of the convolution": changed("conv.conv.bias", zeros),
        "up before gate": exchanged("w1.weight", "w3.weight"),
    },
}
MISTAKES["gpt-oss"] = {
    **windows(WINDOW),
    "windows on other layers": in_config(layer_types=[FAR, NEAR]),
    "no sinks": changed("sinks", lambda s: s - 1000),
    "sinks of other heads": changed("sinks", lambda s: s.roll(1)),
    "gate and up in halves": changed(
        "experts.gate_up_proj", lambda w: torch.cat([w[..., ::2], w[..., 1::2]], -1)
    ),
    "up before gate": changed(
        "experts.gate_up_proj", lambda w: w.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    ),
    "no clamps": with_config(limit=1e9),
    "SiLU in place of the gain": with_config(alpha=1.0),
    "no bias of gate and up": changed("experts.gate_up_proj_bias", zeros),
    "no bias of the experts' output": changed("experts.down_proj_bias", zeros),
    "no bias of the router": changed("router.bias", zeros),
    "no bias of q": changed("q_proj.bias", zeros),
    "no bias of attention's output": changed("o_proj.bias", zeros),
    "no factor of the cosines": with_config(attention_scaling=1.0),
}
made, test_the_models_agree_without_a_mistake, test_a_mistake_is_seen = checks(
    MODELS, MISTAKES
)
