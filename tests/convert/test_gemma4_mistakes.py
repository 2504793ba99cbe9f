"""Test that mistakes people make with Gemma 4 change the logits: shared keys and
values, per-layer inputs, factors, norms, head sizes, caps, experts."""

import torch

from tests.support.hf_gemma4 import FAR, GEMMA4_CASES, NEAR, WINDOW
from tests.support.mistakes import (
    EXPERTS_UP_FIRST,
    changed,
    checks,
    exchanged,
    in_config,
    ones,
    plainly_turned,
    turned_as,
    windows,
    with_config,
    zeros,
)


def with_modules(ending, change):
    """Plants a change of the modules whose name has this ending."""

    def plant(model):
        found = [m for name, m in model.named_modules() if name.endswith(ending)]
        assert found, ending
        for module in found:
            change(module)

    return plant


def without_norm(module):
    module.forward = lambda x: x


def scaled_norm(module):
    """Plants scales of channels in the norm of the values."""
    plain = module.forward
    module.forward = lambda x: torch.linspace(0.7, 1.3, x.shape[-1]) * plain(x)


def silu(module):
    module.act_fn.forward = torch.nn.functional.silu


def keys_of_the_first(model):
    """Plants sharing with the first layer of each type, not the last before."""
    layers = model.model.layers
    kinds = [layer.self_attn.layer_type for layer in layers]
    for kind in (NEAR, FAR):
        stores = [i for i, k in enumerate(kinds) if k == kind]
        for layer in (layers[i] for i in stores):
            layer.self_attn.store_full_length_kv = False
        layers[stores[0]].self_attn.store_full_length_kv = True


def inputs_of_the_next_layer(model):
    """Plants the per-layer inputs of other layers."""
    inner = model.model
    plain = inner.project_per_layer_inputs
    inner.project_per_layer_inputs = lambda *args: plain(*args).roll(-1, 2)


def inputs_without_the_projection(model):
    model.model.per_layer_projection_norm.forward = torch.zeros_like


def inputs_added(model):
    """Plants a sum of both parts without its factor."""
    model.model.per_layer_input_scale = 1.0


def no_factor_of_the_table(model):
    for module in model.modules():
        if getattr(module, "embed_scale", None) is not None:
            if module.embedding_dim != model.config.hidden_size:
                module.embed_scale.fill_(1)


def no_factor_of_the_embedding(model):
    model.model.embed_tokens.embed_scale.fill_(1)


def factor_before_the_sum(model):
    """Plants the layer's factor on the last addend only."""
    for layer in model.model.layers:
        factor = layer.layer_scalar.clone()
        layer.layer_scalar.fill_(1)
        norm = layer.post_per_layer_input_norm
        norm.weight.mul_(factor)


def values_with_rotary(model):
    """Plants values that are the keys after their norm."""
    for layer in model.model.layers:
        attention = layer.self_attn
        if attention.use_alternative_attention:
            attention.v_norm = attention.k_norm


def router(change):
    """Plants a change of the experts' weights."""

    def plant(model):
        for layer in model.model.layers:
            plain = layer.router.forward
            layer.router.forward = lambda x, plain=plain: change(*plain(x))

    return plant


def router_reads_the_experts_input(model):
    for layer in model.model.layers:
        norm, plain = layer.pre_feedforward_layernorm_2, layer.router.forward
        layer.router.forward = lambda x, f=plain, n=norm: f(n(x))


def experts_read_the_mlps_input(model):
    for layer in model.model.layers:
        layer.pre_feedforward_layernorm_2 = layer.pre_feedforward_layernorm


COMMON = {
    **windows(WINDOW),
    "near layers turned as far ones": turned_as(NEAR, FAR),
    "far layers turned as near ones": turned_as(FAR, NEAR),
    "all pairs rotate": plainly_turned(f"{FAR}_inv_freq"),
    "frequencies of fewer channels": plainly_turned(f"{FAR}_inv_freq", 2),
    "scale of the head's size": with_config(scaling=12**-0.5),
    "no cap of logits": in_config(final_logit_softcapping=None),
    "cap twice as high": in_config(final_logit_softcapping=6.0),
    "no factor of the layers": changed("layer_scalar", ones),
    "no factor of the embedding": no_factor_of_the_embedding,
    "norms with 1 added": changed("input_layernorm.weight", lambda w: w + 1),
    "no norm of v": with_modules("v_norm", without_norm),
    "norm of v with a scale": with_modules("v_norm", scaled_norm),
    "no norm of k": with_modules("k_norm", without_norm),
    "no norm of q": with_modules("q_norm", without_norm),
    "norms of attention exchanged": exchanged(
        "input_layernorm.weight", "post_attention_layernorm.weight"
    ),
    "no scale after the MLP": changed("post_feedforward_layernorm.weight", ones),
    "SiLU": with_modules(".mlp", silu),
    "up before gate": exchanged("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}
MISTAKES = {
    "gemma4": {
        **COMMON,
        "keys of the first layer": keys_of_the_first,
        "inputs of the next layer": inputs_of_the_next_layer,
        "inputs without the projection": inputs_without_the_projection,
        "inputs added without a factor": inputs_added,
        "no factor of the inputs' table": no_factor_of_the_table,
        "no norm of the projection": with_modules(
            "per_layer_projection_norm", without_norm
        ),
        "no norm after the inputs": with_modules(
            "post_per_layer_input_norm", without_norm
        ),
        "SiLU of the inputs' gate": lambda model: [
            silu(layer) for layer in model.model.layers
        ],
        "factor of the last addend": factor_before_the_sum,
    },
    "gemma4-moe": {
        **COMMON,
        "values that are normed keys": values_with_rotary,
        "no scale of the router": changed("router.scale", ones),
        "router without its norm": with_modules("router.norm", without_norm),
        "no factors of the experts": changed("per_expert_scale", ones),
        "factors of other experts": changed("per_expert_scale", lambda w: w.roll(1)),
        "weights that do not add up to 1": router(lambda p, w, i: (p, w / 2, i)),
        "router reads the experts' input": router_reads_the_experts_input,
        "experts read the MLP's input": experts_read_the_mlps_input,
        "norms after exchanged": exchanged(
            "post_feedforward_layernorm_1.weight",
            "post_feedforward_layernorm_2.weight",
        ),
        "no experts": changed("post_feedforward_layernorm_2.weight", zeros),
        "no MLP": changed("post_feedforward_layernorm_1.weight", zeros),
        "experts' up before gate": EXPERTS_UP_FIRST,
    },
    "gemma4-unified": {"values that are normed keys": values_with_rotary},
}
made, test_the_models_agree_without_a_mistake, test_a_mistake_is_seen = checks(
    GEMMA4_CASES, MISTAKES
)
