"""Models as Hugging Face directories that transformers loads."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stree_jax.convert.errors import CheckpointError
from stree_jax.convert.store import atomic_directory
from stree_jax.convert.tensors import rows_of, split
from stree_jax.models import AttentionConfig, MambaConfig, MLPConfig, ModelConfig


def export_format(config: ModelConfig) -> str:
    """mamba2: Mamba layers only; llama: attention and MLP in turns, no multipliers;
    granitemoehybrid: any mixer and an MLP in turns."""
    turns = config.layers[1::2] == ("mlp",) * (len(config.layers) // 2)
    mixers = set(config.layers[::2])
    if set(config.layers) == {"mamba"}:
        return "mamba2"
    if not turns or "mlp" in mixers or len(config.layers) % 2:
        raise CheckpointError(f"layers {config.layers}: no Hugging Face class has them")
    scales = (
        config.embedding_multiplier,
        config.residual_multiplier,
        config.logits_divisor,
    )
    plain = config.attention is not None and config.attention.scale is None
    if mixers == {"attention"} and plain and scales == (1.0, 1.0, 1.0):
        return "llama"
    return "granitemoehybrid"


def _require(format: str, facts: dict[str, bool]) -> None:
    for name, holds in facts.items():
        if not holds:
            raise CheckpointError(f"{format} cannot express this model's {name}")


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of the model, in the spelling of the hub (transformers 4)."""
    format = export_format(config)
    _require(format, {"norm 'layer'": config.norm == "rms"})
    if config.mamba is not None:
        m = config.mamba
        facts = {
            "x_heads": m.x_heads is None,
            "d_mlp": m.d_mlp == 0,
            "D_per_channel": not m.D_per_channel,
            "norm order": m.norm == "gate_first" and m.norm_groups == m.n_groups,
            "norm_eps": m.norm_eps == config.norm_eps,
            "biases": m.proj_in_bias == m.proj_out_bias,
            "d_inner": m.d_inner % config.d_model == 0,
        }
        _require(format, facts)
    common: dict[str, Any] = {
        "hidden_size": config.d_model,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": list(config.stop_tokens) or None,
    }
    if format == "mamba2" and config.mamba is not None:
        return common | _mamba2_json(config, config.mamba)
    if config.mlp is None:
        raise CheckpointError(f"{format} cannot express this model's lack of MLPs")
    if format == "llama" and config.attention is not None:
        return common | _llama_json(config, config.attention, config.mlp)
    return common | _granite_json(config, config.mlp)


def _mamba2_json(config: ModelConfig, m: MambaConfig) -> dict[str, Any]:
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
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
    if c.rope is not None:
        _require(format, {"partial rotary": c.rope.dim == c.head_dim})
        fields["rope_theta"] = c.rope.theta
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
        "model_type": "llama",
        "num_hidden_layers": len(config.layers) // 2,
        "head_dim": c.head_dim,
        "intermediate_size": mlp.d_hidden,
        "mlp_bias": mlp.bias,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        **_attention_json("llama", c),
    }


def _granite_json(config: ModelConfig, mlp: MLPConfig) -> dict[str, Any]:
    format, mixers = "granitemoehybrid", config.layers[::2]
    _require(format, {"MLP bias": not mlp.bias})
    fields: dict[str, Any] = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": format,
        "num_hidden_layers": len(mixers),
        "layer_types": list(mixers),
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": mlp.d_hidden,
        "intermediate_size": mlp.d_hidden,
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
        m = config.mamba
        fields |= {
            "mamba_n_heads": m.num_heads,
            "mamba_d_head": m.head_dim,
            "mamba_expand": m.d_inner // config.d_model,
            "mamba_n_groups": m.n_groups,
            "mamba_d_state": m.d_state,
            "mamba_d_conv": m.d_conv,
            "mamba_conv_bias": m.conv_bias,
            "mamba_proj_bias": m.proj_in_bias,
            "time_step_limit": list(m.dt_limit),
        }
    return fields


def export_hf(config: ModelConfig, params: Any, tokenizer: Any, dst: Path) -> None:
    """Write a Hugging Face directory: config.json, model.safetensors, tokenizer.

    Args:
      tokenizer: a `tokenizers.Tokenizer`, or None to leave it out.
      dst: must not exist; killed at any moment, it is absent or whole.

    Raises:
      CheckpointError: the model has an option that no Hugging Face class has.
    """
    from safetensors.numpy import save_file

    dtype = np.asarray(params["embedding"]).dtype.name
    fields = hf_config(config, dtype)
    flat = {
        tuple(k.key for k in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    tensors: dict[str, np.ndarray] = {}
    for row in rows_of(export_format(config), config):
        tensors |= split(row, flat[row.path])
    with atomic_directory(dst) as temporary:
        save_file(tensors, temporary / "model.safetensors", {"format": "pt"})
        text = json.dumps(fields, indent=2)
        (temporary / "config.json").write_text(text + "\n")
        if tokenizer is not None:
            tokenizer.save(str(temporary / "tokenizer.json"))
            (temporary / "tokenizer_config.json").write_text(
                json.dumps(_tokenizer_json(config, tokenizer), indent=2) + "\n"
            )


def _tokenizer_json(config: ModelConfig, tokenizer: Any) -> dict[str, Any]:
    fields = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if config.stop_tokens:
        fields["eos_token"] = tokenizer.id_to_token(config.stop_tokens[0])
    return fields
