"""Configs of Hugging Face's hybrid families, from Granite to Zamba2."""

import reprlib
from dataclasses import replace
from typing import Any

from stree_jax.convert.common import (
    MAMBA_KINDS,
    Layers,
    Tensors,
    attention_config,
    divide,
    has,
    layer_kinds,
    mamba_config,
    rope,
    vocabulary,
    with_mlps,
)
from stree_jax.convert.fields import MAX_LAYERS, Fields
from stree_jax.models.config import (
    AttentionConfig,
    LayerKind,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    SharedConfig,
)

SILU = ("silu", "swish")
NEMOTRON_LAYERS: dict[str, LayerKind] = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


def common(fields: Fields, tensors: Tensors, eps: float) -> dict[str, Any]:
    """Fields of `ModelConfig` that all of these families name alike."""
    rows, _ = vocabulary(fields, tensors)
    return {
        "vocab_size": rows,
        "num_tokens": rows,
        "d_model": fields.size("hidden_size", 4096),
        "norm_eps": eps,
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "stop_tokens": fields.token_ids("eos_token_id"),
    }


def granite(fields: Fields, tensors: Tensors) -> ModelConfig:
    """GraniteMoeHybrid (Granite 4), with experts or without."""
    d_model = fields.size("hidden_size", 4096)
    count = fields.size("num_hidden_layers", 32)
    mixers = layer_kinds(fields, count, ["mamba"] * count)
    fields.choice("hidden_act", "silu", SILU)
    eps = fields.positive("rms_norm_eps", 1e-6)
    attention = mamba = None  # fields of a mixer that does not occur mean nothing
    if "attention" in mixers:
        attention = replace(
            attention_config(fields, tensors, d_model),
            scale=fields.positive("attention_multiplier", 1.0),
        )
        if fields.get("position_embedding_type", "nope") == "rope":
            attention = replace(attention, rope=rope(fields, attention.head_dim))
    if "mamba" in mixers:
        widened = fields.size("mamba_expand", 2) * d_model
        mamba = mamba_config(fields, tensors, widened, eps)
    mlp: MLPConfig | None = MLPConfig(fields.size("shared_intermediate_size", 1024))
    moe, layers = None, with_mlps(mixers)
    experts = fields.size("num_local_experts", 8, low=0)
    if experts:
        moe = MoEConfig(
            num_experts=experts,
            top_k=fields.size("num_experts_per_tok", 2),
            d_hidden=fields.size("intermediate_size", 11008),
            shared=mlp,
        )
        mlp = None
        layers = tuple("moe" if kind == "mlp" else kind for kind in layers)
    return ModelConfig(
        **common(fields, tensors, eps),
        layers=layers,
        mamba=mamba,
        attention=attention,
        mlp=mlp,
        moe=moe,
        embedding_multiplier=fields.positive("embedding_multiplier", 1.0),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
        logits_divisor=fields.positive("logits_scaling", 1.0),
    )


def _mlp(fields: Fields, tensors: Tensors) -> MLPConfig:
    fields.choice("hidden_act", "silu", SILU)
    return MLPConfig(
        fields.size("intermediate_size", 14336),
        bias=has(tensors, "feed_forward.down_proj.bias"),
    )


def bamba(fields: Fields, tensors: Tensors) -> ModelConfig:
    """Bamba: half of each attention head rotates."""
    d_model = fields.size("hidden_size", 4096)
    count = fields.size("num_hidden_layers", 32)
    kept = fields.integers("attn_layer_indices")
    if not all(0 <= i < count for i in kept):
        raise fields.wants("attn_layer_indices", f"numbers in 0..{count - 1}", kept)
    kinds = ["attention" if i in kept else "mamba" for i in range(count)]
    mixers = layer_kinds(fields, count, kinds)
    eps = fields.positive("rms_norm_eps", 1e-5)
    attention = mamba = None
    if "attention" in mixers:
        attention = attention_config(fields, tensors, d_model)
        attention = replace(attention, rope=rope(fields, attention.head_dim, 0.5))
    if "mamba" in mixers:
        widened = fields.size("mamba_expand", 2) * d_model
        mamba = mamba_config(fields, tensors, widened, eps)
    return ModelConfig(
        **common(fields, tensors, eps),
        layers=with_mlps(mixers),
        mamba=mamba,
        attention=attention,
        mlp=_mlp(fields, tensors),
    )


def falcon_h1(fields: Fields, tensors: Tensors) -> ModelConfig:
    """Falcon-H1: mixer and attention side by side in every layer, and multipliers."""
    d_model = fields.size("hidden_size", 4096)
    eps = fields.positive("rms_norm_eps", 1e-5)
    d_inner = fields.size("mamba_d_ssm", fields.size("mamba_expand", 2) * d_model)
    mamba = mamba_config(fields, tensors, d_inner, eps)
    if mamba.d_inner != d_inner:
        raise fields.error("mamba_d_ssm", f"{d_inner} is not mamba_n_heads * head size")
    first = fields.flag("mamba_norm_before_gate", True)
    order: Any = "norm_first" if first else "gate_first"
    normed = fields.flag("mamba_rms_norm", False)
    parts = fields.multipliers("ssm_multipliers", 5)
    mamba = replace(
        mamba,
        norm=order if normed else None,
        in_multiplier=fields.finite("ssm_in_multiplier", 1.0),
        out_multiplier=fields.finite("ssm_out_multiplier", 1.0),
        part_multipliers=(parts[0], parts[1], parts[2], parts[3], parts[4]),
    )
    attention = attention_config(fields, tensors, d_model)
    attention = replace(
        attention,
        rope=rope(fields, attention.head_dim),
        in_multiplier=fields.finite("attention_in_multiplier", 1.0),
        key_multiplier=fields.finite("key_multiplier", 1.0),
        out_multiplier=fields.finite("attention_out_multiplier", 1.0),
    )
    gate, down = fields.multipliers("mlp_multipliers", 2)
    mlp = _mlp(fields, tensors)
    block: Layers = ("parallel", "mlp")
    return ModelConfig(
        **common(fields, tensors, eps),
        layers=block * fields.size("num_hidden_layers", 32),
        mamba=mamba,
        attention=attention,
        mlp=replace(mlp, gate_multiplier=gate, down_multiplier=down),
        embedding_multiplier=fields.finite("embedding_multiplier", 1.0),
        logits_divisor=1 / fields.positive("lm_head_multiplier", 1.0),
    )


def nemotron_h(fields: Fields, tensors: Tensors) -> ModelConfig:
    """Nemotron-H: one mixer, MLP or mixture of experts a layer; no rotary embedding."""
    eps = fields.positive("layer_norm_epsilon", 1e-5)
    layers = _nemotron_layers(fields)
    d_model = fields.size("hidden_size", 4096)
    act = fields.choice("mlp_hidden_act", "relu2", ("relu2", "silu", "gelu"))
    d_hidden = fields.size("intermediate_size", 21504)
    plain: dict[str, Any] = {"gated": False, "activation": act}
    attention = mamba = mlp = moe = None
    if "mamba" in layers:
        mamba = _nemotron_mamba(fields, tensors, eps)
    if "attention" in layers:
        attention = _nemotron_attention(fields, tensors, d_model)
    if "mlp" in layers:
        bias = has(tensors, "mixer.down_proj.bias")
        mlp = MLPConfig(d_hidden, bias=bias, **plain)
    if "moe" in layers:
        width = fields.size("moe_shared_expert_intermediate_size", 7688)
        moe = MoEConfig(
            num_experts=fields.size("n_routed_experts", 8),
            top_k=fields.size("num_experts_per_tok", 2),
            d_hidden=fields.size("moe_intermediate_size", 7688),
            shared=MLPConfig(width, **plain),
            router="sigmoid",
            groups=fields.size("n_group", 1),
            top_groups=fields.size("topk_group", 1),
            normalize=fields.flag("norm_topk_prob", True),
            scale=fields.positive("routed_scaling_factor", 1.0),
            d_latent=fields.size("moe_latent_size", 0, low=0),
            **plain,
        )
    return ModelConfig(
        **common(fields, tensors, eps),
        layers=layers,
        mamba=mamba,
        attention=attention,
        mlp=mlp,
        moe=moe,
    )


def _nemotron_layers(fields: Fields) -> Layers:
    """From `layers_block_type`, `layer_types` or the letters of the older pattern."""
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    named = next((n for n in names if fields.get(n, None) is not None), names[0])
    plan = fields.get(named)
    if not isinstance(plan, str | list) or not plan:
        raise fields.wants(named, "a list of layer types or a pattern", plan)
    if len(plan) > MAX_LAYERS:
        raise fields.error(named, f"{len(plan)} layers, want at most {MAX_LAYERS}")
    for kind in plan:
        if not isinstance(kind, str) or kind not in NEMOTRON_LAYERS:
            raise fields.error(named, f"unknown layer type {reprlib.repr(kind)}")
    return tuple(NEMOTRON_LAYERS[kind] for kind in plan)


def _nemotron_mamba(fields: Fields, tensors: Tensors, eps: float) -> MambaConfig:
    def either(name: str, alias: str, default: int) -> int:
        return fields.size(name if name in fields.values else alias, default)

    groups = either("n_groups", "mamba_n_groups", 8)
    return MambaConfig(
        num_heads=fields.size("mamba_num_heads", 128),
        head_dim=fields.size("mamba_head_dim", 64),
        d_state=fields.size("ssm_state_size", 128),
        n_groups=groups,
        d_conv=either("conv_kernel", "mamba_d_conv", 4),
        norm_groups=groups,
        norm_eps=eps,
        proj_in_bias=has(tensors, "mixer.in_proj.bias"),
        proj_out_bias=has(tensors, "mixer.out_proj.bias"),
        conv_bias=has(tensors, "conv1d.bias"),
        dt_limit=fields.limits("time_step_limit"),
    )


def _nemotron_attention(
    fields: Fields, tensors: Tensors, d_model: int
) -> AttentionConfig:
    heads = fields.size("num_attention_heads", 32)
    older = fields.size("attention_head_dim", 128)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", min(8, heads)),
        head_dim=fields.size("head_dim", older),
        qkv_bias=has(tensors, "mixer.q_proj.bias"),
        out_bias=has(tensors, "mixer.o_proj.bias"),
    )


def zamba2(fields: Fields, tensors: Tensors) -> ModelConfig:
    """Zamba2: Mamba2 layers, some of which also read a shared transformer block."""
    d_model = fields.size("hidden_size", 2560)
    count = fields.size("num_hidden_layers", 54)
    plan = fields.get("layers_block_type")
    kinds: dict[Any, LayerKind] = dict.fromkeys(MAMBA_KINDS, "mamba")
    kinds["hybrid"] = "shared"
    if not isinstance(plan, list) or len(plan) != count:
        raise fields.error("layers_block_type", f"want a list of {count} layer types")
    for kind in plan:
        if not isinstance(kind, str) or kind not in kinds:
            unknown = f"unknown layer type {reprlib.repr(kind)}"
            raise fields.error("layers_block_type", unknown)
    layers = tuple(kinds[kind] for kind in plan)
    heads = fields.size("n_mamba_heads", 8)
    groups = fields.size("mamba_ngroups", 1)
    divide(fields, "mamba_ngroups", heads, groups)
    widened = fields.size("mamba_expand", 2) * d_model
    mamba = MambaConfig(
        num_heads=heads,
        head_dim=divide(fields, "n_mamba_heads", widened, heads),
        d_state=fields.size("mamba_d_state", 64),
        n_groups=groups,
        d_conv=fields.size("mamba_d_conv", 4),
        norm_groups=groups,
        norm_eps=1e-5,  # whatever rms_norm_eps says
        proj_in_bias=has(tensors, "mamba.in_proj.bias"),
        proj_out_bias=has(tensors, "mamba.out_proj.bias"),
        conv_bias=has(tensors, "conv1d.bias"),
        dt_limit=fields.limits("time_step_limit"),
    )
    attention = mlp = shared = None
    if "shared" in layers:
        attention = _zamba2_attention(fields, tensors, d_model)
        mlp = MLPConfig(
            fields.size("intermediate_size", 4 * d_model),
            bias=has(tensors, "feed_forward.down_proj.bias"),
            activation=fields.choice("hidden_act", "gelu", ("gelu", "silu")),
        )
        shared = SharedConfig(
            blocks=_zamba2_blocks(fields, tensors, layers),
            adapter_rank=fields.size("adapter_rank", 128),
            attention_adapter=fields.flag("use_shared_attention_adapter", False),
        )
    same = common(fields, tensors, fields.positive("rms_norm_eps", 1e-5))
    return ModelConfig(
        **same
        | {
            "d_model": d_model,
            "tie_embeddings": fields.flag("tie_word_embeddings", True),
        },
        layers=layers,
        mamba=mamba,
        attention=attention,
        mlp=mlp,
        shared=shared,
    )


def _zamba2_blocks(fields: Fields, tensors: Tensors, layers: Layers) -> int:
    """How many distinct blocks there are.

    transformers 5.23 ties them only where it ties the embeddings; otherwise it saves
    and runs a block of its own in every shared layer.
    """
    used = [i for i, kind in enumerate(layers) if kind == "shared"]
    own = f"model.layers.{used[-1]}.shared_transformer.input_layernorm.weight"
    if own in tensors and not fields.flag("tie_word_embeddings", True):
        return len(used)
    return fields.size("num_mem_blocks", 1)


def _zamba2_attention(
    fields: Fields, tensors: Tensors, d_model: int
) -> AttentionConfig:
    """Attention on the width of [h, embedding], with the scale of half a head."""
    heads = fields.size("num_attention_heads", 32)
    kv_heads = fields.size("num_key_value_heads", heads)
    divide(fields, "num_key_value_heads", heads, kv_heads)
    head_dim = divide(fields, "num_attention_heads", 2 * d_model, heads)
    turns = fields.flag("use_mem_rope", False)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope(fields, head_dim) if turns else None,
        scale=(head_dim / 2) ** -0.5,
        qkv_bias=has(tensors, "self_attn.q_proj.bias"),
        out_bias=has(tensors, "self_attn.o_proj.bias"),
        d_out=d_model,
    )
