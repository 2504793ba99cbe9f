"""GraniteSWAForCausalLM and GraniteMoeSWAForCausalLM: Granite with a sliding window on
most layers and with attention sinks, dense or with experts.

Each layer may have another base of its rotary embedding, or none (`layer_rope_theta`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from stree_jax.convert.families import granite, granite3, llama, read
from stree_jax.convert.families import huggingface as hf
from stree_jax.convert.families.family import Family
from stree_jax.convert.families.gpt_oss import sink_rows
from stree_jax.convert.families.table import Field, read_fields, require, write_fields
from stree_jax.convert.families.tensor_map import Part, Path, Row
from stree_jax.convert.families.windows import (
    SLIDES,
    WINDOW,
    attention_mixers,
    effective,
    has_usual_names,
    layer_attention,
    needed_window,
    sliding_layers,
)
from stree_jax.convert.tensors.fields import ConfigFields
from stree_jax.models import AttentionConfig, MLPConfig, ModelConfig, MoEConfig
from stree_jax.models.stack.config import blocks, named

FORMAT, EXPERTS = "granite_swa", "granitemoe_swa"
MODELS = "Granite with windows and attention sinks"
THETAS = "layer_rope_theta"  # base of each layer's rotary embedding; 0 if it has none
SHARED, LAYERS = "shared_intermediate_size", "num_hidden_layers"
Tables = tuple[Sequence[Field], Sequence[Field]]  # of the model and of attention


def moe_rows(ours: Path, prefix: str, c: MoEConfig) -> Iterator[Row]:
    """Yields a `Row` for each parameter of a layer with experts. Each projection is one
    tensor for all experts."""
    theirs = f"{prefix}block_sparse_moe"
    if c.shared is not None:
        shared = f"{prefix}shared_mlp"
        yield from granite.mlp_rows((*ours, "shared"), shared, c.shared)
    yield Row((*ours, "router"), (f"{theirs}.router.weight",))
    yield Row((*ours, "into"), (f"{theirs}.experts.gate_up_proj",))
    yield Row((*ours, "down"), (f"{theirs}.experts.down_proj",))


NAMES = llama.NAMES.with_parts(
    attention=Part("self_attn", sink_rows), moe=Part("", moe_rows)
)


MODEL = (*hf.model_table("rms_norm_eps", 1e-5, 2560, True), *granite.MULTIPLIERS)
HEADS = Field("num_attention_heads", "num_heads", read.size, 20)
KV_HEADS = Field("num_key_value_heads", "num_kv_heads", read.kv_heads(HEADS), 4)
ATTENTION = (HEADS, KV_HEADS, hf.head_dim(HEADS, 2560), *hf.BIASES, granite.SCALE)
MLP = hf.gated_mlp_table(8192, "mlp")
DENSE = MODEL, ATTENTION
SPARSE = granite.MODEL, granite3.ATTENTION


def parse(fields: ConfigFields) -> ModelConfig:
    mlp = MLPConfig(**read_fields(MLP, fields))
    return _parse(fields, DENSE, fields.size(LAYERS, 24), 8192, mlp=mlp)


def parse_experts(fields: ConfigFields) -> ModelConfig:
    width = fields.size(SHARED, 0, low=0)
    shared = MLPConfig(width) if width else None
    moe = MoEConfig(**read_fields(granite.MOE, fields), shared=shared)
    return _parse(fields, SPARSE, fields.size(LAYERS, 32), 2048, moe=moe)


def _parse(
    fields: ConfigFields, tables: Tables, count: int, longest: int, **second: Any
) -> ModelConfig:
    """Reads a model of these families.

    Args:
      fields: the fields of the config file.
      tables: the family's tables of the model and of attention.
      count: number of layers.
      longest: the class's default of `max_position_embeddings`.
      **second: what follows the attention of every layer, by its name.
    """
    hf.check_silu(fields)
    slides = [i % 4 > 0 for i in range(count)]
    window = needed_window(fields, 128)
    if fields.get("layer_types", None) is not None:
        slides = sliding_layers(fields, window, count)
    size = effective(fields, window, longest)
    c = AttentionConfig(**read_fields(tables[1], fields), sinks=True)
    rope = hf.rope(fields, c.head_dim)
    each = [
        replace(
            c,
            rope=replace(rope, theta=theta) if theta else None,
            window=size if near else 0,
        )
        for theta, near in zip(_thetas(fields, rope.theta, count), slides, strict=True)
    ]
    kinds, mixers = attention_mixers(each)
    return ModelConfig(
        **hf.read_model(tables[0], fields, NAMES),
        layers=blocks(hf.with_mlps(kinds, *second)),
        mixers=named(**mixers, **second),
    )


def _thetas(fields: ConfigFields, theta: float, count: int) -> list[float]:
    """Reads the base of each layer's rotary embedding, 0 for layers without one."""
    listed = fields.get(THETAS, None)
    if listed is None:
        return [theta] * count
    if not isinstance(listed, list) or len(listed) != count:
        raise fields.wants(THETAS, f"a list of {count} numbers", listed)
    each = [replace(fields, values={THETAS: x}).finite(THETAS) for x in listed]
    if any(x != 0 and x <= 1 for x in each):
        raise fields.wants(THETAS, "0 or numbers above 1", listed)
    return each


def export(config: ModelConfig) -> dict[str, Any]:
    values = _export(FORMAT, "GraniteSWAForCausalLM", DENSE, config)
    return values | write_fields(FORMAT, MLP, config.mixers["mlp"])


def export_experts(config: ModelConfig) -> dict[str, Any]:
    moe = config.mixers["moe"]
    shared = moe.shared or MLPConfig(0)
    require(EXPERTS, {"shared MLP": replace(shared, d_hidden=0) == MLPConfig(0)})
    return {
        **_export(EXPERTS, "GraniteMoeSWAForCausalLM", SPARSE, config),
        **write_fields(EXPERTS, granite.MOE, moe, ("shared",)),
        SHARED: shared.d_hidden,
    }


def _export(
    format: str, architecture: str, tables: Tables, config: ModelConfig
) -> dict[str, Any]:
    """Writes the fields that `_parse` reads. `architecture` is the class of
    transformers."""
    each, c, window = layer_attention(format, config)
    ropes = {replace(own.rope, theta=1.0) for own in each if own.rope is not None}
    require(format, {"several scalings of rotary embeddings": len(ropes) < 2})
    c = replace(c, scale=c.head_dim**-0.5 if c.scale is None else c.scale)
    first = next((own for own in each if own.rope is not None), c)
    return {
        "architectures": [architecture],
        **hf.write_model(format, tables[0], config),
        LAYERS: len(each),
        "layer_types": [SLIDES if own.window else "full_attention" for own in each],
        WINDOW: window or 128,  # the class makes a mask of it in any case
        THETAS: [own.rope.theta if own.rope else 0 for own in each],
        "hidden_act": "silu",
        **write_fields(format, tables[1], c, ("sinks",)),
        **hf.rope_fields(format, first),
    }


def _has_sinks(config: ModelConfig, second: str) -> bool:
    """True if the layers alternate between attention, with sinks and Granite's scale,
    and `second`."""
    if set(config.kinds[1::2]) != {second} or not has_usual_names(config):
        return False
    each = [config.mixers[kind] for kind in config.kinds[::2]]
    return all(c.sinks and c.scale is not None for c in each)


def expresses(config: ModelConfig) -> bool:
    return _has_sinks(config, "mlp") and config.mixers["mlp"].gated


def expresses_experts(config: ModelConfig) -> bool:
    return _has_sinks(config, "moe") and not config.mixers["moe"].bias


FAMILY = Family(FORMAT, f"{MODELS}, dense", NAMES, parse, export, expresses)
EXPERTS_FAMILY = Family(
    EXPERTS,
    f"{MODELS}, with experts",
    NAMES,
    parse_experts,
    export_experts,
    expresses_experts,
)
