"""config.json of published drafters, by publisher.

A function of a layout takes the facts and sizes of a drafter and returns the fields.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Sizes of a drafter and of its target; multiples of 16 where NVFP4 needs them."""

    d: int = 32
    target_d: int = 0  # width of the target, by default the same
    vocab: int = 64
    target_layers: int = 8
    boundaries: tuple[int, ...] = ()  # by default three, see `default_boundaries`
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    hidden: int = 48
    layers: int = 2  # of block drafters and P-EAGLE
    eagle3_layers: int = 1
    slots: int = 4
    rank: int = 16
    draft_vocab: int = 40  # of layouts with a vocabulary of their own
    window: int = 8
    top_k: int = 8
    markov: str = "vanilla"
    mask_id: int | None = None  # by default the last token
    q_norms: bool = False  # EAGLE-3 with the attention of Qwen3
    norm_before_fc: bool = False  # options of EAGLE-3 in layouts that state them
    fc_norm: bool = False
    norm_output: bool = False
    safetensors: bool = False  # "yuhuili": instead of pytorch_model.bin
    prefix: str = ""  # of tensor names
    target: str = "example/target"

    @property
    def tap_width(self):
        return self.target_d or self.d

    @property
    def target_hidden_size(self):
        return self.target_d or None


def shape_fields(facts, sizes):
    return {
        "model_type": "qwen3",
        "hidden_size": sizes.d,
        "intermediate_size": sizes.hidden,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": facts.eps,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def rope_fields(facts, nested=False):
    """Returns the rotary fields, `rope_theta` at the top or in `rope_parameters`."""
    theta = {"rope_theta": facts.theta}
    if facts.yarn is not None:
        yarn = facts.yarn
        parameters = {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original,
            **theta,
        }
        return theta | {"rope_parameters": parameters}
    if nested:
        return {"rope_parameters": theta | {"rope_type": "default"}}
    return theta


def window_fields(facts):
    windows = facts.windows
    kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
    window = max((w for w in windows if w is not None), default=None)
    return {
        "layer_types": kinds,
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }


def outputs(facts):
    """Returns the tapped boundaries as ids of the layers whose outputs they are."""
    return [boundary - 1 for boundary in facts.boundaries]


def head_fields(facts, sizes):
    return {
        "markov_rank": sizes.rank,
        "markov_head_type": facts.markov,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def liquid(facts, sizes):
    # The published config states neither the first slot nor the confidence's input.
    return shape_fields(facts, sizes) | {
        "architectures": ["Lfm2DSparkDraftModel"],
        "rope_theta": facts.theta,
        "rope_is_neox_style": False,
        "layer_types": ["full_attention"] * facts.layers,
        "block_size": facts.slots,
        "markov_rank": sizes.rank,
        "markov_head_type": facts.markov,
        "enable_confidence_head": True,
        "dflash_config": {
            "mask_token_id": facts.mask_id,
            "target_layer_ids": outputs(facts),
            "num_target_layers": sizes.target_layers,
        },
    }


def nvidia(facts, sizes, quantized=True):
    dspark, sinks = facts.kind == "dspark", facts.kind == "dspark"
    window = facts.windows[0]
    ids = {"mask_token_id": facts.mask_id, "target_layer_ids": outputs(facts)}
    nested = {"attention_sink_bias": sinks, "causal": facts.causal[0], **ids}
    nested |= {"use_swa": window is not None, "sample_from_anchor": False}
    fields = (
        shape_fields(facts, sizes) | window_fields(facts) | ids | rope_fields(facts)
    )
    fields |= {
        "architectures": ["Qwen3DSparkModel" if dspark else "DFlashDraftModel"],
        "attention_sink_bias": sinks,
        "dflash_config": nested,
        "dflash_query_causal": facts.causal[0],
        "draft_vocab_size": None,
        "eagle_aux_hidden_state_layer_ids": list(facts.boundaries),
        "has_embed_tokens": True,
        "has_lm_head": False,
        "num_aux_layers": len(facts.boundaries),
        "pard_token": facts.mask_id,
        "sample_from_anchor": False,
        "train_embed_tokens": False,
        "use_cache": False,
    }
    del fields["use_sliding_window"]
    if dspark:
        nested["swa_window_size"] = window
        fields |= {
            "block_size": facts.slots,
            "dspark_bonus_anchor": True,
            "dspark_fixup_head_type": "markov",
            "dspark_markov_rank": sizes.rank,
            "markov_rank": sizes.rank,
            "markov_head_type": facts.markov,
            "rope_parameters": None,
        }
    if quantized:
        fields["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4",
            "group_size": 16,
            "kv_cache_quant_algo": None,
            "ignore": ["embed_tokens", "*self_attn*", "markov_head.markov_w1"],
        }
    return fields


def nvidia_bf16(facts, sizes):
    return nvidia(facts, sizes, quantized=False)


def z_lab_flat(facts, sizes):
    return (
        shape_fields(facts, sizes)
        | window_fields(facts)
        | rope_fields(facts)
        | {
            "architectures": ["DFlashDraftModel"],
            "is_causal": False,
            "block_size": facts.slots,
            "mask_token_id": facts.mask_id,
            "target_layer_ids": outputs(facts),
            "num_target_layers": sizes.target_layers,
        }
    )


def z_lab_nested(facts, sizes):
    fields = shape_fields(facts, sizes) | window_fields(facts)
    return (
        fields
        | rope_fields(facts, nested=True)
        | {
            "architectures": ["DFlashDraftModel"],
            "is_causal": False,
            "num_target_layers": sizes.target_layers,
            "dflash_config": {
                "block_size": facts.slots,
                "mask_token_id": facts.mask_id,
                "target_layer_ids": outputs(facts),
            },
        }
    )


def z_lab_dflash2(facts, sizes):
    fields = z_lab_nested(facts, sizes) | {"architectures": ["DFlash2DraftModel"]}
    fields["dflash_config"] |= {
        "conv_group_size": facts.conv_group,
        "conv_kernel_size": 2,
        "selector_rank": sizes.rank,
        "selector_top_k": facts.top_k,
    }
    return fields


def deepspec(facts, sizes):
    fields = shape_fields(facts, sizes) | window_fields(facts) | rope_fields(facts)
    return (
        fields
        | head_fields(facts, sizes)
        | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": facts.slots,
            "mask_token_id": facts.mask_id,
            "target_layer_ids": outputs(facts),
            "num_target_layers": sizes.target_layers,
        }
    )


def specforge(facts, sizes):
    fields = shape_fields(facts, sizes) | window_fields(facts) | rope_fields(facts)
    return fields | {
        "architectures": ["DSparkDraftModel"],
        "block_size": facts.slots,
        "num_target_layers": sizes.target_layers,
        "target_hidden_size": sizes.target_hidden_size,
        "dflash_config": {
            "attention_mode": "gqa",
            "confidence_head_alpha": 1.0,
            "projector_type": "dspark",
            "mask_token_id": facts.mask_id,
            "target_layer_ids": outputs(facts),
            **head_fields(facts, sizes),
        },
    }


def modelopt(facts, sizes):
    fields = shape_fields(facts, sizes) | window_fields(facts) | rope_fields(facts)
    return fields | {
        "architectures": ["DFlashDraftModel"],
        "block_size": facts.slots,
        "num_target_layers": sizes.target_layers,
        "dflash_config": {
            "projector_type": "dspark",
            "mask_token_id": facts.mask_id,
            "target_layer_ids": outputs(facts),
            "markov_rank": sizes.rank,
            "markov_head_type": facts.markov,
            "use_confidence_head": True,
            "shift_label": facts.from_anchor,
            "causal": False,
        },
    }


# --- speculators, EAGLE-3 -------------------------------------------------------------


def speculators(facts, sizes, kind, drafts, **fields):
    """Returns fields whose layer shape is nested, as `speculators` writes them."""
    layer = shape_fields(facts, sizes) | rope_fields(facts, nested=True)
    del layer["dtype"]
    if facts.windows:
        layer |= window_fields(facts)
        fields |= {
            "aux_hidden_state_layer_ids": list(facts.boundaries),
            "block_size": facts.slots,
            "mask_token_id": facts.mask_id,
            "sample_from_anchor": facts.from_anchor,
            "sliding_window_non_causal": not any(facts.causal),
        }
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafts}
    return {
        "draft_vocab_size": sizes.draft_vocab,
        "dtype": "bfloat16",
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": [], "name_or_path": sizes.target},
        },
        "target_hidden_size": sizes.target_hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        **fields,
    }


def redhat_dflash(facts, sizes):
    names = ["DFlashSpeculator"]
    return speculators(facts, sizes, "dflash", facts.drafts, architectures=names)


def redhat_dflash2(facts, sizes):
    return speculators(facts, sizes, "dflash2", facts.drafts) | {
        "architectures": ["DFlash2DraftModel"],
        "draft_vocab_size": sizes.vocab,
        "conv_group_size": facts.conv_group,
        "conv_kernel_size": 2,
        "selector_rank": sizes.rank,
        "selector_top_k": facts.top_k,
    }


def redhat_dspark(facts, sizes):
    fields = speculators(facts, sizes, "dspark", facts.drafts)
    fields |= {"architectures": ["DSparkSpeculator"]}
    return fields | head_fields(facts, sizes)


def eagle_fields(facts, sizes):
    """Returns the shape of the layer, for a Llama or a Qwen3 attention."""
    kind = {"model_type": "qwen3" if sizes.q_norms else "llama"}
    return shape_fields(facts, sizes) | kind


def yuhuili(facts, sizes):
    # The authors' files state no taps, no head width and no rotary base.
    fields = eagle_fields(facts, sizes) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": sizes.draft_vocab,
        "torch_dtype": "float16",
    }
    del fields["dtype"]
    if sizes.target_d:
        fields["target_hidden_size"] = sizes.target_d
    if sizes.heads * sizes.head_dim == sizes.d:
        del fields["head_dim"]
    return fields


def specforge_eagle3(facts, sizes):
    return (
        eagle_fields(facts, sizes)
        | rope_fields(facts)
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": sizes.draft_vocab,
            "torch_dtype": "bfloat16",
        }
    )


def nvidia_eagle3(facts, sizes):
    # Layers whose output is read, and all options, are in `eagle_config`.
    nested = {
        "eagle_aux_hidden_state_layer_ids": outputs(facts),
        "next_layer_regular": True,
        "norm_before_fc": sizes.norm_before_fc,
        "norm_before_residual": facts.norm_before_residual,
        "parallel_draft_heads_num_layers": None,
        "parallel_draft_step": 1,
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }
    return (
        eagle_fields(facts, sizes)
        | rope_fields(facts)
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": sizes.draft_vocab,
            "eagle_config": nested,
            "torch_dtype": "bfloat16",
        }
    )


def speculators_eagle3(facts, sizes, kind="eagle3", drafts=3, **fields):
    names = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}
    fields = speculators(facts, sizes, kind, drafts, **fields) | {
        "architectures": [names[kind]],
        "eagle_aux_hidden_state_layer_ids": list(facts.boundaries),
        "embed_requires_grad": kind == "peagle",
        "fc_norm": sizes.fc_norm,
        "norm_before_fc": sizes.norm_before_fc,
        "norm_before_residual": facts.norm_before_residual,
        "norm_output": facts.norm_output,
    }
    layer = fields["transformer_layer_config"]
    layer["model_type"] = "qwen3" if sizes.q_norms else "llama"
    return fields


def peagle(facts, sizes):
    return speculators_eagle3(facts, sizes, "peagle", 8, mask_token_id=facts.mask_id)
