"""The layout of DeepSpec for block drafters, which other programs read too."""

from typing import Any

import jax
import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.drafters import names
from stree_jax.models.drafters.dflash import DFlash, DFlashConfig
from stree_jax.models.layers.params import by_path

ARCHITECTURES = {
    "DSpark": "Qwen3DSparkModel",
    "DFlash": "DFlashDraftModel",
    "DFlash2": "DFlash2DraftModel",
}


def tensors(drafter: DFlash, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Returns the tensors of a block drafter by their public names, all in one dtype,
    as other programs expect. Queries, keys and values are separate tensors, and so are
    gate and up."""
    found: dict[str, np.ndarray] = {}
    flat = by_path(drafter.params)
    for path, parts in names.tensor_names(drafter.config).items():
        whole = np.asarray(jax.device_get(flat[path]))
        if path == ("head",):
            parts = parts[:1]
        for name, part in zip(parts, np.split(whole, len(parts)), strict=True):
            found[name] = np.ascontiguousarray(part, dtype)
    if drafter.ids is not None:
        ids = np.asarray(drafter.ids, np.int64)
        used = np.zeros(drafter.config.vocab_size, bool)
        used[ids] = True
        found |= {names.IDS: ids - np.arange(len(ids)), names.USED: used}
    return found


def config_fields(c: DFlashConfig) -> dict[str, Any]:
    """Returns the fields of config.json.

    Raises:
      CheckpointError: the layout cannot express the architecture.
    """
    a = c.attention
    causal = _same("causal", [layer.causal for layer in c.layers])
    windows = {layer.window for layer in c.layers} - {0}
    window = _same("window", sorted(windows)) if windows else None
    if a.rope is None or a.rope.yarn is not None or a.rope.dim != a.head_dim:
        raise CheckpointError("drafter: want a plain rotary embedding of whole heads")
    if a.qk_norm_eps not in (None, c.norm_eps):
        raise CheckpointError("drafter: want one epsilon of norms")
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURES[c.kind]],
        "model_type": "qwen3",
        "hidden_size": c.d_model,
        "intermediate_size": c.d_mlp,
        "num_hidden_layers": len(c.layers),
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_theta": a.rope.theta,
        "rope_is_neox_style": True,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": False,
        "block_size": c.slots,
        "layer_types": [
            "sliding_attention" if layer.window else "full_attention"
            for layer in c.layers
        ],
        "sliding_window": window,
        "use_sliding_window": bool(windows),
        "is_causal": causal,
        "dflash_config": {
            "mask_token_id": c.mask_token,
            "target_layer_ids": [b - 1 for b in c.boundaries],
            "causal": causal,
            "sample_from_anchor": c.from_root,
        },
    }
    if c.target_width != c.d_model:
        fields["target_hidden_size"] = c.target_width
    if a.sinks:
        fields["attention_sink_bias"] = True
    if c.head_rows:
        fields["draft_vocab_size"] = c.head_rows
    if c.target:
        fields["target_model_name_or_path"] = c.target
    return fields | _heads(c)


def _heads(c: DFlashConfig) -> dict[str, Any]:
    """Returns the fields of pair scores, confidence and convolutions."""
    fields: dict[str, Any] = {}
    if c.pairs == "selector":
        fields |= {"selector_rank": c.rank, "selector_top_k": 16}
    elif c.pairs:
        fields |= {"markov_rank": c.rank, "markov_head_type": c.pairs}
    if c.confidence:
        fields["enable_confidence_head"] = True
        fields["confidence_head_with_markov"] = c.confidence_pairs
    if c.conv_taps:
        fields |= {"conv_kernel_size": c.conv_taps, "conv_group_size": c.conv_group}
    return fields


def _same(name: str, values: list[Any]) -> Any:
    """Returns the value of a property that must be the same in all layers."""
    if len(set(values)) != 1:
        raise CheckpointError(f"drafter: want the same {name} in all layers")
    return values[0]
