"""The layout of the authors of EAGLE-3, as SpecForge and vLLM use it too: a flat config
that lists the boundaries, and a single layer that is named `midlayer`."""

from typing import Any

import jax
import numpy as np

from stree_jax.convert.base.errors import CheckpointError
from stree_jax.convert.drafters.eagle import TAPS, tensor_names
from stree_jax.convert.drafters.names import IDS, USED
from stree_jax.convert.drafters.plain_names import LAYER
from stree_jax.models.configs.attention import head_runs
from stree_jax.models.drafters.eagle import FIRST, Eagle, EagleConfig
from stree_jax.models.layers.params import by_path


def eagle_fields(c: EagleConfig) -> dict[str, Any]:
    """Returns the fields of config.json.

    Raises:
      CheckpointError: the layout cannot express the architecture.
    """
    if c.kind != "EAGLE-3":
        raise CheckpointError(f"drafter: want EAGLE-3, as {c.kind} is not written")
    if c.hands_down_normed and c.input_norm != "each":
        # Readers ignore `norm_output` then, see `convert.drafters.eagle`.
        raise CheckpointError(
            "drafter: hands down normed vectors; want a norm of each stream too"
        )
    a, mlp = c.mixers[FIRST], c.mixers["mlp"]
    if a.rope is None or a.rope.yarn is not None or a.rope.dim != a.head_dim:
        raise CheckpointError("drafter: want a plain rotary embedding of whole heads")
    if a.qk_norm_eps not in (None, c.norm_eps):
        raise CheckpointError("drafter: want one epsilon of norms")
    windows = [c.mixers[block.mixers[0]].window for block in c.layers[::2]]
    if len(set(windows) - {0}) > 1:
        raise CheckpointError("drafter: want the same window in all layers")
    kinds = {True: "sliding_attention", False: "full_attention"}
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": c.d_model,
        "intermediate_size": mlp.d_hidden,
        "num_hidden_layers": len(windows),
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "attention_bias": a.qkv_bias,
        "mlp_bias": mlp.bias,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": a.rope.theta,
        "layer_types": [kinds[window > 0] for window in windows],
        "sliding_window": max(windows) or None,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.tie_embeddings,
        "use_aux_hidden_state": bool(c.boundaries),
        "norm_before_residual": c.norm_residual,
        "norm_before_fc": c.input_norm == "whole",
        "fc_norm": c.input_norm == "each",
        "norm_output": c.hands_down_normed,
    }
    if c.boundaries:
        fields[TAPS] = list(c.boundaries)
    if c.target_width != c.d_model:
        fields["target_hidden_size"] = c.target_width
    if c.own_head:
        fields["draft_vocab_size"] = c.head_rows or c.vocab_size
    if c.target:
        fields["target_model_name_or_path"] = c.target
    return fields


def eagle_tensors(drafter: Eagle, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Returns the tensors of an EAGLE drafter by their public names, all in one dtype,
    as other programs expect, except the integers `d2t` and flags `t2d`."""
    c, flat = drafter.config, by_path(drafter.params)
    found: dict[str, np.ndarray] = {}
    for path, names in tensor_names(c).items():
        whole = np.asarray(jax.device_get(flat[path]))
        cuts: Any = len(names)
        if len(names) == 3:  # queries, keys and values, whose sizes differ
            cuts = np.cumsum([run.width for run in head_runs(c.mixers[path[1]])])[:2]
        for name, part in zip(names, np.split(whole, cuts), strict=True):
            found[_public(name, c)] = np.ascontiguousarray(part, dtype)
    if c.own_head and c.head_rows:
        ids = np.asarray(drafter.params["head_ids"], np.int64)
        used = np.zeros(c.vocab_size, bool)
        used[ids] = True
        found |= {IDS: ids - np.arange(len(ids)), USED: used}
    return found


def _public(name: str, c: EagleConfig) -> str:
    """Returns the authors' name of a tensor."""
    first = LAYER.format(i=0)
    if len(c.layers) > 2 or not name.startswith(first):
        return name
    return "midlayer." + name.removeprefix(first)
