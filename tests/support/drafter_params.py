"""Turns weights of `drafter_reference` into block drafters of the library."""

import math

import jax.numpy as jnp
import numpy as np

from stree_jax.models import AttentionConfig, Rope
from stree_jax.models.configs.rope import Yarn
from stree_jax.models.drafters.dflash import DFlash, DFlashConfig, DFlashLayer

PAIRS = {
    "markov.before": "previous",
    "selector.before": "previous",
    "markov.after": "following",
    "selector.after": "following",
    "markov.gate": "gate",
    "markov.gate_bias": "gate_bias",
    "markov.joint": "joint",
    "markov.joint_bias": "joint_bias",
    "selector.hidden": "projection",
}


def rope_of(facts):
    yarn = None
    if facts.yarn is not None:
        own = facts.yarn
        scale = 0.1 * math.log(own.factor) + 1
        bounds = own.beta_fast, own.beta_slow
        yarn = Yarn(own.factor, own.original, *bounds, attention_factor=scale)
    return Rope(facts.theta, facts.head_dim, yarn=yarn)


def config_of(arrays, facts):
    """Returns a config with an embedding and a head of its own, which the weights of
    `drafter_reference` always include."""
    rows, d = arrays["0.q"].shape
    kv_rows, h = len(arrays["0.k"]), facts.head_dim
    pairs = {"dflash": "", "dflash2": "selector", "dspark": facts.markov}[facts.kind]
    rank = [
        arrays[name].shape[1]
        for name in PAIRS
        if name.endswith("before") and name in arrays
    ]
    convs = arrays.get("0.mlp_conv.base")
    layers = zip(facts.windows, facts.causal, strict=True)
    return DFlashConfig(
        d_model=d,
        vocab_size=len(arrays["embed"]),
        target_width=arrays["fc"].shape[1] // len(facts.boundaries),
        boundaries=facts.boundaries,
        layers=tuple(DFlashLayer(window or 0, causal) for window, causal in layers),
        attention=AttentionConfig(
            rows // h,
            kv_rows // h,
            h,
            rope=rope_of(facts),
            qk_norm_eps=facts.eps,
            sinks="0.sinks" in arrays,
        ),
        d_mlp=len(arrays["0.up"]),
        slots=facts.slots,
        mask_token=facts.mask_id,
        from_root=facts.from_anchor,
        norm_eps=facts.eps,
        pairs=pairs,
        rank=rank[0] if rank else 0,
        confidence="confidence.weight" in arrays,
        confidence_pairs="confidence.weight" in arrays
        and arrays["confidence.weight"].shape[1] > d,
        conv_taps=0 if convs is None else convs.shape[1],
        conv_group=facts.conv_group,
        own_embedding=True,
        head_rows=len(arrays["head"]),
    )


def half_split(x, head_dim):
    """Reorders the rows of heads from interleaved to half-split rotary pairs."""
    order = np.r_[0:head_dim:2, 1:head_dim:2]
    return x.reshape(-1, head_dim, *x.shape[1:])[:, order].reshape(x.shape)


def layer_params(arrays, facts, layer):
    own = {
        name.partition(".")[2]: x
        for name, x in arrays.items()
        if name.startswith(f"{layer}.")
    }
    if facts.interleaved:
        for name in ("q", "k", "q_norm", "k_norm"):
            own[name] = half_split(own[name], facts.head_dim)
    params = {
        "norm": own["input_norm"],
        "mlp_norm": own["mlp_norm"],
        "q": own["q"],
        "kv": np.concatenate([own["k"], own["v"]]),
        "out": own["o"],
        "q_norm": own["q_norm"],
        "k_norm": own["k_norm"],
        "gate_up": np.concatenate([own["gate"], own["up"]]),
        "down": own["down"],
    }
    for name in ("attention_conv", "mlp_conv"):
        if f"{name}.base" in own:
            params[f"{name}_base"] = own[f"{name}.base"]
            params[f"{name}_projection"] = own[f"{name}.kernels"]
    return params | ({"sinks": own["sinks"]} if "sinks" in own else {})


def dflash_of(arrays, facts):
    """Returns a float32 `DFlash` with the weights of a block drafter."""
    params = {
        "fc": arrays["fc"],
        "context_norm": arrays["hidden_norm"],
        "norm": arrays["norm"],
        "embedding": arrays["embed"],
        "head": arrays["head"],
    }
    for layer in range(facts.layers):
        params[f"layers_{layer}"] = layer_params(arrays, facts, layer)
    pairs = {ours: arrays[name] for name, ours in PAIRS.items() if name in arrays}
    if pairs:
        params["pairs"] = pairs
    if "confidence.weight" in arrays:
        names = "weight", "bias"
        params["confidence"] = {name: arrays[f"confidence.{name}"] for name in names}
    ids = arrays.get("head_ids")
    return DFlash(
        _float32(params),
        config_of(arrays, facts),
        None if ids is None else jnp.asarray(ids, jnp.int32),
    )


def _float32(tree):
    if isinstance(tree, dict):
        return {name: _float32(value) for name, value in tree.items()}
    return jnp.asarray(tree, jnp.float32)
