"""The config.json of Hugging Face's classes from our `ModelConfig`."""

import math
from dataclasses import replace
from typing import Any

from stree_jax.convert.errors import CheckpointError
from stree_jax.models import AttentionConfig, MambaConfig, MLPConfig, ModelConfig

# transformers 5.23 takes the logarithm of `time_step_min`, so that it cannot be 0.
NO_FLOOR = 1e-30


def export_format(config: ModelConfig) -> str:
    """The class that has these layers.

    mamba2: Mamba layers only; zamba2: shared layers, perhaps between Mamba layers;
    falcon_h1: parallel layers; nemotron_h: MLPs or experts without gates, in any order;
    all others want mixers and gated MLPs in turns: llama attention and no multipliers;
    bamba an MLP bias or a part of each head rotating; granitemoehybrid what is left.

    Raises:
      CheckpointError: no class has them.
    """
    layers, kinds = config.layers, set(config.layers)
    second = set(layers[1::2])
    turns = len(layers) % 2 == 0 and len(second) == 1 and second <= {"mlp", "moe"}
    mixers = set(layers[::2])
    mlp, c = config.mlp, config.attention
    if kinds == {"mamba"}:
        return "mamba2"
    if kinds <= {"mamba", "shared"}:
        return "zamba2"
    if turns and mixers == {"parallel"} and mlp is not None:
        return "falcon_h1"
    gates = [part.gated for part in (mlp, config.moe) if part is not None]
    if not kinds & {"parallel", "shared"} and not any(gates):
        return "nemotron_h"
    if not turns or not mixers <= {"mamba", "attention"} or not all(gates):
        raise CheckpointError(f"layers {layers}: no Hugging Face class has them")
    if mlp is not None and _unscaled(config) and (c is None or c.scale is None):
        if mixers == {"attention"} and not _partial(c):
            return "llama"
        if mlp.bias or _partial(c):
            return "bamba"
    return "granitemoehybrid"


def _partial(c: AttentionConfig | None) -> bool:
    return c is not None and c.rope is not None and c.rope.dim != c.head_dim


def _unscaled(config: ModelConfig) -> bool:
    c = config
    return (c.embedding_multiplier, c.residual_multiplier, c.logits_divisor) == (1,) * 3


def _require(format: str, facts: dict[str, bool]) -> None:
    for name, holds in facts.items():
        if not holds:
            raise CheckpointError(f"{format} cannot express this model's {name}")


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of the model, in the spelling of the hub (transformers 4).

    Args:
      dtype: of the weights, "float32" or "bfloat16".

    Raises:
      CheckpointError: the model has an option that its class has not.
    """
    format = export_format(config)
    _require(format, {"norm 'layer'": config.norm == "rms"})
    if config.mamba is not None:
        _check_mamba(format, config, config.mamba)
    if config.attention is not None:
        _check_attention(format, config, config.attention)
    if config.mlp is not None:
        _check_mlp(format, config.mlp)
    common: dict[str, Any] = {
        "model_type": format,
        "hidden_size": config.d_model,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": list(config.stop_tokens) or None,
    }
    if format not in ("granitemoehybrid", "falcon_h1"):
        _require(format, {"multipliers": _unscaled(config)})
    match format:
        case "mamba2":
            return common | _mamba2_json(config, _given(config.mamba))
        case "llama":
            attention, mlp = _given(config.attention), _given(config.mlp)
            return common | _llama_json(config, attention, mlp)
        case "bamba":
            return common | _bamba_json(config, _given(config.mlp))
        case "falcon_h1":
            return common | _falcon_json(config)
        case "nemotron_h":
            return common | _nemotron_json(config)
        case "zamba2":
            return common | _zamba2_json(config)
        case _:
            return common | _granite_json(config)


def _given(part: Any) -> Any:
    assert part is not None  # `export_format` has seen its layers
    return part


def _check_mamba(format: str, config: ModelConfig, m: MambaConfig) -> None:
    norm_eps = 1e-5 if format == "zamba2" else config.norm_eps
    facts = {
        "x_heads": m.x_heads is None,
        "d_mlp": m.d_mlp == 0,
        "D_per_channel": not m.D_per_channel,
        "norm groups": m.norm is None or m.norm_groups == m.n_groups,
        "norm_eps": m.norm_eps == norm_eps,
    }
    if format != "falcon_h1":
        plain = (m.in_multiplier, m.out_multiplier, *m.part_multipliers) == (1.0,) * 7
        facts |= {
            "norm order": m.norm == "gate_first",
            "biases": m.proj_in_bias == m.proj_out_bias,
            "multipliers": plain,
        }
    if format in ("mamba2", "granitemoehybrid", "bamba", "zamba2"):
        facts["d_inner"] = m.d_inner % config.d_model == 0
    _require(format, facts)


def _check_attention(format: str, config: ModelConfig, c: AttentionConfig) -> None:
    width = config.d_model if format == "zamba2" else 0
    facts = {
        "attention d_conv": c.d_conv == 0,
        "attention d_mlp": c.d_mlp == 0,
        "attention d_out": c.d_out == width,
    }
    if format != "falcon_h1":
        scales = (c.in_multiplier, c.key_multiplier, c.out_multiplier)
        facts["attention multipliers"] = scales == (1.0,) * 3
    _require(format, facts)


def _check_mlp(format: str, mlp: MLPConfig) -> None:
    acts = {"nemotron_h": ("silu", "gelu", "relu2"), "zamba2": ("silu", "gelu")}
    facts = {"activation": mlp.activation in acts.get(format, ("silu",))}
    if format != "falcon_h1":
        scales = (mlp.gate_multiplier, mlp.down_multiplier)
        facts["MLP multipliers"] = scales == (1.0,) * 2
    _require(format, facts)


def _mamba2_json(config: ModelConfig, m: MambaConfig) -> dict[str, Any]:
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "num_hidden_layers": len(config.layers),
        "num_heads": m.num_heads,
        "head_dim": m.head_dim,
        "expand": m.d_inner // config.d_model,
        "state_size": m.d_state,
        "n_groups": m.n_groups,
        "conv_kernel": m.d_conv,
        "use_bias": m.proj_in_bias,
        "use_conv_bias": m.conv_bias,
        "layer_norm_epsilon": config.norm_eps,
        "time_step_limit": list(m.dt_limit),
    }


def _attention_json(format: str, c: AttentionConfig) -> dict[str, Any]:
    _require(format, {"biases": c.qkv_bias == c.out_bias})
    fields: dict[str, Any] = {
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "attention_bias": c.qkv_bias,
    }
    return fields | _rope_json(format, c)


def _rope_json(format: str, c: AttentionConfig) -> dict[str, Any]:
    """Rotary embedding of the whole head, in the older spelling; nothing if none."""
    if c.rope is None:
        return {}
    _require(format, {"partial rotary": c.rope.dim == c.head_dim})
    fields: dict[str, Any] = {"rope_theta": c.rope.theta}
    if c.rope.llama3 is not None:
        factor, low, high, old = c.rope.llama3
        fields["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": int(old),
        }
    return fields


def _llama_json(
    config: ModelConfig, c: AttentionConfig, mlp: MLPConfig
) -> dict[str, Any]:
    _require("llama", {"lack of rotary": c.rope is not None})
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": len(config.layers) // 2,
        "head_dim": c.head_dim,
        "intermediate_size": mlp.d_hidden,
        "mlp_bias": mlp.bias,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        **_attention_json("llama", c),
    }


def _mamba_json(config: ModelConfig, m: MambaConfig) -> dict[str, Any]:
    """A mixer in the `mamba_` fields of Granite, Bamba and Falcon-H1."""
    return {
        "mamba_n_heads": m.num_heads,
        "mamba_d_head": m.head_dim,
        "mamba_expand": max(m.d_inner // config.d_model, 1),
        "mamba_n_groups": m.n_groups,
        "mamba_d_state": m.d_state,
        "mamba_d_conv": m.d_conv,
        "mamba_conv_bias": m.conv_bias,
        "mamba_proj_bias": m.proj_in_bias,
        "time_step_limit": list(m.dt_limit),
    }


def _granite_json(config: ModelConfig) -> dict[str, Any]:
    format, mixers = "granitemoehybrid", config.layers[::2]
    moe = config.moe
    mlp = config.mlp if moe is None else moe.shared
    _require(format, {"lack of a shared MLP": mlp is not None})
    mlp = _given(mlp)
    _require(format, {"MLP bias": not mlp.bias, "activation": mlp.activation == "silu"})
    fields: dict[str, Any] = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_hidden_layers": len(mixers),
        "layer_types": list(mixers),
        "num_local_experts": 0 if moe is None else moe.num_experts,
        "num_experts_per_tok": 0 if moe is None else moe.top_k,
        "shared_intermediate_size": mlp.d_hidden,
        "intermediate_size": mlp.d_hidden if moe is None else moe.d_hidden,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": config.logits_divisor,
        "position_embedding_type": "nope",
        "num_attention_heads": 1,  # any valid value, where a mixer does not occur
        "mamba_n_heads": 1,
        "mamba_d_head": "auto",
    }
    if config.attention is not None:
        c = config.attention
        width = c.num_heads * c.head_dim == config.d_model
        _require(format, {"head_dim": width})
        fields |= _attention_json(format, c)
        fields["attention_multiplier"] = (
            c.head_dim**-0.5 if c.scale is None else c.scale
        )
        fields["position_embedding_type"] = "nope" if c.rope is None else "rope"
    if config.mamba is not None:
        fields |= _mamba_json(config, config.mamba)
    return fields


def _bamba_json(config: ModelConfig, mlp: MLPConfig) -> dict[str, Any]:
    mixers, c = config.layers[::2], config.attention
    fields: dict[str, Any] = {
        "architectures": ["BambaForCausalLM"],
        "num_hidden_layers": len(mixers),
        "attn_layer_indices": [i for i, k in enumerate(mixers) if k == "attention"],
        "intermediate_size": mlp.d_hidden,
        "mlp_bias": mlp.bias,
        "rms_norm_eps": config.norm_eps,
        "num_attention_heads": 1,  # any valid value, where a mixer does not occur
    }
    if c is not None:
        rope = c.rope
        width = c.num_heads * c.head_dim == config.d_model
        facts = {"head_dim": width, "lack of rotary": rope is not None}
        _require("bamba", facts | {"llama3": rope is not None and rope.llama3 is None})
        rope = _given(rope)
        fields |= _attention_json("bamba", replace(c, rope=None))
        fields["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": rope.theta,
            "partial_rotary_factor": rope.dim / c.head_dim,
        }
    if config.mamba is not None:
        fields |= _mamba_json(config, config.mamba)
    return fields


def _falcon_json(config: ModelConfig) -> dict[str, Any]:
    m, c, mlp = (_given(x) for x in (config.mamba, config.attention, config.mlp))
    _require(
        "falcon_h1",
        {
            "lack of rotary": c.rope is not None,
            "attention scale": c.scale is None,
            "residual multiplier": config.residual_multiplier == 1,
        },
    )
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "num_hidden_layers": len(config.layers) // 2,
        "head_dim": c.head_dim,
        "intermediate_size": mlp.d_hidden,
        "mlp_bias": mlp.bias,
        "rms_norm_eps": config.norm_eps,
        **_attention_json("falcon_h1", c),
        **_mamba_json(config, m),
        "mamba_d_ssm": m.d_inner,
        "mamba_rms_norm": m.norm is not None,
        "mamba_norm_before_gate": m.norm == "norm_first",
        "projectors_bias": m.proj_out_bias,
        "embedding_multiplier": config.embedding_multiplier,
        "lm_head_multiplier": 1 / config.logits_divisor,
        "ssm_in_multiplier": m.in_multiplier,
        "ssm_out_multiplier": m.out_multiplier,
        "ssm_multipliers": list(m.part_multipliers),
        "attention_in_multiplier": c.in_multiplier,
        "attention_out_multiplier": c.out_multiplier,
        "key_multiplier": c.key_multiplier,
        "mlp_multipliers": [mlp.gate_multiplier, mlp.down_multiplier],
    }


def _nemotron_json(config: ModelConfig) -> dict[str, Any]:
    format = "nemotron_h"
    names = {"mamba": "mamba", "attention": "attention", "mlp": "mlp", "moe": "moe"}
    m, c, mlp, moe = config.mamba, config.attention, config.mlp, config.moe
    acts = {part.activation for part in (mlp, moe) if part is not None} or {"relu2"}
    _require(format, {"activations": len(acts) == 1})
    fields: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": [names[kind] for kind in config.layers],
        "num_hidden_layers": len(config.layers),
        "mlp_hidden_act": acts.pop(),
        "layer_norm_epsilon": config.norm_eps,
    }
    if mlp is not None:
        fields |= {"intermediate_size": mlp.d_hidden, "mlp_bias": mlp.bias}
    if c is not None:
        bare = not (c.qkv_bias or c.out_bias or c.rope) and c.scale is None
        _require(format, {"attention biases, scale or rotary": bare})
        fields |= {
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
        }
    if m is not None:
        fields |= {
            "mamba_num_heads": m.num_heads,
            "mamba_head_dim": m.head_dim,
            "ssm_state_size": m.d_state,
            "n_groups": m.n_groups,
            "conv_kernel": m.d_conv,
            "use_bias": m.proj_in_bias,
            "use_conv_bias": m.conv_bias,
            **_dt_json(m),
        }
    if moe is not None:
        shared = moe.shared is not None and not moe.shared.bias
        _require(format, {"shared expert": shared, "router": moe.router == "sigmoid"})
        fields |= {
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.d_hidden,
            "moe_shared_expert_intermediate_size": _given(moe.shared).d_hidden,
            "moe_latent_size": moe.d_latent or None,
            "n_group": moe.groups,
            "topk_group": moe.top_groups,
            "norm_topk_prob": moe.normalize,
            "routed_scaling_factor": moe.scale,
        }
    return fields


def _dt_json(m: MambaConfig) -> dict[str, Any]:
    """Limits of dt where transformers 5.23 takes `time_step_min` for the lower one."""
    low, high = m.dt_limit
    return {"time_step_limit": [low, high], "time_step_min": low or NO_FLOOR}


def _zamba2_json(config: ModelConfig) -> dict[str, Any]:
    m, c, mlp, shared = (
        _given(part)
        for part in (config.mamba, config.attention, config.mlp, config.shared)
    )
    _check_zamba2(config, m, c, mlp)
    names = {"mamba": "mamba", "shared": "hybrid"}
    return {
        "architectures": ["Zamba2ForCausalLM"],
        "num_hidden_layers": len(config.layers),
        "layers_block_type": [names[kind] for kind in config.layers],
        "rms_norm_eps": config.norm_eps,
        "n_mamba_heads": m.num_heads,
        "mamba_expand": m.d_inner // config.d_model,
        "mamba_ngroups": m.n_groups,
        "mamba_d_state": m.d_state,
        "mamba_d_conv": m.d_conv,
        "use_conv_bias": True,
        "add_bias_linear": m.proj_in_bias,
        **_dt_json(m),
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "use_mem_rope": c.rope is not None,
        **_rope_json("zamba2", c),
        "intermediate_size": mlp.d_hidden,
        "hidden_act": mlp.activation,
        "num_mem_blocks": shared.blocks,
        "adapter_rank": shared.adapter_rank,
        "use_shared_attention_adapter": shared.attention_adapter,
    }


def _check_zamba2(
    config: ModelConfig, m: MambaConfig, c: AttentionConfig, mlp: MLPConfig
) -> None:
    """What transformers 5.23 builds, whatever a config says."""
    shared = _given(config.shared)
    own = shared.blocks >= config.layers.count("shared")
    ungrouped = c.num_kv_heads == c.num_heads
    facts = {
        "lack of a convolution bias": m.conv_bias,
        "upper limit of dt": m.dt_limit[1] == math.inf,
        "biases": m.proj_in_bias == mlp.bias,
        "attention biases": not (c.qkv_bias or c.out_bias),
        "head_dim": c.num_heads * c.head_dim == 2 * config.d_model,
        "attention scale": c.scale == (c.head_dim / 2) ** -0.5,
        "MLP without a gate": mlp.gated,
        "adapters of grouped attention": ungrouped or not shared.attention_adapter,
        "blocks shared without tied embeddings": config.tie_embeddings or own,
    }
    _require("zamba2", facts)
