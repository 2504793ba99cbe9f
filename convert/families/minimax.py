"""MiniMaxForCausalLM (MiniMax-Text-01, MiniMax-M1): lightning attention and attention,
each followed by experts.

The residual stream itself is normed before every layer, and both terms of a residual
sum have factors. The slopes of lightning attention are not read: they follow from the
number of the layer. transformers writes them, and tables of their powers, as buffers.

Published configs have another `model_type` and other field names than transformers. In
the published code only a part of each head rotates (`rotary_dim`). transformers 5.24
ignores that field and rotates whole heads.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families import read
from stree_jax.convert.families.family import RECOMPUTED, Family, alternates
from stree_jax.convert.families.kimi_linear import moe_rows
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import (
    Groups,
    Names,
    Part,
    Path,
    Row,
    attention_rows,
    plain,
)
from stree_jax.convert.families.windows import WINDOW, effective, window_of
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import (
    AttentionConfig,
    Block,
    LightningConfig,
    ModelConfig,
    MoEConfig,
    ResidualScales,
)
from stree_jax.models.configs.lightning import alibi_slopes
from stree_jax.models.stack.config import Norms, named

FORMAT = "minimax"
MODELS = "MiniMax-01 and MiniMax-M1: lightning attention and attention, with experts"
KINDS: dict[str, str] = {"linear_attention": "lightning", "full_attention": "attention"}
TYPES = {ours: theirs for theirs, ours in KINDS.items()}
NUMBERED = ("linear_attention", "full_attention")  # types by number in published files
BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
THETA = 1e6  # default base of the rotary embedding
LONGEST = 131072  # default context length
NORM_EPS = 1e-6  # of the norm of lightning attention; not in the config


def lightning_rows(ours: Path, theirs: str, c: LightningConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of lightning attention. `qkv_proj` has q, k and
    v of the first head, then of the second head, and so on."""
    into = tuple(f"{theirs}.{name}.weight" for name in ("qkv_proj", "output_gate"))
    sizes = (3 * c.d_inner, c.d_inner)
    heads = Groups(c.num_heads, (c.head_dim,) * 3)
    groups = (heads, plain(c.d_inner))
    yield Row((*ours, "in_proj"), into, "concat", sizes, groups=groups)
    for name in ("norm", "out_proj"):
        yield Row((*ours, name), (f"{theirs}.{name}.weight",))


def slope_rows(
    config: ModelConfig, ours: Path, number: int, block: Block
) -> Iterator[Row]:
    """Yields the `Row` of the decay slopes, if a layer has lightning attention. The
    slopes are computed from the number of the layer; later layers have smaller ones."""
    c = config.mixers.get("lightning")
    if c is not None and "lightning" in block.mixers:
        last = len(config.layers) // 2 - 1
        factor = 1 - number / (last + 1e-5) + 1e-5
        slopes = tuple(slope * factor for slope in alibi_slopes(c.num_heads))
        yield Row((*ours, "lightning", "slope"), (), "computed", numbers=slopes)


NAMES = Names(
    parts={
        "lightning": Part("self_attn", lightning_rows),
        "attention": Part("self_attn", attention_rows),
        "moe": Part("block_sparse_moe", moe_rows),
    },
    computed=slope_rows,
    ignored=tuple(f".self_attn.{name}" for name in BUFFERS),
)

MODEL = hf.model_table("rms_norm_eps", 1e-5)
HEADS = Field("num_attention_heads", "num_heads", read.size, 32)
LIGHTNING = (HEADS, hf.HEAD_DIM)
ATTENTION = (
    HEADS,
    Field("num_key_value_heads", "num_kv_heads", read.kv_heads(HEADS), 8),
    hf.HEAD_DIM,
)
MOE = (
    Field("num_local_experts", "num_experts", read.size, 8),
    Field("num_experts_per_tok", "top_k", read.size, 2),
    Field("intermediate_size", "d_hidden", read.size, 14336),
)
# Beginnings of the names of the fields with residual scales, by the mixer of a layer.
SCALES = {"lightning": "linear_attn", "attention": "full_attn", "moe": "mlp"}
PUBLISHED = {"linear_attn": "linear_attention", "full_attn": "full_attention"}


def scale_table(mixer: str) -> tuple[Field, ...]:
    prefix = SCALES[mixer]
    return (
        Field(f"{prefix}_alpha_factor", "stream", read.finite, 1.0),
        Field(f"{prefix}_beta_factor", "added", read.finite, 1.0),
    )


def renamed(fields: ConfigFields) -> ConfigFields:
    """Returns the fields with the names of transformers, which take precedence, in
    place of those of published files."""
    values = dict(fields.values)
    for prefix in SCALES.values():
        for letter in ("alpha", "beta"):
            old = f"layernorm_{PUBLISHED.get(prefix, prefix)}_{letter}"
            if old in values:
                values.setdefault(f"{prefix}_{letter}_factor", values[old])
    values.setdefault("rope_theta", THETA)
    return replace(fields, values=values)


def mixer_kinds(fields: ConfigFields) -> hf.Layers:
    """Reads which layers have lightning attention and which have attention."""
    count = fields.size("num_hidden_layers", 32)
    name = "attn_type_list"
    plan = fields.get(name, None)
    if fields.get("layer_types", None) is not None or plan is None:
        usual = [NUMBERED[1 - i % 2] for i in range(count)]
        return hf.counted_layers(fields, "layer_types", KINDS, count, usual)
    if not isinstance(plan, list) or len(plan) != count:
        raise fields.error(name, f"want a list of {count} layer types")
    if any(type(kind) is not int or kind not in (0, 1) for kind in plan):
        raise fields.wants(name, "0 or 1 for every layer", plan)
    return hf.named_layers(fields, name, KINDS, [NUMBERED[kind] for kind in plan])


def norms_stream(fields: ConfigFields) -> bool:
    """True if the residual stream itself is normed. transformers always does so."""
    if fields.get("model_type") == FORMAT:
        return fields.choice("postnorm", True, (True,))
    return fields.flag("postnorm", False)


def check_published(fields: ConfigFields) -> None:
    """Raises CheckpointError for options of the published code that are not
    supported."""
    shared = fields.get("shared_intermediate_size", 0)
    if any(shared if isinstance(shared, list) else [shared]):
        raise fields.error("shared_intermediate_size", "a shared MLP is not supported")
    heads = HEADS.value(fields)
    if fields.get("model_type") != FORMAT and heads & (heads - 1):
        problem = f"{heads}, want a power of 2: other slopes are not supported"
        raise fields.error(HEADS.name, problem)


def parse(fields: ConfigFields) -> ModelConfig:
    fields = renamed(fields)
    hf.check_silu(fields)
    check_published(fields)
    kinds = mixer_kinds(fields)
    mixers: dict[str, Any] = {"moe": MoEConfig(**read_fields(MOE, fields))}
    if "lightning" in kinds:
        lightning = LightningConfig(**read_fields(LIGHTNING, fields), norm_eps=NORM_EPS)
        mixers["lightning"] = lightning
    if "attention" in kinds:
        mixers["attention"] = _attention(fields)
    norms: Norms = "stream" if norms_stream(fields) else "before"
    each = [name for kind in kinds for name in (kind, "moe")]
    scales = {
        name: ResidualScales(**read_fields(scale_table(name), fields))
        for name in mixers
    }
    return ModelConfig(
        **hf.read_model(MODEL, fields, NAMES),
        layers=tuple(Block((name,), norms=norms) for name in each),
        mixers=named(**mixers),
        residual_scales=scales,
    )


def _attention(fields: ConfigFields) -> AttentionConfig:
    c = AttentionConfig(**read_fields(ATTENTION, fields))
    width = fields.size("rotary_dim", c.head_dim, top=c.head_dim)
    window = effective(fields, window_of(fields, None), LONGEST)
    return replace(c, rope=hf.rope(fields, width), window=window)


def export(config: ModelConfig) -> dict[str, Any]:
    kinds = [block.mixers[0] for block in config.layers[::2]]
    moe, lightning, c = (config.mixers.get(n) for n in ("moe", *TYPES))
    values: dict[str, Any] = {
        "architectures": ["MiniMaxForCausalLM"],
        **write_fields(FORMAT, MODEL, config, ("layers", *hf.PARTS, "residual_scales")),
        "num_hidden_layers": len(kinds),
        "layer_types": [TYPES[kind] for kind in kinds],
        "hidden_act": "silu",
        **write_fields(FORMAT, MOE, moe),
    }
    for name in config.mixers:
        scales = config.residual_scales.get(name, ResidualScales())
        values |= write_fields(FORMAT, scale_table(name), scales)
    if lightning is not None:
        eps = lightning.norm_eps == NORM_EPS
        require(FORMAT, {"norm epsilon of lightning attention": eps})
        values |= write_fields(FORMAT, LIGHTNING, lightning, ("norm_eps",))
    if c is not None:
        alike = lightning is None or all(
            getattr(c, name) == getattr(lightning, name)
            for name in ("num_heads", "head_dim")
        )
        rotates = c.rope is not None
        require(FORMAT, {"different heads": alike, "lack of rotary": rotates})
        values |= write_fields(FORMAT, ATTENTION, c, ("rope", "window"))
        values |= hf.rope_fields(FORMAT, c) | {WINDOW: c.window or None}
    return values


def expresses(config: ModelConfig) -> bool:
    mixers = {f"stream:{kind}" for kind in TYPES}
    return alternates(config, mixers, {"stream:moe"})


FAMILY = Family(
    FORMAT,
    MODELS,
    NAMES,
    parse,
    export,
    expresses,
    exported="yes, if whole heads rotate",
)
TEXT_01_FAMILY = FAMILY.also(
    "minimax_text_01", "MiniMax-Text-01 as published", compared=RECOMPUTED
)
M1_FAMILY = FAMILY.also("minimax_m1", "MiniMax-M1 as published", compared=RECOMPUTED)
