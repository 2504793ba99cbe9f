"""LaraMiniForCausalLM (Lara 4 Mini): Gated DeltaNet, attention with and without a
window, and experts with a shared expert.

The mixers are those of `qwen3_next`, with other tensors: attention has no gate and
rotates only in layers with a window, norms store their scale itself, and the shared
expert has no gate. Published files have one tensor for all input projections of Gated
DeltaNet; transformers also reads the names of Qwen3.5 with separate ones.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import qwen3_5, qwen3_next, read
from stree_jax.convert.families.family import Family, alternates
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import (
    Names,
    Part,
    Path,
    Row,
    attention_rows,
)
from stree_jax.convert.families.windows import NEAR, SLIDES, WINDOW, effective
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig, MoEConfig
from stree_jax.models.configs.delta import DeltaConfig
from stree_jax.models.stack.config import blocks, named

FORMAT = "lara_mini"
MODELS = "Lara 4 Mini: Gated DeltaNet, attention with and without a window, experts"
KINDS: dict[str, str] = {**qwen3_next.KINDS, SLIDES: NEAR}
TYPES = {ours: theirs for theirs, ours in KINDS.items()}
USUAL = ("delta", NEAR, "delta", "attention", NEAR)  # repeated, without `layer_types`
LONGEST = 131072  # default of `max_position_embeddings`
SEPARATE = ".linear_attn.in_proj_qkv.weight"


def delta_rows(ours: Path, theirs: str, c: DeltaConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of Gated DeltaNet. `in_proj` has the rows of q,
    k, v, z, b and a in this order."""
    into, gates, source = c.d_qkv + c.d_inner, 2 * c.value_heads, f"{theirs}.in_proj"
    for param, start, count in (("in_proj", 0, into), ("gates", into, gates)):
        sizes = (start, count, into + gates)
        yield Row((*ours, param), (f"{source}.weight",), "rows", sizes)
    for row in qwen3_next.inner_delta_rows(ours, theirs):
        names = (name.replace(".norm.", ".out_norm.") for name in row.sources)
        yield replace(row, sources=tuple(names))


def spelled(names: Names, tensors: Collection[str]) -> Names:
    """Returns the names that a file uses; see `Names.spelling`."""
    if not any(name.endswith(SEPARATE) for name in tensors):
        return names
    return names.with_parts(delta=Part("linear_attn", qwen3_5.delta_rows))


NAMES = replace(
    qwen3_next.NAMES.with_parts(
        delta=Part("linear_attn", delta_rows),
        moe=qwen3_next.FUSED_EXPERTS,
        **dict.fromkeys(("attention", NEAR), Part("self_attn", attention_rows)),
    ),
    norm_how="copy",
    mtp_rows=None,
    spelling=spelled,
)

MODEL = hf.model_table("rms_norm_eps", 1e-6, 1024, True)
ATTENTION = qwen3_next.attention_table(4, 128)
VALUE_HEADS = Field("linear_num_value_heads", "value_heads", read.size, 16)
DELTA = (
    Field("linear_num_key_heads", "key_heads", read.divisor(VALUE_HEADS), 8),
    VALUE_HEADS,
    *qwen3_next.DELTA[2:],
)
MOE = (
    *qwen3_next.moe_table(128, 4),
    Field("norm_topk_prob", "normalize", read.flag, True),
)
SHARED = qwen3_next.SHARED


def parse(fields: ConfigFields) -> ModelConfig:
    hf.check_silu(fields)
    model, kinds = hf.read_model(MODEL, fields, NAMES), _mixers(fields)
    eps = model["norm_eps"]
    c = AttentionConfig(**read_fields(ATTENTION, fields), qk_norm_eps=eps)
    rope = hf.rope(fields, c.head_dim)
    window = effective(fields, fields.size(WINDOW, 512), LONGEST)
    delta = DeltaConfig(**read_fields(DELTA, fields), norm_eps=eps)
    mixers: dict[str, Any] = {
        "delta": delta,
        "attention": c,
        NEAR: replace(c, rope=rope, window=window),
    }
    shared = MLPConfig(**read_fields(SHARED, fields))
    moe = MoEConfig(**read_fields(MOE, fields), shared=shared)
    return ModelConfig(
        **model,
        layers=blocks(hf.with_mlps(kinds, "moe")),
        mixers=named(moe=moe, **{kind: mixers[kind] for kind in dict.fromkeys(kinds)}),
    )


def _mixers(fields: ConfigFields) -> hf.Layers:
    count = fields.size("num_hidden_layers", 34)
    if fields.get("layer_types", None) is not None:
        return hf.counted_layers(fields, "layer_types", KINDS, count)
    return tuple(USUAL[i % len(USUAL)] for i in range(count))


def export(config: ModelConfig) -> dict[str, Any]:
    kinds, moe, eps = config.kinds[::2], config.mixers["moe"], config.norm_eps
    delta, far, near = (config.mixers.get(n) for n in ("delta", "attention", NEAR))
    written = partial(write_fields, FORMAT)
    require(
        FORMAT,
        {
            "norm_eps": delta is None or delta.norm_eps == eps,
            "shared expert": moe.shared is not None,
            "windows": not getattr(far, "window", 0) and getattr(near, "window", 1) > 0,
            "rotary without a window": getattr(far, "rope", None) is None,
            "lack of rotary": near is None or near.rope is not None,
        },
    )
    values: dict[str, Any] = {
        "architectures": ["LaraMiniForCausalLM"],
        **hf.write_model(FORMAT, MODEL, config),
        "num_hidden_layers": len(kinds),
        "layer_types": [TYPES[kind] for kind in kinds],
        "hidden_act": "silu",
        **written(SHARED, moe.shared),
        **written(MOE, moe, ("shared",)),
    }
    if delta is not None:
        values |= written(DELTA, delta, ("norm_eps",))
    elsewhere = ("rope", "window", "qk_norm_eps")
    both = [c for c in (far, near) if c is not None]
    sizes = [written(ATTENTION, c, elsewhere) for c in both]
    require(
        FORMAT,
        {
            "attention of two sizes": all(size == sizes[0] for size in sizes),
            "attention norms of q and k": all(c.qk_norm_eps == eps for c in both),
        },
    )
    for size in sizes[:1]:
        values |= size
    if near is not None:
        require(FORMAT, {"partial rotary": near.rope.dim == near.head_dim})
        scaling = hf.scaling_fields(FORMAT, near.rope) or {"rope_type": "default"}
        values["rope_parameters"] = {**scaling, "rope_theta": near.rope.theta}
        values[WINDOW] = near.window
    return values


def expresses(config: ModelConfig) -> bool:
    fits = alternates(config, TYPES, {"moe"}) and "delta" in config.kinds
    return fits and not config.mixers["moe"].shared_gate


FAMILY = Family(FORMAT, MODELS, NAMES, parse, export, expresses)
