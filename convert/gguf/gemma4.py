"""Gemma 4 files of llama.cpp (`gemma4`): names and metadata keys.

The divisors of the far layers' frequencies are 1 for pairs that rotate and very large
for others. Layers without values of their own have no tensor of v.

Sources: llama.cpp's `conversion/gemma.py` and its `models/gemma4.cpp`.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from stree_jax.convert.families import gemma4
from stree_jax.convert.families.gemma3 import FULL
from stree_jax.convert.families.tensor_map import Names, Part, Path, Row, norm_rows
from stree_jax.convert.families.windows import SLIDES
from stree_jax.convert.gguf.keys import (
    BLOCKS,
    FEED_FORWARD,
    HEADS,
    KV_HEADS,
    SIZES,
    VALUE_LENGTH,
    VOCAB_SIZE,
    WINDOW,
    layer_count,
    model_options,
    per_layer,
    values_of,
)
from stree_jax.convert.gguf.names import (
    EMBEDDING,
    HALVES,
    attention_rows,
    linear_rows,
    mlp_rows,
    moe_rows,
)
from stree_jax.convert.gguf.rotary import ROPE_FACTORS, ROTATED, THETA
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import (
    AttentionConfig,
    KVReaderConfig,
    MLPMoEConfig,
    ModelConfig,
    PerLayerConfig,
)
from stree_jax.models.stack.param_table import PER_LAYER

PATTERN, SHARED = "attention.sliding_window_pattern", "attention.shared_kv_layers"
INPUT, CAP = "embedding_length_per_layer_input", "final_logit_softcapping"
LENGTH, NEAR_THETA, EXPERTS = "attention.key_length", "rope.freq_base_swa", "expert_"
# Kinds of layers besides those of attention without a window, for `Architecture`.
LAYERS = " ".join(
    f"both:{name}" for name in (*gemma4.READERS, *gemma4.READERS.values())
)
LAYERS += f" after:{PER_LAYER}+scaled" + "".join(
    f" {kind} {kind}+scaled" for kind in ("both:mlp", "both:mlp_wide", "after:mlp_moe")
)
STILL = 1e30  # divisor of the frequencies of pairs that do not rotate
KEYS = (WINDOW, CAP, f"{EXPERTS}count")  # keys of `keys.NEUTRAL` that are read


def qkv_rows(ours: Path, block: str, c: AttentionConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of attention, which may lack v."""
    for row in attention_rows(ours, block, c):
        if c.k_is_v and row.how == "concat":
            row = replace(row, sources=row.sources[:2], sizes=row.sizes[:2])
        yield row


def reader_rows(ours: Path, block: str, c: KVReaderConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of attention with another layer's keys."""
    yield from linear_rows(ours, block, {"q": "attn_q", "out": "attn_output"})
    yield Row((*ours, "q_norm"), (f"{block}attn_q_norm.weight",))


def per_layer_rows(ours: Path, block: str, c: PerLayerConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a layer's mixer of per-layer inputs."""
    yield from linear_rows(ours, block, {"gate": "inp_gate", "out": "proj"})


def mlp_moe_rows(
    ours: Path, block: str, c: MLPMoEConfig, fused: bool = True
) -> Iterator[Row]:
    """Yields a `Row` for each parameter of an MLP and experts side by side; `fused` is
    True if gate and up of the experts are one tensor."""
    yield from mlp_rows((*ours, "mlp"), block, c.mlp)
    yield from moe_rows(ours, block, c.moe, fused)
    yield Row((*ours, "router_scale"), (f"{block}ffn_gate_inp.scale",))
    yield Row((*ours, "expert_scale"), (f"{block}ffn_down_exps.scale",))
    for norm, tensor in {
        "mlp_norm": "ffn_norm",
        "mlp_norm_after": "post_ffw_norm_1",
        "moe_norm": "pre_ffw_norm_2",
        "moe_norm_after": "post_ffw_norm_2",
    }.items():
        yield from norm_rows((*ours, norm), block + tensor)


def input_rows(names: Names, config: ModelConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of the per-layer inputs."""
    yield Row((PER_LAYER, "embedding"), ("per_layer_token_embd.weight",))
    yield Row((PER_LAYER, "projection"), ("per_layer_model_proj.weight",))
    yield from norm_rows((PER_LAYER, "norm"), "per_layer_proj_norm")


NAMES = replace(
    HALVES.with_parts(
        **dict.fromkeys(gemma4.READERS, Part("", qkv_rows)),
        **dict.fromkeys(gemma4.READERS.values(), Part("", reader_rows)),
        mlp_wide=Part("", mlp_rows),
        mlp_moe=Part("", mlp_moe_rows),
        per_layer=Part("", per_layer_rows),
    ),
    norm_after_mixer="post_attention_norm",
    norm_after_mlp="post_ffw_norm",
    norms={PER_LAYER: "post_norm"},
    scalar="layer_output_scale.weight",
    shared_rows=input_rows,
    unread=partial(gemma4.unread_keys, parts=("attn_k", "attn_v", "attn_k_norm")),
)


def names(tensors: Collection[str]) -> Names:
    """Returns the names that a file uses."""
    if "blk.0.ffn_gate_exps.weight" not in tensors:
        return NAMES
    apart = Part("", partial(mlp_moe_rows, fused=False))
    return NAMES.with_parts(mlp_moe=apart)


def parse(fields: ConfigFields) -> ModelConfig:
    """Parses the metadata as the config of a Hugging Face directory."""
    model, count = model_options(fields), layer_count(fields)
    near = fields.get(PATTERN)
    if not isinstance(near, np.ndarray) or near.shape != (count,):
        raise fields.wants(PATTERN, f"a list of {count} flags", near)
    types = [SLIDES if flag else FULL for flag in near.tolist()]
    if types[-1] != FULL:
        raise fields.error(PATTERN, "a window on the last layer is not supported")
    shared = fields.size(SHARED, 0, low=0, top=count - 1)
    kv = dict(zip(types, per_layer(fields, KV_HEADS, HEADS.value(fields)), strict=True))
    far = types.index(FULL)
    values: dict[str, Any] = {
        "model_type": gemma4.FORMAT,
        "hidden_size": model["d_model"],
        "rms_norm_eps": model["norm_eps"],
        "tie_word_embeddings": model["tie_embeddings"],
        "num_hidden_layers": count,
        "layer_types": types,
        "num_attention_heads": HEADS.value(fields),
        "num_key_value_heads": kv.get(SLIDES, kv[FULL]),
        gemma4.FAR_KV: kv[FULL],
        gemma4.K_IS_V: f"blk.{far}.attn_v.weight" not in fields.tensors,
        "head_dim": _head_dim(fields, "_swa"),
        gemma4.FAR_DIM: _head_dim(fields),
        gemma4.SHARED: shared,
        **_widths(fields, count - shared),
        gemma4.INPUT: fields.size(INPUT, 0, low=0),
        "sliding_window": fields.size(WINDOW),
        "final_logit_softcapping": fields.number(CAP, 0.0) or None,
        "rope_parameters": {
            SLIDES: {"rope_type": "default", "rope_theta": fields.positive(NEAR_THETA)},
            FULL: _far_rope(fields),
        },
    }
    if fields.size(f"{EXPERTS}count", 0, low=0):
        values |= {
            gemma4.EXPERTS: True,
            "num_experts": fields.size(f"{EXPERTS}count"),
            "top_k_experts": fields.size(f"{EXPERTS}used_count"),
            "moe_intermediate_size": fields.size(f"{EXPERTS}feed_forward_length"),
        }
    table = fields.tensors[f"{EMBEDDING}.weight"]
    tensors = {f"{gemma4.NAMES.embedding}.weight": table}
    return gemma4.parse(ConfigFields(fields.file, values, tensors=tensors))


def write(config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata: the inverse of `parse`, from the config of a Hugging Face
    directory."""
    found = gemma4.export(config)
    types, width = found["layer_types"], found["intermediate_size"]
    shared, ropes = found[gemma4.SHARED], found["rope_parameters"]
    kv = {SLIDES: found["num_key_value_heads"], FULL: found[gemma4.FAR_KV]}
    last = 2 * width if found[gemma4.WIDE] else width
    widths = [width] * (len(types) - shared) + [last] * shared
    values = {
        VOCAB_SIZE: config.vocab_size,
        BLOCKS: len(types),
        **values_of(SIZES, config),
        HEADS.name: found["num_attention_heads"],
        KV_HEADS: np.array([kv[kind] for kind in types], np.int32),
        FEED_FORWARD: np.array(widths, np.int32),
        THETA: ropes[FULL]["rope_theta"],
        NEAR_THETA: ropes.get(SLIDES, ropes[FULL])["rope_theta"],
        WINDOW: found["sliding_window"],
        PATTERN: np.array([kind == SLIDES for kind in types]),
        SHARED: shared,
        INPUT: found[gemma4.INPUT],
    }
    for name in (LENGTH, VALUE_LENGTH, ROTATED):
        values |= {name: found[gemma4.FAR_DIM], f"{name}_swa": found["head_dim"]}
    if config.logits_cap:
        values[CAP] = config.logits_cap
    if found[gemma4.EXPERTS]:
        names = ("num_experts", "top_k_experts", "moe_intermediate_size")
        keys = (
            f"{EXPERTS}{key}" for key in ("count", "used_count", "feed_forward_length")
        )
        values |= dict(zip(keys, (found[name] for name in names), strict=True))
    share = ropes[FULL].get("partial_rotary_factor", 1.0)
    pairs = found[gemma4.FAR_DIM] // 2
    turning = int(share * pairs)
    if turning < pairs:
        factors = np.where(np.arange(pairs) < turning, 1.0, STILL)
        values[ROPE_FACTORS] = factors.astype(np.float32)
    return values


def _head_dim(fields: ConfigFields, ending: str = "") -> int:
    """Reads the size of a head, of layers with a window if `ending` is "_swa"."""
    size = fields.size(LENGTH + ending)
    for name in (VALUE_LENGTH + ending, ROTATED + ending):
        if (other := fields.size(name, size)) != size:
            raise fields.error(name, f"{other} is not {LENGTH}{ending} {size}")
    return size


def _widths(fields: ConfigFields, own: int) -> dict[str, Any]:
    """Reads the widths of the MLPs; those of layers without keys of their own, from
    number `own` on, may be twice as wide."""
    widths = per_layer(fields, FEED_FORWARD, 0)
    wide = widths[-1] == 2 * widths[0] and own < len(widths)
    last = 2 * widths[0] if wide else widths[0]
    if widths != (widths[0],) * own + (last,) * (len(widths) - own):
        raise fields.error(FEED_FORWARD, "widths of other layers are not supported")
    return {"intermediate_size": widths[0], gemma4.WIDE: wide}


def _far_rope(fields: ConfigFields) -> dict[str, Any]:
    """Reads the rotary embedding of layers without a window."""
    rope = {"rope_type": "proportional", "rope_theta": fields.positive(THETA)}
    factors = fields.get(ROPE_FACTORS, None)
    if factors is None:
        return rope
    turning = int((factors == 1).sum())
    still = factors[turning:]
    if not turning or (factors[:turning] != 1).any() or (still < 1e20).any():
        raise fields.error(ROPE_FACTORS, "want divisors that are 1, then very large")
    return {**rope, "partial_rotary_factor": turning / len(factors)}
